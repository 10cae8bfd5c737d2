"""The C interface is that of the header, and only one llama.cpp runs in a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pyh2o
from pyh2o.errors import LibraryError
from pyh2o.library import LIBRARY_FOLDER, loading
from pyh2o.library.loading import load_backends
from pyh2o.library.verdicts import Verdicts

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "native" / "include" / "llama-h2o.h"


def test_everything_in_the_header_can_be_used() -> None:
    from pyh2o._native import ffi, lib

    header = HEADER.read_text()
    functions = re.findall(r"^LLAMA_H2O_API [^;]*?(llama_h2o_\w+)\(", header, flags=re.MULTILINE)
    constants = re.findall(r"^    (LLAMA_H2O_\w+) *= ", header, flags=re.MULTILINE)
    assert len(functions) == header.count("\nLLAMA_H2O_API ")
    assert [name for name in functions + constants if not hasattr(lib, name)] == []
    params = ffi.new("struct llama_h2o_params *", {"policy": ffi.NULL})
    assert params.heavy == 0


def test_every_status_has_a_text_of_its_own() -> None:
    from pyh2o._native import ffi, lib

    declared = re.findall(r"LLAMA_H2O_(?:OK|ERR_\w+)\s*=\s*(-?\d+)", HEADER.read_text())
    codes = {int(code) for code in declared}
    texts = {code: ffi.string(lib.llama_h2o_strerror(code)).decode() for code in codes}
    assert len(codes) == 32
    assert len(set(texts.values())) == len(codes)
    assert ffi.string(lib.llama_h2o_strerror(-1000)) == b"unknown status"


def run_python(code: str, folder: Path = Path(__file__).parent) -> subprocess.CompletedProcess[str]:
    """Run code in a folder; Python looks for packages there first."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )


def test_another_llama_cpp_in_the_process_is_refused() -> None:
    # stands for a llama_cpp that was imported first and loaded its own library
    result = run_python(
        "import sys, types\n"
        "stock = types.ModuleType('llama_cpp.llama_cpp')\n"
        "stock._lib = types.SimpleNamespace(_name='/usr/lib/stock/libllama.so')\n"
        "sys.modules['llama_cpp'] = types.ModuleType('llama_cpp')\n"
        "sys.modules['llama_cpp.llama_cpp'] = stock\n"
        "import pyh2o\n"
        "try:\n"
        "    pyh2o.Llama\n"
        "except ImportError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("LibraryError llama_cpp was imported before pyh2o")
    assert "import pyh2o first" in result.stdout


@pytest.mark.parametrize(
    "imports", ["from pyh2o import Llama; import llama_cpp", "import pyh2o; import llama_cpp"]
)
def test_llama_cpp_runs_on_our_library(imports: str) -> None:
    result = run_python(
        f"{imports}\n"
        "import os, pyh2o\n"
        "from pyh2o.library import LIBRARY_FOLDER\n"
        "assert issubclass(pyh2o.Llama, llama_cpp.Llama)\n"
        "assert os.path.dirname(llama_cpp.llama_cpp._lib._name) == str(LIBRARY_FOLDER)\n"
        "assert 'LLAMA_CPP_LIB_PATH' not in os.environ\n"
    )
    assert result.returncode == 0, result.stderr


def test_a_variable_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/elsewhere")
    result = run_python(
        "import pyh2o, llama_cpp, os; assert os.environ['LLAMA_CPP_LIB_PATH'] == '/elsewhere'"
    )
    assert result.returncode == 0, result.stderr


def test_python_in_the_checkout_finds_the_installed_libraries() -> None:
    result = run_python(
        "import sys\n"
        "sys.path.insert(0, '')\n"  # PYTHONSAFEPATH may be set where the tests run
        "from pyh2o import Llama, library\n"
        "import pyh2o.cli.options\n"
        "print(pyh2o.__file__, pyh2o.cli.__file__, library.build_info()['backends'])\n",
        folder=ROOT,
    )
    assert result.returncode == 0, result.stderr
    package, commands, _ = result.stdout.split(maxsplit=2)
    assert Path(package) == ROOT / "pyh2o" / "__init__.py"
    assert Path(commands) == ROOT / "cli" / "__init__.py"


def test_a_checkout_that_nothing_was_installed_from_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyh2o import library

    (tmp_path / "pyh2o").mkdir()
    folders = library.package_folders(tmp_path / "pyh2o", search=[str(tmp_path)])
    assert folders == [str(tmp_path / "pyh2o")]
    monkeypatch.setattr(library, "LIBRARY_FOLDER", Path(folders[-1]) / "lib")
    with pytest.raises(LibraryError, match="no compiled library: run `make build`"):
        library.check_library()


def test_the_package_lists_what_it_has() -> None:
    assert set(pyh2o.__all__) <= set(dir(pyh2o))


def test_a_missing_library_is_named_with_its_cure(tmp_path: Path) -> None:
    package = shutil.copytree(LIBRARY_FOLDER.parent, tmp_path / "pyh2o")
    # a wheel has one for each kind of processor
    for library in (package / "lib").glob("libggml-cpu*"):
        library.unlink()
    for module in ("compat.llama", "library.devices"):
        result = run_python(f"import pyh2o.{module}", folder=tmp_path)
        assert result.returncode == 1
        message = result.stderr.splitlines()[-1]
        assert message.startswith("pyh2o.errors.LibraryError: ")
        assert "libggml-cpu" in message
        assert message.endswith("install pyh2o again, on this machine")


def test_libraries_in_the_current_folder_are_not_loaded(tmp_path: Path) -> None:
    """ggml that is not told where to look takes those."""
    here = shutil.copytree(LIBRARY_FOLDER, tmp_path / "here")
    code = "from pyh2o.library.backends import cpu_library; print(cpu_library())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, check=True
    )
    library = Path(result.stdout.strip())
    assert library.is_absolute()
    assert library.parent.resolve() == LIBRARY_FOLDER.resolve()
    assert result.stderr == ""


