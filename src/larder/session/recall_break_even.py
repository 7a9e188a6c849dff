"""Break-even of recall: offloaded entries up to which attention to all is faster than a search.

Where the slow tier is the memory that attention reads anyway, a search pays only from some length
on. The length depends on processor, kernels, model and index; it is measured once per machine and
library of kernels, on random entries, and saved under `$LARDER_HOME/break_even`.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from larder.cache.offload.page_fetch import PageFetcher
from larder.core.errors import UsageError
from larder.core.home import home, measured_count
from larder.core.observation import Entries
from larder.core.recall import RecallPart
from larder.core.spec import LayerSpec, ModelSpec
from larder.core.spelling import spell
from larder.ops.attention import ragged_attention
from larder.ops.cpu.kernel_choice import machine
from larder.session.policy import Policy

VARIABLE = "LARDER_RECALL_BREAK_EVEN"
LENGTHS = (1 << 10, 1 << 12, 1 << 14)  # entries per kv head that are timed
MAX_ENTRIES = 1 << 20
FETCHED_SHARE = 5  # for a budget that is still open: so many entries of which a step fetches one
REPETITIONS = 5
DRIFT = 0.3  # of the query between two steps, relative
EVICTED_FLOATS = 1 << 26  # read before each step: a model's other layers leave nothing in caches


def with_break_even(policy: Policy, spec: ModelSpec) -> Policy:
    """Policy whose recall reads all entries up to the break-even of this machine.

    Unchanged if it names a length, if its recall cannot read all entries, or if the model runs on
    an accelerator.
    """
    recall = policy.recall
    if recall is None or recall.exact is not None or not recall.can_read_all:
        return policy
    if spec.device.type != "cpu":
        return policy
    entries = break_even(recall, spec)
    return replace(policy, recall=replace(recall, exact=entries)) if entries else policy


def break_even(recall: RecallPart, spec: ModelSpec) -> int:
    """Break-even of a recall part over the layers of a model, in entries per kv head.

    Raises:
        UsageError: the environment variable is not a count of entries.
    """
    if given := os.environ.get(VARIABLE, ""):
        if not given.isdecimal():
            raise UsageError(
                f"{VARIABLE} is {given!r}: give a count of entries, 0 to search always."
            )
        return int(given)
    layer = next((layer for layer in spec.layers if layer.is_managed), None)
    if layer is None:
        return 0
    path = home() / "break_even" / f"{platform.node()}.json"
    sizes = layer.query_heads, layer.kv_heads, layer.head_dim, spec.dtype, torch.get_num_threads()
    key = f"{spell(recall)} {sizes}, {machine()}"
    return measured_count(
        path, key, lambda: measure_break_even(recall, layer, spec.dtype), MAX_ENTRIES
    )


def measure_break_even(recall: RecallPart, layer: LayerSpec, dtype: torch.dtype) -> int:
    """Break-even of one layer from the times of both ways at a few lengths."""
    times = list[tuple[int, float, float]]()
    for length in LENGTHS:
        times.append((length, *_step_seconds(recall, layer, dtype, length)))
        if times[-1][1] >= times[-1][2]:
            break
    return crossing(times)


def crossing(times: list[tuple[int, float, float]]) -> int:
    """Length at which attention to all takes as long as recall.

    Between two lengths, and behind the last, times grow as powers of the length.

    Args:
        times: lengths, in ascending order, with the seconds of attention to all and of recall.
    """
    length, whole, found = times[0]
    if whole >= found:
        return int(length * found / whole)
    slopes = (0.0, 0.0)
    for (before, *earlier), (length, *later) in pairwise(times):
        log = math.log(length / before)
        slopes = tuple(
            math.log(b / a) / log for a, b in zip(earlier, later, strict=True)
        )  # [all, recall]
        if later[0] >= later[1]:
            break
    length, whole, found = times[-1]
    most, gain = math.log(MAX_ENTRIES / length), slopes[0] - slopes[1]
    lead = math.log(found / whole)
    if gain <= 0 or lead >= gain * most:
        return MAX_ENTRIES
    return int(length * math.exp(lead / gain))


def _step_seconds(
    recall: RecallPart, layer: LayerSpec, dtype: torch.dtype, length: int
) -> tuple[float, float]:
    """Least seconds of a step over `length` entries: attending to all, and to those recalled."""
    source, heads = torch.Generator().manual_seed(0), layer.kv_heads
    keys, values = (
        torch.randn(heads * length, layer.head_dim, generator=source).to(dtype) for _ in range(2)
    )
    starts = tuple(head * length for head in range(heads))
    positions = torch.arange(length, dtype=torch.int32).repeat(heads)
    entries = Entries(keys, values, positions, starts, (length,) * heads)
    pages = max(1, length // FETCHED_SHARE // recall.page)
    sized = recall if recall.tokens else replace(recall, tokens=pages * recall.page)
    fetcher = PageFetcher(layer, sized, dtype, keys.device)
    base = torch.randn(layer.query_heads, 1, layer.head_dim, generator=source)
    observed = base[:, :0]

    def attend_all(queries: Float[Tensor, "H 1 D"]) -> None:
        ragged_attention(queries, keys, values, *entries.layout, layer.scaling)

    def attend_found(queries: Float[Tensor, "H 1 D"]) -> None:
        if fetcher.takes_one_call(queries, entries):
            fetcher.step_states(queries, entries, observed, [])
            return
        for call in fetcher.step_calls(queries, entries, observed) or ():
            call()

    steps = [
        (base + DRIFT * torch.randn(base.shape, generator=source)).to(dtype)
        for _ in range(REPETITIONS + 1)
    ]
    return _least_seconds(attend_all, steps), _least_seconds(attend_found, steps)


def _least_seconds(attend: Callable[[Tensor], None], steps: list[Tensor]) -> float:
    """Least seconds of a step behind the first, which builds and compiles."""
    times, others = list[float](), torch.ones(EVICTED_FLOATS)
    for queries in steps:
        others.sum()
        started = time.perf_counter()
        attend(queries)
        times.append(time.perf_counter() - started)
    return max(min(times[1:]), 1e-9)
