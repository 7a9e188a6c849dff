"""Codecs that predict each layer from the one below: against a loop, and what they do not code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from builders import RADIANS, a_layer, a_spec, draw, parking_of
from cache_stores import same_bits
from larder.cache import NewTokens, PredictiveTables, SequenceCache, SidePrediction, tables_path
from larder.core import Damaged, MissingWeights, Mode, ModelSpec, Plan
from larder.models import Card
from larder.ops import rotate
from larder.store import (
    CODECS,
    CacheRequirements,
    CacheSnapshot,
    Store,
    codec_named,
    decode_state,
    encode_state,
    pack_container,
    state_nbytes,
    unpack_container,
)
from larder.store.model_identity import model_identity
from references import store_codecs as loops

LAYERS, HEADS, SIZE, TOKENS = 3, 2, 8, 90
WIDTH, SINKS = HEADS * SIZE, 4
PREDICTING = [name for name in CODECS.names() if name.startswith("predictive")]
SPEC = replace(a_spec(*(a_layer(index=n) for n in range(LAYERS))), fingerprint="f" * 32)
CARD = {"card": Card("predictive", (SPEC.fingerprint,)).dumps()}


def some_tables(seed: int = 0) -> PredictiveTables:
    """Predictions that explain nothing, rounded as a file holds them."""
    source = torch.Generator().manual_seed(seed)

    def draw_matrix(rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, generator=source) / (4 * max(rows, 1) ** 0.5)

    pairs = []
    for prefix in range(LAYERS):
        sides = []
        for inputs in (0, WIDTH) if not prefix else (2 * WIDTH, 3 * WIDTH):
            forward = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=source))[0]
            bias = torch.randn(WIDTH, generator=source)
            deviation = torch.linspace(4, 0.5, WIDTH)
            sides.append(SidePrediction(draw_matrix(inputs), bias, forward, deviation))
        pairs.append((sides[0], sides[1]))
    tables = PredictiveTables(tuple(pairs), (torch.tensor(RADIANS),) * LAYERS)
    return PredictiveTables.of(tables.tensors())


@pytest.fixture
def tables() -> PredictiveTables:
    made = some_tables()
    made.save(tables_path(SPEC.fingerprint, "predictive"), CARD)
    return made


def a_cache(form: str = "dense", spec: ModelSpec = SPEC, count: int = TOKENS) -> SequenceCache:
    cache = SequenceCache(spec, form)
    for layer in spec.layers:
        new = draw(layer, count, seed=layer.index)
        given = new.queries, new.keys, new.values, new.positions
        cache.attend(layer.index, NewTokens(*given, Mode.APPEND))
    cache.advance(count)
    return cache


def saved(cache: SequenceCache, name: str = "predictive") -> tuple[dict[str, Tensor], dict]:
    tensors, result = encode_state(cache.state(), codec_named(name), name, cache.spec)
    return unpack_container(pack_container(tensors, {}))[0], result


def decoded(cache: SequenceCache, name: str = "predictive") -> dict[str, Tensor]:
    return decode_state(*saved(cache, name), state_nbytes(cache.state()))


def by_loop(cache: SequenceCache, tables: PredictiveTables, step: float) -> dict[str, Tensor]:
    """Keys and values behind the sinks, as the loop codes them."""
    layers, lists = [], []
    positions = torch.arange(SINKS, TOKENS)
    for prefix, pair in enumerate(tables.layers):
        held = cache.entries(prefix)
        keys, values = (
            torch.stack([own(head) for head in range(HEADS)])[:, SINKS:].float()
            for own in (held.head_keys, held.head_values)
        )
        keys = rotate(keys, -positions, torch.tensor(RADIANS))
        layers.append([side.transpose(0, 1).flatten(1).tolist() for side in (keys, values)])
        names = ("weights", "bias", "forward", "inverse")
        lists.append([{name: getattr(side, name).tolist() for name in names} for side in pair])
    found = {}
    for prefix, (keys, values) in enumerate(loops.predictive(layers, lists, step)):
        sides = [
            torch.tensor(side).unflatten(1, (HEADS, SIZE)).transpose(0, 1)
            for side in (keys, values)
        ]
        found[f"{prefix}.keys"] = rotate(sides[0], positions, torch.tensor(RADIANS))
        found[f"{prefix}.values"] = sides[1]
    return found


@pytest.mark.parametrize("name", PREDICTING)
def test_decoded_layers_equal_the_reference(name: str, tables: PredictiveTables) -> None:
    cache = a_cache()
    tensors, result = saved(cache, name)
    note = result["0.keys"]["stack"]["note"]
    assert note["model"] == SPEC.fingerprint and note["tables"] == tables.digest
    found = decode_state(tensors, result, state_nbytes(cache.state()))
    for key, wanted in by_loop(cache, tables, note["step"]).items():
        torch.testing.assert_close(found[key][:, SINKS:], wanted, rtol=1e-4, atol=1e-4)


def test_first_tokens_are_bfloat16_and_other_fields_exact(tables: PredictiveTables) -> None:
    cache = a_cache()
    state, found = cache.state(), decoded(cache)
    assert found.keys() == state.keys()
    rest = {key for key in state if not key.endswith(("keys", "values"))}
    assert same_bits({k: found[k] for k in rest}, {k: state[k] for k in rest})
    for key in state.keys() - rest:
        assert torch.equal(found[key][:, :SINKS], state[key][:, :SINKS].bfloat16().float())
    again = SequenceCache.restore(SPEC, found, cache.meta())
    assert again.next_position == TOKENS and again.lengths() == cache.lengths()


@pytest.mark.parametrize("form", ["dense", "ragged"])
def test_two_restores_are_the_same_to_the_bit(form: str, tables: PredictiveTables) -> None:
    cache = a_cache(form)
    assert "note" in saved(cache)[1]["0.keys"]["stack"]
    assert same_bits(decoded(cache), decoded(cache))


@pytest.mark.parametrize("name", PREDICTING)
def test_codes_take_the_declared_share_of_bfloat16(name: str, tables: PredictiveTables) -> None:
    cache = a_cache(count=3000)
    tensors, result = saved(cache, name)
    coded = sum(t.nbytes for key, t in tensors.items() if ":" in key)
    beside = 2 * LAYERS * 600  # names and sizes in the container's header
    share = (coded + beside) / (2 * LAYERS * WIDTH * 2 * 3000)
    assert 0.95 < share / codec_named(name).share < 1.01  # pyright: ignore
    found = decode_state(tensors, result, state_nbytes(cache.state()))
    numbers = [found[f"{n}.values"] - cache.state()[f"{n}.values"] for n in range(LAYERS)]
    assert all(float(each.abs().mean()) < 2 for each in numbers)


def test_token_eviction_is_predicted_and_head_eviction_is_not(
    tables: PredictiveTables,
) -> None:
    for by_head, is_stack in ((False, True), (True, False)):
        cache = a_cache("ragged")
        for layer in range(LAYERS):
            kept = (torch.arange(HEADS * TOKENS) % TOKENS) % 3 > 0
            if by_head:
                kept[:TOKENS] = torch.arange(TOKENS) % 3 != 1
            cache.apply(layer, Plan.from_mask(kept, (TOKENS,) * HEADS))
        tensors, result = saved(cache)
        assert ("stack" in result["0.keys"]) == is_stack
        found, state = decode_state(tensors, result, state_nbytes(cache.state())), cache.state()
        assert found.keys() == state.keys()
        assert all(same_bits({"p": found[k]}, {"p": state[k]}) for k in state if "posit" in k)
        if not is_stack:
            wanted = codec_named("entropy"), "entropy"
            same = decode_state(*encode_state(state, *wanted, SPEC), state_nbytes(state))
            assert same_bits(found, same)


def test_offloaded_entries_are_coded_as_resident_ones_are(tables: PredictiveTables) -> None:
    """All entries of every head but the latest one are in the slow tier."""
    cache = SequenceCache(SPEC, "tiered", parking=parking_of("tiered"))
    resident = SequenceCache(SPEC, "ragged")
    for layer in SPEC.layers:
        new = draw(layer, TOKENS, seed=layer.index)
        for twin, part in ((cache, new), (resident, new.part(0, TOKENS - 1))):
            given = part.queries, part.keys, part.values, part.positions
            twin.attend(layer.index, NewTokens(*given, Mode.APPEND))
    cache.advance(TOKENS)
    resident.advance(TOKENS - 1)
    for layer in range(LAYERS):
        latest = torch.arange(1, HEADS + 1) * TOKENS - 1
        cache.apply(layer, Plan(latest, (1,) * HEADS))
    result = saved(cache)[1]
    assert result["0.slow.keys"]["stack"]["prefix"] == "slow."
    found, wanted = decoded(cache), decoded(resident)
    for layer in range(LAYERS):
        for part in ("keys", "values", "positions", "lengths"):
            assert torch.equal(found[f"{layer}.slow.{part}"], wanted[f"{layer}.{part}"])
    assert not torch.equal(found["1.slow.keys"], cache.state()["1.slow.keys"])
    again = SequenceCache.restore(SPEC, found, cache.meta())
    assert again.next_position == TOKENS and again.lengths() == cache.lengths()


@pytest.mark.parametrize("forms", ["dense ragged", "ragged dense", "ragged ragged"])
def test_layers_of_other_forms_keep_the_shape_of_their_positions(
    forms: str, tables: PredictiveTables
) -> None:
    """A dense layer has its positions once, a ragged one per head."""
    first, rest = (a_cache(form).state() for form in forms.split())
    state = {key: own for key, own in first.items() if key.startswith("0.")}
    state |= {key: own for key, own in rest.items() if not key.startswith("0.")}
    tensors, result = encode_state(state, codec_named("predictive"), "predictive", SPEC)
    assert "stack" in result["1.positions"]
    found = decode_state(tensors, result, state_nbytes(state))
    assert found.keys() == state.keys()
    held = {key: own for key, own in state.items() if not key.endswith(("keys", "values"))}
    assert same_bits({key: found[key] for key in held}, held)
    wider = result | {"1.positions": result["1.positions"] | {"shape": [TOKENS + 1]}}
    with pytest.raises(Damaged):
        decode_state(tensors, wider, 2 * state_nbytes(state))


def test_models_without_predictions_are_coded_layer_by_layer() -> None:
    spec = replace(SPEC, fingerprint="e" * 32)
    with pytest.raises(MissingWeights, match="larder train predictive"):
        codec_named("predictive").check_model(spec.fingerprint)
    result = saved(a_cache(spec=spec))[1]
    assert result and not any("stack" in how for how in result.values())


def test_numbers_that_are_not_finite_are_coded_layer_by_layer(tables: PredictiveTables) -> None:
    cache = a_cache()
    state = cache.state()
    state["1.values"][0, 5, 2] = torch.inf
    tensors, result = encode_state(state, codec_named("predictive"), "predictive", SPEC)
    assert not any("stack" in how for how in result.values())
    assert torch.equal(tensors["1.values"], state["1.values"])


def test_retrained_predictions_refuse_earlier_codes(
    tables: PredictiveTables,
) -> None:
    cache = a_cache()
    tensors, result = saved(cache)
    some_tables(seed=1).save(tables_path(SPEC.fingerprint, "predictive"), CARD)
    with pytest.raises(Damaged, match="no longer"):
        decode_state(tensors, result, state_nbytes(cache.state()))


@pytest.mark.failure(number=30)
def test_stacks_with_wrong_metadata_or_missing_tensors_are_refused(
    tables: PredictiveTables,
) -> None:
    cache = a_cache()
    tensors, result = saved(cache)
    room = state_nbytes(cache.state())
    first = result["0.keys"]
    note = first["stack"]["note"]
    for change in (
        {"lengths": [TOKENS, TOKENS + 1]},
        {"lengths": []},
        {"shape": [2, 10**9, 8]},
        {"codec": "int8"},
        {"stack": {"prefix": "slow."}},
        {"stack": {"prefix": "", "note": note | {"step": 0.0}}},
        {"stack": {"prefix": "", "note": note | {"model": "e" * 32}}},
        {"stack": {"prefix": ""}},
        {"stack": 3},
    ):
        with pytest.raises(Damaged):
            decode_state(tensors, result | {"0.keys": first | change}, room)
    for key in tensors:
        if ":" in key or key == "0.positions":
            with pytest.raises(Damaged):
                decode_state({k: t for k, t in tensors.items() if k != key}, result, room)
    for key in ("0.keys:sizes", "0.keys:words", "1.values:exact"):
        cut = tensors | {key: tensors[key][..., :-1]}
        with pytest.raises(Damaged):
            decode_state(cut, result, room)
    half = {key: how for key, how in result.items() if not key.startswith("2.")}
    with pytest.raises(Damaged):
        decode_state(tensors, half, room)


def test_damaged_predictions_file_raises_missing_weights(tables: PredictiveTables) -> None:
    path = tables_path(SPEC.fingerprint, "predictive")
    path.write_bytes(b"no tensors")
    with pytest.raises(MissingWeights, match="no predictions"):
        PredictiveTables.load(SPEC.fingerprint)
    save_file({"0.radians": torch.zeros(3)}, path)
    with pytest.raises(MissingWeights, match="no predictions"):
        PredictiveTables.load(SPEC.fingerprint)


def test_in_memory_store_holds_coded_sessions(tmp_path: Path, tables: PredictiveTables) -> None:
    cache, ids = a_cache(), tuple(range(TOKENS))
    weights = model_identity(SPEC, {}, "weights", "tokenizer")
    store = Store("memory://parked", tmp_path, secret=bytes(32))
    snapshot = CacheSnapshot(cache, weights, "full", "predictive")
    store.sessions.save("someone", "talk", ids, snapshot)
    assert store.sessions.heads()[0].spans[0].bytes < 0.5 * cache.nbytes
    loaded = store.sessions.load("someone", "talk", CacheRequirements(weights, "full", SPEC))
    store.close()
    assert loaded is not None and loaded.cache is not None
    assert same_bits(loaded.cache.state(), decoded(cache))


def test_bfloat16_layers_are_predicted_as_the_decoder_rounds_them(tables: PredictiveTables) -> None:
    """Errors of a bfloat16 cache are those of its steps, in the last layer as in the first."""
    plain = a_cache()
    spec = replace(SPEC, dtype=torch.bfloat16)
    state = {
        key: own.bfloat16() if key.endswith(("keys", "values")) else own
        for key, own in plain.state().items()
    }
    cache = SequenceCache.restore(spec, state, plain.meta())
    tensors, result = saved(cache)
    assert result["0.keys"]["stack"]["note"]["dtype"] == "bfloat16"
    found = decode_state(tensors, result, state_nbytes(state))
    assert same_bits(found, decode_state(tensors, result, state_nbytes(state)))
    exact = decoded(plain)
    for key in (key for key in state if key.endswith(("keys", "values"))):
        assert found[key].dtype is torch.bfloat16
        own, other = ((each[key].float() - plain.state()[key]).std() for each in (found, exact))
        assert 0.9 * other < own < 1.1 * other


def test_files_without_a_dtype_are_decoded_in_float32(tables: PredictiveTables) -> None:
    cache = a_cache()
    tensors, result = saved(cache)
    assert result["0.keys"]["stack"]["note"].pop("dtype") == "float32"
    assert same_bits(decode_state(tensors, result, state_nbytes(cache.state())), decoded(cache))
