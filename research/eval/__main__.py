"""`pyh2o eval`: what a cache that evicts loses, measured without a network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from pyh2o.cache.settings import DEFAULT_POLICY, Positions
from pyh2o.cli.errors import reported_errors
from pyh2o.cli.help import Group
from pyh2o.cli.loading import servers_of, usable_gpu_layers
from pyh2o.cli.options import takes_run_options
from pyh2o.generation.sampling import LARGEST_SEED, Sampling
from pyh2o.models import find_model
from pyh2o.policies import Streaming
from pyh2o.system.machine import machine_facts
from pyh2o.system.threads import physical_cores

from .arguments import (
    COMPARED,
    PLOT,
    RESULTS,
    MeasuringOptions,
    budget_option,
    parse_budgets,
    parse_list,
    parse_recalls,
    policy_option,
    read_text,
    recall_option,
    shared,
    split_policies,
)
from .caches import Compute
from .output import MeasuringBars, Picture, show_table, writable, write_file

if TYPE_CHECKING:
    from .measurement import Measurement, QualitySettings

# The default one, and what every other is measured by.
POLICIES = (DEFAULT_POLICY, Streaming.name)

PROMPT = "Once upon a time, in a town by the sea, there lived a clockmaker who"

app = typer.Typer(
    cls=Group,
    help="Measure what an evicting cache loses: fidelity, recall, dialogue, instructions, stories.",
    no_args_is_help=True,
)


@dataclass(frozen=True)
class EvalOptions(MeasuringOptions):
    """What all measurements share."""

    rpc: Annotated[list[str] | None, shared("rpc")] = None
    policy: Annotated[list[str] | None, policy_option(",".join(POLICIES))] = None
    budget: Annotated[str, budget_option("the text's tokens")] = "0.2,0.1"
    recent_share: Annotated[
        float | None,
        typer.Option(
            help="The recent rows' share of the rows that are not pinned.",
            show_default="as by default: half",
            rich_help_panel=COMPARED,
        ),
    ] = None
    recall: Annotated[str | None, recall_option("the text's tokens")] = None
    pinned: Annotated[int, shared("pinned")] = 0
    json: Annotated[
        Path | None,
        typer.Option(
            help="File for all figures, written after each of them. A run with the same file "
            "measures only what is missing.",
            rich_help_panel=RESULTS,
        ),
    ] = None
    plot: Annotated[Path | None, PLOT] = None

    def compute(self) -> Compute:
        """What to compute with, servers included."""
        servers = servers_of(self.rpc)
        layers = usable_gpu_layers(self.gpu_layers, servers)
        return Compute(self.threads or physical_cores(), layers, servers)


class Run:
    """A measurement from the options to its tables and files."""

    def __init__(self, options: EvalOptions) -> None:
        """Check everything before hours of measuring.

        Raises:
            InputError: a file cannot be written, or there is a picture of that name already.
            PyH2OError: the picture cannot be drawn.
        """
        self._options = options
        self._json = None if options.json is None else writable("--json", options.json)
        self._picture = None if options.plot is None else Picture(options.plot)

    def shared_settings(self, positions: str = "original") -> dict[str, Any]:
        """The fields of QualitySettings.

        Args:
            positions: a list of schemes.

        Raises:
            PyH2OError: a list that is none, no such policy, a share that makes no sense, or no
                model.
        """
        # Imported here because it loads llama.cpp, which `--help` must not wait for.
        from .measurement import CacheSettings, default_recent_share, policy_named

        options, share = self._options, self._options.recent_share
        policies = split_policies(options.policy) if options.policy else POLICIES
        schemes = parse_list("--positions", positions, one_of(Positions), "original,dense")
        caches = CacheSettings(
            policies=tuple(dict.fromkeys(map(policy_named, policies))),
            budgets=parse_budgets(options.budget),
            recent_share=default_recent_share() if share is None else share,
            pinned=options.pinned,
            positions=schemes,
            recalls=parse_recalls(options.recall),
        )
        model = find_model(options.model)
        return {"model": model, "compute": options.compute(), "caches": caches}

    def measure(
        self, measurement: type[Measurement[Any, Any, Any, Any]], settings: QualitySettings
    ) -> None:
        """Measure what is missing, show the tables and write the files.

        Raises:
            PyH2OError: something cannot be measured; what was measured is shown and written.
            KeyboardInterrupt: likewise.
        """
        from .results import ResultFile

        bars = MeasuringBars()
        file = ResultFile(
            self._json,
            measurement.kind,
            settings.basis(),
            machine_facts(settings.compute.threads, settings.compute.gpu_layers),
            with_arrays=bool(measurement.arrays),
        )
        measured = measurement(settings, file, bars)
        complete = False
        try:
            measured.run()
            complete = True
        finally:
            bars.clear()
            summaries = measured.summaries()
            if summaries:
                *tables, last = measured.tables(summaries)
                for table in (*tables, replace(last, remarks=measured.notes)):
                    show_table(table)
                figures = [asdict(one) for one in summaries]
                file.finish(settings.record(), figures, measured.notes, complete=complete)
        if self._picture is not None:
            picture = measured.picture(summaries, self._picture.format)
            write_file(self._picture.path, picture)


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
    keep_lines: Annotated[
        bool,
        typer.Option(
            "--keep-lines",
            help="Read the texts as they are: code, tables, a chat. Otherwise the lines of a "
            "paragraph are joined, as books need it.",
        ),
    ] = False,
    at_once: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most tokens that are read at once; with 1 each looks for evicted rows by itself, "
            "as when a text is written.",
        ),
    ] = 128,
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
        run = Run(options)
        lengths = parse_list("--tokens", tokens, int, "4096,8192")
        words = [(file.name, read_text(file)) for file in text]
        given = run.shared_settings(positions)

        from .fidelity import Fidelity, FidelitySettings
        from .model import NamedText, normalised

        joined = str if keep_lines else normalised
        settings = FidelitySettings(
            **given,
            texts=tuple(NamedText(name, joined(one)) for name, one in words),
            tokens=lengths,
            start=start,
            first=first,
            stretch=stretch,
            at_once=at_once,
        )
        run.measure(Fidelity, settings)


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
            "niah_multiquery, vt, cwe, fwe. Our own: niah_digits_64, pairs, turns (several "
            "questions in one text), updated, present, absent (asked for what is not there). Or "
            "all.",
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
    """What stands somewhere in a long text, asked through each cache: RULER's and other tasks."""
    with reported_errors():
        run = Run(options)
        lengths = parse_list("--tokens", tokens, int, "4096,8192")
        tasks = parse_list("--task", task, str, "niah_single_1,vt")
        words = None if text is None else read_text(text)
        given = run.shared_settings()

        from .model import NamedText, normalised
        from .recall import Recall, RecallSettings, When
        from .tasks import TASKS

        settings = RecallSettings(
            **given,
            tasks=tuple(TASKS) if tasks == ("all",) else tasks,
            tokens=lengths,
            samples=samples,
            questions=parse_list("--question", question, one_of(When), "before,after"),
            prose=None if words is None else NamedText(str(text), normalised(words)),
            seed=seed,
        )
        run.measure(Recall, settings)


