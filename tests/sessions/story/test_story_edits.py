"""A story whose text was edited goes on from the new text."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyh2o import Llama
from pyh2o.errors import ContextLimitError
from pyh2o.sessions.story import Story
from pyh2o.writing.cache_copies import WORTH
from pyh2o.writing.sampling import Sampling
from stories import PROMPT

EDITED = [
    "Once upon a time there was a \N{SNOWMAN}.\n",  # the prompt is as it was
    "Twice upon a time!",
    "On",
    "\N{SNOWMAN}" * 30,
    "It has the word \u2581 in it",
]


@pytest.mark.parametrize("text", EDITED)
@pytest.mark.parametrize("echo", [True, False])
def test_an_edited_story_is_read_again(llm: Llama, tmp_path: Path, text: str, echo: bool) -> None:
    tale = Story(llm, PROMPT, echo=echo, sampling=Sampling(seed=5))
    "".join(tale.write(20))
    prompt = tale.tokens[: tale.n_prompt]
    tale.edit(text)
    if echo:
        assert tale.tokens == llm.tokenize(text.encode())
    else:
        assert tale.tokens[: len(prompt)] == prompt
    assert (tale.text(), tale.finish) == (text, None)
    n_tokens, n_kept = len(tale.tokens), llm.n_tokens
    assert llm.input_ids[:n_kept].tolist() == tale.tokens[:n_kept]
    more = "".join(tale.write(10))
    assert llm.input_ids[: n_tokens + 9].tolist() == tale.tokens[:-1]
    assert tale.n_read - len(prompt) == max(1, n_tokens - n_kept)
    assert tale.text() == text + more
    # the edited text is the story's from now on
    tale.save(tmp_path / "s.h2o")
    loaded = Story.load(tmp_path / "s.h2o", llm)
    assert loaded.text() == text + more
    assert "".join(loaded.write(10)) == "".join(tale.write(10))


def test_what_was_written_of_an_edited_story_counts(llm: Llama) -> None:
    tale = Story(llm, PROMPT, echo=True)
    n_prompt = tale.n_prompt
    "".join(tale.write(20))
    for edited in (f"{PROMPT} there was", f"{PROMPT.lower()} there was"):
        tale.edit(edited)
        assert tale.n_prompt == n_prompt
        assert tale.written > 0


def test_an_edited_story_that_is_too_long_is_refused(full: Llama) -> None:
    tale = Story(full, PROMPT, echo=True)
    text = "".join(tale.write(5))
    with pytest.raises(ContextLimitError):
        tale.edit("word " * 512)
    assert tale.text() == text


@pytest.mark.parametrize("echo", [True, False])
def test_what_stays_of_an_edited_story_is_not_read_again(llm: Llama, echo: bool) -> None:
    tale = Story(llm, PROMPT, echo=echo, sampling=Sampling(seed=5))
    text = "".join(tale.write(20))
    tokens, n_read = list(tale.tokens), tale.n_read
    tale.edit(f"{text[:-5]} and so on")
    assert len(tokens) - 8 < llm.n_tokens < len(tokens)
    assert tale.tokens[: llm.n_tokens] == tokens[: llm.n_tokens]
    n_unread = len(tale.tokens) - llm.n_tokens
    "".join(tale.write(3))
    assert tale.n_read - n_read == n_unread


@pytest.mark.parametrize("copies", [512, 0])
def test_the_beginning_of_an_edited_story_comes_from_a_copy(llm: Llama, copies: int) -> None:
    beginning = PROMPT * 12
    tale = Story(llm, beginning, echo=True, copies_mib=copies)
    "".join(tale.write(60))
    for end in (" there was", " there was another one"):
        tale.edit(beginning + end)
        n_read, n_tokens = tale.n_read, len(tale.tokens)
        more = "".join(tale.write(60))
        assert tale.text() == beginning + end + more
        assert llm.input_ids[: llm.n_tokens].tolist() == tale.tokens[: llm.n_tokens]
        if copies:
            assert tale.n_read - n_read < WORTH
        else:
            assert tale.n_read - n_read == n_tokens


def test_a_story_comes_back_from_a_copy_when_the_model_was_used_for_another(llm: Llama) -> None:
    tale = Story(llm, PROMPT * 12)
    "".join(tale.write(40))
    n_cached, n_read = llm.n_tokens, tale.n_read
    other = Story(llm, "The other one")
    "".join(other.write(40))
    "".join(tale.write(20))
    n_again = tale.n_read - n_read
    assert n_again < 41 + 2 * llm.text.model.min_chunk
    assert n_again < n_cached - WORTH
    assert llm.input_ids[: llm.n_tokens].tolist() == tale.tokens[: llm.n_tokens]
