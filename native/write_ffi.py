"""Generate the C code of the Python extension from our headers with cffi.

CMake calls this: python native/write_ffi.py OUTPUT
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi

HEADERS = [Path(__file__).parent / "include" / name for name in ("llama-h2o.h", "llama-h2o-chat.h")]

# Python functions that the library calls.
CALLBACKS = 'extern "Python" bool pyh2o_ask(void * data);'


def main() -> None:
    output = Path(sys.argv[1])
    builder = cffi.FFI()
    texts = [declarations(header.read_text(encoding="utf-8")) for header in HEADERS]
    builder.cdef("".join(texts) + CALLBACKS)
    includes = "\n".join(f'#include "{header.name}"' for header in HEADERS)
    builder.set_source("pyh2o._native._ffi", includes, compiler_verbose=0)
    output.unlink(missing_ok=True)  # cffi leaves an unchanged file older than its inputs
    builder.emit_c_code(str(output))


def declarations(header: str) -> str:
    """Return the declarations of a header without preprocessor directives."""
    for_c = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", header, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^#.*$|\bLLAMA_H2O_API\b", "", for_c, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
