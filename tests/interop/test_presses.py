"""Presses of kvpress under a LarderCache keep what they keep under their own hooks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import cache_utils

import larder
from architectures.families import families
from builders import runnable
from interop.fake_presses import (
    GeneratingPress,
    KeyNormPress,
    MaskingPress,
    QueryPress,
    ZeroingPress,
    left_by,
)
from larder.core import ScoreError, UsageError
from larder.interop import LarderCache, entry_digests, matched_indices
from larder.session import Policy
from model_runs import some_ids
from tiny_models import tiny

IDS = torch.tensor([some_ids(80)])
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PRESSES = {"scores": QueryPress(0.7), "masks": MaskingPress(QueryPress(0.7))}
GUIDE = Path(__file__).parents[2] / "docs" / "from_kvpress.md"
# Presses that came with kvpress 0.5.5, all at once.
LATEST = {"EntropyGatedChunkKVPress", "KVgradPress", "RestoreKVPress"}
with_kvpress = pytest.mark.skipif(not runnable(["kvpress"]), reason="kvpress is not installed")


def kept_by(cache: LarderCache, row: int = 0) -> list[list[list[int]]]:
    """Positions of each layer and head among the tokens of the prompt."""
    held = cache.sequences[row]
    layers = [held.entries(layer.index) for layer in held.spec.layers]
    return [
        [
            [position for position in own.head_positions(head).tolist() if position < IDS.shape[1]]
            for head in range(len(own.lengths))
        ]
        for own in layers
    ]


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_press_equals_its_own_hooks(architecture: str, name: str) -> None:
    model, press = tiny(architecture), PRESSES[name]
    with larder.applied(model, kvpress=press) as run:
        out = model.generate(IDS, max_new_tokens=5, **GREEDY)
    assert run.cache is not None
    kept = kept_by(run.cache)
    assert kept == left_by(press, tiny(architecture), IDS)
    assert out.shape == (1, 85)
    lengths = [len(head) for layer in kept for head in layer]
    assert (len(set(lengths)) > 1) is (name == "masks")
    assert sum(lengths) == pytest.approx(4 * 24, abs=2)
    assert run.cache.lengths()[0] == tuple(tuple(len(h) + 4 for h in own) for own in kept)


def test_memory_of_masked_entries_is_freed(llama: Any) -> None:
    cache = LarderCache(llama, kvpress=PRESSES["masks"])
    with torch.no_grad():
        llama(IDS, past_key_values=cache)
    needed = sum(map(sum, cache.lengths()[0])) * (2 * 16 * 4 + 4)
    assert needed <= cache.nbytes <= 1.05 * needed
    assert not any(
        "masked_key_indices" in vars(m) or hasattr(m, "rotary_emb") for m in attentions(llama)
    )


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


def test_ratio_of_zero_keeps_all(llama: Any) -> None:
    with larder.applied(llama, kvpress=QueryPress(0.0)):
        got = llama.generate(IDS, max_new_tokens=4, **GREEDY)
    assert torch.equal(got, llama.generate(IDS, max_new_tokens=4, **GREEDY))


def test_later_text_is_not_evicted(llama: Any) -> None:
    cache = LarderCache(llama, kvpress=QueryPress(0.5))
    with torch.no_grad():
        llama(IDS, past_key_values=cache)
        llama(IDS[:, :20], past_key_values=cache)
    assert cache.lengths()[0] == ((60, 60), (60, 60))


def test_rows_of_a_batch_are_compressed_independently(llama: Any) -> None:
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), IDS[:, :50]], 1)
    mask = torch.cat([torch.ones_like(IDS), (padded > 0).long()])
    cache = LarderCache(llama, kvpress=QueryPress(0.5))
    with torch.no_grad():
        llama(torch.cat([IDS, padded]), attention_mask=mask, past_key_values=cache)
    for row, ids in enumerate([IDS, IDS[:, :50]]):
        assert kept_by(cache, row) == left_by(QueryPress(0.5), tiny("llama"), ids)


def test_sliding_layers_keep_their_window(models: Any) -> None:
    with larder.applied(models("gemma3"), kvpress=QueryPress(0.5)) as run:
        models("gemma3").generate(IDS, max_new_tokens=1, **GREEDY)
    assert run.cache is not None
    assert run.cache.lengths()[0][1] == (40, 40)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Gemma 3", "OLMo 3"])
def test_press_compresses_models_with_rotary_embeddings_by_layer_kind(name: str) -> None:
    model = next(family for family in families() if family.name == name).model()
    cache = LarderCache(model, kvpress=KeyNormPress(0.5))
    model(IDS, past_key_values=cache)
    managed = cache.sequences[0].spec.managed
    assert managed and {cache.lengths()[0][layer.index] for layer in managed} == {(40, 40)}


@pytest.mark.skipif(
    "LinearAttentionCacheLayerMixin" not in vars(cache_utils),
    reason="this transformers holds no states of recurrent layers in its caches",
)
def test_press_on_a_model_without_rotary_embeddings_is_refused() -> None:
    model = next(family for family in families() if family.name == "Granite hybrid").model()
    with pytest.raises(UsageError, match=r"KeyNormPress.* reads rotary embeddings, but this Gran"):
        LarderCache(model, kvpress=KeyNormPress(0.5))


@pytest.mark.parametrize(
    ("press", "message"),
    [
        (QueryPress, "is a class: give an instance"),
        ("SnapKVPress", "is a text: give the object"),
        (GeneratingPress(0.5), r"GeneratingPress has a forward_hook\(\) of its own.*from_kvpress"),
    ],
)
def test_unsupported_presses_are_refused(llama: Any, press: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LarderCache(llama, kvpress=press)


@pytest.mark.parametrize("other", [{"policy": "full"}, {"budget": 9}, {"block": 9}])
def test_press_with_a_policy_is_refused(llama: Any, other: Any) -> None:
    with (
        pytest.raises(UsageError, match="leave the others out"),
        larder.applied(llama, kvpress=QueryPress(0.5), **other),
    ):
        pass


@pytest.mark.parametrize(
    ("press", "ids", "message"),
    [
        (ZeroingPress(), IDS, "rotates or zeroes them"),
        (QueryPress(0.5), IDS[:, :6], "AssertionError: the prompt is shorter than the window"),
    ],
)
def test_press_that_fails_leaves_the_cache_empty(
    llama: Any, press: Any, ids: torch.Tensor, message: str
) -> None:
    cache = LarderCache(llama, kvpress=press)
    with torch.no_grad(), pytest.raises(ScoreError, match=message):
        llama(ids, past_key_values=cache)
    assert not cache.is_initialized


def test_duplicate_entries_are_matched_in_order() -> None:
    keys = torch.tensor([[[1.0], [2.0], [1.0], [3.0], [1.0]]])
    digests = entry_digests(keys, keys)
    positions, is_found = matched_indices(digests, digests[:, [3, 2, 0]])
    assert positions.tolist() == [[3, 0, 2]]
    assert is_found.all()
    other = entry_digests(keys[:, :1], keys[:, 1:2])
    assert not matched_indices(digests, other)[1].any()


def guide_rows() -> dict[str, str]:
    """Policy, or an empty string, of each press in the guide's table."""
    rows = re.findall(r"^\| `(\w+Press)[^|]*\|[^|]*\|([^|]*)\|", GUIDE.read_text(), re.MULTILINE)
    return {press: policy.strip().strip("`") for press, policy in rows}


