"""`larder demo`: one text under several policies, compared in one table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.console import format_bytes, format_seconds, make_table, results_console
from larder.cli.errors import INTERRUPTED_EXIT_CODE, SCHEMA, print_document
from larder.cli.options import ModelOptions, OutputOptions, command
from larder.core.conversation import Conversation, Question
from larder.engine.progress_bar import progress_bar
from larder.session.files.loader import read_conversation

if TYPE_CHECKING:
    from larder.cli.question_run import QuestionRun
    from larder.core.conversation import Conversation
    from larder.engine.engine import Engine

FULL = "full"
MAX_NEW_TOKENS = 32  # the answers are names, dates and numbers
CONVERSATION_MODEL = "seed"
DOCUMENT_MODEL = "smollm2"


@dataclass(frozen=True)
class Demonstration:
    """A bundled text and the policies that read it.

    Args:
        file: its name in the package.
        text: what it is, for the introduction.
        policies: spellings of the policies with a budget, by their names in the table.
        budget_divisor: the default budget is the context divided by this.
        questions: with their answers; empty if the file has them.
    """

    file: str
    text: str
    policies: Mapping[str, str]
    budget_divisor: int
    questions: tuple[Question, ...] = ()

    @property
    def conversation(self) -> Conversation:
        """The text, with its questions."""
        with as_file(files("larder.cli.demo") / self.file) as path:
            found = read_conversation(path)
        return replace(found, questions=self.questions) if self.questions else found


CONVERSATION = Demonstration(
    file="conversation.json",
    text="a life-log",
    policies={
        "streaming_llm": "streaming_llm",
        "snapkv_blockwise": "snapkv_blockwise",
        "kvzip_blockwise": "kvzip_blockwise",
        "epicache": "epicache",
    },
    budget_divisor=6,
)


DOCUMENT = Demonstration(
    file="field_station.md",
    text="the handbook of a field station",
    policies={
        "icecache": "icecache",
        "kvzip:int4": "whole() > reconstruct() > global() > quantized(bits=4)",
        "epicache_pooled": "epicache_pooled",
        "streaming_llm": "streaming_llm",
        "snapkv": "snapkv",
    },
    budget_divisor=4,
    questions=(
        Question("What is the code of the door?", "4718"),
        Question("How many beds are there?", "11 beds"),
        Question("Where are the spare filters kept?", "blue cupboard"),
        Question("What is the customer number of the gas tank?", "20561"),
        Question("What is the name of the boat?", "Margaret"),
        Question("In which year do the measurements begin?", "1937"),
        Question("What is the password of the computer?", "heron88"),
        Question("How deep is the deepest place of the lake?", "63 met"),
        Question("What is the address of the laboratory?", "27 Mill Lane"),
        Question("What is the name of the goat?", "Bishop"),
        Question("On which channel does the radio reach the mountain rescue?", "channel 16"),
        Question("What is the telephone number of the doctor?", "55302"),
        Question("How much is the fee for each night?", "14 pounds"),
        Question("How many days does the battery on the island last?", "40 days"),
    ),
)


def demonstration(model: str) -> Demonstration:
    """The conversation for the bundled model, which was trained on such; else the document."""
    return CONVERSATION if model == CONVERSATION_MODEL else DOCUMENT


@command
def demo(
    options: OutputOptions,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="512 (tokens per kv head), 20% or 1/5 of the context, or 64MiB.  "
            "Default: a quarter of the document, a sixth of the conversation.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_PATH",
            help="As --model of `ask`.  Default: smollm2; where it is not installed, seed.",
        ),
    ] = None,
) -> None:
    """Read a bundled text with the full cache and under policies with a budget, and compare.

    SmolLM2, or another model, reads a document; the bundled model, seed, a conversation. Nothing
    is downloaded for these two, and it takes one to three minutes.
    """
    from larder.cli.question_run import open_engine
    from larder.core.memory_budget import MemoryBudget

    if budget is not None:
        MemoryBudget.parse(budget, "--budget")  # an error before the full cache is prefilled
    model = model or _default_model()
    shown = demonstration(model)
    conversation = shown.conversation
    engine = open_engine(replace(ModelOptions(), model=model))
    if not options.json:
        _print_introduction(shown, conversation, model)
    runs, is_whole = _run(engine, shown, conversation, budget)
    if options.json:
        print_document(_demo_document(runs))
    else:
        _print_table(runs)
    if not is_whole:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _default_model() -> str:
    """SmolLM2 where its package is installed, else the bundled model and a line that says so."""
    from larder.models.model_packages import PACKAGED_MODELS

    packaged = PACKAGED_MODELS[DOCUMENT_MODEL]
    if packaged.files:
        return DOCUMENT_MODEL
    print(
        f"The model {DOCUMENT_MODEL} is not installed ({packaged.command}): the bundled model "
        f"{CONVERSATION_MODEL} takes its place.",
        file=sys.stderr,
    )
    return CONVERSATION_MODEL


def _run(
    engine: Engine, demonstration: Demonstration, conversation: Conversation, budget: str | None
) -> tuple[dict[str, QuestionRun], bool]:
    """Finished runs by policy; False if Ctrl-C came before the last."""
    from larder.session.policy import parsed_policy, with_searched_recall

    done: dict[str, QuestionRun] = {}
    try:
        done[FULL] = _run_policy(engine.under(FULL), conversation, FULL)
        context = done[FULL].memory.figures.context_tokens
        for name, spelling in demonstration.policies.items():
            searching = with_searched_recall(parsed_policy(spelling))
            limited = engine.under(
                searching, budget or str(context // demonstration.budget_divisor)
            )
            done[name] = _run_policy(limited, conversation, name)
    except KeyboardInterrupt:
        if not done:
            raise
        return done, False
    return done, True


def _run_policy(engine: Engine, conversation: Conversation, name: str) -> QuestionRun:
    """Prefill under one policy, and answers to all questions."""
    from larder.cli.question_run import prefill_run
    from larder.engine.sampler import SamplingParams

    run = prefill_run(engine, conversation, {}, f"{name}: reading")
    # Kernels compile at their first call, which would count as the first policy's decode time.
    engine.ask(run.memory, conversation.questions[0].question, max_new_tokens=2)
    with progress_bar(f"{name}: answering", "questions") as watch:
        for number, question in enumerate(conversation.questions, start=1):
            run.ask(question, SamplingParams(), MAX_NEW_TOKENS)
            watch(number, len(conversation.questions))
    return run


def _print_introduction(
    demonstration: Demonstration, conversation: Conversation, model: str
) -> None:
    unit = "paragraphs" if conversation.form.is_document else "messages"
    print(
        f"The model {model} reads {demonstration.text}, {len(conversation.messages)} {unit}, and "
        f"answers {len(conversation.questions)} questions about it:\nfirst with its full KV cache, "
        f"then under {len(demonstration.policies)} policies with the same budget. No policy knows "
        "the questions while it reads.\n",
        flush=True,
    )


def _print_table(runs: dict[str, QuestionRun]) -> None:
    from larder.cli.json_documents import summary

    console = results_console()
    table = make_table(
        "policy", "budget", "right", "KV active", "KV total", "KV peak*", "prefill", "decode tok/s"
    )
    for name, run in runs.items():
        figures = run.memory.figures
        table.add_row(
            name,
            f"{figures.budget_tokens:,}",
            f"{_right(run)}/{len(run.outcomes)}",
            format_bytes(figures.active_kv_bytes),
            format_bytes(figures.kv_bytes),
            format_bytes(run.peak_kv_bytes),
            format_seconds(figures.prefill_seconds),
            f"{summary(run.outcomes)['decode_tokens_per_second']:.1f}",
        )
    console.print(table)
    context = runs[FULL].memory.figures.context_tokens
    console.print(
        f"\nThe context has {context:,} tokens; the budget counts tokens per kv head. An\n"
        "answer is right if it contains the expected one. Active is what a question\n"
        "attends to; entries offloaded, or of other episodes, are in host memory and\n"
        "count in total.\n"
        "* the peak over prefill and answers: caches, the block being read, scoring\n"
        "  prompts, space for the answer.\n"
    )
    console.print(_conclusion(runs))
    console.print(
        '\nGo on: larder ask FILE -q "...", larder chat, larder policy list, larder ask --help'
    )


def _right(run: QuestionRun) -> int:
    """Number of answers that contain the expected one."""
    return sum(one.scores is not None and one.scores.contains for one in run.outcomes)


def _conclusion(runs: dict[str, QuestionRun]) -> str:
    """Sentence about the policies with the most right answers."""
    full, *limited = runs.items()
    if not limited:
        return ""
    most = max(_right(run) for _, run in limited)
    best = ", ".join(
        f"{name} ({_share(run, 'active_kv_bytes')} of its memory active, "
        f"{_share(run, 'kv_bytes')} in total)"
        for name, run in limited
        if _right(run) == most
    )
    return (
        f"Most right answers with a budget: {most}, where the full cache gives "
        f"{_right(full[1])}: {best}."
    )


def _share(run: QuestionRun, of: str) -> str:
    """Bytes of a run's caches as a share of the full cache of its context."""
    figures = run.memory.figures
    return f"{getattr(figures, of) / figures.full_kv_bytes:.0%}"


def _demo_document(runs: dict[str, QuestionRun]) -> dict[str, Any]:
    from larder.cli.json_documents import run_document

    rows = [{"name": name, **run_document(run)} for name, run in runs.items()]
    return {"schema": SCHEMA, "rows": rows}
