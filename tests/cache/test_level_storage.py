"""Transform layers whose coder has levels: what is held of keys and values, and in what bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from builders import a_layer, a_plan, draw, layer_options
from cache_stores import attend_held, same_bits
from larder.cache import INDEX_BYTES, TransformLayer, TransformTables, state_of, tables_path
from larder.core import CacheError, Coder, MeanSource, TransformSpec
from references import kvquant as reference
from references import transform as rotation
from transforms import some_tables

LAYER = a_layer(2, 2)
CHOSEN = [[0, 1, 3, 4, 5, 6, 8, 9, 11], [2, 5, 7, 8, 9]]
SPEC = TransformSpec(
    Coder.LEVELS, sinks=1, recent=0, block=4, mean=MeanSource.MODEL, level_bits=2, outliers=0.1
)
LEVELS = torch.tensor([[-0.9, -0.3, 0.2, 0.8], [-1.0, -0.4, 0.3, 0.7]])


def coded(spec: TransformSpec = SPEC, dtype: torch.dtype = torch.float32) -> TransformLayer:
    """Layer of twelve tokens, all but the first of which are coded where they stay."""
    whole = torch.eye(LAYER.head_dim).expand(2, LAYER.kv_heads, -1, -1)
    scales = torch.tensor([0.8, 1.0])[:, None, None, None]
    mean = some_tables(LAYER).mean * torch.tensor([0.2, 0.0])[:, None, None]
    tables = TransformTables(whole * scales, mean, torch.ones_like(mean), LAYER.radians or ())
    path = tables_path("", "kvquant")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state_of({0: tables}) | {"0.levels2": LEVELS}, path)
    held = TransformTables.load(LAYER, spec)
    store = TransformLayer(LAYER, layer_options(dtype, transform=spec), held)
    new = draw(LAYER, 12)
    store.append(new.keys.to(dtype), new.values.to(dtype), new.positions)
    grades = torch.full((14,), 3, dtype=torch.int8)
    grades[0] = 0
    store.apply(replace(a_plan(CHOSEN, store.lengths), grades=grades, step=1.0))
    return store


def test_unrotated_keys_and_values_equal_the_reference() -> None:
    store, new = coded(), draw(LAYER, 12)
    tables, batch = store.tier.tables, store.tier.batch()
    for block in store.tier.blocks:
        head, own = block.head, block.entries
        positions = store.tier.positions_of(block).tolist()
        keys = [
            [
                rotation.component(
                    new.keys[head, position].tolist(),
                    tables.mean[0, head].tolist(),
                    tables.forward[0, head].tolist(),
                    LAYER.radians or (),
                    position,
                    index,
                )
                for index in range(LAYER.head_dim)
            ]
            for position in positions
        ]
        values = [new.values[head, position].tolist() for position in positions]
        expected = [
            [*key, *reference.held_value(value, LEVELS[1].tolist(), SPEC.outliers)]
            for key, value in zip(
                reference.held_keys(keys, LEVELS[0].tolist(), SPEC.outliers), values, strict=True
            )
        ]
        torch.testing.assert_close(batch.components[own], torch.tensor(expected), rtol=0, atol=1e-3)


def test_first_token_is_exact_and_others_approximate() -> None:
    store, new = coded(), draw(LAYER, 12)
    held = store.entries()
    assert store.full_precision_lengths == (1, 0)
    assert torch.equal(held.head_keys(0)[0], new.keys[0, 0])
    assert torch.equal(held.head_values(0)[0], new.values[0, 0])
    exact = torch.cat([new.values[head][own] for head, own in enumerate(CHOSEN)])
    error = (held.pack(held.values) - exact).square().mean() / exact.square().mean()
    assert 0 < float(error) < 0.2


def test_bytes_are_those_of_index_payload_and_exact_entries() -> None:
    store = coded()
    tier = store.tier
    ragged = 2 * LAYER.head_dim * 4 + 4 + 2 * 2 * 8
    sizes = tier.index[:, 4].tolist()
    assert len(sizes) == 4 and len(tier.payload) == sum(sizes)
    assert store.nbytes == ragged + INDEX_BYTES * len(sizes) + len(tier.payload)
    assert tier.estimate(tier.centered(tier.batch(), 1.0), 1.0) >= tier.index.nbytes + len(
        tier.payload
    )


@pytest.mark.parametrize("queries", [1, 20])
def test_attention_equals_that_over_decoded_entries(queries: int) -> None:
    store, new = coded(), draw(LAYER, queries, 12)
    entries, out = store.entries(), attend_held(store, new)
    for query_head in range(LAYER.query_heads):
        head = query_head // LAYER.group
        keys, values = entries.head_keys(head).tolist(), entries.head_values(head).tolist()
        for index in range(queries):
            asked = new.queries[query_head, index].tolist()
            expected = rotation.attention(asked, keys, values, LAYER.scaling)
            torch.testing.assert_close(
                out[query_head, index], torch.tensor(expected), rtol=1e-4, atol=1e-4
            )


def test_restored_copy_continues_identically() -> None:
    store = coded()
    back = TransformLayer.restore(LAYER, store.state())
    assert same_bits(store.state(), back.state())
    new = draw(LAYER, 3, 12)
    for twin in (store, back):
        twin.append(new.keys, new.values, new.positions)
    assert torch.equal(attend_held(store, new), attend_held(back, new))


def test_keys_without_outliers_are_unchanged_by_truncating_their_block() -> None:
    store = coded(replace(SPEC, outliers=0.0))
    before, positions = store.entries(), store.entries().packed_positions()
    store.truncate(9)
    after = store.entries()
    assert after.packed_positions().tolist() == positions[positions < 9].tolist()
    torch.testing.assert_close(
        after.pack(after.keys), before.pack(before.keys)[positions < 9], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_unchanged_by_evictions_of_others(dtype: torch.dtype) -> None:
    store = coded(dtype=dtype)
    before, positions = store.entries(), store.entries().packed_positions()
    store.truncate(11)
    store.apply(a_plan([[0, 1, 3, 4, 6, 7], [0, 1, 3]], store.lengths))
    store.truncate(9)
    stays = torch.tensor([0, 1, 3, 4, 6, 9, 10, 12])
    after = store.entries()
    assert after.packed_positions().tolist() == positions[stays].tolist()
    sides = (after.pack(after.values), before.pack(before.values)[stays])
    if dtype is torch.float32:
        assert torch.equal(*sides)
    torch.testing.assert_close(*sides, rtol=0, atol=2**-7)


def test_state_of_other_levels_is_refused() -> None:
    state = coded().state()
    own = {name: part for name, part in _file().items() if name != "0.levels2"}
    save_file(own | {"0.levels2": LEVELS + 0.05}, tables_path("", "kvquant"))
    _forget_files()
    with pytest.raises(CacheError, match="build the cache again"):
        TransformLayer.restore(LAYER, state)


def test_model_without_levels_is_refused() -> None:
    with pytest.raises(CacheError, match="larder model calibrate MODEL kvquant"):
        TransformTables.load(LAYER, replace(SPEC, model="other"))


def _file() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(tables_path("", "kvquant"))


def _forget_files() -> None:
    from larder.cache import transform_tables

    transform_tables._read.cache_clear()
