"""Decoder stack: decode steps equal the model's own layers, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from covering import covering
from larder.cache import SequenceCache
from larder.core import Ledger, Mode
from larder.models import (
    BatchSegment,
    Decoder,
    DecoderStack,
    SmallBatchHead,
    SmallBatchRunner,
    decoder_stack,
)
from larder.ops import c_library
from larder.ops.cpu import decoder_layer
from learned_gates import give_gates
from model_runs import some_ids
from tiny_models import tiny

pytestmark = pytest.mark.skipif(c_library() is None, reason="no C compiler at installation")
SERVED = ("llama", "mistral", "qwen2", "qwen3")
FEW = 16  # rows that the kernel takes in these tests
ROUNDING = 0.05  # of logits with a spread of about 3, in bfloat16
MOST_DIFFERENCE = {torch.bfloat16: ROUNDING, torch.float32: 1e-5}  # of the spread
by_dtype = pytest.mark.parametrize("dtype", list(MOST_DIFFERENCE))


def take_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Let the kernel take up to so many rows."""
    monkeypatch.setattr(decoder_layer, "max_rows", lambda dtype: most)
    monkeypatch.setattr(decoder_stack, "max_rows", lambda dtype: most)


@pytest.fixture(autouse=True)
def kernel_is_taken(monkeypatch):
    take_rows(monkeypatch, FEW)


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """Rows of every run of a stack."""
    seen, run = list[int](), DecoderStack.forward

    def noted(self, hidden_states, **named):
        seen.append(hidden_states.shape[1])
        return run(self, hidden_states, **named)

    monkeypatch.setattr(DecoderStack, "forward", noted)
    return seen


def a_decoder(name: str = "llama", dtype: torch.dtype = torch.bfloat16, **options) -> Decoder:
    return Decoder(tiny(name, dtype=dtype, **options))


def filled_caches(decoder: Decoder, lengths: list[int], form: str = "dense") -> list[SequenceCache]:
    caches = [SequenceCache(decoder.spec, form) for _ in lengths]
    for seed, (cache, length) in enumerate(zip(caches, lengths, strict=True)):
        decoder.read([BatchSegment(cache, some_ids(length, seed=seed))], Mode.APPEND)
    return caches


def step_logits(decoder: Decoder, caches: list[SequenceCache], token: int = 5) -> torch.Tensor:
    segments = [BatchSegment(cache, (token + n,)) for n, cache in enumerate(caches)]
    return decoder.forward_logits(segments, Mode.APPEND, list(range(len(caches))))


def without_stack(monkeypatch) -> None:
    monkeypatch.setattr(SmallBatchRunner, "_are_few", lambda *_: False)


@pytest.mark.parametrize("name, kv_heads, dtype", covering(SERVED, [1, 2, 4], MOST_DIFFERENCE))
def test_steps_equal_the_models_layers(monkeypatch, runs, name, kv_heads, dtype):
    decoder = a_decoder(name, dtype, kv_heads=kv_heads, layers=3)
    got = [step_logits(decoder, filled_caches(decoder, [20, 31]))]
    assert runs == [2]
    without_stack(monkeypatch)
    expected = [step_logits(decoder, filled_caches(decoder, [20, 31]))]
    assert runs == [2]
    difference = (got[0] - expected[0]).square().mean().sqrt()
    assert difference < MOST_DIFFERENCE[dtype] * expected[0].std()


