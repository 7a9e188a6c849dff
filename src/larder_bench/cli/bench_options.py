"""Options of `larder bench`, and the models that they select."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larder.cli.options import OutputOptions
from larder.core import DependencyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from larder.engine import Engine
    from larder_bench.execution.runner import ContextLoader
    from larder_bench.studies.model_context import ModelContext
    from larder_bench.studies.study import Study

Names = list[str]
# Modules of the extra `bench` that files of studies and tables need.
TABLE_MODULES = ("msgspec", "polars")


@dataclass(frozen=True)
class BenchOptions(OutputOptions):
    """Overrides of a study on the command line; None keeps the study's value."""

    study: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="Study in TOML, or one of studies/.")
    ] = None
    tokens: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Lengths.  Default: 1500.")
    ] = None
    files: Annotated[
        int | None, typer.Option(help="Conversations per task and length.  Default: 9.")
    ] = None
    first_seed: Annotated[int | None, typer.Option(help="Seed of the first conversation.")] = None
    policy: Annotated[
        Names | None, typer.Option(metavar="SPELLING", help="May be given many times.")
    ] = None
    control: Annotated[
        Names | None,
        typer.Option(
            metavar="NAME",
            help="full, random, oracle, exact_topk, rag_2k, rag_episodic; none.  Default: all six.",
        ),
    ] = None
    budget: Annotated[
        Names | None,
        typer.Option(metavar="SIZE", help="1/4, 12.5%, 512 (tokens per kv head), 64MiB."),
    ] = None
    matched: Annotated[
        Names | None,
        typer.Option(
            metavar="WHAT",
            help="Quantity held equal: bytes, tokens, or total (of all caches).  Default: bytes "
            "and tokens, separately.",
        ),
    ] = None
    question: Annotated[
        Names | None,
        typer.Option(
            metavar="after|inside",
            help="Place of the question: after the compressed context, or inside it, read and "
            "compressed with it.  Default: after.",
        ),
    ] = None
    wording: Annotated[
        str | None,
        typer.Option(
            metavar="seed|instruct|plain", help="Of the prompts.  Default: what the model follows."
        ),
    ] = None
    measure: Annotated[
        Names | None,
        typer.Option(
            metavar="SPELLING",
            help="forced, generated, answer_kl, divergence, fidelity, similarity, prompts, recall, "
            "decode, reading, cost, stages.",
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the study.  Default: bench.")] = None
    model: Annotated[
        Names | None,
        typer.Option(metavar="NAME_OR_PATH", help="Also random:qwen3-0.6b.  Default: seed."),
    ] = None
    device: Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")] = (
        "cpu"
    )
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16.  Default: that of the weights where the CPU is "
            "fast at it, else float32."
        ),
    ] = None
    corpus: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Prose and dialogues to build tasks from.")
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with one folder per public data set."),
    ] = None
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: results/STUDY.jsonl.")
    ] = None
    ray: Annotated[
        bool,
        typer.Option(
            "--ray", help="Measure on all machines of a Ray cluster; workers use as many threads."
        ),
    ] = False
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="Only print the estimated duration: from rows of the study if there are any, else "
            "from one cell of each kind, measured now.",
        ),
    ] = False
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Measure the cheapest committed cell of the study, or of --policy, again and "
            "compare; without --study one of each study, in two processes of one thread.",
        ),
    ] = False


def check_extra(command_name: str) -> None:
    """Raise DependencyError if a package of the extra `bench` that tables need is missing."""
    missing = [name for name in TABLE_MODULES if find_spec(name) is None]
    if missing:
        raise DependencyError(
            f"'larder {command_name}' needs {', '.join(missing)}: pip install 'larder[bench]'."
        )


def load_engine(model: str, device: str, dtype: str | None) -> Engine:
    """Engine of a model with the full cache."""
    from larder.engine import Engine
    from larder.engine.progress_bar import progress_bar
    from larder_bench.random_models import open_model

    with progress_bar(f"Loading {model}"):
        return Engine(open_model(model, device, dtype), policy="full")


def context_loader(
    study: Study,
    options: BenchOptions,
    engines: Callable[[str, str, str | None], Engine] = load_engine,
) -> ContextLoader:
    """Loader of a study's models, worded as the study asks.

    Args:
        engines: returns the engine of a model on a device in a dtype.
    """
    from larder_bench.datasets.sources import TaskSources
    from larder_bench.datasets.task_prompts import Wording
    from larder_bench.studies.model_context import ModelContext

    def load_context(model: str) -> ModelContext:
        engine = engines(model, options.device, options.dtype)
        template = engine.tokenizer.tokenizer.chat_template
        wording = (
            Wording(study.wording) if study.wording else Wording.of_model(model, bool(template))
        )
        count = engine.tokenizer.count_tokens
        return ModelContext(engine, TaskSources(count, options.corpus, options.data, wording))

    return load_context