@app.command("dialogue")
@takes_run_options
def dialogue(
    *,
    options: EvalOptions,
    tokens: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Lengths of a dialogue with an answer.")
    ] = "20000",
    samples: Annotated[int, typer.Option(min=1, help="Dialogues of each length.")] = 1,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A UTF-8 file whose sentences the two also say; it is repeated if it is too "
            "short.",
            show_default="made-up sentences",
        ),
    ] = None,
    seed: Annotated[int, SEED] = 0,
) -> None:
    """What two people told each other over months: facts, changes, dates, and what was never said.

    A dialogue that is longer than the context the model was trained on has no full cache to be
    compared with.
    """
    with reported_errors():
        run = Run(options)
        lengths = parse_list("--tokens", tokens, int, "8000,20000")
        words = None if text is None else read_text(text)
        given = run.shared_settings()

        from .dialogue import Dialogue, DialogueSettings
        from .model import NamedText, normalised

        settings = DialogueSettings(
            **given,
            tokens=lengths,
            samples=samples,
            prose=None if words is None else NamedText(str(text), normalised(words)),
            seed=seed,
        )
        run.measure(Dialogue, settings)


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
        run = Run(options)
        given = run.shared_settings()

        from .instructions import Instructions, InstructionSettings, Pin

        pins: tuple[Pin, ...] = get_args(Pin)
        settings = InstructionSettings(
            **given,
            turns=turns,
            samples=samples,
            pins=tuple(one for one in pins if pin.value in (one, "both")),
            seed=seed,
        )
        run.measure(Instructions, settings)


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
        run = Run(options)
        given = run.shared_settings()

        from .stories import Stories, StorySettings

        settings = StorySettings(
            **given,
            prompt=prompt,
            tokens=tokens,
            samples=samples,
            sampling=Sampling(temperature=temp, seed=seed),
        )
        run.measure(Stories, settings)


def one_of(words: Any) -> Callable[[str], Any]:
    """A parser for the words of a Literal."""

    def parse(text: str) -> str:
        if text not in get_args(words):
            raise ValueError(text)
        return text

    return parse
