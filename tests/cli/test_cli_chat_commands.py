"""`pyh2o chat`: slash commands, with a scripted model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_fakes import Output, cache_with, run
from pyh2o.cli.chat.answers import AnswerStats, footer
from pyh2o.cli.chat.commands import COMMANDS
from pyh2o.writing.sampling import Sampling
from scripted_chat import RecordedConversation, ScriptedModel, answers_of, notes_of, said
from tiny_gguf import CHAT_TEMPLATE, write_tiny_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a model whose answers do not end."""
    return write_tiny_gguf(tmp_path / "tiny.gguf", seed=17, chat_template=CHAT_TEMPLATE)


pytestmark = pytest.mark.usefixtures("surroundings")


def test_help(model: ScriptedModel) -> None:
    lines = run("chat", stdin="/help\n").notes.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("/")]
    assert names == list(COMMANDS)
    assert lines[0] == "/help                Show this list."


@pytest.mark.parametrize("name", ["/foo", "/UNDO", "/usr/bin"])
def test_unknown_commands_are_never_sent(model: ScriptedModel, name: str) -> None:
    model.say("Hi")
    output = run("chat", stdin=f"{name} bar\nHello\n")
    assert output == Output(
        1,  # at the end: the script was not done as it was written
        "Hi\n",
        f"error: unknown command {name}: /help lists the commands; start the line with a space to "
        "send it to the model\n" + model.footer(("Hello", "Hi")),
    )
    assert said() == ["Hello"]


def test_quit_ends_the_chat(model: ScriptedModel) -> None:
    assert run("chat", stdin="/quit \nHello\n") == Output(0, "", "")
    assert said() == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/quit now", "/quit takes no argument"),
        ("/read", "/read needs an argument: /read FILE [TEXT]"),
        ("/load ", "/load needs an argument: /load NAME|FILE"),
        ("/regen", "there is no message yet: send one"),
        ("/answers", "there is no message yet: send one"),
        ("/save", "this chat is not saved automatically: /save FILE saves a copy"),
        ("/kv 0", "/kv shows the passages with most rows, /kv all shows all"),
        ("/set colour", "unknown setting colour: /set shows all settings\n"),
        ("/set top 5", "unknown setting top: /set shows all settings\n"),
        ("/set temp hot", "temperature is 'hot': give a number"),
        ("/set dry-seq a", "dry_sequence_breakers is 'a': give a list such as ["),
        ("/set temp -1", "temperature is -1.0: give 0 for the most probable token, or a "),
        ("/read none.txt", "cannot read none.txt: No such file or directory"),
        ("/read latin.txt", "latin.txt is not UTF-8 text (byte 2): save it as UTF-8"),
        ("/read empty.txt", "empty.txt is empty: give a file with a text"),
        ("/read 'my", 'unclosed quote in "\'my"'),
        ("/read ~nobody-here/x.txt", "cannot read ~nobody-here/x.txt: No such file"),
        ("/save a\0b", r"'a\x00b' is not a valid file name"),
        (f"/save {'x' * 300}", f"{'x' * 300}: File name too long"),
        ("/save none/x.h2o", "cannot use the session file none/x.h2o: No such file or directory"),
        ("/load none.h2o", "no session or file none.h2o: /sessions lists"),
        ("/continue", "there is no message yet: send one"),
        ("/pin the code", "'the code' is not in the conversation: give the exact words"),
        ("/unpin", "nothing is pinned\n"),
        ("/load a b", "'a b' is not a file: put quotes around a name with spaces"),
    ],
)
def test_commands_report_errors(model: ScriptedModel, line: str, message: str) -> None:
    Path("latin.txt").write_bytes("caé".encode("latin-1"))
    Path("empty.txt").write_bytes(b"\n")
    output = run("chat", stdin=f"{line}\n")
    assert (output.code, output.text) == (1, "")
    assert output.notes.startswith(f"error: {message}")
    assert output.notes.count("\n") == 1


def test_regen_and_edit(model: ScriptedModel) -> None:
    model.say("one", "two", "three")
    output = run("chat", stdin="Hello\n/regen\n/edit Good  morning \n")
    assert output == Output(
        0,
        "one\ntwo\nthree\n",
        model.footer(("Hello", "one"))
        + model.footer(("Hello", "two"))
        + model.footer(("Good  morning", "three")),
    )
    assert said() == ["Hello", "Hello", "Good  morning"]
    assert answers_of() == [("Good  morning", "three")]
    model.say("one")
    output = run("chat", stdin="Hello\n/edit\n")
    assert output.notes.endswith("error: in a script, /edit needs the new message: /edit TEXT\n")


