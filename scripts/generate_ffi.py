"""Write pyh2o/_native/_ffi.c, the Python extension's C code, from its two hand-written parts.

_ffi.cdef.txt says what Python may call, _ffi.csrc.c what the C code includes. The result is
committed, so that building pyh2o needs no cffi.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

import cffi

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "pyh2o" / "_native"
OUTPUT = NATIVE / "_ffi.c"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed file differs")
    args = parser.parse_args()

    pinned = pinned_cffi((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if cffi.__version__ != pinned:
        return fail(f"cffi is {cffi.__version__}; run: pip install cffi=={pinned}")
    try:
        code = generate(NATIVE)
    except (OSError, cffi.CDefError) as error:
        return fail(f"{' '.join(str(error).split())}; correct {NATIVE / '_ffi.cdef.txt'}")

    current = OUTPUT.read_text(encoding="utf-8") if OUTPUT.exists() else None
    if code == current:
        return 0
    if args.check:
        return fail(f"{OUTPUT.relative_to(ROOT)} is out of date; run: make format")
    temporary = OUTPUT.with_name(OUTPUT.name + ".part")
    temporary.write_text(code, encoding="utf-8")
    os.replace(temporary, OUTPUT)
    print(f"wrote {OUTPUT.relative_to(ROOT)}")
    return 0


def generate(folder: Path) -> str:
    """The C code for the declarations in `folder`. Raises OSError or cffi.CDefError."""
    builder = cffi.FFI()
    builder.cdef((folder / "_ffi.cdef.txt").read_text(encoding="utf-8"))
    source = (folder / "_ffi.csrc.c").read_text(encoding="utf-8")
    builder.set_source("pyh2o._native._ffi", source, compiler_verbose=0)
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "_ffi.c"
        builder.emit_c_code(str(output))
        return output.read_text(encoding="utf-8")


def pinned_cffi(pyproject: str) -> str:
    """The exact cffi version of the dev extra, with which the committed file was written."""
    match = re.search(r'"cffi==([^"]+)"', pyproject)
    if match is None:
        raise ValueError("pyproject.toml pins no cffi version")
    return match.group(1)


def fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
