"""`pyh2o eval`: what a cache that evicts loses, measured without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from pyh2o.cache.settings import DEFAULT_POLICY, Positions
from pyh2o.generation.sampling import LARGEST_SEED, Sampling
from pyh2o.models import find_model
from pyh2o.policies import Streaming
from pyh2o.system.threads import physical_cores

from ..errors import reported_errors
from ..loading import usable_gpu_layers
from ..options import takes_run_options
from .arguments import parse_budget, parse_list, read_text, shared, split_policies
from .eval_output import Outputs

if TYPE_CHECKING:
    from pyh2o.measuring.quality.caches import CacheSettings, Compute

COMPARED = "What is compared"
RESULTS = "Results"

# The default one, and what every other is measured by.
POLICIES = (DEFAULT_POLICY, Streaming.name)

PROMPT = "Once upon a time, in a town by the sea, there lived a clockmaker who"

app = typer.Typer(
    help="Measure what a cache that evicts loses: fidelity, recall, instructions, stories.",
    no_args_is_help=True,
)


@dataclass(frozen=True)
class EvalOptions:
    """What all measurements share."""

    model: Annotated[Path | None, shared("model")] = None
    gpu_layers: Annotated[int, shared("gpu_layers")] = 0
    threads: Annotated[int | None, shared("threads")] = None
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY,...",
            help="What makes a row worth keeping, such as snap:queries=64; may be given again.",
            show_default=",".join(POLICIES),
            rich_help_panel=COMPARED,
        ),
    ] = None
    budget: Annotated[
        str,
        typer.Option(
            metavar="ROWS,...",
            help="Rows to keep: fractions of the text's tokens or counts.",
            rich_help_panel=COMPARED,
        ),
    ] = "0.2,0.1"
    recent_share: Annotated[
        float | None,
        typer.Option(
            help="The recent rows' share of the rows that are not pinned.",
            show_default="as by default: half",
            rich_help_panel=COMPARED,
        ),
    ] = None
    pinned: Annotated[int, shared("pinned")] = 0
    json: Annotated[
        Path | None,
        typer.Option(
            help="File for all figures, written after each of them. A run with the same file "
            "measures only what is missing.",
            rich_help_panel=RESULTS,
        ),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(help="New PNG or SVG file for a picture.", rich_help_panel=RESULTS),
    ] = None

    def compute(self) -> Compute:
        """What to compute with; says so if there is no GPU."""
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.measuring.quality.caches import Compute

        threads = self.threads or physical_cores()
        return Compute(threads, usable_gpu_layers(self.gpu_layers))

    def caches(self, positions: str = "original") -> CacheSettings:
        """What is compared.

        Args:
            positions: a list of schemes.

        Raises:
            PyH2OError: a list that is none, no such policy, or a share that makes no sense.
        """
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from pyh2o.measuring.quality.caches import CacheSettings, default_recent_share, policy_named

        share = default_recent_share() if self.recent_share is None else self.recent_share
        policies = split_policies(self.policy) if self.policy else POLICIES
        schemes = parse_list("--positions", positions, one_of(Positions), "original,dense")
        return CacheSettings(
            policies=tuple(dict.fromkeys(map(policy_named, policies))),
            budgets=parse_list("--budget", self.budget, parse_budget, "0.2,512"),
            recent_share=share,
            pinned=self.pinned,
            positions=schemes,
        )


class Pins(str, Enum):
    """Whether the system prompt is pinned."""

    system = "system"
    none = "none"
    both = "both"


SEED = typer.Option(
    min=0, max=LARGEST_SEED, help="Start of all random draws; the same seed gives the same numbers."
)


# -------------------------------------------------------------------------------------------------
# The measurements
# -------------------------------------------------------------------------------------------------


@app.command("fidelity")
@takes_run_options
def fidelity(
    *,
    options: EvalOptions,
    text: Annotated[list[Path], typer.Option(help="A UTF-8 file to read; may be given again.")],
    tokens: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Lengths that are read of each text.")
    ] = "4096",
    start: Annotated[int, typer.Option(min=0, help="First token of a text that is read.")] = 0,
    first: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=1,
            help="First of the tokens read whose prediction counts.",
            show_default="1024, or a quarter of a shorter text",
        ),
    ] = None,
    stretch: Annotated[
        int, typer.Option(min=1, help="Tokens of a part that has a perplexity of its own.")
    ] = 2048,
    positions: Annotated[
        str,
        typer.Option(
            metavar="SCHEME,...",
            help="Schemes for the positions: original, dense.",
            rich_help_panel=COMPARED,
        ),
    ] = "original",
) -> None:
    """Perplexity of texts that stream through each cache, and KL to the full cache's predictions.

    A text that is longer than the context the model was trained on has no full cache to be compared
    with; --policy full measures the full cache's perplexity there all the same.
    """
    with reported_errors():
        outputs = Outputs(options)
        lengths = parse_list("--tokens", tokens, int, "4096,8192")
        words = [(file.name, read_text(file)) for file in text]
        caches = options.caches(positions)
        model = find_model(options.model)
        compute = options.compute()

        from pyh2o.measuring.quality.basis import basis_of
        from pyh2o.measuring.quality.fidelity import Fidelity, FidelitySettings
        from pyh2o.measuring.quality.plot import fidelity_picture
        from pyh2o.measuring.quality.table import fidelity_tables
        from pyh2o.measuring.quality.texts import EvalText, normalised

        settings = FidelitySettings(
            model=model,
            compute=compute,
            texts=tuple(EvalText(name, normalised(one)) for name, one in words),
            tokens=lengths,
            start=start,
            first=first,
            stretch=stretch,
            caches=caches,
        )
        basis = basis_of(model, compute, caches, start=start)
        file = outputs.results("fidelity", basis, settings, with_arrays=True)
        outputs.measure(
            Fidelity(settings, file, outputs.bars, outputs.folder),
            file,
            lambda summaries: fidelity_tables(summaries, stretch),
            lambda summaries, form: fidelity_picture(summaries, stretch, form),
        )


@app.command("recall")
@takes_run_options
def recall(
    *,
    options: EvalOptions,
    task: Annotated[
        str,
        typer.Option(
            metavar="TASK,...",
            help="Tasks of RULER: niah_single_1/2/3, niah_multikey_1/2/3, niah_multivalue, "
            "niah_multiquery, vt, cwe, fwe; or all.",
        ),
    ] = "niah_single_1,niah_multikey_2,vt,cwe,fwe",
    tokens: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Lengths of a sample with its answer.")
    ] = "4096",
    samples: Annotated[int, typer.Option(min=1, help="Of each task and length.")] = 5,
    question: Annotated[
        str,
        typer.Option(
            metavar="before|after,...",
            help="Whether the question is known before rows are evicted, or after.",
        ),
    ] = "after,before",
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 file with prose to hide something in; it is repeated if it is too short.",
            show_default="made-up sentences",
        ),
    ] = None,
    seed: Annotated[int, SEED] = 0,
) -> None:
    """RULER's synthetic tasks: what stands somewhere in a long text, asked through each cache."""
    with reported_errors():
        outputs = Outputs(options)
        lengths = parse_list("--tokens", tokens, int, "4096,8192")
        tasks = parse_list("--task", task, str, "niah_single_1,vt")
        prose = None if text is None else read_text(text)
        caches = options.caches()
        model = find_model(options.model)
        compute = options.compute()

        from pyh2o.measuring.quality.basis import basis_of
        from pyh2o.measuring.quality.plot import recall_picture
        from pyh2o.measuring.quality.recall import Question, Recall, RecallSettings
        from pyh2o.measuring.quality.table import recall_tables
        from pyh2o.measuring.quality.tasks import TASKS
        from pyh2o.measuring.quality.texts import EvalText, normalised

        questions = parse_list("--question", question, one_of(Question), "before,after")
        words = None if prose is None else EvalText(str(text), normalised(prose))
        settings = RecallSettings(
            model=model,
            compute=compute,
            tasks=tuple(TASKS) if tasks == ("all",) else tasks,
            tokens=lengths,
            samples=samples,
            questions=questions,
            prose=None if words is None else words.text,
            seed=seed,
            caches=caches,
        )
        basis = basis_of(
            model, compute, caches, seed=seed, text="" if words is None else words.sha256[:12]
        )
        file = outputs.results("recall", basis, settings)
        outputs.measure(Recall(settings, file, outputs.bars), file, recall_tables, recall_picture)


