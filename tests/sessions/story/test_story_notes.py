"""What a model is told where a passage begins, and what is no part of the story."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conversations import without_kv
from pyh2o import Llama
from pyh2o.sessions.lorebooks import LoreEntry, note_for_passage
from pyh2o.sessions.story import Story
from pyh2o.sessions.story_notes import NEAR, place_of_note
from pyh2o.writing.sampling import Sampling
from tiny_llama import tiny_llama

CACHE: dict[str, Any] = {"n_ctx": 2000, "hh": 120, "recent": 200, "slack": 40}
PROMPT = "It was dark. Nobody was there. And then, in the distance, a"
NOTE = "Be sad."
TOLD = f"\n[Author's note: {NOTE}]\n"
PASSAGE = 40
SAMPLING = Sampling(seed=5)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Llama]:
    with tiny_llama(model, **CACHE) as running:
        yield running


def begun(llm: Llama, note: str = NOTE, prompt: str = PROMPT) -> Story:
    tale = Story(llm, prompt, echo=True, sampling=SAMPLING, ignore_eos=True, loop_guard=False)
    tale.note = note
    return tale


def noted(tale: Story) -> list[str]:
    """What was told, in the order of the text."""
    model = tale.llm.model
    return [model.detokenize(tale.tokens[start:end]).decode() for start, end in tale.told]


def n_evaluated(llm: Llama) -> int:
    return llm.text.model.batcher.counts.tokens


def test_each_passage_has_its_own_note_and_no_other(llm: Llama) -> None:
    """In ten passages; each reads its note and the end of the text, and nothing else again."""
    tale = begun(llm)
    whole = "".join(tale.write(PASSAGE))
    before_note = tale.tokens[: tale.told[0][0]]
    assert llm.detokenize(before_note).decode() == PROMPT[: PROMPT.index(".") + 1]
    costs = []
    for _ in range(9):
        before = n_evaluated(llm)
        whole += "".join(tale.write(PASSAGE))
        (start, end), n_tokens = tale.told[-1], len(tale.tokens)
        behind = n_tokens - PASSAGE - end  # of the passage before, read again
        costs.append(n_evaluated(llm) - before - PASSAGE)
        assert costs[-1] == end - start + max(0, behind - 1)  # its newest one was not read yet
        assert behind <= NEAR
        assert llm.text.dropped_spans == [*tale.told[:-1]]
        for layer in range(2):
            positions, _ = llm.kv_rows(layer)
            kept = set(positions.ravel().tolist())
            assert not any(kept & set(range(*span)) for span in tale.told[:-1])
    assert noted(tale) == [TOLD] * 10
    assert tale.text() == whole
    assert whole.startswith(PROMPT)
    assert "Author" not in whole
    assert "[" not in whole
    assert tale.written == 10 * PASSAGE
    assert llm.kv.compactions > 0
    print("tokens read beside those written, in each passage:", costs)


def test_no_note_is_copied(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model would write brackets; else it may."""
    bracket = llm.tokenize(b"a[", add_bos=False)[-1]
    forbid = Story._forbid

    def love_brackets(self: Story, input_ids: Any, logits: Any) -> Any:
        logits[bracket] = 100.0
        return forbid(self, input_ids, logits)

    monkeypatch.setattr(Story, "_forbid", love_brackets)
    tale = begun(llm)
    assert "[" not in "".join(tale.write(20))
    tale.note = ""
    assert "".join(tale.write(5)) == "[[[[["


def test_it_goes_on_where_it_was_saved(llm: Llama, tmp_path: Path) -> None:
    tale = begun(llm)
    tale.lore = (LoreEntry(("dark",), "Lamps are forbidden."),)
    "".join(tale.write(PASSAGE))
    tale.save(tmp_path / "tale")
    again = Story.load(tmp_path / "tale", llm)
    assert (again.told, again.lore, again.note) == (tale.told, tale.lore, tale.note)
    assert (again.text(), again.written) == (tale.text(), tale.written)
    more = "".join(again.write(PASSAGE))
    for reread in (False, True):
        file = tmp_path / "tale"
        other = Story.load(without_kv(file) if reread else file, llm)
        text = "".join(other.write(PASSAGE))
        assert reread or text == more
        assert noted(other) == [f"\n[Lamps are forbidden.]\n[Author's note: {NOTE}]\n"] * 2
        other.save(tmp_path / "again")
        assert llm.text.dropped_spans == [other.told[0]]
    assert Story.load(tmp_path / "again", llm).text() == other.text()


def test_notes_are_where_they_were_after_an_edit(llm: Llama) -> None:
    tale = begun(llm)
    first = "".join(tale.write(PASSAGE))
    second = "".join(tale.write(PASSAGE))
    told = tale.told
    assert tale.text() == first + second
    tale.cut(len(first))
    assert tale.text() == first
    assert tale.told in (told, told[:1])  # the second one stood before the last words of the first
    tale.edit(f"{first[:-5]} and so on")
    assert tale.text() == f"{first[:-5]} and so on"
    assert tale.told[:1] == told[:1]
    assert "".join(tale.write(5)) == tale.text()[-len(tale.text()) + len(first) + 5 :]
    tale.edit("Nothing of that.")
    assert (tale.text(), tale.told) == ("Nothing of that.", ())
    assert tale.own_tokens == tale.tokens
    for _ in range(3):
        tale.write(1).close()  # nothing comes of it
        next(tale.write(3))
    assert tale.text().startswith("Nothing of that.")


def test_a_full_cache_keeps_them(model: Path) -> None:
    with tiny_llama(model, n_ctx=600, evict=False) as full:
        tale = begun(full)
        text = "".join("".join(tale.write(20)) for _ in range(3))
        assert (tale.text(), noted(tale)) == (text, [TOLD] * 3)
        assert full.n_tokens == len(tale.tokens) - 1


def test_an_entry_is_told_while_it_comes_up(llm: Llama) -> None:
    lore = (
        LoreEntry(("comet",), "Comets bring luck.", order=2.0),
        LoreEntry(("dark",), "[Lamps are forbidden.]", order=1.0),
    )
    assert note_for_passage("a Comet in the dark", lore, "[sad]") == (
        "[Lamps are forbidden.]\n[Comets bring luck.]\n[sad]"
    )
    assert note_for_passage(f"a comet{'.' * 2000}", lore) == ""
    tale = begun(llm, note="", prompt="It was light. And")
    tale.lore = lore
    "".join(tale.write(5))
    assert tale.told == ()
    tale.edit("It was dark. And")
    "".join(tale.write(5))
    assert noted(tale) == ["\n[Lamps are forbidden.]\n"]


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("One. ", "Two."),  # the first one that may be
        ('He said "No."', " And then. It"),
        ("One. Two.\n\n", "Three. Four, and\n"),  # a paragraph before a sentence
        ("One is 3.14, or so.", " It"),
        ("It ends here.", ""),
        ("nothing ends here, for very long" * 5, ""),
        ("One. Two" + " and so on" * 60, ""),  # its sentence ended too long ago
    ],
)
def test_a_note_tears_no_sentence(llm: Llama, before: str, behind: str) -> None:
    tokens = llm.tokenize(f"{before}{behind}".encode())
    place = place_of_note(llm.text.model, tokens, 1)
    assert llm.detokenize(tokens[:place]).decode() == before.rstrip(" ")
    assert place == len(tokens) or len(tokens) - place <= NEAR
