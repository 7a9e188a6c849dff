"""Principal components over all layers: groups by dynamic programming, codes, and whole caches."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import RADIANS, a_layer, a_spec, draw
from larder.cache import KvtcTables, NewTokens, PrincipalSide, SequenceCache, tables_path
from larder.core import Damaged, MissingWeights, Mode, Plan
from larder.models import Card
from larder.ops import AllocationTable, group_errors
from larder.store import (
    Kvtc,
    LayerStack,
    TensorRole,
    codec_named,
    decode_state,
    encode_state,
    state_nbytes,
)
from larder.training import planned, principal_side
from references.ops import bit_allocation as slow

LAYERS, HEADS, SIZE, TOKENS = 2, 2, 8, 200
WIDTH, EXACT = LAYERS * HEADS * SIZE, [*range(4), *range(TOKENS - 128, TOKENS)]
SPEC = replace(a_spec(*(a_layer(index=n) for n in range(LAYERS))), fingerprint="e" * 32)
CARD = {"card": Card("kvtc", (SPEC.fingerprint,)).dumps()}


@given(st.integers(0, 50), st.integers(0, 160))
@settings(max_examples=15, deadline=None)
def test_bit_groups_minimize_the_error_within_the_budget(seed: int, half: int) -> None:
    source = torch.Generator().manual_seed(seed)
    components = torch.randn(5, 4, generator=source) * torch.tensor([8.0, 4, 1, 0.1])
    errors = group_errors(components, (1, 2, 4))
    table = AllocationTable.of(errors, 4, 320)
    groups = table.groups(2 * half)
    chosen = [(each.size, each.bits) for each in groups]
    assert sum(size for size, _ in chosen) == 4
    assert sum(map(slow.cost, chosen)) <= 2 * half
    listed = {key: own.tolist() for key, own in errors.items()}
    wanted = slow.least_error(listed, 4, 2 * half)
    assert slow.error(chosen, listed) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_bit_groups_hand_values() -> None:
    # A pair in two bits costs 36 bits, a single one 34, as much in eight bits 48 and 40.
    errors = {
        (1, 0): torch.tensor([9.0, 1.0]).numpy(),
        (1, 2): torch.tensor([1.0, 0.5]).numpy(),
        (2, 0): torch.tensor([10.0]).numpy(),
        (2, 2): torch.tensor([1.6]).numpy(),
    }
    table = AllocationTable.of(errors, 2, 68)
    found = [table.groups(budget) for budget in (32, 34, 36, 68, 100)]
    assert [[(g.size, g.bits) for g in own] for own in found] == [
        [(1, 0), (1, 0)],
        [(1, 2), (1, 0)],
        [(2, 2)],
        [(1, 2), (1, 2)],
        [(1, 2), (1, 2)],
    ]


def test_components_are_eigenvectors_of_the_covariance() -> None:
    source = torch.Generator().manual_seed(3)
    numbers = torch.randn(400, 12, generator=source) * torch.linspace(6, 0.2, 12) + 5
    mean, basis = principal_side(numbers, 4, seed=0)
    centered = (numbers - numbers.mean(0)).double()
    variances, directions = torch.linalg.eigh(centered.T @ centered)
    own = (basis.double().T @ directions.flip(1)[:, :4]).abs()
    assert torch.allclose(mean, numbers.mean(0))
    assert torch.allclose(own, torch.eye(4, dtype=torch.float64), atol=2e-3)
    assert variances[-1] > variances[0]


def some_tables(share: float = 0.5) -> KvtcTables:
    """Tables of what caches of `draw` hold, with plans of many bits."""
    source = torch.Generator().manual_seed(0)
    sides = []
    for _ in range(2):
        basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=source))[0]
        components = torch.randn(64, WIDTH, generator=source)
        most = share * 16 * WIDTH
        table = AllocationTable.of(group_errors(components, (1, 16)), WIDTH, int(2 * most))
        plan = planned(components, table, most)
        own = PrincipalSide(
            torch.randn(WIDTH, generator=source), basis, {"1/8": plan, "1/16": plan.clone()}
        )
        sides.append(own)
    tables = KvtcTables((sides[0], sides[1]), (torch.tensor(RADIANS),) * LAYERS)
    return KvtcTables.of(tables.tensors())


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KvtcTables:
    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    made = some_tables()
    made.save(tables_path(SPEC.fingerprint, "kvtc"), CARD)
    return made


def a_cache(count: int = TOKENS) -> SequenceCache:
    cache = SequenceCache(SPEC, "ragged")
    for layer in SPEC.layers:
        new = draw(layer, count, seed=layer.index)
        given = new.queries, new.keys, new.values, new.positions
        cache.attend(layer.index, NewTokens(*given, Mode.APPEND))
    cache.advance(count)
    return cache


@pytest.mark.parametrize("name", ["kvtc", "kvtc16"])
def test_layers_round_trip_with_exact_first_and_last_tokens(name: str, tables: KvtcTables) -> None:
    cache, codec = a_cache(), codec_named(name)
    state = cache.state()
    tensors, result = encode_state(state, codec, name, cache.spec)
    assert json.loads(json.dumps(result))["0.keys"]["stack"]["note"]["tables"] == tables.digest
    found = decode_state(tensors, result, state_nbytes(state))
    for key in (f"{index}.{side}" for index in range(LAYERS) for side in ("keys", "values")):
        own = state[key].view(HEADS, -1, SIZE)[:, :TOKENS]
        near = found[key].view(HEADS, -1, SIZE)[:, :TOKENS]
        assert torch.equal(near[:, EXACT], own[:, EXACT].bfloat16().float())
        error = (near - own)[:, 4:-128].square().mean() / own[:, 4:-128].square().mean()
        assert 0 < float(error) < 0.02
    again = decode_state(tensors, result, state_nbytes(state))
    assert all(torch.equal(found[key], again[key]) for key in found)


def test_codec_without_exact_latest_tokens_codes_them(tables: KvtcTables) -> None:
    class Everything(Kvtc):
        recent = 0

    state = a_cache().state()
    sides = [
        {role: state[f"{n}.{role.value}"].view(HEADS, -1, SIZE)[:, :TOKENS] for role in TensorRole}
        for n in range(LAYERS)
    ]
    positions = torch.arange(TOKENS)
    coded = Everything().encode_stack(LayerStack(tuple(sides), positions, SPEC.fingerprint))
    found = [*Everything().decode_stack(coded, positions, [HEADS] * LAYERS)]
    for own, near in zip(sides, found, strict=True):
        for role, numbers in own.items():
            error = (near[role] - numbers).square().amax((0, 2))
            assert torch.equal(near[role][:, :4], numbers[:, :4].bfloat16().float())
            assert float(error[4:].min()) > 0
            assert float(error[4:].mean()) < 0.05 * float(numbers.square().amax((0, 2)).mean())


def test_smaller_bit_budget_spends_no_more_bits() -> None:
    source = torch.Generator().manual_seed(1)
    components = torch.randn(256, 32, generator=source) * torch.linspace(8, 0.1, 32)
    table = AllocationTable.of(group_errors(components, (1, 16)), 32, 800)
    plans = [planned(components, table, bits) for bits in (400.0, 200.0, 100.0)]
    spent = [sum(s * b + 32 for s, b in plan.tolist() if b) for plan in plans]
    assert spent == sorted(spent, reverse=True) and spent[0] > spent[2]


def test_model_without_components_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARDER_HOME", str(tmp_path))
    with pytest.raises(MissingWeights, match="larder train kvtc"):
        codec_named("kvtc").check_model("f" * 32)


def test_per_head_eviction_is_coded_layer_by_layer(tables: KvtcTables) -> None:
    cache = a_cache()
    for layer in range(LAYERS):
        kept = torch.tensor([*range(0, TOKENS, 2), *range(TOKENS, 2 * TOKENS, 4)])
        cache.apply(layer, Plan(kept, (TOKENS // 2, TOKENS // 4)))
    _, result = encode_state(cache.state(), codec_named("kvtc"), "kvtc", cache.spec)
    assert "stack" not in result["0.keys"]


def test_damaged_codes_raise(tables: KvtcTables) -> None:
    cache = a_cache()
    tensors, result = encode_state(cache.state(), codec_named("kvtc"), "kvtc", cache.spec)
    name = next(key for key in tensors if key.endswith("words"))
    tensors[name] = tensors[name][:-9]
    with pytest.raises(Damaged):
        decode_state(tensors, result, state_nbytes(cache.state()))


@pytest.mark.extended
def test_oversized_codes_are_refused_before_allocation(tables: KvtcTables) -> None:
    cache = a_cache()
    tensors, result = encode_state(cache.state(), codec_named("kvtc"), "kvtc", cache.spec)
    name = next(key for key in tensors if key.endswith("words"))
    numbers = zlib.decompress(tensors[name].numpy().tobytes())
    for packed in (bytes(1 << 25), numbers + bytes(1), numbers[:-1]):
        codes = bytearray(zlib.compress(packed, 9))
        tensors[name] = torch.frombuffer(codes, dtype=torch.uint8)
        del packed
        tracemalloc.start()
        try:
            with pytest.raises(Damaged):
                decode_state(tensors, result, state_nbytes(cache.state()))
            assert tracemalloc.get_traced_memory()[1] < 1 << 23
        finally:
            tracemalloc.stop()