@app.command("instructions")
@takes_run_options
def instructions(
    *,
    options: EvalOptions,
    turns: Annotated[int, typer.Option(min=1, help="Messages of a dialogue.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Dialogues.")] = 4,
    pin: Annotated[Pins, typer.Option(help="Whether the system prompt is pinned.")] = Pins.both,
    seed: Annotated[int, SEED] = 0,
) -> None:
    """Whether a system prompt is still followed after many turns, and kept secret."""
    with reported_errors():
        outputs = Outputs(options)
        caches = options.caches()
        model = find_model(options.model)
        compute = options.compute()

        from pyh2o.measuring.quality.basis import basis_of
        from pyh2o.measuring.quality.instructions import Instructions, InstructionSettings, Pin
        from pyh2o.measuring.quality.plot import instruction_picture
        from pyh2o.measuring.quality.table import instruction_tables

        settings = InstructionSettings(
            model=model,
            compute=compute,
            turns=turns,
            samples=samples,
            pins=tuple(one for one in get_args(Pin) if pin.value in (one, "both")),
            seed=seed,
            caches=caches,
        )
        file = outputs.results(
            "instructions", basis_of(model, compute, caches, seed=seed, turns=turns), settings
        )
        outputs.measure(
            Instructions(settings, file, outputs.bars),
            file,
            instruction_tables,
            instruction_picture,
        )


