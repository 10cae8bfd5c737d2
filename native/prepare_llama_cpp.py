"""Write the pinned and patched llama.cpp to the build directory. CMake runs this at configure time.

Only files whose content changed are written, so a second build recompiles nothing. For a machine
without network access, create the folder on another machine, copy it, and build with
CMAKE_ARGS=-DPYH2O_LLAMA_CPP=FOLDER.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import patch_ng

from llama_pin import BuildError, Pin, cached_sdist, read_pin

PATCHES = Path(__file__).with_name("patches")

# Versions and patches of the sources, stored next to them; CMake adds the ggml backends.
BUILD_INFO = "pyh2o.json"

# What llama.cpp's CMakeLists.txt reads without tools, tests and examples; common/ with the chat
# parsers; and the library of projectors for images and audio.
NEEDED = (
    "CMakeLists.txt",
    "LICENSE",
    "licenses/",
    "cmake/",
    "include/",
    "src/",
    "ggml/",
    "vendor/",
    "common/",
    "tools/mtmd/",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for the sources")
    parser.add_argument("--prepared", action="store_true", help="only check existing sources")
    args = parser.parse_args()
    try:
        pin = read_pin()
        info = json.dumps(build_info(pin), indent=2).encode() + b"\n"
        if args.prepared:
            check_prepared(args.output, info)
            return 0
        files = {**patched_sources(cached_sdist(pin)), BUILD_INFO: info}
        changed = sync(files, args.output)
    except BuildError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error}; make the build folder writable and free some disk space", file=sys.stderr)
        return 1
    print(f"-- llama.cpp sources: {len(files)} files, {len(changed)} changed")
    return 0


def check_prepared(folder: Path, info: bytes) -> None:
    """Raise BuildError unless the folder was written with the current pin and patches."""
    path = folder / BUILD_INFO
    if not path.is_file() or path.read_bytes() != info:
        raise BuildError(
            f"{folder} does not hold the llama.cpp of this checkout; write it with "
            "python native/prepare_llama_cpp.py --output FOLDER on a machine with network access"
        )


def patched_sources(sdist: Path) -> dict[str, bytes]:
    """Return the llama.cpp sources that the build needs, with all patches (path -> content).

    Raises BuildError if the archive is not readable or a patch does not apply.
    """
    files = read_sources(sdist)
    logging.getLogger("patch_ng").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(PATCHES.glob("*.patch")):
            apply_patch(files, path, Path(folder))
    return files


def apply_patch(files: dict[str, bytes], path: Path, folder: Path) -> None:
    """Apply a patch to files (path -> content), in a temporary folder."""
    patch = patch_ng.fromfile(path)
    names = [item.target.decode().removeprefix("b/") for item in patch] if patch else []
    for name in files.keys() & set(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(files[name])
    if not names or not files.keys() >= set(names) or not patch.apply(strip=1, root=str(folder)):
        raise BuildError(
            f"{path.name} does not apply to the pinned llama.cpp: fix the patch "
            "(scripts/move_pin.py --dry-run shows the hunk)"
        )
    files.update({name: (folder / name).read_bytes() for name in names})


def read_sources(sdist: Path) -> dict[str, bytes]:
    """Read the needed files of vendor/llama.cpp from the source distribution (path -> content)."""
    prefix = sdist.name.removesuffix(".tar.gz") + "/vendor/llama.cpp/"
    needed = tuple(prefix + name for name in NEEDED)
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(sdist, "r|gz") as archive:
            for member in archive:
                if member.name.startswith(needed) and (content := archive.extractfile(member)):
                    files[member.name.removeprefix(prefix)] = content.read()
    except (tarfile.TarError, EOFError, KeyError) as error:
        raise BuildError(f"cannot read {sdist} ({error}); delete it and build again") from error
    if "CMakeLists.txt" not in files or any(".." in path.split("/") for path in files):
        raise BuildError(f"{sdist} has no usable vendor/llama.cpp; move the pin to another version")
    return files


def sync(files: Mapping[str, bytes], folder: Path) -> list[str]:
    """Make `folder` contain exactly `files`. Return the paths that were written or removed.

    A file that already has the right content keeps its modification time.
    """
    changed = [path for path, content in files.items() if write_if_changed(folder / path, content)]
    for path in sorted(folder.rglob("*"), reverse=True):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif name not in files:
            path.unlink()
            changed.append(name)
    return changed


def write_if_changed(path: Path, content: bytes) -> bool:
    """Write the content unless the file already has it. Return whether it was written."""
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return True


def build_info(pin: Pin) -> dict[str, str]:
    """Return the versions and the patches that the library is built from."""
    return {
        "llama_cpp_python": pin.version,
        "llama_cpp_commit": pin.llama_cpp_commit,
        "ggml": pin.ggml_version,
        "patches": patches_sha256(PATCHES),
    }


def patches_sha256(folder: Path) -> str:
    """Return one hash over the names and contents of all patches, in order."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.patch")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
