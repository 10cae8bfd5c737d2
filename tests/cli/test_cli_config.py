"""The configuration file: what it sets, what goes before it, and how mistakes in it are told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli_fakes import Output, run
from fake_story import FakeModel, options_of
from pyh2o.cli.config import config_path, read_sections
from pyh2o.cli.options import KVType, RunOptions

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my.toml"
    monkeypatch.setenv("PYH2O_CONFIG", str(path))
    return path


def test_config_file_is_in_the_user_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYH2O_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("HOME", str(tmp_path))
    found = config_path()
    assert (found.name, found.parent.name) == ("config.toml", "pyh2o")
    assert tmp_path in found.parents
    assert run("models", "list").code == 0
    found.parent.mkdir(parents=True)
    found.write_text("[defaults]\nthreads = 0\n")
    assert run("models", "list").notes.startswith(f"error: {found}: threads in [defaults] is 0: ")


def test_every_kind_of_value_reaches_the_options(file: Path, fake: FakeModel) -> None:
    file.write_text(
        """\
[defaults]
model = "a.gguf"
threads = 3
hh = 0.2
recent = 30
kv-type = "q8_0"
no-evict = true
temp = 0
rpc = ["a:1", "b:2"]

[generate]
max-tokens = 2
"""
    )
    given = options_of(fake)
    assert (given.model, given.threads, given.kv_type) == (Path("a.gguf"), 3, KVType.q8_0)
    assert (given.eviction.hh, given.eviction.recent) == (0.2, 30)
    assert isinstance(given.eviction.recent, int)
    assert (given.no_evict, given.rpc) == (True, ["a:1", "b:2"])
    assert given.sampling.temperature == 0


def test_command_line_goes_before_environment_and_file(
    file: Path, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_of_file(file, fake, "[chat]\nthreads = 2\n").threads is None
    assert options_of_file(file, fake, "[defaults]\nthreads = 2\n").threads == 2
    both = "[generate]\nthreads = 3\n\n[defaults]\nthreads = 2\n"
    assert options_of_file(file, fake, both).threads == 3
    monkeypatch.setenv("PYH2O_THREADS", "4")
    assert options_of_file(file, fake, both).threads == 4
    assert options_of(fake, "--threads", "5").threads == 5


def options_of_file(file: Path, fake: FakeModel, text: str) -> RunOptions:
    file.write_text(text)
    return options_of(fake)


def test_flag_with_two_names(file: Path, fake: FakeModel) -> None:
    file.write_text("[generate]\necho = true\n")
    fake.script = ["a"]
    assert run("generate", "-p", "x").text.startswith("x")
    assert not run("generate", "-p", "x", "--no-echo").text.startswith("x")
    file.write_text("[generate]\necho = false\n")
    assert not run("generate", "-p", "x").text.startswith("x")


def test_group_of_commands(file: Path) -> None:
    file.write_text('[models]\njson = "of-all/a.json"\n')
    assert "of-all" in run("models", "check").notes
    file.write_text('[models]\njson = "of-all/a.json"\n\n[models.check]\njson = "its-own/a.json"\n')
    assert "its-own" in run("models", "check").notes


def test_one_model_for_a_command_that_takes_several(file: Path) -> None:
    file.write_text('[serve]\nmodel = "one.gguf"\nport = 0\n')
    assert "no model file one.gguf" in run("serve").notes
    file.write_text('[serve]\nmodel = ["two.gguf", "one.gguf"]\nport = 0\n')
    assert "no model file two.gguf" in run("serve").notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[defaults\n", "is not valid TOML: "),
        (b"[chat]\nsystem = '\xff'\n", "is not valid TOML: "),
        ("threads = 2\n", "threads is not in a section: put it below [defaults] or a command"),
        ("[chta]\nhh = 0.1\n", "unknown section [chta]: did you mean chat?"),
        (
            "[chat]\nmax_tokens = 2\n",
            "unknown option max_tokens in [chat]: did you mean max-",
        ),
        ("[chat]\nhelp = true\n", "unknown option help in [chat]"),
        ("[defaults]\nthreads = 0\n", "threads in [defaults] is 0: "),
        ("[defaults]\nhh = 1\n", "hh in [defaults] is 1: 1 is ambiguous: write 1.0 for"),
        ("[defaults]\nkv-type = 'q5'\n", "kv-type in [defaults] is 'q5': "),
        ("[defaults]\nno-evict = 1\n", "no-evict in [defaults] is 1: give true or false"),
        ("[defaults]\nmodel = true\n", "model in [defaults] is True: give a text or a number"),
        ("[defaults]\nctx = [1]\n", "ctx in [defaults] is [1]: give a text or a number"),
        ("[serve]\nmodel = [1, true]\n", "model in [serve] is [1, True]: give a text or a number"),
        ("[chat]\nsystem = 2026-01-01\n", "give a text or a number"),
        (f"[defaults]\nseed = {'9' * 5000}", "is not valid TOML: Exceeds the limit"),
        (f"[{'.'.join('a' * 5000)}]\nb = 1", "is not valid TOML: "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_mistakes_in_the_file_are_told(file: Path, text: str | bytes, message: str) -> None:
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    output = run("models", "list")
    assert (output.code, output.text) == (1, "")
    assert output.notes.startswith(f"error: {file}")
    assert message in output.notes
    assert output.notes.count("\n") == 1


@pytest.mark.parametrize("variable", ["HOME", "XDG_CONFIG_HOME"])
def test_home_that_is_no_folder(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYH2O_CONFIG")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv(variable, os.devnull)
    assert read_sections(config_path()) == {}


def test_file_that_is_not_there(file: Path) -> None:
    output = run("models", "list")
    assert output == Output(
        1, "", f"error: PYH2O_CONFIG is {file}, which does not exist: unset it\n"
    )


def test_help_shows_what_would_be_taken(file: Path) -> None:
    file.write_text("[defaults]\npinned = 77\n")
    assert "default: 77" in run("generate", "--help-all").text