def test_answers_lists_and_chooses_replaced_answers(model: ScriptedModel) -> None:
    model.say("one", "two  lines\nof it", "3", "four")
    lines = ["Hello", "/regen", "/regen", "/answers", "/answers 2", "/answers", "Bye", "/answers"]
    output = run("chat", stdin="\n".join(lines))
    assert (output.code, output.text) == (0, "one\ntwo  lines\nof it\n3\ntwo  lines\nof it\nfour\n")
    assert notes_of(output) == [
        "   1      3 tokens  one",
        "   2     16 tokens  two lines of it",
        "*  3       1 token  3",
        "16 tokens will be read again with the next message",
        "   1      3 tokens  one",
        "*  2     16 tokens  two lines of it",
        "   3       1 token  3",
        "*  1      4 tokens  four",
    ]
    assert answers_of() == [("Hello", "two  lines\nof it"), ("Bye", "four")]


@pytest.mark.parametrize("wanted", ["0", "3", "1 2", "²"])
def test_an_unknown_answer_is_refused(model: ScriptedModel, wanted: str) -> None:
    model.say("one", "two")
    output = run("chat", stdin=f"Hello\n/regen\n/answers {wanted}\n")
    assert notes_of(output) == [f"error: unknown answer {wanted}: /answers lists them"]
    assert (output.code, answers_of()) == (1, [("Hello", "two")])


def test_continue_resumes_an_interrupted_answer(model: ScriptedModel) -> None:
    model.say("Hi there", " there", "")
    output = run("chat", "-n", "2", stdin="Hello\n/continue\n/continue\n/continue\n")
    hello = model.n_text(("Hello", "Hi t"))
    cut = (
        "the answer reached 2 tokens: give a larger --max-tokens; /continue continues it, "
        "/regen samples another one"
    )
    assert notes_of(output) == [
        cut,
        cut,
        "error: the model has ended its answer: send a message, or regenerate it",
    ]
    assert (output.code, output.text) == (1, "Hi\n t\n")
    assert f"2 tokens · 2.0 tokens/s · first after 0.5 s · {model.cache(hello - 1)}" in output.notes
    assert RecordedConversation.last.limits == [2] * 4
    assert answers_of() == [("Hello", "Hi t")]


def test_an_answer_that_only_repeats_itself_ends(model: ScriptedModel) -> None:
    model.say("Repeat! " * 80, "Repeat! " * 80)
    output = run("chat", stdin="Hello\n/continue\n")
    ended = (
        "the answer ends here: the model keeps repeating itself (a higher --temp or "
        "--repeat-penalty helps); /continue continues it, /regen samples another one"
    )
    assert notes_of(output) == [ended, ended]
    [(_, answer)] = answers_of()
    assert answer == ("Repeat! " * 80)[: 8 + 256 + 256]


def test_pin_and_unpin(model: ScriptedModel) -> None:
    model.say("Hi", "Ho")
    lines = [
        "/pin",
        "The code is 4711. Keep it.",
        "/pin CODE",
        "More.",
        "/pin keep it",
        "/pin nope",
    ]
    output = run("chat", stdin="\n".join([*lines, "/unpin code", "/unpin"]))
    assert notes_of(output) == [
        "nothing is pinned: /pin TEXT pins the last sentences with these words",
        "pinned, 17 tokens: The code is 4711.",
        "pinned, 17 tokens: The code is 4711.",
        "pinned, 8 tokens: Keep it.",
        "error: 'nope' is not in the conversation: give the exact words",
        "still pinned: 1 passage",
        "nothing is pinned",
    ]


def test_undo_and_clear(model: ScriptedModel) -> None:
    model.say(*["a"] * 5)
    lines = ["one", "two", "word " * 50, "/undo", "/undo", "four", "five", "/clear", "/undo"]
    output = run("chat", "-s", "Be kind.", stdin="\n".join(lines))
    said = [("one", "a"), ("two", "a")]
    shown = "word " * 11 + "wo..."
    assert notes_of(output) == [
        f"removed: {shown} (2 turns, {model.n_text(*said[:2], system='Be kind.')} tokens left)",
        f"removed: two (1 turn, {model.n_text(*said[:1], system='Be kind.')} tokens left)",
        "removed: 3 turns; the system prompt stays",
        "error: there is no message yet: send one",
    ]
    assert RecordedConversation.last.system == "Be kind."


def test_undo_shows_how_many_tokens_are_read_again(path: Path) -> None:
    small = ["-m", str(path), "--hh=16", "--recent=16", "--slack=8", "-n60", "--seed=1"]
    output = run("chat", *small, "--recall=0", "--store-mib=0", stdin="one\ntwo\n/undo\nthree\n")
    undone, again = [line for line in notes_of(output) if "the answer reached" not in line][-2:]
    (n_left,) = re.findall(r"removed: two \(1 turn, (\d+) tokens left\)", undone)
    assert again == f"{n_left} tokens will be read again with the next message"


def test_statistics_below_an_answer() -> None:
    answer = AnswerStats("stop", True, 9, 0.5, 120, 7.0)
    assert footer(answer, cache_with(4_481, used=1_638, found_share=0.0314)) == (
        "120 tokens · 17.0 tokens/s · first after 0.5 s · 1,638 of 4,481 tokens cached · "
        "3.1% recalled"
    )