@app.command("story")
@takes_run_options
def story(
    *,
    options: EvalOptions,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What every story goes on after.")
    ] = PROMPT,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Of a story.")] = 1000,
    samples: Annotated[int, typer.Option(min=1, help="Stories of each cache.")] = 4,
    temp: Annotated[float, shared("temperature")] = Sampling().temperature,
    seed: Annotated[int, SEED] = 0,
) -> None:
    """How repetitive generated stories are, and how likely under the full cache."""
    with reported_errors():
        outputs = Outputs(options)
        caches = options.caches()
        model = find_model(options.model)
        compute = options.compute()

        from pyh2o.measuring.quality.basis import basis_of
        from pyh2o.measuring.quality.plot import story_picture
        from pyh2o.measuring.quality.stories import Stories, StorySettings
        from pyh2o.measuring.quality.table import story_tables

        settings = StorySettings(
            model=model,
            compute=compute,
            prompt=prompt,
            tokens=tokens,
            samples=samples,
            sampling=Sampling(temperature=temp, seed=seed),
            caches=caches,
        )
        basis = basis_of(model, compute, caches, seed=seed, prompt=prompt, tokens=tokens, temp=temp)
        file = outputs.results("story", basis, settings)
        outputs.measure(
            Stories(settings, file, outputs.bars),
            file,
            lambda summaries: story_tables(summaries, tokens),
            story_picture,
        )


# -------------------------------------------------------------------------------------------------
# What the user gives
# -------------------------------------------------------------------------------------------------


def one_of(words: Any) -> Callable[[str], Any]:
    """A parser for the words of a Literal."""

    def parse(text: str) -> str:
        if text not in get_args(words):
            raise ValueError(text)
        return text

    return parse