@pytest.mark.parametrize("name", SERVED)
@by_dtype
def test_step_is_bitwise_independent_of_the_batch(runs, name, dtype):
    decoder, lengths = a_decoder(name, dtype), [20, 31, 17, 40, 23]
    together = step_logits(decoder, filled_caches(decoder, lengths))
    for number, cache in enumerate(filled_caches(decoder, lengths)):
        alone = step_logits(decoder, [cache], 5 + number)
        assert torch.equal(alone[0], together[number])
    assert runs == [5, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("rows", [17, 33, 64])
@by_dtype
def test_many_rows_are_bitwise_independent_of_each_other(monkeypatch, runs, rows, dtype):
    take_rows(monkeypatch, 64)
    decoder, lengths = a_decoder("llama", dtype), [3 + n % 7 for n in range(rows)]
    together = step_logits(decoder, filled_caches(decoder, lengths))
    assert runs[-1] == rows
    for number, cache in enumerate(filled_caches(decoder, lengths)):
        alone = step_logits(decoder, [cache], 5 + number)
        assert torch.equal(alone[0], together[number])


@by_dtype
def test_prompts_read_together_are_bitwise_those_read_alone(monkeypatch, runs, dtype):
    take_rows(monkeypatch, 64)
    decoder, lengths = a_decoder("qwen3", dtype), [9, 1, 20, 34]
    texts = [some_ids(length, seed=length) for length in lengths]

    def logits(texts: list[tuple[int, ...]]) -> torch.Tensor:
        segments = [BatchSegment(SequenceCache(decoder.spec, "dense"), text) for text in texts]
        return decoder.forward_logits(segments, Mode.APPEND, range(sum(map(len, texts))))

    together = logits(texts)
    assert runs == [64]
    assert torch.equal(together, torch.cat([logits([text]) for text in texts]))


@by_dtype
def test_rows_that_are_asked_for_alone_pass_the_last_layer(monkeypatch, dtype):
    take_rows(monkeypatch, 64)
    decoder, texts = a_decoder("qwen3", dtype, layers=3), [some_ids(20), some_ids(31, seed=2)]
    finish, seen = decoder_layer.LayerRows.finish_layer, list[int]()

    def noted(self, layer, attended):
        seen.append(attended.shape[1])
        finish(self, layer, attended)

    monkeypatch.setattr(decoder_layer.LayerRows, "finish_layer", noted)

    def logits(indices: list[int]) -> torch.Tensor:
        segments = [BatchSegment(SequenceCache(decoder.spec, "dense"), text) for text in texts]
        return decoder.forward_logits(segments, Mode.APPEND, indices)

    whole = logits(list(range(51)))
    assert seen[-3:] == [51, 51, 51]
    assert torch.equal(logits([19, 50, 3]), whole[[19, 50, 3]])
    assert seen[-3:] == [51, 51, 3]


@pytest.mark.parametrize("part", ["body", "norm"])
def test_hooks_behind_the_layers_read_the_states_of_all_rows(monkeypatch, part):
    take_rows(monkeypatch, 64)
    decoder, seen = a_decoder("qwen3", torch.float32, layers=2), list[torch.Tensor]()
    module = {"body": decoder.body, "norm": decoder.body.norm}[part]

    def read(module, args, out) -> None:
        seen.append(out if part == "norm" else out.last_hidden_state)

    def logits(indices: list[int]) -> None:
        segments = [BatchSegment(SequenceCache(decoder.spec, "dense"), some_ids(20))]
        decoder.forward_logits(segments, Mode.APPEND, indices)

    module.register_forward_hook(read)
    logits(list(range(20)))
    logits([19])
    assert torch.equal(*seen)


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
def test_other_architectures_use_the_models_layers(runs, name):
    decoder = a_decoder(name)
    step_logits(decoder, filled_caches(decoder, [20]))
    assert runs == []


def test_many_tokens_and_other_dtypes_use_the_models_layers(runs):
    decoder = a_decoder()
    filled_caches(decoder, [FEW + 1])
    half = a_decoder(dtype=torch.float16)
    step_logits(half, filled_caches(half, [20]))
    assert runs == []


def test_model_keeps_its_weights_and_its_modules(runs):
    decoder = a_decoder()
    module = decoder.module
    before = {name: (each, each.data_ptr()) for name, each in module.state_dict().items()}
    parts = list(module.modules())
    step_logits(decoder, filled_caches(decoder, [20]))
    assert runs == [1]
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == address for name, (_, address) in before.items())
    assert all(a is b for a, b in zip(module.modules(), parts, strict=True))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in parts)


