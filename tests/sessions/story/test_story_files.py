"""What the file of a story holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversations import held_by_all
from pyh2o import Llama
from pyh2o.sessions.database import Database
from pyh2o.sessions.messages import unpacked
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
    loaded = Story.load(tmp_path / "s.h2o", smaller)
    assert (loaded.tokens, loaded.text(), loaded.pins) == (tale.tokens, text, ((3, 7),))
    assert loaded.sampling == tale.sampling
    assert loaded.unread == loaded.tokens
    more = "".join(loaded.write(10))
    assert loaded.text() == text + more
    tale.pin(10, 26)
    tale.save(tmp_path / "s.h2o")
    assert Story.load(tmp_path / "s.h2o", smaller).pins == ()


@pytest.mark.parametrize("echo", [False, True])
def test_another_model_reads_the_text_of_a_story(llm: Llama, tmp_path: Path, echo: bool) -> None:
    tale = Story(llm, PROMPT, echo=echo)
    text = "".join(tale.write(20))
    tale.notes = {"by": "me"}
    tale.save(tmp_path / "s.h2o")
    path = write_tiny_gguf(tmp_path / "other.gguf", seed=18, n_ctx_train=1 << 17)
    other = tiny_llama(path, n_ctx=512, hh=10, recent=20, slack=8)
    loaded = Story.load(tmp_path / "s.h2o", other)
    assert (loaded.text(), loaded.notes, loaded.pins) == (text, tale.notes, ())
    assert loaded.reread_reason == "it was saved with another model (tiny.gguf)"
    more = "".join(loaded.write(10))
    assert loaded.text() == text + more
    loaded.save(tmp_path / "s.h2o")
    again = Story.load(tmp_path / "s.h2o", other)
    assert (again.text(), again.reread_reason) == (text + more, "")
    assert [passage.text for passage in again.passages] == [
        passage.text for passage in loaded.passages
    ]


def test_passages_stay_what_they_were(llm: Llama, tmp_path: Path) -> None:
    tale = Story(llm, PROMPT, sampling=Sampling(seed=3), ignore_eos=True, echo=True)
    with Database(tmp_path / "chats.db") as database:
        text = tale.keep_in(database, "tale")
        written = ["".join(tale.write(30))]
        tale.store()
        tale.note = "sad"
        written += ["".join(tale.write(30)) for _ in range(2)]
        tale.store()

        def stored() -> list[str]:
            contents = database.read(text)
            tokens = b"".join(message.tokens for message in contents.messages)
            assert unpacked(tokens) == tale.tokens
            opening = contents.messages[0].user
            assert opening + "".join(message.answer for message in contents.messages) == tale.text()
            return [message.answer for message in contents.messages[1:]]

        assert PROMPT + "".join(stored()) == "".join(written)
        assert len(stored()) == 3
        whole = tale.text()
        tale.edit(whole[:-5] + " the end")
        tale.store()
        stored()
        tale.edit("Another beginning")
        tale.store()
        stored()
        assert database.search("once upon")


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
