"""`larder demo`: one conversation under five policies, compared in one table."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.console import (
    format_bytes,
    format_score,
    format_seconds,
    make_table,
    progress_bar,
    results_console,
)
from larder.cli.errors import INTERRUPTED_EXIT_CODE, SCHEMA, print_document
from larder.cli.options import ModelOptions, OutputOptions, command

if TYPE_CHECKING:
    from larder.cli.question_run import QuestionRun
    from larder.core.conversation import Conversation
    from larder.engine.engine import Engine

FULL = "full"
POLICIES = ("streaming_llm", "snapkv_blockwise", "kvzip_blockwise", "epicache")
BUDGET_DIVISOR = 6  # default budget: the context divided by this
MAX_NEW_TOKENS = 32  # the answers are names, dates and numbers


@command
def demo(
    options: OutputOptions,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="512 (tokens per kv head), 20% or 1/5 of the context, or 64MiB.  "
            "Default: a sixth of the context.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME_OR_PATH", help="As --model of `ask`.")
    ] = ModelOptions.model,
) -> None:
    """Read a bundled conversation under five policies, and compare.

    With the bundled model nothing is downloaded, and it takes one to three minutes.
    """
    from larder.cli.question_run import open_engine
    from larder.core.memory_budget import MemoryBudget

    if budget is not None:
        MemoryBudget.parse(budget, "--budget")  # an error before the full cache is prefilled
    conversation = _conversation()
    engine = open_engine(replace(ModelOptions(), model=model))
    if not options.json:
        _print_introduction(conversation, model)
    runs, is_whole = _run(engine, conversation, budget)
    if options.json:
        print_document(_demo_document(runs))
    else:
        _print_table(runs)
    if not is_whole:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _conversation() -> Conversation:
    from larder.session.files import read_conversation

    with as_file(files("larder.cli.demo") / "conversation.json") as path:
        return read_conversation(path)


def _run(
    engine: Engine, conversation: Conversation, budget: str | None
) -> tuple[dict[str, QuestionRun], bool]:
    """Finished runs by policy; False if Ctrl-C came before the last."""
    done: dict[str, QuestionRun] = {}
    try:
        done[FULL] = _run_policy(engine.under(FULL), conversation, FULL)
        context = done[FULL].memory.figures.context_tokens
        for name in POLICIES:
            limited = engine.under(name, budget or str(context // BUDGET_DIVISOR))
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


def _print_introduction(conversation: Conversation, model: str) -> None:
    print(
        f"The model {model} reads {len(conversation.messages)} messages of a life-log and answers "
        f"{len(conversation.questions)} questions about them:\nfirst with its full KV cache, then "
        "under four policies that keep the same small part of it.\n",
        flush=True,
    )


def _print_table(runs: dict[str, QuestionRun]) -> None:
    from larder.cli.json_documents import mean_scores, summary

    console = results_console()
    table = make_table(
        "policy",
        "budget",
        "exact",
        "F1",
        "KV active",
        "KV total",
        "KV peak*",
        "prefill",
        "decode tok/s",
    )
    for name, run in runs.items():
        figures, scores = run.memory.figures, mean_scores(run.asked)
        table.add_row(
            name,
            f"{figures.budget_tokens:,}",
            format_score(scores["exact"]),
            format_score(scores["f1"]),
            format_bytes(figures.active_kv_bytes),
            format_bytes(figures.kv_bytes),
            format_bytes(run.peak_kv_bytes),
            format_seconds(figures.prefill_seconds),
            f"{summary(run.asked)['decode_tokens_per_second']:.1f}",
        )
    console.print(table)
    context = runs[FULL].memory.figures.context_tokens
    console.print(
        f"\nThe context has {context:,} tokens; the budget counts tokens per kv head. EpiCache "
        "holds\none cache per episode: one is active, the others are in host memory.\n"
        "* the peak over prefill and answers: caches, the block being read, scoring prompts,\n"
        "  space for the answer.\n"
    )
    console.print(
        'Go on: larder ask FILE -q "...", larder chat, larder policy list, larder ask --help'
    )


def _demo_document(runs: dict[str, QuestionRun]) -> dict[str, Any]:
    from larder.cli.json_documents import run_document

    rows = [{"name": name, **run_document(run)} for name, run in runs.items()]
    return {"schema": SCHEMA, "rows": rows}
