"""Range coder of transform components, and attention that decodes them as it goes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import draw, layer_options
from cache_stores import attend_held
from larder.cache import TransformLayer, TransformTables
from larder.core import LOG_COUNT, CacheError, Coder, LayerSpec, Ledger, Plan, TransformSpec
from larder.ops import (
    ESCAPE,
    MOST_TABLE,
    TIER_ROW,
    TOTAL,
    c_library,
    classes_of,
    frequencies,
    rotate,
    rotate_by_table,
    rotation_table,
)
from larder.ops import transform_coder as coding
from larder.ops.cpu import range_coder, transform_attention
from larder.ops.symbol_model import symbol_model
from references import transform as reference
from transforms import some_tables

CASES = [(1, 3.0), (7, 0.5), (33, 0.1), (64, 30.0), (70, 1e-5), (100, 0.02)]  # entries, step

AVX512_BF16, MATRIX_UNITS = 3, 4  # of `enum instruction_set` of c_library.h

needs_kernel = pytest.mark.skipif(c_library() is None, reason="the C kernels were not compiled")


def a_block(entries: int, step: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Components, tiers and deviations, with some numbers far beyond the latter."""
    source = np.random.default_rng(entries)
    deviations = np.exp(source.normal(size=16)).astype(np.float32)
    numbers = source.standard_t(10, size=(entries, 16)) * deviations
    if step > 1e-3:
        numbers[0, 3], numbers[entries // 2, 5] = 1e5, -3e4
    tiers = source.integers(-2, 3, entries).astype(np.int8)
    return numbers.astype(np.float32), tiers, deviations


def test_code_slots_sum_to_the_total() -> None:
    model = symbol_model()
    for row in (0, 17, 40, 60, len(model.starts) - 2, TIER_ROW):
        counts = np.diff(model.starts[row].astype(int))
        assert counts.sum() == TOTAL and counts.min() >= 0
        for code in counts.nonzero()[0]:
            mine = model.slots[row] == code
            assert sorted(model.ranks[row][mine]) == list(range(counts[code]))
    assert (model.starts[:TIER_ROW, ESCAPE] < TOTAL).all()


@pytest.mark.parametrize(("entries", "step"), CASES)
def test_words_equal_the_reference(entries, step) -> None:
    numbers, tiers, deviations = a_block(entries, step)
    payload = coding.encoded(numbers, tiers, deviations, step, Coder.ENTROPY)
    symbols = coding.quantized(numbers, tiers, step)
    model, bases = symbol_model(), classes_of(deviations, step)
    words = payload.view(np.uint16).tolist()
    found = reference.decoded_symbols(words, entries, bases.tolist(), model)
    assert found == (symbols.tolist(), tiers.tolist())
    back, back_tiers = coding.decoded(payload, entries, deviations, step, Coder.ENTROPY)
    assert back_tiers.tolist() == tiers.tolist()
    scales = (step * 2.0 ** tiers.astype(np.float64)).astype(np.float32)
    assert np.array_equal(back, symbols.astype(np.float32) * scales[:, None])


@needs_kernel
@pytest.mark.slow  # numba compiles
@pytest.mark.parametrize(("entries", "step"), CASES)
def test_numba_coder_equals_c(monkeypatch, entries, step) -> None:
    numbers, tiers, deviations = a_block(entries, step)
    given = numbers, tiers, deviations, step, Coder.ENTROPY
    payload, size = coding.encoded(*given), coding.coded_bytes(*given)
    compiled = coding.decoded(payload, entries, *given[2:])
    monkeypatch.setattr(range_coder, "c_library", lambda: None)
    assert np.array_equal(coding.encoded(*given), payload)
    assert coding.coded_bytes(*given) == pytest.approx(size, rel=1e-6)
    for own, other in zip(coding.decoded(payload, entries, *given[2:]), compiled, strict=True):
        assert np.array_equal(own, other)


@pytest.mark.parametrize(("entries", "step"), CASES)
def test_byte_count_without_encoding_is_a_close_upper_bound(entries, step) -> None:
    given = *a_block(entries, step), step, Coder.ENTROPY
    size, counted = len(coding.encoded(*given)), coding.coded_bytes(*given)
    assert size <= counted <= size + 4 * min(entries, range_coder.LANES)


@needs_kernel
@pytest.mark.parametrize("limit", range(MATRIX_UNITS + 1))
@pytest.mark.parametrize(("entries", "step"), [*CASES, (300, 1.0)])
def test_every_instruction_set_decodes_the_same_words(entries, step, limit) -> None:
    numbers, tiers, deviations = a_block(entries, step)
    given = numbers, tiers, deviations, step, Coder.ENTROPY
    payload, library = coding.encoded(*given), c_library()
    symbols = coding.quantized(numbers, tiers, step)
    assert library is not None
    try:
        library.larder_limit_instruction_set(limit)
        back, back_tiers = coding.decoded(payload, entries, *given[2:])
        size = coding.coded_bytes(*given)
        library.larder_limit_instruction_set(0)
        assert coding.coded_bytes(*given) == size
    finally:
        library.larder_limit_instruction_set(MATRIX_UNITS)
    assert back_tiers.tolist() == tiers.tolist()
    scales = (step * 2.0 ** tiers.astype(np.float64)).astype(np.float32)
    assert np.array_equal(back, symbols.astype(np.float32) * scales[:, None])


@pytest.mark.parametrize("kept", [0, 0.5])
def test_damaged_words_are_decoded_within_bounds(kept) -> None:
    numbers, tiers, deviations = a_block(70, 0.1)
    payload = coding.encoded(numbers, tiers, deviations, 0.1, Coder.ENTROPY)
    damaged = np.random.default_rng(1).integers(0, 256, len(payload)).astype(np.uint8)
    least = 4 * range_coder.LANES
    few = damaged[: least + int(kept * (len(damaged) - least)) // 2 * 2]
    found, found_tiers = coding.decoded(few, 70, deviations, 0.1, Coder.ENTROPY)
    assert found.shape == numbers.shape and abs(found_tiers).max() <= 2


@pytest.mark.extended
def test_damaged_block_of_fixed_widths_is_refused() -> None:
    numbers, tiers, deviations = a_block(70, 0.1)
    payload = coding.encoded(numbers, tiers, deviations, 0.1, Coder.WIDTHS)
    exceptions = int(payload[:4].view(np.int32)[0])
    assert exceptions > 0
    changes = ((4, 0xFF), (4, payload[4] ^ 1), (0, payload[0] ^ 1), (3, 0x80))
    damaged = [payload[:-1], payload[:2], payload[:20]]
    for place, byte in (*changes, (len(payload) - 8 * exceptions + 3, 0x7F)):
        damaged.append(payload.copy())
        damaged[-1][place] = byte
    for own in damaged:
        with pytest.raises(CacheError, match="build the cache again"):
            coding.decoded(own, 70, deviations, 0.1, Coder.WIDTHS)


@pytest.mark.slow  # numba compiles
def test_numba_decodes_few_words_as_c(monkeypatch) -> None:
    deviations = a_block(70, 0.1)[2]
    few = np.arange(6, dtype=np.uint8)
    expected = coding.decoded(few, 70, deviations, 0.1, Coder.ENTROPY)
    monkeypatch.setattr(range_coder, "c_library", lambda: None)
    for own, other in zip(
        coding.decoded(few, 70, deviations, 0.1, Coder.ENTROPY), expected, strict=True
    ):
        assert np.array_equal(own, other)


@pytest.mark.parametrize("first", [0, 700, MOST_TABLE - 3, -4])
def test_keys_rotated_by_the_table_equal_rotated_keys(first: int) -> None:
    vectors, positions = torch.randn(2, 9, 20), torch.arange(first, first + 9)
    radians = frequencies(16, 10_000.0)
    expected = rotate(vectors, positions, radians)
    got = rotate_by_table(vectors, positions, tuple(radians.tolist()))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_rotation_table_equals_the_function() -> None:
    radians = frequencies(64, 1e4)
    table = rotation_table(1500, tuple(radians.tolist()))
    vectors = torch.randn(1, 3, 64)
    positions = torch.tensor([0, 700, 1499])
    cosine, sine = table[positions].unbind(1)
    one, other = vectors[0].chunk(2, 1)
    turned = torch.cat([one * cosine - other * sine, other * cosine + one * sine], 1)
    assert torch.equal(turned, rotate(vectors, positions, radians)[0])
    assert len(rotation_table(10, tuple(radians.tolist()))) >= 1500


def a_wide_layer(head_dim: int, turned: int) -> LayerSpec:
    radians = tuple(frequencies(turned, 1e4).tolist())
    return LayerSpec(0, 6, 2, head_dim, head_dim**-0.5, None, radians)


def a_coded_layer(
    layer: LayerSpec,
    dtype: torch.dtype,
    step: float,
    coder: Coder = Coder.ENTROPY,
    block: int = 64,
) -> TransformLayer:
    """Layer whose first head codes most of 150 entries, in all tiers."""
    spec, ledger = TransformSpec(coder, sinks=1, recent=2, block=block), Ledger((LOG_COUNT,))
    count = 150
    device = torch.device("cpu")
    store = TransformLayer(
        layer,
        layer_options(dtype, device=device, ledger=ledger, transform=spec),
        some_tables(layer),
    )
    new = draw(layer, count)
    store.append(new.keys.to(dtype), new.values.to(dtype), new.positions)
    lengths = count - 1, 40
    kept = torch.cat([torch.arange(1, count), count + torch.arange(0, 80, 2)])
    grades = torch.arange(len(kept)) % 5 + 1
    grades[:3] = 0
    store.apply(Plan(kept, lengths, grades=grades.to(torch.int8), step=step))
    return store


def looped(store: TransformLayer, queries: Tensor, biased: bool) -> Tensor:
    entries, layer = store.entries(), store.layer
    outs = list[Tensor]()
    for query_head in range(layer.query_heads):
        head = query_head // layer.group
        bias = entries.columns[LOG_COUNT][entries.rows(head)] * biased / layer.scaling
        wide = torch.cat([entries.head_keys(head).float(), bias[:, None]], 1).tolist()
        values = entries.head_values(head).float().tolist()
        for query in queries[query_head].tolist():
            outs.append(
                torch.tensor(reference.attention([*query, 1.0], wide, values, layer.scaling))
            )
    return torch.stack(outs).view(layer.query_heads, -1, layer.head_dim)


@needs_kernel
@pytest.mark.parametrize(("head_dim", "turned"), [(64, 64), (32, 32), (96, 32)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("coder", transform_attention.CODERS)
def test_attention_equals_the_reference_over_decoded_entries(
    monkeypatch, head_dim, turned, dtype, tolerance, coder
) -> None:
    layer = a_wide_layer(head_dim, turned)
    store = a_coded_layer(layer, dtype, 0.3, coder)
    store.write_columns({LOG_COUNT: torch.arange(189.0) / 50})
    calls = list[int]()
    attend = transform_attention.transform_attention
    monkeypatch.setattr(
        transform_attention, "transform_attention", lambda *a: calls.append(1) or attend(*a)
    )
    new = draw(layer, 2, 150)
    found = attend_held(store, replace(new, queries=new.queries))
    expected = looped(store, new.queries, biased=True)
    assert calls == [1]
    assert float((found - expected).norm() / expected.norm()) < tolerance


@needs_kernel
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
def test_matrix_units_equal_dot_products(monkeypatch, head_dim) -> None:
    monkeypatch.setattr(TransformTables, "byte_keys", None)
    layer = a_wide_layer(head_dim, 32)
    store, new = a_coded_layer(layer, torch.bfloat16, 0.3), draw(layer, 2, 150)
    library = c_library()
    assert library is not None
    found = list[Tensor]()
    try:
        for limit in (AVX512_BF16, MATRIX_UNITS):
            library.larder_limit_instruction_set(limit)
            found.append(attend_held(store, new))
    finally:
        library.larder_limit_instruction_set(MATRIX_UNITS)
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 2e-5


@needs_kernel
@pytest.mark.parametrize("coder", transform_attention.CODERS)
def test_results_do_not_depend_on_threads(coder) -> None:
    layer = a_wide_layer(64, 64)
    store, new = a_coded_layer(layer, torch.float32, 0.3, coder), draw(layer, 1, 150)
    former = torch.get_num_threads()
    try:
        found = list[Tensor]()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(attend_held(store, new))
    finally:
        torch.set_num_threads(former)
    assert torch.equal(*found)


@needs_kernel
@pytest.mark.parametrize("coder", transform_attention.CODERS)
def test_attention_over_symbols_beyond_bfloat16_equals_the_reference(coder) -> None:
    layer = a_wide_layer(64, 64)
    fine, new = a_coded_layer(layer, torch.bfloat16, 1e-4, coder), draw(layer, 1, 150)
    expected = looped(fine, new.queries, biased=False)
    assert float((attend_held(fine, new) - expected).norm() / expected.norm()) < 1e-2


def test_byte_matrices_hold_the_numbers_and_repay_the_offsets_of_symbols() -> None:
    matrices = torch.randn(2, 8, 16) * torch.rand(16)
    found, symbols = transform_attention.byte_matrices(matrices), torch.randint(-127, 128, (8,))
    upper, lower = found.numbers.int().transpose(3, 4).flatten(2, 3).unbind(1)
    plain = (upper + lower / 256) * found.scales[:, None]
    assert float(((plain - matrices).abs() / found.scales[:, None]).max()) <= 1 / 256
    for fours in (0, 1, 2):
        behind, all_of_them = symbols + 128, symbols + 128
        sums = found.firsts[:, fours] + (behind[: 4 * fours, None] * lower[:, : 4 * fours]).sum(1)
        keys = (sums >> 8) + found.firsts[:, -1] + (all_of_them[:, None] * upper).sum(1)
        held = upper.double()
        held[:, : 4 * fours] += lower[:, : 4 * fours] / 256
        assert float((keys - (symbols[:, None] * held).sum(1)).abs().max()) <= 0.5


def test_components_with_lower_bytes_keep_the_noise_of_the_others_below_its_bound() -> None:
    found = transform_attention.byte_matrices(torch.linalg.qr(torch.randn(2, 64, 64))[0])
    ratios = torch.logspace(1.5, -1, 64).repeat(2, 1)
    lowers = found.lowers(ratios)
    assert (lowers.diff(dim=1) <= 0).all() and 0 < int(lowers[0, 0]) < 16
    for tier in range(-2, 3):
        for head, fours in enumerate(lowers[:, tier + 2].tolist()):
            squares = (ratios[head].double() / 2.0**tier).square() * found.noise[head].double()
            assert float(squares[4 * fours :].sum()) <= transform_attention.MOST_NOISE
            assert (
                not fours or float(squares[4 * fours - 4 :].sum()) > transform_attention.MOST_NOISE
            )


@needs_kernel
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
@pytest.mark.parametrize("step", [0.3, 0.02])
def test_keys_from_bytes_are_near_those_from_bfloat16(monkeypatch, head_dim, step) -> None:
    layer, found = a_wide_layer(head_dim, 32), list[Tensor]()
    library = c_library()
    assert library is not None
    try:
        library.larder_limit_instruction_set(AVX512_BF16)
        for _ in range(2):
            torch.manual_seed(3)
            store, new = a_coded_layer(layer, torch.bfloat16, step), draw(layer, 2, 150)
            found.append(attend_held(store, new))
            monkeypatch.setattr(TransformTables, "byte_keys", None)
    finally:
        library.larder_limit_instruction_set(MATRIX_UNITS)
    distance = float((found[0] - found[1]).norm() / found[1].norm())
    assert distance < 2e-2  # as far as bfloat16 may be from the reference
    assert distance > 0 or library.larder_instruction_set() < AVX512_BF16
