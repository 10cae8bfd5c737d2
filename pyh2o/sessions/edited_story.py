"""A story's text that was edited by hand, as tokens to go on after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..llama import Llama
from ..text.detokenizer import CHARACTER_TOKENS, Detokenizer, detokenizer
from ..text.prompt import check_prompt, prompt_tokens, suffix_tokens


@dataclass(frozen=True)
class EditedStory:
    """A text and its tokens.

    Attributes:
        tokens: of the prompt and of the text behind it.
        n_prompt: how many of them count as the prompt's.
        opening: the beginning of the text, which the other tokens do not make.
    """

    tokens: list[int]
    n_prompt: int
    opening: str

    @classmethod
    def of(cls, llm: Llama, text: str, prompt: Sequence[int], *, with_prompt: bool) -> EditedStory:
        """The tokens of a text, of which as many as before are the prompt's.

        Args:
            llm: the model.
            text: as it is now.
            prompt: tokens of the prompt as it was.
            with_prompt: whether the text begins with the prompt.

        Raises:
            ValueError, ContextLimitError: as for a prompt.
        """
        if with_prompt:
            tokens = prompt_tokens(llm, text, None, None)
        else:
            tokens = [*prompt, *suffix_tokens(llm, text)]
        check_prompt(llm, tokens, llm.position_limit, llm.evicting)
        first, end = min(len(prompt), len(tokens)), len(tokens)
        data = text.encode()
        # The border may fall amid a character; at the end all of the text is the opening.
        for n_prompt in range(first, min(first + CHARACTER_TOKENS, end)):
            parts = parts_after(llm, tokens[:n_prompt])
            rest = b"".join(parts.feed(token) for token in tokens[n_prompt:])
            opening = data.removesuffix(rest)
            if data == opening + rest and opening.decode(errors="ignore").encode() == opening:
                return cls(tokens, n_prompt, opening.decode())
        return cls(tokens, end, text)


def parts_after(llm: Llama, prompt: Sequence[int]) -> Detokenizer:
    """The bytes of the tokens that a story has after its prompt."""
    return detokenizer(llm, prompt, starts_text=list(prompt) == [llm.token_bos()])
