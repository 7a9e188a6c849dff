"""Bit planes of transform components: what is held, in how many bytes, and attention to it."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from builders import a_layer, draw
from cache_stores import attend_held
from larder.cache import TransformTables
from larder.core import CacheError, Coder, TransformSpec
from larder.ops import NARROW_CODES, WIDE_CODES, c_library, plane_coder
from larder.ops import transform_coder as coding
from ops.test_transform_attention import a_coded_layer, a_wide_layer, looped
from references import planes as reference

needs_kernel = pytest.mark.skipif(
    plane_coder.plane_library() is None, reason="the C kernels were not compiled"
)
LEAST, MOST = -(2**31), 2**31 - 1
AVX512_BF16, MATRIX_UNITS = 3, 4  # of `enum instruction_set` of c_library.h
SHAPES = [(1, 1), (7, 16), (8, 3), (63, 64), (64, 128), (65, 70), (130, 130), (256, 32)]
KINDS = "spread", "sparse", "some far", "any"

Block = tuple[np.ndarray, np.ndarray]


def a_block(entries: int, width: int, kind: str, seed: int = 0) -> Block:
    """Symbols and tiers."""
    source = np.random.default_rng([entries, width, seed])
    scales = np.exp(source.normal(size=width) * (0.5 if kind == "sparse" else 2))
    symbols = np.rint(source.standard_t(5, (entries, width)) * scales)
    if kind == "sparse":
        symbols[:, ::2] *= source.random((entries, len(scales[::2]))) < 0.05
    if kind == "some far":
        symbols[source.random(symbols.shape) < 1e-3] = -128
        symbols.flat[[0, -1]] = LEAST, MOST
    if kind == "any":
        symbols = source.integers(LEAST, MOST, symbols.shape, endpoint=True)
    tiers = source.integers(-2, 3, entries).astype(np.int8)
    return symbols.clip(LEAST, MOST).astype(np.int32), tiers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("entries", "width"), SHAPES)
def test_decoded_symbols_equal_those_that_were_coded(entries, width, kind) -> None:
    symbols, tiers = a_block(entries, width, kind)
    payload = plane_coder.encode(symbols, tiers)
    assert reference.decoded(payload.tolist(), entries, width) == (
        symbols.tolist(),
        tiers.tolist(),
    )
    numbers, found = plane_coder.decode(payload, entries, width, 0.5)
    assert np.array_equal(found, tiers)
    scales = (0.5 * 2.0 ** tiers.astype(np.float64)).astype(np.float32)
    assert np.array_equal(numbers, symbols.astype(np.float32) * scales[:, None])
    assert plane_coder.is_whole(payload, entries, width)


def test_bytes_of_a_block_hand_values() -> None:
    """Saved caches hold these bytes: where they change, so does the name of the coder's version."""
    symbols = np.zeros((10, 3), np.int32)
    symbols[:, 0] = [5, -3, 0, 2, 0, -1, 1, 4, -6, 0]
    symbols[3, 1], symbols[9, 2] = -100, 70000
    tiers = np.array([0, 0, -2, 1, 0, 0, 2, 0, 0, 0], np.int8)
    payload = plane_coder.encode(symbols, tiers)
    # Rows are entries 2, 0, 1, 4, 5, 7, 8, 9, 3, 6: their tiers, in planes, come first.
    assert payload[:6].tolist() == [0b1000, 0, 0b10111011, 0b11, 0b1000000, 0]
    assert payload[6:16].tolist() == [25, 0, 0, 0, 1, 0, 1, 0, 5, 0]  # bytes, lists, codes
    assert payload[16:19].tolist() == [64 + 8, 0, 256 - 100]
    assert payload[19:25].tolist() == [128 + 7, 0, 112, 17, 1, 0]
    assert payload[25:27].tolist() == [0b01110110, 0b11]  # rows that are not 0
    levels = "1101110111101011101010"
    signs = "0110100"
    bits = "".join(f"{byte:08b}"[::-1] for byte in payload[27:].tolist())
    assert bits == levels + signs + "000"


