"""Dialogues of two people over months, and questions about what they told each other: our own task.

After LoCoMo (Maharana et al. 2024) and LongMemEval (Wu et al. 2025), but made from templates, so
that every answer is known, each fact stands in the text once, and other seeds have other ones. The
dialogue consists of sessions with dates; in between the two say sentences of a text. Kinds of
questions:

* fact: something that one of them said once.
* change: something that changed later, perhaps twice; the latest counts.
* date: days between two events, which are told in the sessions of their dates.
* joined: two facts, one from each of them; somebody else has done something of the same kind.
* absent: what one of them never said; the other one has said so.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta

from .samples import Question, Sample
from .words import Prose

KINDS = ("fact", "change", "date", "joined", "absent")
EACH = 4
"""Questions of a kind."""

LEAST = 1
"""Words that are said besides in the shortest dialogue."""

# A session has about so many tokens, and a dialogue at least so many sessions.
SESSION_TOKENS = 800
LEAST_SESSIONS = 5
DAYS_APART = (3, 20)

REFUSAL = "not mentioned"


def _listed(words: str) -> list[str]:
    return words.split("|")


_CONTEXT = (
    "Below are conversations between {a} and {b}, each with its date. Make sure to memorize what "
    "they tell each other. I will ask you about it afterwards.\n{text}\n"
)
_QUESTION = "\n{question} If that was never said, say that it is not mentioned."
_NAMES = _listed(
    "Amira|Bruno|Celeste|Dario|Edith|Felix|Greta|Hugo|Iris|Jonas|Katja|Leon|Marta|Nils|Olga|Pavel"
)
_OTHERS = _listed(
    "Barnaby|Cordelia|Ferdinand|Henrike|Lorenzo|Mathilda|Ottilie|Quentin|Rosalind|Silvio|Tabitha|"
    "Ulrich|Wanda|Yannick"
)
_MONTHS = _listed(
    "January|February|March|April|May|June|July|August|September|October|November|December"
)
_GREETINGS = (
    ("Hi {b}, how have you been?", "Quite well, thank you. And you?"),
    ("Good to see you, {b}. What is new?", "This and that. Tell me about your week first."),
    ("Hello {b}, do you have a moment?", "Of course, for you I always have one."),
    ("There you are, {b}. I have been looking forward to this.", "So have I."),
)
_REPLIES = (
    "That is good to know.",
    "I did not expect that.",
    "How nice, tell me more about it some time.",
    "I see. Thank you for telling me.",
    "Really? I would never have guessed.",
)


@dataclass(frozen=True)
class Topic:
    """What somebody may say of himself, in the words of a sentence, a question and an answer.

    Attributes:
        said: sentence with the {value}.
        asked: question about what {who} said.
        prefix: what the answer begins with.
        values: what it may be, separated by "|"; "#" are random digits.
    """

    said: str
    asked: str
    prefix: str
    values: str

    def drawn(self, rng: random.Random, count: int) -> list[str]:
        """So many different values."""
        if "#" not in self.values:
            return rng.sample(_listed(self.values), count)
        n = self.values.count("#")
        return [str(one) for one in rng.sample(range(10 ** (n - 1), 10**n), count)]

    def about(self, who: str, kind: str, answer: str, *places: str, wrong: str) -> Question:
        """The question about somebody (see `_question`)."""
        asked, prefix = self.asked.format(who=who), self.prefix.format(who=who)
        return _question(asked, prefix, kind, answer, *places, wrong=wrong)


def _question(
    asked: str, prefix: str, kind: str, answer: str, *places: str, wrong: str
) -> Question:
    """A question; `wrong` is the wrong answer that the right one is compared with."""
    return Question(
        _QUESTION.format(question=asked),
        f" {prefix}",
        (answer,),
        places,
        wrong=rf"\b{re.escape(wrong)}\b",
        rival=f" {wrong}",
        kind=kind,
    )


# Single facts, and those that only one of the two has told of himself.
_FACTS = (
    Topic(
        "I have a dog now, and its name is {value}.",
        "What is the name of {who}'s dog?",
        "The name of {who}'s dog is",
        "Biscuit|Domino|Juniper|Waffles|Bandit|Clover|Tango|Pepper",
    ),
    Topic(
        "My favourite dish is {value}, I could eat it every day.",
        "What is {who}'s favourite dish?",
        "{who}'s favourite dish is",
        "mushroom risotto|lentil soup|fish tacos|pumpkin curry|onion tart|potato salad",
    ),
    Topic(
        "I am learning to play the {value}.",
        "Which instrument is {who} learning to play?",
        "{who} is learning to play the",
        "accordion|cello|clarinet|harp|banjo|trombone|oboe",
    ),
    Topic(
        "My sister lives in {value}, I visit her in summer.",
        "In which town does {who}'s sister live?",
        "{who}'s sister lives in",
        "Lisbon|Bergen|Valencia|Krakow|Galway|Turin|Quebec",
    ),
    Topic(
        "The code of my bicycle lock is {value}, in case you need it.",
        "What is the code of {who}'s bicycle lock?",
        "The code of {who}'s bicycle lock is",
        "#####",
    ),
    Topic(
        "I have painted my kitchen {value}.",
        "In which colour has {who} painted the kitchen?",
        "{who} has painted the kitchen",
        "dark green|pale yellow|sky blue|light grey|deep red|pure white",
    ),
    Topic(
        "I am reading a book that is called {value}.",
        "What is the book called that {who} is reading?",
        "The book that {who} is reading is called",
        "The Salt Road|Nine Winters|The Glass Orchard|A Map of Rain|The Last Ferryman",
    ),
    Topic(
        "I am allergic to {value}, so please leave them out.",
        "What is {who} allergic to?",
        "{who} is allergic to",
        "walnuts|shrimps|strawberries|lupins|almonds|mussels",
    ),
)

_CHANGES = (
    Topic(
        "I work at the {value} now.",
        "Where does {who} work now?",
        "{who} now works at the",
        "bakery|harbour office|town library|post office|flower shop|hospital",
    ),
    Topic(
        "I live in {value} now.",
        "In which street does {who} live now?",
        "{who} now lives in",
        "Mill Lane|Harbour Street|Castle Road|Garden Row|Station Square|Chapel Hill",
    ),
    Topic(
        "My telephone number is {value} now.",
        "What is {who}'s telephone number now?",
        "{who}'s telephone number is now",
        "######",
    ),
    Topic(
        "I go running on {value} now.",
        "On which day does {who} go running now?",
        "{who} now goes running on",
        "Mondays|Tuesdays|Wednesdays|Thursdays|Fridays|Saturdays|Sundays",
    ),
    Topic(
        "The tomato plants on my balcony are {value} now.",
        "How many tomato plants does {who} have now?",
        "The number of {who}'s tomato plants is now",
        "##",
    ),
)

_EVENTS = _listed(
    "first pottery class|driving test|half marathon|job interview|house-warming party|"
    "piano recital|flight to Rome|exhibition of photographs|eye operation|chess tournament|"
    "cooking contest|sailing lesson"
)
_EVENT = "I had my {event} today."
_DAYS = "How many days after {who}'s {first} was {who}'s {second}?"
_DAYS_PREFIX = "The number of days between them is"

# Whom somebody knows, and what the other one says of somebody of that name.
_RELATIONS = (
    (
        "neighbour",
        Topic(
            "{name} keeps {value} in the garden.",
            "What does {who}'s neighbour keep in the garden?",
            "{who}'s neighbour keeps",
            "goats|bees|ducks|rabbits|hens|peacocks",
        ),
    ),
    (
        "dentist",
        Topic(
            "{name} is going to spend the summer in {value}.",
            "Where is {who}'s dentist going to spend the summer?",
            "{who}'s dentist is going to spend the summer in",
            "Norway|Portugal|Greece|Canada|Iceland|Japan",
        ),
    ),
    (
        "landlord",
        Topic(
            "{name} collects old {value}.",
            "What does {who}'s landlord collect?",
            "{who}'s landlord collects old",
            "clocks|maps|coins|lamps|stamps|radios",
        ),
    ),
    (
        "cousin",
        Topic(
            "{name} has become a {value}.",
            "What has {who}'s cousin become?",
            "{who}'s cousin has become a",
            "carpenter|pilot|nurse|baker|lawyer|gardener",
        ),
    ),
    (
        "colleague",
        Topic(
            "{name} has won a prize for {value}.",
            "What has {who}'s colleague won a prize for?",
            "{who}'s colleague has won a prize for",
            "dancing|singing|fencing|juggling|baking|skating",
        ),
    ),
)
_CALLED = "My {relation} is called {name}."


@dataclass
class _Plan:
    """What will be said when.

    Attributes:
        people: the two.
        dates: of the sessions.
        said: of each session, (how far in it, who, sentence).
        questions: about all of that.
    """

    people: tuple[str, str]
    dates: list[date]
    said: list[list[tuple[float, str, str]]]
    questions: list[Question] = field(default_factory=list)

    def say(self, session: int, who: str, sentence: str, rng: random.Random) -> str:
        """Let somebody say a sentence; it is given back."""
        self.said[session].append((rng.random(), who, sentence))
        return sentence

    def sessions(self, rng: random.Random, count: int) -> list[int]:
        """So many different sessions, in their order."""
        return sorted(rng.sample(range(len(self.dates)), count))

    def someone(self, rng: random.Random) -> str:
        """One of the two."""
        return rng.choice(self.people)

    def other(self, who: str) -> str:
        """The other one of the two."""
        return self.people[who == self.people[0]]


def build(size: int, tokens: int, rng: random.Random, prose: Prose) -> Sample:
    """A dialogue in which `size` words of the prose are said.

    Args:
        size: words.
        tokens: of the dialogue, which tell how many sessions there are.
        rng: random numbers.
        prose: what is said besides.
    """
    a, b = rng.sample(_NAMES, 2)
    n = max(LEAST_SESSIONS, tokens // SESSION_TOKENS)
    dates = [date(2023, 1, 1) + timedelta(days=rng.randrange(300))]
    while len(dates) < n:
        dates.append(dates[-1] + timedelta(days=rng.randint(*DAYS_APART)))
    plan = _Plan((a, b), dates, [[] for _ in dates])
    topics = rng.sample(_FACTS, 2 * EACH)
    _add_facts(plan, topics[:EACH], rng)
    _add_changes(plan, rng.sample(_CHANGES, EACH), rng)
    _add_dates(plan, rng.sample(_EVENTS, 2 * EACH), rng)
    _add_joined(plan, rng.sample(_RELATIONS, EACH), rng)
    _add_absent(plan, topics[EACH:], rng)
    text = "".join(f"\n{line}" for line in _lines(plan, prose.words(size), rng))
    return Sample(_CONTEXT.format(a=a, b=b, text=text), tuple(plan.questions), apart=True)


def _add_facts(plan: _Plan, topics: Sequence[Topic], rng: random.Random) -> None:
    for topic in topics:
        who, (value,), (session,) = plan.someone(rng), topic.drawn(rng, 1), plan.sessions(rng, 1)
        place = plan.say(session, who, topic.said.format(value=value), rng)
        plan.questions.append(topic.about(who, "fact", value, place, wrong=REFUSAL))


def _add_changes(plan: _Plan, topics: Sequence[Topic], rng: random.Random) -> None:
    for topic in topics:
        who, count = plan.someone(rng), rng.randint(2, 3)
        values = topic.drawn(rng, count)
        for session, value in zip(plan.sessions(rng, count), values, strict=True):
            place = plan.say(session, who, topic.said.format(value=value), rng)
        plan.questions.append(topic.about(who, "change", values[-1], place, wrong=values[-2]))


def _add_dates(plan: _Plan, events: Sequence[str], rng: random.Random) -> None:
    for first, second in zip(events[::2], events[1::2], strict=True):
        who, sessions = plan.someone(rng), plan.sessions(rng, 2)
        places = [
            plan.say(session, who, _EVENT.format(event=event), rng)
            for session, event in zip(sessions, (first, second), strict=True)
        ]
        days = str((plan.dates[sessions[1]] - plan.dates[sessions[0]]).days)
        asked = _DAYS.format(who=who, first=first, second=second)
        plan.questions.append(_question(asked, _DAYS_PREFIX, "date", days, *places, wrong=REFUSAL))


def _add_joined(plan: _Plan, relations: Sequence[tuple[str, Topic]], rng: random.Random) -> None:
    names = rng.sample(_OTHERS, 2 * len(relations))
    for (relation, topic), name, decoy in zip(relations, names[::2], names[1::2], strict=True):
        who, values = plan.someone(rng), topic.drawn(rng, 2)
        first, second, third = rng.sample(range(len(plan.dates)), 3)
        places = (
            plan.say(first, who, _CALLED.format(relation=relation, name=name), rng),
            plan.say(second, plan.other(who), topic.said.format(name=name, value=values[0]), rng),
        )
        plan.say(third, plan.other(who), topic.said.format(name=decoy, value=values[1]), rng)
        plan.questions.append(topic.about(who, "joined", values[0], *places, wrong=values[1]))


def _add_absent(plan: _Plan, topics: Sequence[Topic], rng: random.Random) -> None:
    for topic in topics:
        who, (value,), (session,) = plan.someone(rng), topic.drawn(rng, 1), plan.sessions(rng, 1)
        plan.say(session, plan.other(who), topic.said.format(value=value), rng)
        plan.questions.append(topic.about(who, "absent", REFUSAL, wrong=value))


def _lines(plan: _Plan, words: Sequence[str], rng: random.Random) -> Iterator[str]:
    """The dialogue: the sentences of the words, and what the plan has at its places among them."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(words))
    n = len(plan.dates)
    for i, (day, said) in enumerate(zip(plan.dates, plan.said, strict=True)):
        yield f"[Session {i + 1}, {day.day} {_MONTHS[day.month - 1]} {day.year}]"
        speakers = rng.sample(plan.people, 2)
        greeting, answer = rng.choice(_GREETINGS)
        yield f"{speakers[0]}: {greeting.format(b=speakers[1])}"
        yield f"{speakers[1]}: {answer}"
        own = sentences[len(sentences) * i // n : len(sentences) * (i + 1) // n]
        waiting = sorted(said, reverse=True)
        for j, sentence in enumerate(own):
            while waiting and waiting[-1][0] <= j / len(own):
                yield from _told(plan, waiting.pop(), rng)
            yield f"{speakers[j % 2]}: {sentence}"
        while waiting:
            yield from _told(plan, waiting.pop(), rng)
        yield ""


def _told(plan: _Plan, one: tuple[float, str, str], rng: random.Random) -> Iterator[str]:
    _, who, sentence = one
    yield f"{who}: {sentence}"
    yield f"{plan.other(who)}: {rng.choice(_REPLIES)}"