def test_system_prompt_is_shown_set_and_removed(model: ScriptedModel) -> None:
    model.say("a", "b")
    lines = ["/system", "/system Be kind.", "Hello", "/system Be brief.\\", "Always.", "/system"]
    output = run("chat", stdin="\n".join([*lines, "Who?", '/system ""']))
    hello, who = ("Hello", "a"), ("Who?", "b")
    n_brief = model.n_text(hello, system="Be brief.\nAlways.")
    n_both = model.n_text(hello, who)
    assert notes_of(output) == [
        "the template's default system prompt",
        "system prompt: Be kind.",
        f"{n_brief} tokens will be read again with the next message",
        "system prompt: Be brief.",
        "Always.",
        "system prompt: Be brief.",
        "Always.",
        f"{n_both} tokens will be read again with the next message",
        "the template's default system prompt",
    ]
    assert RecordedConversation.last.system is None


def test_read_sends_a_file_and_a_question(model: ScriptedModel) -> None:
    Path("notes.txt").write_bytes(b"\xef\xbb\xbfone\r\n/two\r\n")
    Path("my notes.txt").write_text("three\n")
    model.say(*["a"] * 6)
    script = [
        "/read notes.txt",
        "/read notes.txt What's this?",
        "/read my notes.txt",
        "/read 'my notes.txt' Well?",
        r"/read my\ notes.txt",
        '"""x',
        '"""',
    ]
    assert run("chat", stdin="\n".join(script)).code == 0
    assert said() == [
        "one\n/two",
        "one\n/two\n\nWhat's this?",
        "three",
        "three\n\nWell?",
        "three",
        "x",
    ]


def test_set_shows_and_changes_the_sampling(model: ScriptedModel) -> None:
    script = ["/set", "/set temp", "/set top-k 5", "/set temperature 0", '/set dry-seq ["\\n"]']
    output = run("chat", "--seed", "7", stdin="\n".join(script))
    lines = [line.split() for line in output.notes.splitlines()]
    assert lines == [
        ["temperature", "0.8"],
        ["top_k", "40"],
        ["top_p", "0.95"],
        ["min_p", "0.05"],
        ["typical_p", "1.0"],
        ["repeat_penalty", "1.1"],
        ["frequency_penalty", "0.0"],
        ["presence_penalty", "0.0"],
        ["seed", "7"],
        ["dry_multiplier", "0.0"],
        ["dry_base", "1.75"],
        ["dry_allowed_length", "2"],
        ["dry_penalty_last_n", "-1"],
        ["dry_sequence_breakers", '["\\n",', '":",', '"\\"",', '"*"]'],
        ["xtc_probability", "0.0"],
        ["xtc_threshold", "0.1"],
        ["temperature", "0.8"],
        ["top_k", "5"],
        ["temperature", "0.0"],
        ["dry_sequence_breakers", '["\\n"]'],
    ]
    changed = Sampling(temperature=0.0, top_k=5, seed=7, dry_sequence_breakers=("\n",))
    assert RecordedConversation.last.sampling == changed


def test_stats_of_answers_and_of_the_cache(model: ScriptedModel) -> None:
    model.say("Hi there", "one two three")
    output = run("chat", stdin="/stats\nHello you\nWho\n/stats\n")
    lines = notes_of(output)
    before = [
        "conversation   0 turns · 0 tokens of text",
        "cache          KV 0/300 cells · budget 200 (100 heavy + 100 recent) · 0 evicted · "
        "3.0 MiB of 8.0 MiB full",
        f"               {cache_with(0).details()}",
        "snapshots      0 · 0.0 of 1,024 MiB",
    ]
    assert lines[:4] == before
    n_first = model.n_text(("Hello you", "Hi there"))
    used = model.n_text(("Hello you", "Hi there"), ("Who", "one two three"))
    n_read = used - 13 - n_first
    n_both = n_read + n_first - 8
    assert lines[4:] == [
        f"conversation   2 turns · {used} tokens of text",
        f"last answer    {n_read} tokens read · {n_read * 2:.1f} tokens/s · 13 tokens written · "
        "2.0 tokens/s",
        f"all answers    {n_both} tokens read · {n_both:.1f} tokens/s · 21 tokens written · "
        "2.0 tokens/s",
        before[1].replace("0/", f"{used}/", 1),
        before[2],
        "snapshots      1 · 0.1 of 1,024 MiB",
    ]


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(("typed", "row"), [("7", "0 · 0.0 of 7 MiB"), ("0", None)])
def test_snapshots_can_be_limited(typed: str, row: str | None) -> None:
    lines = notes_of(run("chat", "--store-mib", typed, stdin="/stats\n"))
    assert RecordedConversation.last.llm.model.snapshots.mib == int(typed)
    rows = [line.split(maxsplit=1)[1] for line in lines if line.startswith("snapshots")]
    assert rows == ([] if row is None else [row])


def test_stats_of_a_text_that_is_read_again(model: ScriptedModel) -> None:
    model.say("Hi there")
    output = run("chat", stdin="Hello you\n/system Be brief.\n/stats\n")
    tokens = model.n_text(("Hello you", "Hi there"), system="Be brief.")
    assert f"conversation   1 turn · {tokens} tokens of text" in notes_of(output)
