"""Try types of weights in another process, and use the results."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from cli_fakes import run_program
from pyh2o import Llama
from pyh2o.core.product_trial import error_of, write_model
from pyh2o.errors import LibraryError
from pyh2o.library import products as products_module
from pyh2o.library import verdicts as verdicts_module
from pyh2o.library.backends import cpu_library, type_name, weight_types
from pyh2o.library.products import Products, find_products, may_rearrange
from pyh2o.library.verdicts import Verdicts, keep_verdicts, read_verdicts
from tiny_gguf import write_tiny_gguf

F32, Q4_0, Q5_1, Q8_0 = (
    GGMLQuantizationType[name].value for name in ("F32", "Q4_0", "Q5_1", "Q8_0")
)
ALL = tuple(map(type_name, weight_types()))
EXAMPLE = Verdicts({"Q4_0": "", "Q5_1": "SIGSEGV"}, {"libggml-cpu-x.so": "Q4_0 (SIGILL)"})

needs_preload = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")


@pytest.fixture(autouse=True)
def verdicts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the results, which do not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # for other processes
    path = tmp_path / "cache" / "pyh2o" / "verdicts.json"
    monkeypatch.setattr(verdicts_module, "_path", lambda: path)
    return path


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function; after it is called, no process may be started."""
    return lambda: monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: pytest.fail("another process")
    )


@pytest.fixture
def wrong_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make child processes load a library with wrong products."""
    library = tmp_path / "wrong.so"
    source = Path(__file__).parents[1] / "faults" / "wrong_products.c"
    flags = ("-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Return a function that sets exit codes and output of trials, and returns the tried types."""

    def set_ends(*ends: tuple[int, list[str]]) -> list[list[int]]:
        asked, left = [], list(ends)

        def run(types: list[int], **_: Any) -> tuple[int, list[str]]:
            asked.append([*types])
            return left.pop(0)

        monkeypatch.setattr(products_module, "_run", run)
        return asked

    return set_ends


def model_in(folder: Path, dtype: str) -> Path:
    return write_tiny_gguf(folder / f"{dtype}.gguf", seed=1, dtype=GGMLQuantizationType[dtype])


def test_products_of_every_type_equal_numpys(no_process: Callable[[], None]) -> None:
    expected = Products("", right=ALL, plain={}, wrong={}, unknown=())
    assert len(ALL) > 20
    assert find_products(weight_types(), on_gpus=False) == expected
    no_process()
    assert find_products(weight_types(), on_gpus=False) == expected


def test_types_of_a_model_are_tried_once(tmp_path: Path, no_process: Callable[[], None]) -> None:
    path = model_in(tmp_path, "Q8_0")
    Llama(str(path)).close()
    assert read_verdicts().products == {"F32": "", "Q8_0": ""}
    no_process()
    with Llama(str(path)) as llm:
        assert llm.model_params.use_extra_bufts


def test_a_vocabulary_needs_no_trial(tmp_path: Path, no_process: Callable[[], None]) -> None:
    path = model_in(tmp_path, "F32")
    no_process()
    Llama(str(path), vocab_only=True).close()


def test_doctor_repeats_the_trials(printed: Callable[..., list[list[int]]]) -> None:
    keep_verdicts(Verdicts({"Q4_0": "SIGSEGV"}))
    asked = printed((0, ["lib", str(Q4_0), "0.01"]), *2 * [(0, ["lib", str(Q4_0), "1"])])
    assert find_products([Q4_0], on_gpus=False, anew=True).right == ("Q4_0",)
    assert asked == [[Q4_0]]
    assert read_verdicts().products == {"Q4_0": ""}
    assert find_products([Q4_0], on_gpus=False, anew=True).wrong == {"Q4_0": "wrong by 100%"}
    assert read_verdicts().products == {}


@pytest.mark.parametrize(
    "name", ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"]
)
def test_a_missing_block_is_detected(tmp_path: Path, name: str) -> None:
    weights = write_model(tmp_path / "model.gguf", Q4_0)
    matrix = weights[f"blk.0.{name}"].copy()
    matrix[:, 32:64] = 0
    changed = {**weights, f"blk.0.{name}": matrix}
    error = error_of(tmp_path / "model.gguf", changed, on_gpus=False, rearranged=True)
    assert error > products_module.ROUNDED


