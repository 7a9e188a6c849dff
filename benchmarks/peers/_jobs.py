"""Cells of the comparison with other libraries, each run in a process of its own."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from _pairs import LARDER, PeerPair

from larder.core.conversation import Conversation
from larder.core.errors import LarderError
from larder.core.family import public_name
from larder.core.memory_budget import MemoryBudget
from larder.core.spelling import spell
from larder.engine.engine import Engine
from larder.models.loader import SEED
from larder.session.policy import Policy
from larder_bench.datasets.sources import TaskSources
from larder_bench.profiling.timing import percentiles
from larder_bench.random_models import RANDOM, open_model
from larder_bench.results.budget_labels import WHOLE
from larder_bench.results.environment import ID_LENGTH, environment_row
from larder_bench.results.rows import CELL, SCHEMA, Row
from larder_bench.scoring.item_scores import generated_items
from larder_bench.studies.question_sequences import number_questions
from larder_bench.tasks.base import Task, parse_task

HERE = Path(__file__).parent
STUDY = "peers"
PROBE = "import json,importlib.metadata as m,sys;json.dump({d.metadata['Name']:d.version for d in m.distributions()},sys.stdout)"  # noqa: E501
RANDOM_QUESTIONS = 2  # default for a model with meaningless answers
PEER_PACKAGES = ("torch", "transformers", "kvpress", "optimum-quanto", "hqq")


@dataclass(frozen=True)
class ComparisonJob:
    """One conversation with one policy, of a peer or of Larder.

    Args:
        made: constructor of a peer; empty for Larder.
        written: Larder's policy; empty for a peer.
    """

    task: Task
    tokens: int
    seed: int
    policy: str
    budget: str
    made: str = ""
    written: str = ""


@dataclass(frozen=True, eq=False)
class ComparisonSetup:
    """Objects that all cells share.

    Args:
        folder: model folder that both sides load.
        environments: environment rows of both sides.
    """

    options: argparse.Namespace
    engine: Engine
    folder: Path
    command: str
    environments: dict[str, Row]

    @staticmethod
    def of(options: argparse.Namespace, scratch: Path, command: str) -> ComparisonSetup:
        """Load the model once and save it where both sides can load it."""
        loaded = open_model(options.model)
        engine = Engine(loaded, policy="full")
        folder = Path(options.model)
        if options.model == SEED:
            folder = Path(str(files("larder.models") / "seed"))
        elif options.model.startswith(RANDOM):
            folder = scratch
            loaded.decoder.release()
            loaded.decoder.module.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
        return ComparisonSetup(options, engine, folder, command, _environments(options))

    @property
    def is_random(self) -> bool:
        """Test if the model has random weights, so that its answers are meaningless."""
        return self.options.model.startswith(RANDOM)

    @property
    def num_questions(self) -> int | None:
        """Number of questions of each conversation; None for all."""
        return self.options.questions or (RANDOM_QUESTIONS if self.is_random else None)

    @property
    def measure_label(self) -> str:
        """Measure with its settings, so that rows with other settings count as other cells."""
        options = self.options
        settings = {} if self.num_questions is None else {"questions": self.num_questions}
        settings |= {"new_tokens": options.new_tokens, "repeats": options.repeats}
        settings |= {"threads": options.threads}
        inner = ", ".join(f"{name}={number}" for name, number in settings.items())
        return f"{'cost' if self.is_random else 'generated'}({inner})"

    def head(self, job: ComparisonJob) -> Row:
        """First fields of a job's row."""
        side = "peers" if job.made else LARDER
        spelling = job.made or str(Policy.parse(job.written))
        return {
            "schema": SCHEMA,
            "row": CELL,
            "study": STUDY,
            "model": self.options.model,
            "model_fingerprint": self.engine.loaded.decoder.spec.fingerprint,
            "task": spell(job.task),
            "kind": public_name(type(job.task)),
            "tokens": job.tokens,
            "seed": job.seed,
            "policy": job.policy,
            "spelling": spelling,
            "budget": job.budget,
            "matched": "tokens",
            "measure": self.measure_label,
            "device": self.options.device,
            "dtype": self.options.dtype,
            "environment": self.environments[side]["id"],
            "command": self.command,
        }

    def measure(self, job: ComparisonJob) -> Row:
        """Measured fields of a job's row.

        Raises:
            LarderError: the job failed, which is a result, too.
        """
        conversation = self.conversation(job.task, job.seed, job.tokens)
        sequences = number_questions(job.task, conversation)
        questions = [one for sequence in sequences for one in sequence]
        questions = questions[: self.num_questions]
        request = self._request(job, conversation, [one.question.question for one in questions])
        if job.written:
            result = _run([sys.executable, str(HERE / "larder_worker.py")], request)
        else:
            result = _run([self.options.peer_python, str(HERE / "peer_worker.py")], request)
        tokenizer, items = self.engine.tokenizer, list[Row]()
        for one, ids in zip(questions, result["answers"], strict=True):
            if not self.is_random:
                items += generated_items(one, tokenizer.decode(tuple(ids)).strip())
        return self._figures(request, result) | {"items": items}

    def _request(
        self, job: ComparisonJob, conversation: Conversation, questions: list[str]
    ) -> dict[str, Any]:
        """Input of a worker."""
        options, tokenizer = self.options, self.engine.tokenizer
        context = list(tokenizer.encode_conversation(conversation).ids)
        kept = MemoryBudget.parse(job.budget).tokens(len(context), self._token_bytes)
        wrap = conversation.question_prompt
        return {
            "made": job.made,
            "spelling": job.written,
            "budget": None if job.budget == WHOLE else str(kept),
            "kept": kept / len(context),
            "model": str(self.folder),
            "context": context,
            "questions": [
                list(tokenizer.encode_question(wrap.format(question=q))) for q in questions
            ],
            "stops": [] if self.is_random else sorted(self.engine.stop_ids),
            "task": spell(job.task),
            "tokens": job.tokens,
            "seed": job.seed,
            "corpus": None if options.corpus is None else str(options.corpus),
            "device": options.device,
            "dtype": options.dtype,
            "threads": options.threads,
            "repeats": options.repeats,
            "max_new_tokens": options.new_tokens,
        }

    def _figures(self, request: dict[str, Any], result: dict[str, Any]) -> Row:
        context = len(request["context"])
        full, held = self.engine.loaded.decoder.spec.full_bytes(context), result["kv_bytes"]
        active = result.get("active_kv_bytes", held)
        first = [times[1] - times[0] for times in result["stamps"] if len(times) > 1]
        later = [b - a for times in result["stamps"] for a, b in zip(times[1:], times[2:])]  # noqa: B905
        timings = {"first_token": first, "token": later}
        row: Row = {
            "context_tokens": context,
            "budget_tokens": context if request["budget"] is None else int(request["budget"]),
            "full_kv_bytes": full,
            "bytes_share": round(active / full, 5),
            "active_kv_bytes": active,
            "latency": {name: percentiles(times) for name, times in timings.items() if times},
        }
        if self.is_random and later:
            row["tokens_per_second"] = round(1 / statistics.median(later), 3)
        same = ("kv_bytes", "peak_kv_bytes", "prefill_seconds", "masked_entries", "counted_bytes")
        peaks = ("process_peak_bytes", "working_peak_bytes")
        return row | {name: result[name] for name in (*same, *peaks) if name in result}

    @property
    def _token_bytes(self) -> int:
        return self.engine.loaded.decoder.spec.managed_bytes_per_token()

    @property
    def conversation(self) -> Any:
        return _maker(self)