class Ggml:
    """ggml that is linked with no backend, and finds those that `found` names."""

    def __init__(self, *found: bytes) -> None:
        self.found = found
        self.folders: list[bytes] = []
        self.named: list[str | None] = []

    def ggml_log_set(self, *_: object) -> None:
        pass

    def ggml_backend_load_all_from_path(self, folder: bytes) -> None:
        self.folders.append(folder)
        self.named.append(os.environ.get("GGML_BACKEND_PATH"))

    def ggml_backend_load(self, path: bytes) -> None:
        self.folders.append(path)

    def ggml_backend_reg_by_name(self, name: bytes) -> int:
        return int(name in self.found)


def test_backends_come_from_the_folder_of_the_libraries_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGML_BACKEND_PATH", "/elsewhere/libggml-other.so")
    ggml = Ggml(b"CPU", b"RPC")
    load_backends(ggml, tmp_path)
    assert (ggml.folders, ggml.named) == ([os.fsencode(tmp_path)], [None])
    assert os.environ["GGML_BACKEND_PATH"] == "/elsewhere/libggml-other.so"
    with pytest.raises(LibraryError, match="install pyh2o again"):
        load_backends(Ggml(b"RPC"), tmp_path)


def test_a_variant_that_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the others the best by its own score is loaded, if there is one that runs here."""
    scores = {"good": 3, "better": 5, "best": 9, "foreign": 0}
    for name, score in scores.items():
        code = f"int ggml_backend_score(void) {{ return {score}; }}"
        library = tmp_path / f"libggml-cpu-{name}.so"
        command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
        subprocess.run(command, input=code.encode(), check=True)
    for name in ("libggml-cpu-broken.so", "libggml-base.so", "libggml-rpc.so", "libggml.so"):
        (tmp_path / name).write_bytes(b"no library")
    passed_over = ["libggml-cpu-best.so"]
    verdicts = Verdicts(passed_over=dict.fromkeys(passed_over, "Q4_0 (SIGSEGV)"))
    monkeypatch.setattr(loading, "read_verdicts", lambda folder: verdicts)
    ggml = Ggml(b"CPU")
    load_backends(ggml, tmp_path)
    loaded = [Path(os.fsdecode(path)).name for path in ggml.folders]
    assert loaded == ["libggml-rpc.so", "libggml-cpu-better.so"]
    passed_over += ["libggml-cpu-better.so", "libggml-cpu-good.so"]
    assert loading.without_variants(tmp_path, passed_over) == [tmp_path / "libggml-rpc.so"]


def test_ggml_that_is_linked_with_its_backends_loads_none(tmp_path: Path) -> None:
    class Linked(Ggml):
        ggml_backend_cpu_reg = None

    ggml = Linked(b"CPU")
    load_backends(ggml, tmp_path)
    assert ggml.folders == []


def test_missing_libraries_of_cuda_have_a_cure_of_their_own() -> None:
    from pyh2o._native import how_to_load

    reason = "libcublas.so.13: cannot open shared object file: No such file or directory"
    assert "pip install nvidia-cublas nvidia-cuda-runtime" in how_to_load(reason)


def test_looking_at_the_package_loads_no_library() -> None:
    result = run_python("import pyh2o, sys; assert 'llama_cpp' not in sys.modules")
    assert result.returncode == 0, result.stderr
