"""Select a file of a repository."""

from __future__ import annotations

import pytest

from pyh2o.errors import ModelError
from pyh2o.models.quantisations import HubFile, HubModel, choose, models_of, quantisation_of


def models(*names: str) -> list[HubModel]:
    """Return models of 10, 20 ... bytes."""
    files = [HubFile(f"{name}.gguf", 10 * i, "0" * 64) for i, name in enumerate(names, start=1)]
    return models_of(files)


def chosen(*names: str, wanted: str | None = None) -> str:
    return choose(models(*names), wanted).path


@pytest.mark.parametrize(
    ("path", "quantisation"),
    [
        ("Qwen3-0.6B-Q4_K_M", "Q4_K_M"),
        ("mistral-7b-v0.1.Q5_0", "Q5_0"),
        ("gemma-3-1b-it-q4_0", "Q4_0"),
        ("Qwen3-4B-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("Llama-IQ3_XXS", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("phi-4-bf16", "BF16"),
        ("phi-4-fp16", "F16"),
        ("Q8_0", "Q8_0"),
        ("BF16/big", "BF16"),
        ("Q4_K_M/big-Q8_0", "Q8_0"),
        ("Qwen3-0.6B", ""),
        ("a-Q4_K_M-v2", "Q4_K_M"),
    ],
)
def test_a_quantisation_is_selected_by_name(path: str, quantisation: str) -> None:
    assert quantisation_of(path) == quantisation


def test_the_default_quantisation() -> None:
    assert chosen("m-Q2_K", "m-UD-Q4_K_M", "m-Q4_K_M", "m-Q8_0") == "m-Q4_K_M"
    assert chosen("m-anything") == "m-anything"


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (["a-Q4_K_M", "b-Q4_K_M"], None, r"add one of these after a colon: a-Q4_K_M .* b-Q4_K_M"),
        (["a-Q4_K_M", "b-Q4_K_M"], "q4_k_m", "several models match q4_k_m"),
        (["a", "b"], None, "it has no Q4_K_M: .*: a .* b "),
        (["a-Q4_K_M", "a-Q8_0"], "Q5_0", r"it has no Q5_0: .*: Q4_K_M \(0\.0 GB\), Q8_0"),
    ],
)
def test_an_ambiguous_or_missing_quantisation_is_refused(
    names: list[str], wanted: str | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        chosen(*names, wanted=wanted)
    if names[0] != "a":
        assert chosen(*names, wanted=names[0]) == names[0]


def test_other_files_are_ignored() -> None:
    names = ["mmproj-model-f16", "imatrix-m-Q4_K_M", "m-Q4_K_M", "n-00001-of-00002"]
    assert [model.path for model in models(*names)] == ["m-Q4_K_M"]
    assert models_of([HubFile("m-Q4_K_M.bin", 1, None)]) == []


def test_parts_are_selected_together() -> None:
    names = [f"UD/m-Q8_0-{i:05}-of-00003" for i in (2, 1, 3)]
    [model] = models(*names)
    assert model.path == "UD/m-Q8_0"
    assert model.bytes == 60
    assert [file.path for file in model.files] == [f"{name}.gguf" for name in sorted(names)]
    assert models(*names[1:]) == []


def test_a_single_file_is_preferred_to_parts() -> None:
    parts = [f"m-Q8_0-{i:05}-of-{n:05}" for n in (2, 3) for i in range(1, n + 1)]
    [model] = models("m-Q8_0", *parts)
    assert [file.path for file in model.files] == ["m-Q8_0.gguf"]
    [model] = models(*parts)
    assert [file.path for file in model.files] == [f"{name}.gguf" for name in parts[:2]]
    assert len(models("m-Q8_0", parts[1])) == 1


def test_parts_may_have_gguf_inside_their_names() -> None:
    names = [f"{folder}/m.Q8_0.gguf-{i:05}-of-00002" for folder in "ab" for i in (1, 2)]
    found = models(*names)
    assert [model.path for model in found] == ["a/m.Q8_0", "b/m.Q8_0"]
    assert choose(found, "b/m.Q8_0") == choose(found, "b/m.Q8_0.gguf") == found[1]
