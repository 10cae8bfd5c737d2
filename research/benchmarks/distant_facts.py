"""Measure whether the model recalls facts of a long text at its end.

    python -m research.benchmarks.distant_facts --text book.txt --tokens 30000 --rows 1638

The text is read as the first message of a conversation, with ten facts at even distances; a short
text is repeated. Then each fact is asked for, and the question is removed. Reported are the answers
whose every token was the most probable one, the loss of the right answer, and how often the page
with the fact was the most retrieved one while the question was read.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyh2o import Conversation, Llama
from research.eval.metrics import log_softmax

from .common import open_model, parser_of

PAGE = 128  # positions

FACTS = [  # start and end of a sentence, and a question
    ("The treasure is buried under the old", "windmill", "where is the treasure buried"),
    ("The ship in the harbour is called the", "Silver Heron", "how is the ship called"),
    ("My sister's telephone number is", "5830147", "what is my sister's telephone number"),
    ("The recipe for the cake needs this much sugar:", "475 grams", "how much sugar"),
    ("Our cat was born in the village of", "Brackenford", "in what village was our cat born"),
    (
        "The password of the old computer is",
        "tulip-9921",
        "what is the password of the old computer",
    ),
    ("The dentist expects me on", "Thursday the 14th", "when does the dentist expect me"),
    ("The violin was made by", "Teodoro Valsecchi", "who made the violin"),
    ("The train to the mountains leaves from platform", "17", "from which platform"),
    ("The name of the dragon is", "Orsovane", "what is the name of the dragon"),
]


@dataclass(frozen=True)
class FactAnswer:
    """Likelihood of the right answer.

    Attributes:
        is_right: each of its tokens was the most probable one.
        loss: nats per token.
        is_retrieved: the page with the fact was retrieved most, by squared shares of attention.
    """

    is_right: bool
    loss: float
    is_retrieved: bool


def with_facts(llm: Llama, text: str, n_tokens: int) -> str:
    """Return `n` tokens of the text, repeated if needed, with the facts at even distances."""
    words = text.split()
    n_words = round(n_tokens * len(words) / len(llm.tokenize(text.encode())))
    words = (words * -(-n_words // len(words)))[:n_words]
    size = n_words // len(FACTS)
    pieces: list[str] = []
    for i, (begun, answer, _) in enumerate(FACTS):
        piece = words[i * size : (i + 1) * size]
        fact = f"Remember this: {begun} {answer}."
        pieces += [" ".join(piece[: size // 2]), fact, " ".join(piece[size // 2 :])]
    return "\n\n".join(pieces)


def page_of(llm: Llama, sentence: str) -> int:
    """Return the page in which a sentence starts."""
    pieces = [llm.detokenize([token]) for token in llm.input_ids[: llm.n_tokens].tolist()]
    at = b"".join(pieces).find(sentence.encode())
    return int(np.searchsorted(np.cumsum([len(piece) for piece in pieces]), at)) // PAGE


def ask(llm: Llama, begun: str, answer: str, question: str) -> FactAnswer:
    """Ask a question, and remove it."""
    start, page = llm.n_tokens, page_of(llm, begun)
    asked = f"\n\nQuestion: {question}?\n\nAnswer: {begun}"
    right = llm.tokenize(f" {answer}".encode(), add_bos=False)
    llm.text.read(llm.tokenize(asked.encode(), add_bos=False))
    weights = np.asarray(llm.text.cache.found(start))
    pages = np.add.reduceat(weights, np.arange(0, start, PAGE))
    losses, is_right = [], True
    for token in right:
        expected = log_softmax(llm.text.logits[-1:])[0]
        losses.append(-float(expected[token]))
        is_right &= int(expected.argmax()) == token
        llm.text.eval([token])
    llm.text.remove_tail(start)
    return FactAnswer(
        is_right, statistics.mean(losses), bool(pages.any()) and page == pages.argmax()
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--full", action="store_true", help="llama.cpp's own cache")
    arguments = parser.parse_args()
    text = " ".join(arguments.text.read_text(encoding="utf-8").split())
    cache = {"evict": False, "recall": 0} if arguments.full else {}
    with open_model(arguments, **cache) as llm:
        for _ in Conversation(llm).say(with_facts(llm, text, arguments.tokens), max_tokens=1):
            pass
        answers = [ask(llm, *fact) for fact in FACTS]
        n_right = sum(one.is_right for one in answers)
        loss = statistics.mean(one.loss for one in answers)
        n_retrieved = sum(one.is_retrieved for one in answers)
        print(
            f"{llm.n_tokens:,} tokens, {n_right} of {len(FACTS)} facts right, loss {loss:.3f}, "
            f"retrieved most: {n_retrieved}"
        )


if __name__ == "__main__":
    main()
