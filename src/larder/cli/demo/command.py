"""`larder demo`: one conversation, five ways to keep it, one table."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from larder.cli.failing import INTERRUPTED, SCHEMA, print_document
from larder.cli.options import Common, Output, command
from larder.cli.showing import results, seconds, share, size, table, watched

if TYPE_CHECKING:
    from larder.cli.sitting import Sitting
    from larder.core.conversation import Conversation
    from larder.engine.engine import Engine

FULL = "full"
POLICIES = ("streaming_llm", "snapkv_blockwise", "kvzip_blockwise", "epicache")
SHARE = 6  # the budget is the context over this, where nothing else is asked for
MAX_NEW_TOKENS = 32  # the answers are names, dates and numbers


@command
def demo(
    options: Output,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="512 (tokens per kv head), 20% or 1/5 of the context, or 64MiB.  "
            "Default: a sixth of the context.",
        ),
    ] = None,
) -> None:
    """Read a bundled conversation with a bundled model under five policies, and compare.

    Nothing is downloaded. It takes one to three minutes.
    """
    from larder.cli.sitting import open_engine
    from larder.core.memory_budget import MemoryBudget

    if budget is not None:
        MemoryBudget.parse(
            budget, "--budget"
        )  # refused now rather than after the full cache was read
    conversation = _conversation()
    engine = open_engine(Common())
    if not options.json:
        _announce(conversation)
    sittings, is_whole = _run(engine, conversation, budget)
    if options.json:
        print_document(_document(sittings))
    else:
        _show(sittings)
    if not is_whole:
        raise typer.Exit(INTERRUPTED)


def _conversation() -> Conversation:
    from larder.session.files import read_conversation

    with as_file(files("larder.cli.demo") / "conversation.json") as path:
        return read_conversation(path)


def _run(
    engine: Engine, conversation: Conversation, budget: str | None
) -> tuple[dict[str, Sitting], bool]:
    """Sit through every policy; whether all were finished before Ctrl-C."""
    done: dict[str, Sitting] = {}
    try:
        done[FULL] = _sit(engine.under(FULL), conversation, FULL)
        context = done[FULL].memory.figures.context_tokens
        for name in POLICIES:
            limited = engine.under(name, budget or str(context // SHARE))
            done[name] = _sit(limited, conversation, name)
    except KeyboardInterrupt:
        if not done:
            raise
        return done, False
    return done, True


def _sit(engine: Engine, conversation: Conversation, name: str) -> Sitting:
    """Read under one policy and ask every question."""
    from larder.cli.sitting import read
    from larder.engine.sampling import Sampling

    sitting = read(engine, conversation, {}, f"{name}: reading")
    # Kernels compile at their first call, which would be charged to the first policy's answers.
    engine.ask(sitting.memory, conversation.questions[0].question, max_new_tokens=2)
    with watched(f"{name}: answering", "questions") as watch:
        for number, question in enumerate(conversation.questions, start=1):
            sitting.ask(question, Sampling(), MAX_NEW_TOKENS)
            watch(number, len(conversation.questions))
    return sitting


def _announce(conversation: Conversation) -> None:
    print(
        f"A small model reads {len(conversation.messages)} messages of a life-log and answers "
        f"{len(conversation.questions)} questions about them:\nfirst with its full KV cache, then "
        "under four policies that keep the same small part of it.\n",
        flush=True,
    )


def _show(sittings: dict[str, Sitting]) -> None:
    from larder.cli.documents import means, summary

    console = results()
    made = table(
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
    for name, sitting in sittings.items():
        figures, scores = sitting.memory.figures, means(sitting.asked)
        made.add_row(
            name,
            f"{figures.budget_tokens:,}",
            share(scores["exact"]),
            share(scores["f1"]),
            size(figures.active_kv_bytes),
            size(figures.kv_bytes),
            size(sitting.peak_kv_bytes),
            seconds(figures.prefill_seconds),
            f"{summary(sitting.asked)['decode_tokens_per_second']:.1f}",
        )
    console.print(made)
    context = sittings[FULL].memory.figures.context_tokens
    console.print(
        f"\nThe context has {context:,} tokens; the budget counts tokens per kv head. EpiCache "
        "holds\none cache per episode: one is active, the others wait in host memory.\n"
        "* the most held at any time, while reading or answering: caches, the block being read,\n"
        "  prompts that only judge, room for the answer.\n"
    )
    console.print(
        'Go on: larder ask FILE -q "...", larder chat, larder policy list, larder ask --help'
    )


def _document(sittings: dict[str, Sitting]) -> dict[str, Any]:
    from larder.cli.documents import document

    rows = [{"name": name, **document(sitting)} for name, sitting in sittings.items()]
    return {"schema": SCHEMA, "rows": rows}