def test_failing_step_restores_the_layers(monkeypatch):
    decoder = a_decoder()
    caches, layers = filled_caches(decoder, [20]), decoder.body.layers

    def fail(*_, **__):
        raise MemoryError("of the test")

    monkeypatch.setattr(DecoderStack, "forward", fail)
    with pytest.raises(MemoryError):
        step_logits(decoder, caches)
    assert decoder.body.layers is layers
    assert not decoder.module.lm_head._forward_pre_hooks
    assert caches[0].next_position == 20


def replaced_projection(module) -> None:
    class Adapted(nn.Linear):
        pass

    module.model.layers[1].self_attn.q_proj = Adapted(64, 64, bias=False).bfloat16()


def hooked_layer(module) -> None:
    module.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def patched_forward(module) -> None:
    part = module.model.layers[0].mlp.down_proj
    part.forward = part.forward


def transposed_weight(module) -> None:
    weight = module.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.T


@pytest.mark.parametrize(
    "change", [replaced_projection, hooked_layer, patched_forward, transposed_weight]
)
def test_modified_model_uses_its_own_layers(runs, change):
    decoder = a_decoder()
    caches = filled_caches(decoder, [20])
    step_logits(decoder, caches)
    change(decoder.module)
    step_logits(decoder, caches)
    assert runs == [1]


def test_replaced_layer_is_used(monkeypatch, runs):
    decoder, other = a_decoder(), a_decoder(seed=1)
    step_logits(decoder, filled_caches(decoder, [20]))
    decoder.body.layers[1] = other.body.layers[1]
    got = step_logits(decoder, filled_caches(decoder, [20]))
    without_stack(monkeypatch)
    expected = step_logits(decoder, filled_caches(decoder, [20]))
    assert runs == [1, 1]
    assert (got - expected).square().mean().sqrt() < ROUNDING * expected.std()


def test_hooks_on_all_modules_see_what_the_model_computes(runs):
    decoder, seen = a_decoder(), list[tuple[int, ...]]()
    caches = filled_caches(decoder, [20])
    step_logits(decoder, caches)
    linear = [part for part in decoder.module.modules() if type(part) is nn.Linear]

    def see(part, args, out) -> None:
        if type(part) is nn.Linear:
            seen.append(tuple(out.shape[:-1]))

    with nn.modules.module.register_module_forward_hook(see):
        step_logits(decoder, caches)
    assert runs == [1]
    assert seen == [(1, 1)] * len(linear)


@by_dtype
def test_gates_are_recorded_in_the_stack(monkeypatch, runs, dtype):
    """Gates of each sequence equal those of the model's own layers, beside one without a column."""
    decoder = a_decoder("qwen3", dtype)
    give_gates(decoder)
    ledger = Ledger(columns=("kvzap",))

    def recorded() -> list[torch.Tensor]:
        caches = [SequenceCache(decoder.spec, "ragged", own) for own in (ledger, Ledger())]
        for seed, cache in enumerate(caches):
            decoder.read([BatchSegment(cache, some_ids(40, seed=seed))], Mode.APPEND)
        for token in range(3):
            step_logits(decoder, caches, token)
        layers = [layer.index for layer in decoder.spec.layers]
        return [caches[0].entries(layer).column("kvzap") for layer in layers]

    got = recorded()
    assert runs == [2, 2, 2]
    without_stack(monkeypatch)
    expected = recorded()
    assert runs == [2, 2, 2] and len(got[0]) == 43 * decoder.spec.layers[0].kv_heads
    for own, other in zip(got, expected, strict=True):
        difference = (own - other).square().mean().sqrt()
        assert difference < MOST_DIFFERENCE[dtype] * other.std()