def test_each_policy_of_the_guide_can_be_read() -> None:
    policies = [policy for policy in guide_rows().values() if policy]
    assert len(policies) > 25
    for policy in policies:
        Policy.parse(policy)


REAL = (
    "AdaKVPress(SnapKVPress(0.7, window_size=8))",
    "AdaKVPress(ExpectedAttentionPress(0.7, epsilon=0.01), alpha_safeguard=0.0)",
    "BlockPress(KeyDiffPress(0.7), block_size=16)",
    "CURPress(0.7)",
    "ChunkKVPress(SnapKVPress(0.7, window_size=8), chunk_length=8)",
    "ChunkPress(KnormPress(0.7), chunk_length=16)",
    "CompactorPress(0.7, chunk_size=16, blending=0)",
    "CriticalAdaKVPress(SnapKVPress(0.7, window_size=8))",
    "CriticalKVPress(SnapKVPress(0.7, window_size=8))",
    "ExpectedAttentionPress(0.7)",
    "KeyDiffPress(0.7)",
    "KnormPress(0.7)",
    "LagKVPress(0.7, lag_size=8)",
    "LeverageScorePress(0.7)",
    "NonCausalAttnPress(0.7, chunk_size=16)",
    "PyramidKVPress(0.7, window_size=4)",
    "SimLayerKVPress(lazy_threshold=0.1, n_recent=20, n_last=4)",
    "SnapKVPress(0.7, window_size=8)",
    "StreamingLLMPress(0.7)",
    "TOVAPress(0.7)",
)


@with_kvpress
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fire, which kvpress imports
@pytest.mark.parametrize("made", REAL)
def test_kvpress_presses_equal_their_own_hooks(made: str) -> None:
    import kvpress  # pyright: ignore

    model = tiny("llama")
    press = eval(made, dict(vars(kvpress)))
    cache = LarderCache(model, kvpress=press)
    torch.manual_seed(0)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    torch.manual_seed(0)
    assert kept_by(cache) == left_by(press, tiny("llama"), IDS)
    assert sum(map(sum, cache.lengths()[0])) < 4 * IDS.shape[1]


@with_kvpress
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_guide_has_every_press() -> None:
    import kvpress  # pyright: ignore

    names = {name for name in vars(kvpress) if re.fullmatch(r"\w+Press", name)}
    presses, rows = names - {"BasePress", "ScorerPress"}, set(guide_rows())
    assert presses <= rows
    assert rows - presses in (set(), LATEST)
