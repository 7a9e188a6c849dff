"""With nothing rejected, Larder gives the model's own logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from builders import FORM_NAMES, tiers_of
from covering import covering
from larder.cache import SequenceCache
from larder.models import load, wrap_model
from model_runs import native_logits, read_on, some_ids
from tiny_models import ARCHITECTURES, tiny

TOLERANCE = 1e-4  # float32, on logits whose spread is about 1 to 3
LOW_TOLERANCE = 0.08  # bfloat16 has 8 bits; largest difference as a share of the spread
READ, DECODED = 45, 20
BLOCK_OF_FORM = {"dense": 16, "ragged": 7}
# Every form of storage reads blocks of 9 tokens, and of other sizes where windows slide or do not.
BLOCKS = [
    *((architecture, 9) for architecture in ARCHITECTURES),
    *((architecture, block) for architecture in ("llama", "gemma3") for block in (2, 64)),
]


def through_larder(decoder, form: str, ids, block: int) -> torch.Tensor:
    """Blocks of a context, then single tokens."""
    cache = SequenceCache(decoder.spec, form, **tiers_of(form))
    context = read_on(decoder, cache, ids[:READ], block)
    decoded = read_on(decoder, cache, ids[READ:], 1)
    assert cache.next_position == len(ids)
    return torch.cat([context, decoded])


@pytest.mark.parametrize(
    "architecture, kv_heads, form", covering(ARCHITECTURES, (1, 2, 4), BLOCK_OF_FORM)
)
def test_blocks_and_decoding_equal_the_model(architecture, kv_heads, form, adopted, own) -> None:
    ids = some_ids(READ + DECODED)
    expected = native_logits(own(architecture, kv_heads=kv_heads), ids)
    got = through_larder(adopted(architecture, kv_heads), form, ids, BLOCK_OF_FORM[form])
    assert expected.std() > 0.5
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("read, form", covering(BLOCKS, FORM_NAMES))
def test_blocks_of_any_size_equal_the_model(read, form, adopted, own) -> None:
    ids, (architecture, block) = some_ids(READ), read
    cache = SequenceCache(adopted(architecture).spec, form, **tiers_of(form))
    got = read_on(adopted(architecture), cache, ids, block)
    assert (got - native_logits(own(architecture), ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("architecture, form", covering(ARCHITECTURES, FORM_NAMES))
def test_bfloat16_stays_within_its_rounding(architecture, form, adopted, own) -> None:
    ids = some_ids(READ + DECODED)
    expected = native_logits(own(architecture, dtype=torch.bfloat16), ids)
    got = through_larder(adopted(architecture, dtype=torch.bfloat16), form, ids, 16)
    assert (got - expected).abs().max() < LOW_TOLERANCE * expected.std()


@pytest.mark.extended
@pytest.mark.parametrize("form, block", [("dense", 32), ("ragged", 7)])
def test_seed_model_is_exact(form, block) -> None:
    decoder = load().decoder
    ids = some_ids(READ + DECODED, decoder.vocab_size)
    got = through_larder(decoder, form, ids, block)
    decoder.release()
    assert (got - native_logits(decoder.module, ids)).abs().max() < TOLERANCE


def test_seed_model_keeps_its_rope_base(seed_model) -> None:
    """Written for one major version of transformers, a config may lose its RoPE base in another."""
    rotary = seed_model.decoder.module.base_model.rotary_emb
    assert torch.allclose(rotary.inv_freq[1], torch.tensor(1e6 ** (-2 / 64)))


@pytest.mark.extended
def test_model_with_only_sliding_layers_is_exact() -> None:
    from transformers import MistralForCausalLM

    config = tiny("mistral").config
    config.sliding_window = 9
    config._attn_implementation = "sdpa"
    torch.manual_seed(1)
    module = MistralForCausalLM(config).eval()
    ids = some_ids(READ + DECODED)
    expected = native_logits(module, ids)
    decoder = wrap_model(module)
    assert decoder.spec.managed == ()
    for form in FORM_NAMES:
        assert (through_larder(decoder, form, ids, 6) - expected).abs().max() < TOLERANCE


def test_query_heads_use_their_own_kv_head(adopted) -> None:
    """Head h belongs to kv head h // R: any other mapping is far from the model's logits."""
    decoder, ids = adopted("llama", 2), some_ids(30)
    expected = native_logits(tiny("llama"), ids)
    cache = SequenceCache(decoder.spec, "ragged")
    plain = cache.attend

    def interleaved(layer, new, *rest):
        order = [0, 2, 1, 3]
        return plain(layer, replace(new, queries=new.queries[order]), *rest)[order]

    cache.attend = interleaved
    assert (read_on(decoder, cache, ids, 8) - expected).abs().max() > 1000 * TOLERANCE
