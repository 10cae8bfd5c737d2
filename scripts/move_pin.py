"""Move pyh2o to the llama.cpp of another llama-cpp-python version.

Downloads that version and tries every patch on it with git, which reports each hunk that has moved
or does not apply. Only if all apply, the pin, the requirement in pyproject.toml, requirements.txt
and the line numbers of the patches are rewritten.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "native"))

from llama_pin import (  # noqa: E402  (CMake runs the files of native as scripts: no package)
    PIN_FILE,
    BuildError,
    DownloadError,
    Pin,
    download_sdist,
    read_pin,
    sha256_of,
)
from prepare_llama_cpp import PATCHES, read_sources, sync  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="version of llama-cpp-python, such as 0.3.36")
    parser.add_argument("--dry-run", action="store_true", help="try the patches, rewrite nothing")
    args = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder:
            sdist = download_sdist(args.version, Path(folder))
            pin, files = describe(sdist, args.version), read_sources(sdist)
            print(f"llama.cpp {pin.llama_cpp_commit}, ggml {pin.ggml_version}")
            patches = moved_patches(files, Path(folder) / "llama.cpp")
        old = read_pin()
    except DownloadError as error:
        sys.exit(f"cannot download llama-cpp-python {args.version} ({error})")
    except BuildError as error:
        sys.exit(str(error))

    if failed := [path.name for path, text in patches.items() if text is None]:
        sys.exit(f"{', '.join(failed)}: not every hunk applies; nothing was changed")
    if args.dry_run:
        print("every patch applies; nothing was changed (--dry-run)")
        return 0
    rewrite(old, pin)
    for path, text in patches.items():
        path.write_text(str(text), encoding="utf-8")
    print("every patch applies; the pin is rewritten. Now run: make test")
    return 0


def describe(sdist: Path, version: str) -> Pin:
    """Return the pin of a source distribution, or raise a BuildError if it is incomplete."""
    root = sdist.name.removesuffix(".tar.gz")
    # The sdist ships the git metadata of its llama.cpp submodule.
    head = read_member(sdist, f"{root}/.git/modules/vendor/llama.cpp/HEAD").strip()
    cmake = read_member(sdist, f"{root}/vendor/llama.cpp/ggml/CMakeLists.txt")
    ggml = [re.search(rf"GGML_VERSION_{part} (\d+)", cmake) for part in ("MAJOR", "MINOR", "PATCH")]
    if not re.fullmatch(r"[0-9a-f]{40}", head) or not all(ggml):
        raise BuildError(f"{sdist.name} does not say which llama.cpp it contains")
    return Pin(
        version=version,
        sha256=sha256_of(sdist),
        llama_cpp_commit=head,
        ggml_version=".".join(match.group(1) for match in ggml if match),
    )


def read_member(sdist: Path, name: str) -> str:
    with tarfile.open(sdist) as archive:
        try:
            file = archive.extractfile(name)
        except KeyError:
            file = None
        if file is None:
            raise BuildError(f"{sdist.name} has no {name}")
        return file.read().decode("utf-8")


def moved_patches(files: dict[str, bytes], folder: Path) -> dict[Path, str | None]:
    """Apply all patches to the files in a folder; return each for the lines where it applied.

    The result is None for a patch with a hunk that does not apply, which git prints.
    """
    sync(files, folder)
    patches: dict[Path, str | None] = {}
    git(folder, "init", "-q")
    for path in sorted(PATCHES.glob("*.patch")):
        git(folder, "add", "--all")
        applied = subprocess.run(
            ["git", "apply", "--reject", "--verbose", path], cwd=folder, check=False
        )
        head = path.read_text(encoding="utf-8").partition("--- a/")[0]
        lines = git(folder, "diff").splitlines(keepends=True)
        diff = "".join(line for line in lines if not line.startswith(("diff --git ", "index ")))
        patches[path] = head + diff if applied.returncode == 0 else None
    return patches


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode()


def rewrite(old: Pin, new: Pin) -> None:
    """Replace the old pin in all files, or in none if one of them is ambiguous."""
    places = {
        PIN_FILE: [
            (old.version, new.version),
            (old.sha256, new.sha256),
            (old.llama_cpp_commit, new.llama_cpp_commit),
            (f'"{old.ggml_version}"', f'"{new.ggml_version}"'),
        ],
        ROOT / "pyproject.toml": [
            (f"llama-cpp-python=={old.version}", f"llama-cpp-python=={new.version}")
        ],
        ROOT / "requirements.txt": [
            (f"llama-cpp-python=={old.version}", f"llama-cpp-python=={new.version}"),
            (old.sha256, new.sha256),
        ],
    }
    texts: dict[Path, str] = {}
    for path, changes in places.items():
        text = path.read_text(encoding="utf-8")
        for before, after in changes:
            if text.count(before) != 1:
                raise BuildError(f"{path.name} should contain {before} once; correct it by hand")
            text = text.replace(before, after)
        texts[path] = text
    for path, text in texts.items():
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
