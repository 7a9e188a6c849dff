"""Worker that runs Larder on one job, as peer_worker.py runs the others: JSON in, JSON out."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _memory import PeakMemory, held_bytes

from larder.cache import SequenceCache
from larder.core import Conversation
from larder.engine import Engine, SamplingParams, StoppingCriteria, no_observer
from larder.engine.generate import generate
from larder.session import ConversationMemory, decode_planner
from larder_bench.datasets.prompt_templates import worded_chat
from larder_bench.datasets.sources import TaskSources
from larder_bench.datasets.task_prompts import Wording
from larder_bench.tasks.base import parse_task

WARM_TOKENS = 256


@torch.no_grad()
def run(job: dict[str, Any]) -> dict[str, Any]:
    """Result of a job."""
    torch.set_num_threads(job["threads"])
    base = _engine(job["model"], job["device"], job["dtype"])
    engine, conversation = base.under(job["spelling"], job["budget"]), _conversation(base, job)
    ids = list(base.tokenizer.encode_conversation(conversation).ids)
    if ids != job["context"]:
        raise RuntimeError("The conversation has other token ids than the peer's.")
    _warm_up(base, ids)
    peak, seconds, cpu_seconds = PeakMemory(job["device"]), list[float](), list[float]()
    memory = None
    if job["has_warm_up"]:
        _answer(engine, engine.read(conversation), job["questions"][0], job)
    for _ in range(job["repeats"]):
        memory = None  # free the previous one
        cpu_started = time.process_time()
        memory = engine.read(conversation)
        cpu_seconds.append(time.process_time() - cpu_started)
        seconds.append(memory.figures.prefill_seconds)
    assert memory is not None
    caches = [memory.caches.activate(number) for number in range(len(memory.caches))]
    held, counted = held_bytes(caches), memory.caches.nbytes
    highest, answers, stamps = memory.figures.peak_kv_bytes, list[list[int]](), list[list[float]]()
    for question in job["questions"]:
        answer, times, held_during = _answer(engine, memory, question, job)
        answers.append(answer)
        stamps.append(times)
        highest = max(highest, held_during)
    return peak.figures() | {
        "prefill_seconds": statistics.median(seconds),
        "prefill_cpu_seconds": statistics.median(cpu_seconds),
        "kv_bytes": held,
        "counted_bytes": counted,
        "active_kv_bytes": memory.figures.active_kv_bytes,
        "peak_kv_bytes": max(highest, held),
        "spelling": str(memory.policy),
        "answers": answers,
        "stamps": stamps,
    }


@lru_cache(maxsize=1)
def _engine(model: str, device: str, dtype: str) -> Engine:
    return Engine.load(model, policy="full", device=device, dtype=dtype)


@lru_cache(maxsize=1)
def _sources(engine: Engine, corpus: str | None, wording: Wording) -> TaskSources:
    folder = None if corpus is None else Path(corpus)
    return TaskSources(engine.tokenizer.count_tokens, folder, wording=wording)


def _conversation(engine: Engine, job: dict[str, Any]) -> Conversation:
    wording = Wording(job["wording"])
    sources = _sources(engine, job["corpus"], wording)
    made = parse_task(job["task"]).make(job["seed"], job["tokens"], sources)
    conversation = worded_chat(made, wording)
    number = job["inside"]
    inside = None if number is None else conversation.questions[number]
    return replace(conversation, inside=inside)


def _warm_up(engine: Engine, ids: list[int]) -> None:
    """Compile or load kernels before anything is timed."""
    cache = SequenceCache(engine.loaded.decoder.spec, "dense")
    limits = StoppingCriteria(2, frozenset())
    generate(engine.loaded.decoder, [cache], [tuple(ids[:WARM_TOKENS])], SamplingParams(), limits)


def _answer(
    engine: Engine, memory: ConversationMemory, question: list[int], job: dict[str, Any]
) -> tuple[list[int], list[float], int]:
    """Greedy tokens up to the end of turn, their times, and the bytes held meanwhile."""
    cache = memory.caches.activate(0)
    planner = decode_planner(engine.runtime, memory.policy, [cache])
    if planner is not None:
        cache = cache.fork()  # as `Engine.ask` does
    mark, limits = (
        cache.next_position,
        StoppingCriteria(job["max_new_tokens"], frozenset(job["stops"])),
    )
    cache.reserve(len(question) + (limits.max_new_tokens if planner is None else 1))
    stamps = [time.perf_counter()]

    def record_time(row: int, token: int) -> bool:
        del row, token
        stamps.append(time.perf_counter())
        return True

    observe = no_observer if planner is None else planner.observer
    decoder = engine.loaded.decoder
    [ids] = generate(
        decoder, [cache], [tuple(question)], SamplingParams(), limits, record_time, observe
    )
    held = held_bytes(cache)
    if planner is None:
        cache.truncate(mark)
        cache.compact()
    return ids, stamps, held


if __name__ == "__main__":
    json.dump([run(job) for job in json.load(sys.stdin)], sys.stdout)