def test_new_weights_are_read_at_the_next_step(monkeypatch, runs):
    decoder, other = a_decoder(), a_decoder(seed=1)
    caches = filled_caches(decoder, [20])
    step_logits(decoder, caches)
    for own, new in zip(
        decoder.body.layers.parameters(), other.body.layers.parameters(), strict=True
    ):
        own.data = new.data.clone()
    got = step_logits(decoder, filled_caches(decoder, [20]))
    without_stack(monkeypatch)
    expected = step_logits(decoder, filled_caches(decoder, [20]))
    assert runs == [1, 1]
    assert (got - expected).square().mean().sqrt() < ROUNDING * expected.std()


def test_layer_with_another_computation_does_not_run_in_the_stack(monkeypatch, runs):
    decoder = a_decoder()
    attention = type(decoder.body.layers[0].self_attn)
    own = attention.forward

    def scaled(self, hidden_states, **named):
        return own(self, hidden_states * 1.5, **named)

    monkeypatch.setattr(attention, "forward", scaled)
    step_logits(decoder, filled_caches(decoder, [20]))
    assert runs == []


@by_dtype
def test_head_hook_runs_once_and_is_removed(dtype):
    module = tiny("llama", dtype=dtype)
    states = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = module.lm_head(states)
    with SmallBatchHead(module):
        assert module.lm_head._forward_pre_hooks
        got = module.lm_head(states)
        assert not module.lm_head._forward_pre_hooks and not module.lm_head._forward_hooks
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-2)
    with SmallBatchHead(module):
        wide = module.lm_head(states.repeat(1, 6, 1))
    assert torch.equal(wide, module.lm_head(states.repeat(1, 6, 1)))


def test_head_on_states_of_another_dtype_uses_torch():
    module = tiny("llama", dtype=torch.bfloat16)
    states = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = module.lm_head(states)
        with SmallBatchHead(module):
            assert torch.equal(module.lm_head(states), expected)


@pytest.mark.skipif(
    not hasattr(c_library(), "larder_decoder_step"), reason="the library is of an older version"
)
@pytest.mark.parametrize(
    "name, form, rows, dtype", covering(SERVED, ["dense", "ragged"], [1, 3], MOST_DIFFERENCE)
)
def test_fused_step_equals_layer_calls_bitwise(monkeypatch, name, form, rows, dtype):
    decoder = a_decoder(name, dtype, layers=3)

    def steps() -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[str]]:
        caches = filled_caches(decoder, [20, 31, 7][:rows], form)
        result = list[str]()

        def observer(row, layer, recorded):
            result.append(f"{row} {layer} {recorded.queries.sum()} {recorded.values.sum()}")

        segments = [BatchSegment(cache, (5,)) for cache in caches]
        decoder.read(segments, Mode.APPEND, observer)
        logits = [step_logits(decoder, caches), step_logits(decoder, caches, 8)]
        states = [list(store.state().values()) for own in caches for store in own.layers]
        return logits, states, result

    calls = list[int]()
    take_step = decoder_layer.LayerRows.take_step
    monkeypatch.setattr(
        decoder_layer.LayerRows,
        "take_step",
        lambda self, layers, *rest: (calls.append(len(layers)), take_step(self, layers, *rest))[1],
    )
    whole = steps()
    assert calls == [3, 3, 3]
    monkeypatch.setattr(decoder_layer, "can_step", lambda *_: False)
    by_layer = steps()
    assert calls == [3, 3, 3]
    assert whole[2] == by_layer[2] and len(whole[2]) == 3 * rows
    for ours, theirs in zip([whole[0], *whole[1]], [by_layer[0], *by_layer[1]], strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert len(whole[1]) == 3 * rows


def test_layer_attending_separately_keeps_recorded_logits_of_the_others(monkeypatch):
    decoder = a_decoder(layers=2)
    [cache] = filled_caches(decoder, [20], "ragged")
    first, last = cache.layers
    monkeypatch.setattr(last, "step_storage", lambda: None)
    cache.record_logits([0])
    step_logits(decoder, [cache])
    logits = first.take_logits()
    assert logits is not None and logits[:, :21].isfinite().all()
    assert first.lengths == last.lengths == (21,) * len(first.lengths)
