"""Values of GGUF blocks equal those of transformers and gguf, rounded to bfloat16, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers.integrations.gguf.dequant")  # not in older transformers

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize  # noqa: E402  # pyright: ignore
from transformers.integrations.gguf.dequant import GGML_BLOCK  # noqa: E402
from transformers.integrations.gguf.dequant import dequantize as by_transformers  # noqa: E402

from larder.ops.cpu import gguf_blocks  # noqa: E402

BLOCKS, NUM_BLOCKS = gguf_blocks.BLOCKS, 700


def random_blocks(kind: int, seed: int) -> torch.Tensor:
    """Blocks of random bytes."""
    source = torch.Generator().manual_seed(seed)
    _, width = BLOCKS[kind]
    return torch.randint(0, 256, (NUM_BLOCKS, width), dtype=torch.uint8, generator=source)


def expected_values(stored: torch.Tensor, kind: int) -> torch.Tensor:
    if kind in GGML_BLOCK:
        return by_transformers(stored.flatten(), kind).to(torch.bfloat16)
    with np.errstate(invalid="ignore"):  # random scales are infinite or no numbers, too
        values = dequantize(stored.numpy(), GGMLQuantizationType(kind))
    return torch.from_numpy(values).flatten().to(torch.bfloat16)


@pytest.fixture(autouse=True)
def library() -> None:
    if not gguf_blocks.supports(2):
        pytest.skip("the C kernels were not compiled: no C compiler was found at installation")


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_have_sizes_of_the_format(kind: int) -> None:
    assert BLOCKS[kind] == GGML_QUANT_SIZES[GGMLQuantizationType(kind)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", BLOCKS)
def test_values_equal_transformers_to_the_bit(kind: int, seed: int) -> None:
    stored = random_blocks(kind, seed)
    values = torch.empty(NUM_BLOCKS * BLOCKS[kind][0], dtype=torch.bfloat16)
    gguf_blocks.dequantize_blocks(stored.flatten(), kind, values)
    expected = expected_values(stored, kind)
    numbers = ~expected.isnan()
    assert torch.equal(values.isnan(), ~numbers)
    assert torch.equal(values[numbers].view(torch.int16), expected[numbers].view(torch.int16))
    assert numbers.float().mean() > 0.7


def test_values_of_another_count_are_refused() -> None:
    with pytest.raises(ValueError, match="do not hold 33 values"):
        gguf_blocks.dequantize_blocks(
            torch.zeros(18, dtype=torch.uint8), 2, torch.empty(33).bfloat16()
        )
    with pytest.raises(ValueError, match="must be bfloat16"):
        gguf_blocks.dequantize_blocks(torch.zeros(18, dtype=torch.uint8), 2, torch.empty(32))


def test_other_types_are_not_supported() -> None:
    assert not gguf_blocks.supports(0) and not gguf_blocks.supports(20)
