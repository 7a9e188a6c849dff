"""C kernels in the form of every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from larder.ops import c_library, few_rows_linear, ragged_attention
from larder.ops.cpu import decode_attention, decoder_layer
from without_kernels import reference

pytestmark = pytest.mark.skipif(c_library() is None, reason="no C compiler at installation")

# `enum instruction_set` of c_library.h; where a processor lacks one, the next lower is taken.
INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "avx512_bf16", "matrix_units")
BATCHES = (1, 2, 8, 9, 15, 16, 17, 31, 32, 33, 48, 127, 128, 129)
ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 1e-5}  # of a number, relative
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
by_dtype = pytest.mark.parametrize("dtype", list(ROUNDING))


@pytest.fixture(params=range(len(INSTRUCTION_SETS)), ids=INSTRUCTION_SETS, autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    library = c_library()
    assert library is not None
    library.larder_limit_instruction_set(request.param)
    yield INSTRUCTION_SETS[request.param]
    library.larder_limit_instruction_set(len(INSTRUCTION_SETS) - 1)


def random_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size", "outputs"), [(32, 16), (160, 112)])
@by_dtype
def test_row_is_bitwise_independent_of_the_batch(
    size: int, outputs: int, dtype: torch.dtype
) -> None:
    rows = random_numbers(max(BATCHES) + 1, size).to(dtype)
    rows[3, ::7], rows[4, 5], rows[5] = float("nan"), float("inf"), rows[5] * 1e-38
    weight = random_numbers(outputs, size, seed=1).to(dtype)
    alone = torch.cat([few_rows_linear(row, weight) for row in rows.split(1)])
    expected = rows.float() @ weight.float().T
    torch.testing.assert_close(
        alone.float(), expected, rtol=ROUNDING[dtype], atol=1e-4, equal_nan=True
    )
    for first in (0, 1):
        for count in BATCHES:
            own = slice(first, first + count)
            beside = few_rows_linear(rows[own], weight)
            assert torch.equal(beside.view(BITS[dtype]), alone[own].view(BITS[dtype])), own


@pytest.mark.parametrize("head_dim", [16, 48])
@by_dtype
def test_layer_output_is_bitwise_independent_of_the_batch(
    head_dim: int, dtype: torch.dtype
) -> None:
    sizes = decoder_layer.LayerSizes(
        hidden=64, inner=96, heads=4, kv_heads=2, head_dim=head_dim, epsilon=1e-5
    )
    tensors = layer_tensors(sizes, dtype)
    layer = decoder_layer.LayerPointers.of(tensors)
    states, angles = random_numbers(33, 64).to(dtype), random_numbers(33, head_dim, seed=1)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)

    def run(rows: slice) -> list[torch.Tensor]:
        call = decoder_layer.LayerRows(sizes, states[rows], cosines[rows], sines[rows])
        queries, keys, values = call.attention_inputs(layer)
        call.finish_layer(layer, queries)
        return [*(own.transpose(0, 1) for own in (queries, keys, values)), call.states]

    together = run(slice(None))
    for row in range(33):
        for beside, alone in zip(together, run(slice(row, row + 1)), strict=True):
            assert torch.equal(beside[row], alone[0])


def layer_tensors(
    sizes: decoder_layer.LayerSizes, dtype: torch.dtype
) -> decoder_layer.LayerTensors:
    """Random weights of a layer with norms of heads and biases."""
    wide, narrow = (count * sizes.head_dim for count in (sizes.heads, sizes.kv_heads))
    shapes = {
        "input_norm": (sizes.hidden,),
        "output_norm": (sizes.hidden,),
        "query": (wide, sizes.hidden),
        "key": (narrow, sizes.hidden),
        "value": (narrow, sizes.hidden),
        "output": (sizes.hidden, wide),
        "gate": (sizes.inner, sizes.hidden),
        "up": (sizes.inner, sizes.hidden),
        "down": (sizes.hidden, sizes.inner),
        "query_bias": (wide,),
        "key_bias": (narrow,),
        "value_bias": (narrow,),
        "output_bias": (sizes.hidden,),
        "query_norm": (sizes.head_dim,),
        "key_norm": (sizes.head_dim,),
    }
    return decoder_layer.LayerTensors(
        **{
            name: (0.1 * random_numbers(*shape, seed=number)).to(dtype)
            for number, (name, shape) in enumerate(shapes.items())
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 17, 64, 80])
def test_decode_attention_reads_only_rows_of_its_heads(head_dim: int, dtype: torch.dtype) -> None:
    lengths = torch.tensor([1, 15, 16, 17, 65, 513])
    starts = (lengths + 1).cumsum(0) - lengths  # a row without numbers before each head
    stored = int((lengths + 1).sum()) + 1
    keys, values = (random_numbers(stored, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    for side in (keys, values):
        side[starts - 1], side[-1] = float("nan"), float("nan")
    queries = random_numbers(12, 1, head_dim)
    out, lse = decode_attention.decode_attention(queries, keys, values, starts, lengths, 0.2)
    expected_out, expected_lse = reference(ragged_attention)(
        queries, keys.float(), values.float(), starts, lengths, 0.2
    )
    torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
