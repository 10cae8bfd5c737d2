"""What the file of a story holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversations import held_by_all
from pyh2o import Llama
from pyh2o.errors import SessionError, SettingsError
from pyh2o.sessions.story import Story
from pyh2o.writing.sampling import Sampling
from stories import PROMPT
from tiny_gguf import write_tiny_gguf
from tiny_llama import tiny_llama


@pytest.mark.usefixtures("no_end")
def test_a_story_that_is_read_again_goes_on_under_other_settings(
    llm: Llama, model: Path, tmp_path: Path
) -> None:
    tale = Story(llm, PROMPT, sampling=Sampling(seed=4))
    text = "".join(tale.write(60))
    tale.pin(3, 7)
    tale.save(tmp_path / "s.h2o")
    smaller = tiny_llama(model, n_ctx=1024, hh=10, recent=20, slack=8)
    loaded = Story.load(tmp_path / "s.h2o", smaller, reread=True)
    assert (loaded.tokens, loaded.text(), loaded.pins) == (tale.tokens, text, ((3, 7),))
    assert loaded.sampling == tale.sampling
    assert loaded.unread == loaded.tokens
    more = "".join(loaded.write(10))
    assert loaded.text() == text + more
    tale.pin(10, 26)
    tale.save(tmp_path / "s.h2o")
    with pytest.raises(SettingsError, match="do not fit"):
        Story.load(tmp_path / "s.h2o", smaller, reread=True)


def test_another_model_reads_the_text_in_the_notes_of_a_story(llm: Llama, tmp_path: Path) -> None:
    tale = Story(llm, PROMPT, echo=True)
    text = "".join(tale.write(20))
    path = write_tiny_gguf(tmp_path / "other.gguf", seed=18, n_ctx_train=1 << 17)
    other = tiny_llama(path, n_ctx=512, hh=10, recent=20, slack=8)
    tale.save(tmp_path / "s.h2o")
    with pytest.raises(SessionError, match="has only tokens of the story"):
        Story.load(tmp_path / "s.h2o", other, reread=True)
    tale.notes = {"text": text, "by": "me"}
    tale.save(tmp_path / "s.h2o")
    loaded = Story.load(tmp_path / "s.h2o", other, reread=True)
    assert (loaded.text(), loaded.notes, loaded.pins) == (text, tale.notes, ())
    more = "".join(loaded.write(10))
    assert loaded.text() == text + more


@pytest.mark.usefixtures("no_end")
@pytest.mark.parametrize("n_more", [0, 60], ids=["as long", "longer"])
def test_a_story_is_saved_while_the_model_has_another_text(
    llm: Llama, other: Llama, tmp_path: Path, n_more: int
) -> None:
    """Without that one's state: it is read again when it is loaded."""
    tale = Story(llm, PROMPT, sampling=Sampling(seed=1))
    text = "".join(tale.write(100))
    another = Story(llm, PROMPT, sampling=Sampling(seed=2))
    "".join(another.write(100 + n_more))
    tale.save(tmp_path / "s.h2o")
    loaded = Story.load(tmp_path / "s.h2o", other)
    assert (loaded.tokens, loaded.text()) == (tale.tokens, text)
    assert other.n_tokens == 0
    # the other one goes on as if nothing had been saved
    assert llm.input_ids[: llm.n_tokens].tolist() == another.tokens[:-1]
    whole_tale = Story(other, PROMPT, sampling=Sampling(seed=2))
    text = "".join(whole_tale.write(120 + n_more))
    "".join(another.write(20))
    assert another.tokens == whole_tale.tokens


@pytest.mark.usefixtures("no_end")
def test_pins_of_another_story_are_not_taken_over(llm: Llama) -> None:
    """Where that begins as this one does."""
    tale = Story(llm, PROMPT, sampling=Sampling(seed=1))
    "".join(tale.write(10))
    tale.pin(3, 7)
    another = Story(llm, tale.tokens[:12], sampling=Sampling(seed=1))
    "".join(another.write(1))
    another.pin(8, 12)
    "".join(tale.write(200))
    held = held_by_all(llm)
    assert {3, 4, 5, 6} <= held
    assert not {8, 9, 10, 11} <= held
