"""Cells of the comparison with other libraries, each run in a process of its own."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from _pairs import LARDER, PeerPair

from larder.core import Conversation, LarderError, MemoryBudget, public_name, spell
from larder.engine import Engine
from larder.models import PACKAGED_MODELS, SEED
from larder.session import Policy
from larder_bench.datasets.prompt_templates import worded_chat
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import QuestionPlacement, Wording
from larder_bench.profiling.timing import percentiles
from larder_bench.random_models import RANDOM, open_model
from larder_bench.results.budget_labels import WHOLE
from larder_bench.results.environment import ID_LENGTH, environment_row
from larder_bench.results.rows import CELL, SCHEMA, Row
from larder_bench.scoring.item_scores import NumberedQuestion, generated_items
from larder_bench.studies.question_sequences import number_questions
from larder_bench.tasks.base import BenchTask, parse_task

HERE = Path(__file__).parent
STUDY = "peers"
PROBE = "import json,importlib.metadata as m,sys;json.dump({d.metadata['Name']:d.version for d in m.distributions()},sys.stdout)"  # noqa: E501
RANDOM_QUESTIONS = 2  # default for a model with meaningless answers
CACHED_CONVERSATIONS = 16
PROCESS_PER_CELL, PROCESS_PER_POLICY = "cell", "policy"
RESULTS = "[{"  # begins the output of a worker, after what its packages print
PEER_PACKAGES = ("torch", "transformers", "kvpress", "optimum-quanto", "hqq")


@dataclass(frozen=True)
class ComparisonJob:
    """One conversation with one policy, of a peer or of Larder.

    Args:
        made: constructor of a peer; empty for Larder.
        written: Larder's policy; empty for a peer.
    """

    task: BenchTask
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
        loaded = open_model(options.model, dtype=options.dtype)
        engine = Engine(loaded, policy="full")
        folder = Path(options.model)
        if options.model == SEED:
            folder = Path(str(files("larder.models") / "seed"))
        elif options.model in PACKAGED_MODELS:
            folder = PACKAGED_MODELS[options.model].folder(options.model)
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
    def wording(self) -> Wording:
        """Wording that the model follows."""
        template = self.engine.tokenizer.tokenizer.chat_template
        return Wording.of_model(self.options.model, bool(template))

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
        settings |= {} if options.process == PROCESS_PER_CELL else {"process": options.process}
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
            "question": self.options.question,
            "wording": self.wording.value,
            "environment": self.environments[side]["id"],
            "command": self.command,
        }

    def questions(self, job: ComparisonJob) -> list[NumberedQuestion]:
        """Questions of a job's conversation that are asked."""
        conversation = self.conversation(job.task, job.seed, job.tokens)
        sequences = number_questions(job.task, conversation)
        return [one for sequence in sequences for one in sequence][: self.num_questions]

    def requests(self, job: ComparisonJob) -> list[dict[str, Any]]:
        """Input of a worker: one context with all questions, or a context for each one inside."""
        conversation, asked = self.conversation(job.task, job.seed, job.tokens), self.questions(job)
        if self.options.question == QuestionPlacement.AFTER.value:
            return [self._request(job, conversation, asked)]
        return [
            self._request(job, replace(conversation, inside=one.question), [one]) for one in asked
        ]

    def row(self, job: ComparisonJob, results: Sequence[dict[str, Any]]) -> Row:
        """Measured fields of a job's row, from the result of each request."""
        answers = [ids for result in results for ids in result["answers"]]
        items = list[Row]()
        for one, ids in zip(self.questions(job), answers, strict=True):
            if not self.is_random:
                items += generated_items(one, self.engine.tokenizer.decode(tuple(ids)).strip())
        times = {
            name: statistics.mean(result[name] for result in results)
            for name in ("prefill_seconds", "prefill_cpu_seconds")
        }
        stamps = [each for result in results for each in result["stamps"]]
        merged = results[0] | times | {"stamps": stamps}
        return self._figures(self.requests(job)[0], merged) | {"items": items}

    def _request(
        self, job: ComparisonJob, conversation: Conversation, asked: Sequence[NumberedQuestion]
    ) -> dict[str, Any]:
        """Input of a worker for one context."""
        options, tokenizer = self.options, self.engine.tokenizer
        context = list(tokenizer.encode_conversation(conversation).ids)
        kept = MemoryBudget.parse(job.budget).tokens(len(context), self._token_bytes)
        return {
            "made": job.made,
            "spelling": job.written,
            "budget": None if job.budget == WHOLE else str(kept),
            "kept": kept / len(context),
            "model": str(self.folder),
            "context": context,
            "questions": [
                list(tokenizer.encode_question_about(conversation, one.question)) for one in asked
            ],
            "inside": None if conversation.inside is None else asked[0].number,
            "wording": self.wording.value,
            "stops": [] if self.is_random else sorted(self.engine.stop_ids),
            "task": spell(job.task),
            "tokens": job.tokens,
            "seed": job.seed,
            "corpus": None if options.corpus is None else str(options.corpus),
            "device": options.device,
            "dtype": options.dtype,
            "threads": options.threads,
            "repeats": options.repeats,
            "has_warm_up": options.process == PROCESS_PER_CELL,
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
        same = ("kv_bytes", "peak_kv_bytes", "masked_entries", "counted_bytes")
        same += ("prefill_seconds", "prefill_cpu_seconds")
        same += ("process_peak_bytes", "working_peak_bytes")
        return row | {name: result[name] for name in same if name in result}

    @property
    def _token_bytes(self) -> int:
        return self.engine.loaded.decoder.spec.managed_bytes_per_token()

    @property
    def conversation(self) -> Any:
        return _maker(self)


@dataclass(frozen=True, eq=False)
class JobRunner:
    """Measures jobs in worker processes, one for each job or for all jobs of a method.

    Args:
        jobs: all jobs.
    """

    setting: ComparisonSetup
    jobs: Sequence[ComparisonJob]
    _results: dict[ComparisonJob, list[Any]] = field(default_factory=dict[ComparisonJob, list[Any]])

    def measure(self, job: ComparisonJob) -> Row:
        """Measured fields of a job's row.

        Raises:
            LarderError: the job failed, which is a result, too.
        """
        if job not in self._results:
            self._run(self._together(job))
        return self.setting.row(job, self._results.pop(job))

    def _together(self, job: ComparisonJob) -> list[ComparisonJob]:
        """Jobs from this one on that run in one process."""
        if self.setting.options.process == PROCESS_PER_CELL:
            return [job]
        later = self.jobs[self.jobs.index(job) :]
        return [one for one in later if replace(one, seed=job.seed) == job]

    def _run(self, jobs: Sequence[ComparisonJob]) -> None:
        options, requests = self.setting.options, [self.setting.requests(job) for job in jobs]
        python, worker = options.peer_python, "peer_worker.py"
        if jobs[0].written:
            python, worker = sys.executable, "larder_worker.py"
        flat = [request for own in requests for request in own]
        results = iter(_run([python, str(HERE / worker)], flat))
        for job, own in zip(jobs, requests, strict=True):
            self._results[job] = [next(results) for _ in own]


def jobs_of(
    setting: ComparisonSetup,
    pairs: Sequence[PeerPair],
    tasks: Sequence[str],
    tokens: Sequence[int],
    budgets: Sequence[str],
) -> list[ComparisonJob]:
    """Jobs of all cells: peers and Larder alternate on each conversation; shared cells occur once.

    Conversations that share a process follow each other.

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
    ordered = list(jobs)
    if options.process == PROCESS_PER_POLICY:
        methods = [(job.policy, job.budget) for job in ordered]
        ordered.sort(key=lambda job: methods.index((job.policy, job.budget)))
    return ordered


@lru_cache(maxsize=1)
def _maker(setting: ComparisonSetup) -> Any:
    count, corpus, wording = (
        setting.engine.tokenizer.count_tokens,
        setting.options.corpus,
        setting.wording,
    )
    sources = TaskSources(count, corpus, wording=wording)

    def make(task: BenchTask, seed: int, tokens: int) -> Conversation:
        return worded_chat(task.make(seed, tokens, sources), wording)

    return lru_cache(maxsize=CACHED_CONVERSATIONS)(make)


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


def _run(command: list[str], requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of a worker, one for each request.

    Raises:
        LarderError: the worker failed; the message is its last line.
    """
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise LarderError(lines[-1])
    return json.loads(done.stdout[done.stdout.index(RESULTS) :])
