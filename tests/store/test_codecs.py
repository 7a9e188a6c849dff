"""Codecs of saved caches: each against its loop, and unquantizable numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from builders import FORM_NAMES, a_layer, a_spec, draw, tiers_of
from cache_stores import same_bits
from larder.cache import NewTokens, SequenceCache
from larder.core import CacheError, Damaged, Mode
from larder.store import (
    CODECS,
    STEP_SCALE,
    STEPS,
    Entropy,
    RowLayout,
    TensorRole,
    codec_named,
    compress,
    decode_state,
    decompress,
    encode_state,
    pack_container,
    state_nbytes,
    unpack_container,
)
from references import store_codecs as loops

LENGTHS = (70, 0, 1, 23)
LOSSY = [name for name in CODECS.names() if not codec_named(name).lossless]


def some_rows(role: TensorRole, depth: float = 0.0, width: int = 8) -> tuple[Tensor, RowLayout]:
    source = torch.Generator().manual_seed(3)
    numbers = torch.randn(sum(LENGTHS), width, generator=source)
    numbers = numbers.cumsum(0) * torch.arange(1, width + 1)  # neighbors are alike
    numbers[:, 2] = 1.25
    return numbers, RowLayout(LENGTHS, width, depth, role)


@pytest.mark.parametrize("role", TensorRole)
@pytest.mark.parametrize("name", CODECS.names())
def test_codec_equals_its_reference(name: str, role: TensorRole) -> None:
    for depth, step in ((0.0, STEPS[0]), (0.5, STEPS[1]), (0.9, STEPS[2])):
        numbers, rows = some_rows(role, depth)
        codec = codec_named(name)
        found = codec.decode(codec.encode(numbers, rows), rows)
        if name == "raw":
            assert torch.equal(found, numbers)
            return
        if isinstance(codec, Entropy) or codec.spans_layers:  # which code one layer as entropy does
            scale = codec.step_scale if isinstance(codec, Entropy) else STEP_SCALE
            wanted = loops.entropy(numbers.double().tolist(), LENGTHS, step * scale, 10)
        else:
            bits = {"int8": 8, "int4": 4, "q4": 4}[name]
            wanted = loops.affine(numbers.double().tolist(), LENGTHS, bits, 64, role.value)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32))


def test_groups_of_channels_end_with_the_head() -> None:
    source = torch.Generator().manual_seed(3)
    numbers = torch.randn(5, 80, generator=source)
    rows = RowLayout((5,), 80, 0.0, TensorRole.VALUES)
    found = codec_named("int4").decode(codec_named("int4").encode(numbers, rows), rows)
    wanted = loops.affine(numbers.double().tolist(), (5,), 4, 64, "values")
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32))


@pytest.mark.parametrize("form", FORM_NAMES)
@pytest.mark.parametrize("name", CODECS.names())
def test_every_cache_form_round_trips(name: str, form: str) -> None:
    spec = a_spec(a_layer(), a_layer(index=1))
    cache = SequenceCache(spec, form, **tiers_of(form))
    for layer in spec.layers:
        new = draw(layer, 90)
        cache.attend(
            layer.index, NewTokens(new.queries, new.keys, new.values, new.positions, Mode.APPEND)
        )
    cache.advance(90)
    state, codec = cache.state(), codec_named(name)
    tensors, result = encode_state(state, codec, name, spec)
    tensors = unpack_container(pack_container(tensors, {}))[0]
    found = decode_state(tensors, result, state_nbytes(state))
    assert found.keys() == state.keys()
    exact = {key for key in state if not key.endswith(("keys", "values"))}
    assert same_bits({key: found[key] for key in exact}, {key: state[key] for key in exact})
    if codec.lossless:
        assert same_bits(found, state)
    else:
        assert state_nbytes(tensors) < 0.6 * state_nbytes(state)
        farthest = {"int8": 0.04, "int4": 0.6, "q4": 0.6, "entropy_coarse": 2.4}.get(
            name, 1.2
        )  # of numbers within +-9
        for key in found.keys() - exact:
            assert not len(found[key]) or (found[key] - state[key]).abs().max() < farthest
    again = SequenceCache.restore(spec, found, cache.meta())
    assert again.next_position == 90 and again.lengths() == cache.lengths()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e5])
def test_unquantizable_tensors_are_stored_exactly(name: str, bad: float) -> None:
    state = {"0.keys": torch.randn(2, 12, 8), "0.values": torch.randn(2, 12, 8)}
    state["0.values"][1, 3, 4] = bad
    tensors, result = encode_state(state, codec_named(name), name, a_spec(a_layer()))
    assert set(result) == {"0.keys"}
    assert same_bits(
        {"0.values": decode_state(tensors, result, 10**6)["0.values"]},
        {"0.values": state["0.values"]},
    )
    with pytest.raises(CacheError):
        codec_named(name).encode(state["0.values"][1], RowLayout((12,), 8, 0.0, TensorRole.VALUES))


@pytest.mark.failure(number=30)
@pytest.mark.parametrize("name", LOSSY)
def test_codes_with_wrong_metadata_or_missing_tensors_are_refused(name: str) -> None:
    state = {"0.keys": torch.randn(2, 30, 8)}
    tensors, result = encode_state(state, codec_named(name), name, a_spec(a_layer()))
    how = result["0.keys"]
    for change in (
        {"lengths": [30, 31]},
        {"lengths": [-1, 61]},
        {"shape": [2, 31, 8]},
        {"shape": [2, 10**12, 8], "lengths": [10**12, 10**12]},
        {"dtype": "X"},
        {"codec": "int8" if name != "int8" else "entropy"},
        {"shape": 3},
    ):
        with pytest.raises(Damaged):
            decode_state(tensors, {"0.keys": how | change}, 10**4)
    for short in tensors:
        with pytest.raises(Damaged):
            decode_state({key: t for key, t in tensors.items() if key != short}, result, 10**4)
    with pytest.raises(Damaged):
        decode_state(tensors, {"0.positions": how}, 10**4)


@pytest.mark.failure(number=30)
def test_decompression_bomb_is_refused() -> None:
    bomb = compress(bytes(10**7))
    assert len(bomb) < 2000 and decompress(bomb, 10**7) == bytes(10**7)
    for data, size in ((bomb, 100), (bomb, 10**7 + 1), (bomb[:-9], 10**7), (b"no frame", 8)):
        with pytest.raises(Damaged):
            decompress(data, size)
