"""Words and prose for synthetic tasks, so that nothing must be downloaded.

RULER takes its words from the package wonderwords and its prose from Paul Graham's essays. The
lists here are shorter and our own. The prose is generated from them: grammatical sentences that
mean little. A given text replaces the prose.
"""

from __future__ import annotations

import random
from itertools import product


def _different(words: str) -> tuple[str, ...]:
    return tuple(sorted(set(words.split())))


ADJECTIVES = _different(
    "able ancient amber angry arctic autumn awake bitter blank bold brave brief bright broad "
    "bronze busy calm careful cheap clean clear clever cloudy coarse cold common copper cosy "
    "crisp crooked curious damp dark dear deep dense dim distant dry dull dusty eager early "
    "earnest eastern empty equal exact faint fair famous fancy fast fierce final fine firm flat "
    "foggy foreign formal fragile free fresh friendly frozen full gentle giant glad golden "
    "grand grateful gray green hollow honest humble hungry icy idle inner ivory keen kind large "
    "late lazy lean light little lively lonely long loud lucky merry mild modest muddy narrow "
    "neat noble northern odd open orange outer pale patient plain polite proud pure purple "
    "quick quiet rapid rare ready rich ripe rough round royal rusty salty scarlet secret "
    "serious shallow sharp shiny short silent silver simple sleepy slim slow small smooth snowy "
    "soft solid sour southern spare stable steady steep stiff strange strict strong subtle "
    "sudden sunny sweet swift tall tame tender thick thin tidy tiny tired tough useful vague "
    "vast violet warm wary weary western wide wild windy wise wooden young"
)

NOUNS = _different(
    "acorn actor anchor ankle apple apron arrow attic autumn bakery balcony banner barley barn "
    "basin basket beacon bell bench berry blanket blossom boat border bottle boulder branch "
    "bread bridge broom brother bucket button cabin camel candle canal canoe canvas captain "
    "carpet castle cattle cellar chain chair chalk chapel cherry chimney circle clerk cliff "
    "clock cloud coast collar comet copper corner cotton cousin cradle crane cricket crown "
    "crystal curtain dancer desert diamond doctor donkey door dragon drawer drum eagle elbow "
    "engine envelope falcon farmer feather fence ferry fiddle field finger fisher flag flame "
    "flute forest fork fountain fox frame friend garden garlic gate ginger glacier glove goat "
    "grain granite grape guest guitar hammer harbor harvest hat hawk hedge helmet hill honey "
    "horizon horse hotel hunter island jacket jar jewel journey judge kettle key kitchen kite "
    "knife knot ladder lake lamp lantern leaf lemon letter library lily linen lion lizard lodge "
    "magnet map maple marble market meadow melon miller mirror monkey moon mosaic mountain "
    "museum needle nest nettle notebook oak oasis ocean olive onion orchard organ otter oven "
    "owl oyster paddle painter palace paper parrot pasture path pearl pebble pencil pepper "
    "piano pigeon pillow pilot pine pirate planet plum pocket poet pond poppy porch potter "
    "prairie prince puzzle quarry quilt rabbit raft railway rain raven ribbon river robin "
    "rocket roof rope rose saddle sailor salmon sand scarf school seed shadow shelf shell "
    "shepherd shield ship shore shoulder sister sketch sled smith snail soldier spider spoon "
    "spring square stable stamp station statue stone storm stove stream summit sunset swan "
    "table tailor teacher temple tent thread throne thunder tiger timber tower trail train tree "
    "trumpet tulip tunnel turtle uncle valley velvet village vine violin wagon walnut water "
    "weaver wheel whistle willow window winter wolf wool writer yard zebra"
)

VERBS = _different(
    "admire answer arrange avoid borrow bring build bury carry catch chase choose clean climb "
    "close collect count cover cross deliver describe discover draw dress enter examine explain "
    "fetch fill find finish follow forget gather greet guard guide hear hide hold imagine "
    "improve invite join keep leave lend lift love measure meet mend miss move notice offer "
    "open order paint pass polish praise promise protect pull push reach read remember repair "
    "reply rescue return ring sail save search sell send serve share shout show sing sketch "
    "speak spend start study teach thank throw touch trade trust turn understand visit wait "
    "walk wash watch welcome whisper win wonder"
)

# Subject, verb and object; {a}, {n} and {p} are sampled at each occurrence.
_SENTENCES = (
    "The {a} {n} stood near the {a} {n}.",
    "Nobody in the village had ever seen such {an} {n}.",
    "{p} walked past the {n} and thought about the {a} {n}.",
    "In the evening the {n} was as {a} as before.",
    "{p} asked why the {n} was so {a}, but the {n} gave no answer.",
    "It is easy to forget how {a} the {n} can be.",
    "Behind the {n} there was {an} {n}, and behind that {an} {n}.",
    "When the {n} was gone, {p} looked for {an} {n} until it was dark.",
    "Some people say that {an} {n} is worth more than {an} {n}.",
    "The road led from the {n} to the {n}, and it was {a} all the way.",
    "{p} kept {an} {n} in the {n} for many years.",
    "After the rain every {n} seemed {a}.",
    "A letter about the {a} {n} came on Monday, and {p} read it twice.",
    "They sold the {n} and bought {an} {n} instead.",
    "{p} said that the {n} would be {a} by the end of the year.",
)

_PEOPLE = _different(
    "Anna Boris Clara Dora Emil Frida Georg Hanna Igor Julia Karl Lena Martin Nora Otto Paula "
    "Robert Sara Tom Vera"
)


def key_words(rng: random.Random, count: int) -> list[str]:
    """Return `n` distinct pairs such as "quiet-lantern"."""
    size = len(ADJECTIVES) * len(NOUNS)
    return [
        f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"
        for number in rng.sample(range(size), count)
    ]


def single_words(rng: random.Random) -> list[str]:
    """Return all words in random order, followed by as many pairs as needed."""
    words = sorted({*ADJECTIVES, *NOUNS, *VERBS})
    rng.shuffle(words)
    pairs = [f"{adjective}-{noun}" for adjective, noun in product(ADJECTIVES, NOUNS)]
    rng.shuffle(pairs)
    return words + pairs


class Prose:
    """A long text to hide something in, word by word.

    Attributes:
        is_own: whether the text was given.
    """

    def __init__(self, text: str | None, seed: int = 0) -> None:
        """Use a text, or generate one.

        Args:
            text: repeated when it ends; None for sentences generated from the lists.
            seed: of these.
        """
        self.is_own = text is not None
        self._words = [] if text is None else text.split()
        self._rng = None if text is not None else random.Random(f"prose {seed}")

    def words(self, count: int) -> list[str]:
        """Return the first words; a larger count extends them."""
        while len(self._words) < count:
            if self._rng is None:
                self._words += self._words
            else:
                self._words += self._sentence(self._rng).split()
        return self._words[:count]

    def _sentence(self, rng: random.Random) -> str:
        parts = []
        for part in rng.choice(_SENTENCES).split(" "):
            word = part
            if "{p}" in word:
                word = word.replace("{p}", rng.choice(_PEOPLE))
            if "{n}" in word:
                word = word.replace("{n}", rng.choice(NOUNS))
            if "{an}" in word:
                adjective = rng.choice(ADJECTIVES)
                article = "an" if adjective[0] in "aeiou" else "a"
                word = word.replace("{an}", f"{article} {adjective}")
            if "{a}" in word:
                word = word.replace("{a}", rng.choice(ADJECTIVES))
            parts.append(word)
        return " ".join(parts)
