"""Write the C code of the Python extension from the declarations of llama-h2o.h, with cffi.

CMake calls this: python native/write_ffi.py OUTPUT
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi

HEADER = Path(__file__).parent / "include" / "llama-h2o.h"

# Functions of Python that the library calls.
CALLBACKS = 'extern "Python" bool pyh2o_ask(void * data);'


def main() -> None:
    output = Path(sys.argv[1])
    builder = cffi.FFI()
    builder.cdef(declarations(HEADER.read_text(encoding="utf-8")) + CALLBACKS)
    include = f'#include "{HEADER.name}"'
    builder.set_source("pyh2o._native._ffi", include, compiler_verbose=0)
    output.unlink(missing_ok=True)  # cffi leaves an equal file older than what it is made from
    builder.emit_c_code(str(output))


def declarations(header: str) -> str:
    """The declarations of a header, without what only a compiler understands."""
    for_c = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", header, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^#.*$|\bLLAMA_H2O_API\b", "", for_c, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