@needs_preload
@pytest.mark.usefixtures("wrong_library")
def test_wrong_products_are_detected(no_process: Callable[[], None]) -> None:
    found = find_products([F32, Q4_0, Q5_1, Q8_0], on_gpus=False)
    assert (found.right, found.plain) == (("F32", "Q8_0"), {"Q4_0": "SIGSEGV"})
    assert re.fullmatch(r"wrong by \d+%", found.wrong["Q5_1"])
    assert read_verdicts().products == {"F32": "", "Q8_0": "", "Q4_0": "SIGSEGV"}
    no_process()
    assert find_products([F32, Q4_0], on_gpus=False).plain == {"Q4_0": "SIGSEGV"}


@needs_preload
@pytest.mark.usefixtures("wrong_library")
def test_wrong_rearranged_products_disable_rearranging(tmp_path: Path) -> None:
    path = model_in(tmp_path, "Q4_0")
    for _ in range(2):  # every start prints it
        with pytest.warns(RuntimeWarning, match=r"that it rearranges, in Q4_0 \(SIGSEGV\): "):
            llm = Llama(str(path))
        assert not llm.model_params.use_extra_bufts
        llm.close()


@needs_preload
@pytest.mark.usefixtures("wrong_library")
def test_types_with_wrong_products_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"fails on this processor with weights in Q5_1 \(") as e:
        Llama(str(model_in(tmp_path, "Q5_1")))
    assert "\n" not in str(e.value)
    assert "-DGGML_NATIVE=OFF" in str(e.value)


@needs_preload
@pytest.mark.real
@pytest.mark.usefixtures("surroundings", "wrong_library")
def test_commands_print_one_warning(tmp_path: Path) -> None:
    """Their own process would crash."""
    model = model_in(tmp_path, "Q4_0")
    output = run_program("generate", "-m", model, "-p", "Once upon a time in a town", "-n", "2")
    notes = [line for line in output.notes.splitlines() if "the library fails" in line]
    assert (output.code, len(notes)) == (0, 1)
    assert notes[0].startswith("the library fails on this processor with weights that it re")


def test_types_after_a_crash_are_tried(printed: Callable[..., list[list[int]]]) -> None:
    asked = printed(
        (-signal.SIGILL, ["lib", str(F32), "0.001", str(Q4_0)]),
        (0, ["lib", str(Q5_1), "0.1", str(Q8_0), "nan"]),
        (0, ["lib", str(Q4_0), "0.1", str(Q8_0), "0.3"]),
    )
    found = find_products([F32, Q4_0, Q5_1, Q8_0], on_gpus=False)
    assert asked == [[F32, Q4_0, Q5_1, Q8_0], [Q5_1, Q8_0], [Q4_0, Q8_0]]
    assert (found.right, found.unknown) == (("F32", "Q5_1"), ())
    assert (found.plain, found.wrong) == ({"Q4_0": "SIGILL"}, {"Q8_0": "no numbers"})


def test_the_error_limit_of_floats_is_lower(printed: Callable[..., list[list[int]]]) -> None:
    printed(*2 * [(0, ["lib", str(F32), "0.1", str(Q8_0), "0.1"])])
    found = find_products([F32, Q8_0], on_gpus=False)
    assert (found.right, found.wrong) == (("Q8_0",), {"F32": "wrong by 10%"})


@pytest.mark.parametrize(
    "end",
    [
        (-signal.SIGKILL, ["lib", str(Q8_0)]),  # too little memory
        (1, ["lib", str(Q8_0)]),  # an error
        (-signal.SIGSEGV, []),  # before any type was tried
    ],
)
def test_failures_outside_the_library_are_not_recorded(
    printed: Callable[..., list[list[int]]], verdicts_file: Path, end: tuple[int, list[str]]
) -> None:
    printed(end, end)
    assert find_products([Q8_0], on_gpus=False).unknown == ("Q8_0",)
    assert read_verdicts() == Verdicts()
    assert may_rearrange([Q8_0], on_gpus=False)


def test_a_hanging_trial_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert find_products([Q8_0], on_gpus=False).unknown == ("Q8_0",)