def test_bytes_of_many_codes_are_those_of_saved_caches() -> None:
    scales = np.round(2 ** np.linspace(-3, 12, 128))
    rows = np.arange(130)[:, None] * 7919 % 257 - 128
    symbols = (rows * scales // 64).astype(np.int32)
    symbols[:64] = symbols[:64].clip(-127, 127)
    payload = plane_coder.encode(symbols, (np.arange(130) // 64 - 1).astype(np.int8))
    assert sha256(payload.tobytes()).hexdigest()[:16] == "a901893b8393ed97"


@given(st.lists(st.integers(LEAST, MOST) | st.integers(-300, 300), min_size=1, max_size=150))
def test_any_numbers_are_held(symbols) -> None:
    block = np.array(symbols, np.int32)[:, None], np.zeros(len(symbols), np.int8)
    payload = plane_coder.encode(*block)
    numbers, _ = plane_coder.decode(payload, len(symbols), 1, 1.0)
    assert np.array_equal(numbers, block[0].astype(np.float32))


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("entries", "width"), SHAPES)
def test_bytes_and_numbers_without_the_kernel_are_the_same(
    monkeypatch, entries, width, kind
) -> None:
    block = a_block(entries, width, kind)
    payload = plane_coder.encode(*block)
    compiled = plane_coder.decode(payload, entries, width, 0.5)
    numbers = compiled[0]
    size = plane_coder.count_bytes(numbers, block[1], 0.5)
    monkeypatch.setattr(plane_coder, "c_library", lambda: None)
    assert np.array_equal(plane_coder.encode(*block), payload)
    for own, other in zip(plane_coder.decode(payload, entries, width, 0.5), compiled, strict=True):
        assert np.array_equal(own, other)
    assert plane_coder.count_bytes(numbers, block[1], 0.5) == size
    assert plane_coder.is_whole(payload, entries, width)


@needs_kernel
@pytest.mark.parametrize("limit", range(MATRIX_UNITS + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_every_instruction_set_reads_and_writes_the_same_bytes(kind, limit) -> None:
    block, library = a_block(200, 128, kind), c_library()
    payload = plane_coder.encode(*block)
    expected = plane_coder.decode(payload, 200, 128, 0.5)
    size = plane_coder.count_bytes(expected[0], block[1], 0.5)
    assert library is not None
    try:
        library.larder_limit_instruction_set(limit)
        assert np.array_equal(plane_coder.encode(*block), payload)
        for own, other in zip(plane_coder.decode(payload, 200, 128, 0.5), expected, strict=True):
            assert np.array_equal(own, other)
        assert plane_coder.count_bytes(expected[0], block[1], 0.5) == size
    finally:
        library.larder_limit_instruction_set(MATRIX_UNITS)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize(("entries", "width"), SHAPES)
def test_counted_bytes_are_those_of_the_code(entries, width, kind) -> None:
    symbols, tiers = a_block(entries, width, kind)
    symbols = symbols.clip(-(2**30), 2**30)
    numbers = symbols.astype(np.float32) * 2.0 ** (tiers[:, None] - 1.0)
    given = numbers.astype(np.float32), tiers, np.ones(width), 0.5, Coder.PLANES
    assert coding.coded_bytes(*given) == len(coding.encoded(*given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("entries", "width"), SHAPES)
def test_bits_of_components_are_what_a_block_holds_beside_heads(entries, width, kind) -> None:
    symbols, tiers = a_block(entries, width, kind)
    bits, groups = plane_coder.component_bits(symbols, tiers), -(-entries // plane_coder.ROWS)
    assert bits.shape == (width,)
    heads = int(plane_coder.least_bytes(np.array([entries]), width)[0])
    left = 8 * (len(plane_coder.encode(symbols, tiers)) - heads) - int(bits.sum())
    assert 0 <= left < 8 * groups  # the last bits of a group fill their byte


@pytest.mark.parametrize(("codes", "last"), [(NARROW_CODES, 4.5), (WIDE_CODES, 30)])
def test_every_code_is_chosen_somewhere(codes, last) -> None:
    source, chosen = np.random.default_rng(3), set[int]()
    scales = 2.0 ** np.linspace(-6, last, 128)
    for freedom in (1.5, 3, 10, 100):
        symbols = np.rint(source.standard_t(freedom, (64, 128)) * scales).clip(LEAST, MOST)
        if codes is NARROW_CODES:
            symbols = symbols.clip(-127, 127)
        block = symbols.astype(np.int32), np.zeros(64, np.int8)
        group = plane_coder.encode(*block)[3 * 8 :]
        assert bool(group[3] & 0x80) is (codes is WIDE_CODES)
        chosen |= {*(group[8:72] & 15).tolist(), *(group[8:72] >> 4).tolist()}
    assert chosen == set(range(16))


def test_damaged_bytes_are_refused_and_decoded_within_bounds() -> None:
    symbols, tiers = a_block(130, 64, "some far")
    payload = plane_coder.encode(symbols, tiers)
    source, head = np.random.default_rng(1), 3 * (8 + 8 + 1)  # tiers, then the first group
    damaged = [payload[:-1], payload[: head + 1], payload[:3], np.append(payload, np.uint8(0))]
    for place in range(head, head + 8):
        damaged += [payload.copy() for _ in range(2)]
        damaged[-2][place] ^= 1
        damaged[-1][place] ^= 128
    assert not any(plane_coder.is_whole(own, 130, 64) for own in damaged)
    for place in source.integers(head, len(payload), 50):
        damaged.append(payload.copy())
        damaged[-1][place] ^= 1 << source.integers(8)
    damaged += [source.integers(0, 256, len(payload)).astype(np.uint8) for _ in range(20)]
    for own in damaged:
        numbers, found = plane_coder.decode(own, 130, 64, 1.0)
        assert numbers.shape == symbols.shape and abs(found).max() <= 2


@needs_kernel
@pytest.mark.parametrize("kind", ["near", "far"])
def test_damaged_bytes_are_judged_alike_without_the_kernel(monkeypatch, kind) -> None:
    symbols, tiers = a_block(70, 16, "some far" if kind == "far" else "spread")
    payload = plane_coder.encode(symbols, tiers)
    source, damaged = np.random.default_rng(2), list[np.ndarray]()
    for place in range(0, len(payload), 3):
        damaged.append(payload.copy())
        damaged[-1][place] ^= 1 << source.integers(8)
    found = [plane_coder.is_whole(own, 70, 16) for own in damaged]
    monkeypatch.setattr(plane_coder, "c_library", lambda: None)
    assert [plane_coder.is_whole(own, 70, 16) for own in damaged] == found
    assert 0 < sum(found) < len(found)


@needs_kernel
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize("step", [0.3, 0.02])
@pytest.mark.parametrize("block", [64, 149])
def test_attention_to_bytes_is_near_the_reference(head_dim, step, block) -> None:
    layer = a_wide_layer(head_dim, 32)
    store = a_coded_layer(layer, torch.bfloat16, step, Coder.PLANES, block)
    new = draw(layer, 2, 150)
    found, expected = attend_held(store, new), looped(store, new.queries, biased=False)
    assert float((found - expected).norm() / expected.norm()) < 2e-2


def test_heads_wider_than_bit_planes_hold_are_refused() -> None:
    spec = TransformSpec(coder=Coder.PLANES)
    with pytest.raises(CacheError, match="514 components.*holds 512 at most"):
        TransformTables.load(replace(a_layer(), head_dim=514), spec)
    with pytest.raises(CacheError, match="larder model calibrate"):
        TransformTables.load(replace(a_layer(), head_dim=512), spec)
