"""Other calls of a decoder between the layers of a long one change neither of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from architectures.families import families
from larder.cache import SequenceCache
from larder.core import Mode
from larder.models import (
    LONG_CALL_TOKENS,
    BatchSegment,
    Decoder,
    decoder_stack,
    no_calls,
    wrap_model,
)
from larder.ops import c_library
from larder.ops.cpu import decoder_layer
from model_runs import some_ids

LONG = LONG_CALL_TOKENS + 12
# Recurrent layers, latents and layers that share entries keep more than caches during a call.
FAMILIES = ["Bamba", "DeepSeek-V3", "Gemma 3n"]


def logits(decoder: Decoder, cache: SequenceCache, ids: tuple[int, ...]) -> Tensor:
    return decoder.forward_logits([BatchSegment(cache, ids)], Mode.APPEND, [len(ids) - 1])


class Steps:
    """Decode steps of another text, one before each layer of a long call."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.cache = decoder, SequenceCache(decoder.spec, "ragged")
        self.ids, self.seen = list(some_ids(40, seed=2)), list[Tensor]()
        logits(decoder, self.cache, tuple(self.ids[:9]))
        self.place = 9

    def step(self) -> None:
        self.seen.append(logits(self.decoder, self.cache, (self.ids[self.place],)))
        self.place += 1


def check_interrupted(decoder: Decoder, step_tolerance: float = 1e-5) -> None:
    """A long call and the steps between its layers give what each gives alone."""
    ids = some_ids(LONG, seed=1)
    alone = SequenceCache(decoder.spec, "ragged")
    expected = logits(decoder, alone, ids)
    between, apart = Steps(decoder), Steps(decoder)
    cache = SequenceCache(decoder.spec, "ragged")
    with decoder.interruptions.by(between.step):
        found = logits(decoder, cache, ids)
    assert len(between.seen) == len(decoder.spec.layers)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for name, tensor in alone.state().items():
        torch.testing.assert_close(cache.state()[name], tensor, rtol=0, atol=0)
    for _ in between.seen:
        apart.step()
    seen, expected = torch.cat(between.seen), torch.cat(apart.seen)
    torch.testing.assert_close(seen, expected, rtol=0, atol=step_tolerance)


def test_interrupted_call_and_its_steps_equal_separate_calls(architecture, adopted) -> None:
    check_interrupted(adopted(architecture))


@pytest.mark.skipif(c_library() is None, reason="no C compiler at installation")
def test_interrupted_call_of_the_kernel_and_its_steps_have_their_bits_alone(adopted, monkeypatch):
    for module in (decoder_layer, decoder_stack):
        monkeypatch.setattr(module, "max_rows", lambda dtype: 2 * LONG)
    rows, run = list[int](), decoder_stack.DecoderStack.forward

    def noted(self, hidden_states, **named):
        rows.append(hidden_states.shape[1])
        return run(self, hidden_states, **named)

    monkeypatch.setattr(decoder_stack.DecoderStack, "forward", noted)
    decoder = adopted("qwen3")
    rows.clear()
    check_interrupted(decoder, step_tolerance=0)
    assert rows.count(LONG) == 2 and rows.count(1) == 2 * len(decoder.spec.layers)


@pytest.mark.skipif(c_library() is None, reason="no C compiler at installation")
@pytest.mark.parametrize(("around", "between"), [(LONG, LONG + 8), (LONG + 8, LONG), (LONG, LONG)])
def test_long_call_between_layers_has_its_bits_alone(around, between, adopted, monkeypatch) -> None:
    """Of one call the kernel runs the layers, of a longer one torch does."""
    for module in (decoder_layer, decoder_stack):
        monkeypatch.setattr(module, "max_rows", lambda dtype: LONG)
    decoder, seen = adopted("qwen3"), list[Tensor]()
    ids = some_ids(around, seed=1), some_ids(between, seed=2)
    alone = [logits(decoder, SequenceCache(decoder.spec, "ragged"), each) for each in ids]

    def call() -> None:
        with decoder.interruptions.by(no_calls):
            seen.append(logits(decoder, SequenceCache(decoder.spec, "ragged"), ids[1]))

    with decoder.interruptions.by(call):
        found = logits(decoder, SequenceCache(decoder.spec, "ragged"), ids[0])
    assert len(seen) == len(decoder.spec.layers)
    assert torch.equal(found, alone[0]) and all(torch.equal(each, alone[1]) for each in seen)


@pytest.mark.extended
@pytest.mark.parametrize("name", FAMILIES)
def test_interrupted_calls_of_recurrent_and_latent_models_equal_separate_calls(name: str) -> None:
    [family] = [family for family in families() if family.name == name]
    check_interrupted(wrap_model(family.model()))


def test_short_calls_are_not_interrupted(adopted) -> None:
    decoder = adopted("qwen3")
    between, cache = Steps(decoder), SequenceCache(decoder.spec, "ragged")
    with decoder.interruptions.by(between.step):
        logits(decoder, cache, some_ids(LONG_CALL_TOKENS))
    logits(decoder, cache, some_ids(LONG))
    assert not between.seen


def test_calls_with_foreign_hooks_are_not_interrupted(adopted) -> None:
    decoder, calls = adopted("qwen3"), list[int]()

    def halved(module: nn.Module, args: object, out: Tensor) -> Tensor:
        calls.append(1)
        return out / 2

    between, cache = Steps(decoder), SequenceCache(decoder.spec, "ragged")
    hook = decoder.module.get_input_embeddings().register_forward_hook(halved)
    with hook, decoder.interruptions.by(between.step):
        logits(decoder, cache, some_ids(LONG))
    assert calls == [1] and not between.seen


def test_failing_interruption_rolls_the_call_back(adopted) -> None:
    decoder = adopted("qwen3")
    cache, read = SequenceCache(decoder.spec, "ragged"), list[int]()

    def fail() -> None:
        if read:
            raise RuntimeError("no step")
        read.append(1)

    with decoder.interruptions.by(fail), pytest.raises(RuntimeError, match="no step"):
        logits(decoder, cache, some_ids(LONG))
    assert cache.next_position == 0 and not any(map(max, cache.lengths()))
