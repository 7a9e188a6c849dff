"""Internal names that the goldens need: the only file of this folder that a rename touches.

Everything else in this folder goes through commands, HTTP, files and `import larder`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from click import Command
from typer.main import get_command
from typer.testing import CliRunner

from larder import Engine
from larder.cli import question_run
from larder.cli.main import app
from larder.models import SEED, LoadedModel, load
from larder.store import RestorePath, ThroughputEstimates

BLOCK = 16  # tokens of tiny models that are read between two plans
# Help and tables as every machine prints them.
TERMINAL = {"COLUMNS": "100", "LINES": "50", "NO_COLOR": "1", "TERM": "dumb"}


@dataclass(frozen=True)
class Outcome:
    """Exit code and both streams of a command."""

    code: int
    stdout: str
    stderr: str


@cache
def bundled() -> LoadedModel:
    """Bundled model, loaded once in this process."""
    return load()


def run(*words: str | Path, stdin: str | None = None, home: Path | None = None) -> Outcome:
    """Run a command line in this process, with the bundled model loaded once and caches restored.

    Args:
        home: LARDER_HOME; None for the one that is set.
    """
    environment = TERMINAL | ({} if home is None else {"LARDER_HOME": str(home)})
    with patch.object(question_run, "load", _load), restored():
        result = CliRunner().invoke(app, [str(word) for word in words], stdin, environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@contextmanager
def restored() -> Iterator[None]:
    """Load caches even if recomputing them may be faster, which depends on the machine.

    Nothing is flushed to the disk, which no golden is about.
    """
    with (
        patch.object(ThroughputEstimates, "choose", lambda *args: RestorePath.LOAD),
        patch.object(os, "fsync"),
    ):
        yield


def commands() -> Command:
    """Tree of commands of the command line."""
    return get_command(app)


def study_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a results file."""
    from larder_bench.results.rows import read_rows

    return read_rows(path)


def architectures() -> tuple[str, ...]:
    """Names of the tiny random models."""
    from tiny_models import ARCHITECTURES

    return ARCHITECTURES


def last_logits(
    architecture: str, policy: str, budget: str | None, text: str, more: str
) -> list[float]:
    """Logits of a tiny random model after the last character of `more`, read in one pass after the
    cache that a policy builds from `text`.
    """
    from larder.core import Mode
    from larder.models import BatchSegment
    from server_core import characters

    loaded = characters(architecture)
    engine = Engine(loaded, policy=policy, budget=budget, block=None if budget is None else BLOCK)
    cache = engine.read(text).caches.activate(0)
    ids = tuple(loaded.tokenizer(more, add_special_tokens=False)["input_ids"])
    return loaded.decoder.forward_logits([BatchSegment(cache, ids)], Mode.APPEND, [len(ids) - 1])[
        0
    ].tolist()


def families() -> dict[str, list[str]]:
    """Public names of every family of parts, by the kind that entry points are grouped by."""
    from larder.core import RECALLS
    from larder.models import MEASUREMENTS
    from larder.policy import TALLIES
    from larder.session import EMBEDDERS, FAMILIES
    from larder.store import CODECS, EVICTIONS
    from larder_bench.execution.runner import MEASURES
    from larder_bench.plots.figures.base import FIGURES
    from larder_bench.studies.methods import RETRIEVALS
    from larder_bench.tasks.base import TASKS
    from larder_bench.traces.base import TRACES

    others = (MEASURES, RETRIEVALS, TASKS, TRACES, RECALLS, MEASUREMENTS, FIGURES, TALLIES)
    every = (*FAMILIES.values(), *others, EMBEDDERS, CODECS, EVICTIONS)
    return {family.kind: sorted(family.builtin_names()) for family in every}


@contextmanager
def serving(home: Path, **options: Any) -> Iterator[str]:
    """`larder serve` in this process with the bundled model, at home in a folder; its address.

    Args:
        options: as the command has them; the key file hides the archive as well as the store.
    """
    from larder.cli.engine_clients import local_engine_client
    from larder.cli.serve import ServeOptions
    from larder.server import Archive, HttpSettings, LoopbackAuth, create_app
    from larder.store import encryption_for, read_key

    asked = ServeOptions(**options)
    with patch.dict(os.environ, {"LARDER_HOME": str(home)}), restored():
        sealing = encryption_for(read_key(asked.key_file), "archive")
        with patch.object(question_run, "load", _load), local_engine_client(asked) as hub:
            archive = Archive(home / "server" / "archive.sqlite", sealing=sealing)
            limits = HttpSettings(max_new_tokens=asked.max_new_tokens)
            with _listening(create_app(hub, LoopbackAuth(), archive, limits)) as url:
                yield url


@contextmanager
def _listening(application: Any) -> Iterator[str]:
    import uvicorn

    from larder.server import ServerConfig

    config = ServerConfig(application, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        while not server.started:
            thread.join(0.01)
            assert thread.is_alive(), "the server did not start"
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not stop"


def _load(
    name: str, *, device: str, dtype: str | None, adapter: str | None, **options: Any
) -> LoadedModel:
    if (name, device, dtype, adapter) == (SEED, "cpu", None, None):
        return bundled()
    return load(name, device, dtype, adapter, **options)
