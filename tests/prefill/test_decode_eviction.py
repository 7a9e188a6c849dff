"""Entries go while text is generated, and the model sees no more and no less than what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import one_in
from larder import Policy
from larder.cache import SequenceCache
from larder.core import Mode, Observation
from larder.engine import SamplingParams, StoppingCriteria, no_observer
from larder.engine.generate import generate
from larder.models import Decoder, LayerActivations, wrap_model
from larder.policy import Split
from larder.prefill import DecodeEviction, PeakMemoryMeter
from larder.session import ModelRuntime, build_caches, decode_planner
from model_runs import id_runtime, some_ids
from references import mass
from references.tally_loop import AttentionHistory
from tiny_models import tiny

LAYERS, HEADS, M = 3, 2, 24
CONTEXT, QUESTION, STEPS = 40, 5, 60
TOLERANCE = 1e-4  # float32, on logits whose spread is about 1 to 3

BLOCKS = "blockwise(tokens=8)"
POLICIES = {
    "h2o": f"{BLOCKS} > protect(sinks=0, recent=0.5) > column_mass() > uniform() > every_step()",
    "mass": f"{BLOCKS} > protect(sinks=1, recent=2) > column_mass() > pooled() > every_step()",
    "tova": "whole() > protect(sinks=0, recent=0) > last_query() > uniform() > every_step()",
    "roco": f"{BLOCKS} > protect(sinks=0, recent=3) > roco() > uniform() > every_step()",
    "morph": f"{BLOCKS} > protect(sinks=2, recent=0) > morph(window=3) > lagged(tokens=4)",
    "lazy": f"{BLOCKS} > protect(sinks=0, recent=6) > recurrence() > uniform() > lagged(tokens=6)",
    "novelty": f"{BLOCKS} > protect(sinks=1, recent=3) > novelty() > uniform() > every_step()",
    "lagkv": f"{BLOCKS} > protect(sinks=2, recent=2) > lagkv(sinks=2, lag=4) > uniform() > "
    "lagged(tokens=4)",
    "slide": "whole() > protect(sinks=0, recent=4) > last_query() > sum() > group_mean() > "
    "pooled() > split(reading=0.5)",
    "discontinuous": "whole() > protect(sinks=0, recent=3) > column_mass() > uniform() > "
    'split(reading=0.5, strategy="discontinuous", recent=4, every=5)',
}
PYRAMID = f"{BLOCKS} > protect(sinks=0, recent=2) > column_mass() > pyramid() > every_step()"
LONG = ("h2o", "mass")  # the others answer in fewer tokens


class RecordingDecoder(Decoder):
    """A decoder of one sequence that remembers what every query could see, and every logit."""

    def reset(self) -> None:
        self.visible: dict[tuple[int, int, int], set[int]] = {}  # layer, kv head, position
        self.logits: list[Tensor] = []
        self.history = AttentionHistory()  # of the first layer

    def forward_logits(self, *args: Any) -> Tensor:
        logits = super().forward_logits(*args)
        self.logits += list(logits)
        return logits

    def _run(self, module: Any, rows: Any, mode: Mode, observer: Any, **options: Any) -> Any:
        [row] = rows
        start, end = row.cache.next_position, row.cache.next_position + len(row.ids)
        for layer in range(LAYERS):
            entries = row.cache.entries(layer)
            for head in range(HEADS):
                held = set(entries.head_positions(head).tolist())
                for at in range(start, end):
                    self.visible[layer, head, at] = held | {*range(start, at + 1)}

        def watch(number: int, layer: int, recorded: LayerActivations) -> None:
            if layer == 0:
                observation = Observation(
                    self.spec.layers[0],
                    row.cache.entries(0),
                    queries=recorded.queries,
                    query_positions=recorded.positions,
                    length=end,
                    span=(0, end),
                )
                self.history.observe(observation)
            if observer is not None:
                observer(number, layer, recorded)

        return super()._run(module, rows, mode, watch, **options)


@dataclass
class BoundChecker:
    """Hands a policy's observers on, and counts entries before each layer's turn and afterwards.

    Afterwards is at once where texts are read, and when the pass is over where single tokens are.
    """

    tending: DecodeEviction
    quotas: Mapping[int, int]
    wrong: list[str] = field(default_factory=list)
    storages: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(LAYERS)])

    def __call__(self, numbers: Any, rows: Any, steps: Any) -> Any:
        inner = self.tending.observer(numbers, rows, steps)
        waiting = self.tending.planner.timing.excess() or 0

        def watch(row: int, layer: int, recorded: LayerActivations) -> None:
            cache = rows[row].cache
            self._count(cache, layer, steps[row], waiting + len(rows[row].ids))
            inner(row, layer, recorded)
            if any(len(other.ids) > 1 for other in rows):
                self._count(cache, layer, steps[row], waiting)
            elif (row, layer) == (len(rows) - 1, LAYERS - 1):
                for other, step in zip(rows, steps, strict=True):
                    for each in range(LAYERS):
                        self._count(other.cache, each, step, waiting)
            storage = cache.entries(layer).keys
            if not any(storage is known for known in self.storages[layer][-1:]):
                self.storages[layer].append(storage)

        return watch

    def _count(self, cache: SequenceCache, layer: int, step: int, beyond: int) -> None:
        held = sum(cache.lengths()[layer])
        quota = self.tending.planner.timing.quota(self.quotas[layer], M, step)
        if held > (quota + beyond) * HEADS:
            self.wrong.append(f"layer {layer}: {held} of {quota} + {beyond}")


def a_desk(decoder: Decoder) -> ModelRuntime:
    """Reads token ids alone: there is no text to write, and nothing to measure."""

    return id_runtime(decoder)


def a_policy(sentence: str) -> Policy:
    return Policy.parse(sentence).with_sizes(M, None)


def after_reading(decoder: Decoder, policy: Policy, context: int) -> SequenceCache:
    runtime = a_desk(decoder)
    return build_caches(runtime, policy, some_ids(context), [{}], PeakMemoryMeter()).activate(0)


def answer(decoder: Decoder, caches: Any, tended: Any, steps: int = STEPS) -> list[list[int]]:
    """Answers to questions of different lengths, token by token."""
    questions = [some_ids(QUESTION + n, seed=n + 1) for n in range(len(caches))]
    return generate(
        decoder, caches, questions, SamplingParams(), StoppingCriteria(steps), make_observer=tended
    )


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return wrap_model(tiny("qwen3", layers=LAYERS))


@pytest.fixture(scope="module")
def recording_decoder() -> RecordingDecoder:
    made = wrap_model(tiny("qwen3", layers=LAYERS))
    made.__class__ = RecordingDecoder
    return made


def masked(ids: tuple[int, ...], visible: dict[tuple[int, int, int], set[int]]) -> Tensor:
    """Logits [T, V] of one full pass of the plain model, where a query sees what it saw."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(module, query, key, value, mask, scaling, **rest):
        count, group = query.shape[2], query.shape[1] // HEADS
        shown = torch.zeros(HEADS, count, count, dtype=torch.bool)
        for head in range(HEADS):
            for at in range(count):
                shown[head, at, sorted(visible[module.layer_idx, head, at])] = True
        keys, values = (states.repeat_interleave(group, 1) for states in (key, value))
        logits = query @ keys.transpose(2, 3) * scaling
        logits = logits.masked_fill(~shown.repeat_interleave(group, 0), -torch.inf)
        return (logits.softmax(-1) @ values).transpose(1, 2), None

    module = tiny("qwen3", layers=LAYERS)
    AttentionInterface.register("masked", attend)
    AttentionMaskInterface.register("masked", lambda *a, **k: None)
    try:
        module.set_attn_implementation("masked")
        with torch.no_grad():
            return module(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        del AttentionInterface._global_mapping["masked"]
        del AttentionMaskInterface._global_mapping["masked"]


@pytest.mark.extended
@pytest.mark.parametrize("name", POLICIES)
def test_generated_logits_equal_a_masked_model(recording_decoder, name) -> None:
    policy = a_policy(POLICIES[name])
    recording_decoder.reset()
    cache = after_reading(recording_decoder, policy, CONTEXT)
    tending = decode_planner(a_desk(recording_decoder), policy, [cache])
    bounded = BoundChecker(tending, tending.quotas[0])
    steps = STEPS if name in LONG else STEPS // 3
    [answer_ids] = answer(recording_decoder, [cache], bounded, steps)
    assert len(answer_ids) == steps and len(set(answer_ids)) > 5
    ids = some_ids(CONTEXT) + some_ids(QUESTION, seed=1) + tuple(answer_ids[:-1])
    expected = masked(ids, recording_decoder.visible)[CONTEXT + QUESTION - 1 :]
    assert expected.std() > 0.5
    assert (torch.stack(recording_decoder.logits) - expected).abs().max() < TOLERANCE
    assert bounded.wrong == [] and cache.next_position == len(ids)
    seen = [len(recording_decoder.visible[0, head, len(ids) - 1]) for head in range(HEADS)]
    assert sum(seen) <= HEADS * (M + 1 + (policy.timing.excess() or 0))
    if isinstance(policy.timing, Split):
        kept = recording_decoder.visible[2, 1, CONTEXT]
        assert {at for at in kept if at < CONTEXT} <= recording_decoder.visible[2, 1, len(ids) - 1]


@pytest.mark.parametrize("name", ["h2o", "mass"])
def test_column_mass_sums_all_queries(recording_decoder, name) -> None:
    policy = a_policy(POLICIES[name])
    recording_decoder.reset()
    cache = after_reading(recording_decoder, policy, CONTEXT)
    answer(
        recording_decoder,
        [cache],
        decode_planner(a_desk(recording_decoder), policy, [cache]).observer,
        20,
    )
    entries = cache.entries(0)
    for head in range(HEADS):
        rows = entries.rows(head)
        held = zip(entries.positions[rows].tolist(), entries.columns["mass"][rows], strict=True)
        for position, column in held:
            result = mass.remembered(recording_decoder.history.records[head, position])
            assert float(column) == pytest.approx(result["mass"], rel=1e-4)


def test_all_heads_keep_entries_of_the_newest_query(decoder) -> None:
    policy = a_policy(POLICIES["tova"])
    cache = after_reading(decoder, policy, CONTEXT)
    answer(decoder, [cache], decode_planner(a_desk(decoder), policy, [cache]).observer, 20)
    for layer in range(LAYERS):
        entries = cache.entries(layer)
        one, other = (entries.head_positions(head).tolist() for head in range(HEADS))
        assert one == other and len(one) == M
        assert one != list(range(cache.next_position - M, cache.next_position))


ROUNDS = 'context_refresh(tokens=16, recent=3, reading=0.5, scorer="last_query()")'
READ = "whole() > protect(sinks=0, recent=0) > column_mass() >"
SHARES = {
    "split": f"{READ} uniform() > split(reading=0.5, recent=3)",
    "refresh": f"{READ} uniform() > {ROUNDS}",
    "refresh of all layers": f"{READ} global() > {ROUNDS}",
}


@pytest.mark.parametrize("name", one_in(3, SHARES))
def test_decode_policies_keep_prefill_entries_for_a_turn_and_latest_tokens(decoder, name) -> None:
    policy = a_policy(SHARES[name])
    cache = after_reading(decoder, policy, CONTEXT)
    read = [cache.entries(layer).packed_positions() for layer in range(LAYERS)]
    for turn in range(3):
        answer(decoder, [cache], decode_planner(a_desk(decoder), policy, [cache]).observer, 12)
        held = [cache.entries(layer) for layer in range(LAYERS)]
        assert sum(map(sum, cache.lengths())) == LAYERS * HEADS * M
        newest = list(range(cache.next_position - 3, cache.next_position))
        for own in held:
            assert all(own.head_positions(head).tolist()[-3:] == newest for head in range(HEADS))
        if turn == 0:
            positions = [own.packed_positions() for own in held]
            assert all(
                torch.equal(now[now < CONTEXT], before)
                for now, before in zip(positions, read, strict=True)
            )


@pytest.mark.parametrize("name", LONG)
def test_evictions_reallocate_storage_only_for_shared_budgets(decoder, name) -> None:
    policy = a_policy(POLICIES[name])
    cache = after_reading(decoder, policy, CONTEXT)
    cache.reserve(QUESTION + 1)
    tending = decode_planner(a_desk(decoder), policy, [cache])
    bounded = BoundChecker(tending, tending.quotas[0])
    held = cache.nbytes
    answer(decoder, [cache], bounded, STEPS // 2)
    fresh = [len(storages) for storages in bounded.storages]
    # Heads that share a budget outgrow their regions now and then; heads of their own never do.
    assert fresh == [1] * LAYERS if name != "mass" else max(fresh) <= 3
    assert cache.nbytes == held if name != "mass" else cache.nbytes < 4 * held


@pytest.mark.extended
@pytest.mark.parametrize("sentence", [POLICIES["mass"], POLICIES["discontinuous"], PYRAMID])
def test_batch_of_uneven_lengths_equals_single_sequences(decoder, sentence) -> None:
    policy, contexts = a_policy(sentence), (CONTEXT, 9)
    together = [after_reading(decoder, policy, context) for context in contexts]
    tending = decode_planner(a_desk(decoder), policy, together)
    assert tending.starts == contexts
    answer_ids = answer(decoder, together, tending.observer, 15)
    for n, context in enumerate(contexts):
        alone = after_reading(decoder, policy, context)
        single = decode_planner(a_desk(decoder), policy, [alone])
        question = some_ids(QUESTION + n, seed=n + 1)
        got = generate(
            decoder,
            [alone],
            [question],
            SamplingParams(),
            StoppingCriteria(15),
            make_observer=single.observer,
        )
        assert got == [answer_ids[n]]
        assert_same(alone, together[n], 1e-4)


def assert_same(one: SequenceCache, other: SequenceCache, within: float) -> None:
    mine, its = one.state(), other.state()
    assert set(mine) == set(its)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, its[name], rtol=within, atol=within)


def test_prefill_policy_does_not_evict_during_decoding(decoder) -> None:
    policy = a_policy(f"{BLOCKS} > protect(sinks=1, recent=2) > column_mass() > pooled()")
    watched, plain = (after_reading(decoder, policy, CONTEXT) for _ in range(2))
    assert decode_planner(a_desk(decoder), policy, [plain]) is None
    quotas = dict.fromkeys(range(LAYERS), M)
    tending = DecodeEviction(policy.planner, M, (quotas,), (CONTEXT,))
    answer_ids = answer(decoder, [plain], no_observer, 20)
    assert answer(decoder, [watched], tending.observer, 20) == answer_ids
    mine, its = watched.state(), plain.state()
    kept = [name for name in its if "column." not in name]
    assert all(torch.equal(mine[name], its[name]) for name in kept)
    assert sum(map(sum, plain.lengths())) == LAYERS * HEADS * (M + QUESTION + 20 - 1)


def test_bound_check_detects_an_excess(decoder) -> None:
    policy = a_policy(POLICIES["h2o"])
    cache = after_reading(decoder, policy, CONTEXT)
    tending = decode_planner(a_desk(decoder), policy, [cache])
    [quotas] = tending.quotas
    larger = replace(tending, quotas=({layer: quota + 1 for layer, quota in quotas.items()},))
    lax = BoundChecker(larger, quotas)
    answer(decoder, [cache], lax, 10)
    assert lax.wrong