def test_an_executable_other_than_python_is_not_started(
    no_process: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program built with PyInstaller would start itself recursively."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    no_process()
    assert find_products([Q8_0], on_gpus=False).unknown == ("Q8_0",)


def test_gpus_are_tried_in_addition_to_the_cpu(
    printed: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_module, "gpu_names", lambda: ["card"])
    right, wrong = ["lib", str(Q8_0), "0.01"], ["lib", str(Q8_0), "1.5"]
    asked = printed((0, right), (0, wrong), (0, wrong))
    with pytest.raises(LibraryError, match=r"on card with weights in Q8_0 .*--gpu-layers 0"):
        may_rearrange([Q8_0], on_gpus=True)
    assert len(asked) == 3
    assert read_verdicts().products == {"Q8_0": ""}
    printed((0, right))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert may_rearrange([Q8_0], on_gpus=True)
    assert read_verdicts().products == {"Q8_0": "", "Q8_0 on card": ""}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Return a folder with a library."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libggml-cpu.so").write_bytes(b"code")
    return tmp_path / "lib"


def test_another_library_is_tried_again(library: Path) -> None:
    keep_verdicts(EXAMPLE, library)
    keep_verdicts(Verdicts({"F32": ""}))
    assert read_verdicts(library) == EXAMPLE
    (library / "libggml-cpu.so").write_bytes(b"other code")
    assert read_verdicts(library) == Verdicts()


def test_another_processor_is_tried_again(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_verdicts(EXAMPLE, library)
    monkeypatch.setattr(verdicts_module, "cpu_name", lambda: "another one")
    assert read_verdicts(library) == Verdicts()


def test_results_of_old_libraries_are_removed(library: Path, tmp_path: Path) -> None:
    keep_verdicts(EXAMPLE, library)
    for number in range(verdicts_module._MOST_LIBRARIES):
        assert read_verdicts(library) == EXAMPLE
        keep_verdicts(EXAMPLE, tmp_path / f"{number}")
    assert read_verdicts(library) == Verdicts()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: re.sub(r": \{.*", ": 3}", text, count=1),
        lambda text: text.replace('"SIGSEGV"', "1"),
        lambda text: text.replace("products", "product"),
        lambda text: re.sub(r'"products": \{.*?\}', '"products": []', text),
    ],
)
def test_damaged_results_are_ignored(
    library: Path, verdicts_file: Path, change: Callable[[str], str]
) -> None:
    keep_verdicts(EXAMPLE, library)
    verdicts_file.write_text(change(verdicts_file.read_text()))
    assert read_verdicts(library) == Verdicts()
    keep_verdicts(EXAMPLE, library)
    assert read_verdicts(library) == EXAMPLE


def test_results_that_cannot_be_written_are_still_used(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts_module, "_path", lambda: Path("/dev/null/verdicts.json"))
    keep_verdicts(EXAMPLE, library)
    assert read_verdicts(library) == Verdicts()


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the variant of this process and two other variants."""
    names = [Path(cpu_library()).name, "libggml-cpu-b.so", "libggml-cpu-c.so"]
    monkeypatch.setattr(products_module, "variants", lambda _: [Path(name) for name in names])
    return names


def tried_in(library: str, error: float) -> list[tuple[int, list[str]]]:
    return [(0, [library, str(Q8_0), str(error)])]


def test_the_next_variant_is_selected(
    printed: Callable[..., list[list[int]]], variants: list[str]
) -> None:
    first, second, third = variants
    printed(*2 * tried_in(first, 1), *tried_in(second, 1), *tried_in(third, 0.1))
    with pytest.raises(LibraryError, match=f"{first} is skipped.*: start again, with {third}"):
        may_rearrange([Q8_0], on_gpus=False)
    reason = "Q8_0 (wrong by 100%)"
    assert read_verdicts() == Verdicts(passed_over={first: reason, second: reason})


@pytest.mark.parametrize("n_more", [1, 2])
def test_no_variant_is_selected_if_all_are_wrong(
    printed: Callable[..., list[list[int]]], variants: list[str], n_more: int
) -> None:
    """With one more variant the result is not written, so the same variant is loaded again."""
    more = [end for name in variants[1 : 1 + n_more] for end in tried_in(name, 1)]
    printed(*2 * tried_in(variants[0], 1), *more, *tried_in(variants[0], 1))
    with pytest.raises(LibraryError, match=r"with weights in Q8_0 .*: install pyh2o again"):
        may_rearrange([Q8_0], on_gpus=False)
    assert read_verdicts() == Verdicts()