def jobs_of(
    setting: ComparisonSetup,
    pairs: Sequence[PeerPair],
    tasks: Sequence[str],
    tokens: Sequence[int],
    budgets: Sequence[str],
) -> list[ComparisonJob]:
    """Jobs of all cells: peers and Larder alternate on each conversation; shared cells occur once.

    Raises:
        LarderError: a peer is not installed in the peers' environment.
    """
    options, jobs = setting.options, dict[ComparisonJob, None]()
    missing = {p.package for p in pairs if not setting.environments["peers"][p.package]}
    if missing:
        raise LarderError(
            f"{options.peer_python} has no {', '.join(sorted(missing))}: see --help for how peers "
            "are installed, or choose others by --peer."
        )
    for task in map(parse_task, tasks):
        for length in tokens:
            for seed in range(options.first_seed, options.first_seed + options.files):
                for budget in budgets:
                    for pair in pairs:
                        size = pair.share or budget
                        peer = ComparisonJob(task, length, seed, pair.peer, size, made=pair.made)
                        ours = ComparisonJob(task, length, seed, pair.name, size, written=pair.ours)
                        jobs |= {peer: None, ours: None}
    return list(jobs)


@lru_cache(maxsize=1)
def _maker(setting: ComparisonSetup) -> Any:
    sources = TaskSources(setting.engine.tokenizer.count_tokens, setting.options.corpus)
    return lru_cache(maxsize=1)(lambda task, seed, tokens: task.make(seed, tokens, sources))


def _environments(options: argparse.Namespace) -> dict[str, Row]:
    """Environment rows of Larder and of the peers."""
    ours = environment_row(options.threads)
    try:
        command = [options.peer_python, "-c", PROBE]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LarderError(
            f"{options.peer_python} cannot be run ({error}): give a Python by --peer-python."
        ) from error
    installed = {name.lower(): version for name, version in json.loads(done.stdout).items()}
    versions = {name: installed.get(name, "") for name in PEER_PACKAGES}
    fields = {name: ours[name] for name in ("python", "platform", "cpu", "threads")} | versions
    digest = hashlib.blake2b(json.dumps(fields).encode(), digest_size=ID_LENGTH // 2).hexdigest()
    head = {name: ours[name] for name in ("schema", "row", "date")}
    return {LARDER: ours, "peers": head | {"id": digest} | fields}


def _run(command: list[str], job: dict[str, Any]) -> dict[str, Any]:
    """Output of a worker.

    Raises:
        LarderError: the worker failed; the message is its last line.
    """
    done = subprocess.run(
        command, input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise LarderError(lines[-1])
    return json.loads(done.stdout[done.stdout.index("{") :])
