"""Prompts with images for the families with a vision tower, built without a processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from architectures.families_vision import FAMILIES, IMAGE, PATCH, SIDE
from model_runs import some_ids
from tiny_models import SPREAD

# Image tokens of an image, by family.
IMAGE_TOKENS = {"Qwen2.5-VL": 4, "Gemma 3 with images": 4, "Llava": 16, "SmolVLM": 4, "Idefics3": 4}
NAMES = tuple(IMAGE_TOKENS)
PATCHES = SIDE // PATCH  # along a side


@dataclass(frozen=True)
class Prompt:
    """Text with images: numbers of text tokens, and None for an image; both are random."""

    parts: tuple[int | None, ...]
    seed: int = 0

    @property
    def num_images(self) -> int:
        return sum(part is None for part in self.parts)

    def ids(self, name: str) -> list[int]:
        """Token ids, with image tokens."""
        texts = (
            [IMAGE] * IMAGE_TOKENS[name] if part is None else some_text(part, self.seed + number)
            for number, part in enumerate(self.parts)
        )
        return [token for text in texts for token in text]

    def pixels(self) -> list[Tensor]:
        """Pixels of each image [3, SIDE, SIDE]."""
        drawn = torch.Generator().manual_seed(self.seed)
        return [torch.randn(3, SIDE, SIDE, generator=drawn) for _ in range(self.num_images)]


def some_text(tokens: int, seed: int) -> list[int]:
    """Text tokens: neither image tokens nor special ones."""
    return [3 + token % 90 for token in some_ids(tokens, seed=seed)]


@cache
def model_of(name: str) -> Any:
    """Tiny model of a family, whose images matter: no weights are all zero."""
    model = next(family for family in FAMILIES if family.name == name).model()
    drawn = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        if not weight.any():
            weight.data.normal_(std=SPREAD, generator=drawn)
    return model


def inputs_of(name: str, *prompts: Prompt, seen: Prompt | None = None) -> dict[str, Any]:
    """Arguments of `generate`, as the processor of a family makes them; rows are padded left.

    Args:
        seen: an earlier part of a single prompt, whose images a cache holds already.
    """
    rows = [prompt.ids(name) for prompt in prompts]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    skipped = seen.num_images if seen else 0
    images = [prompt.pixels()[skipped:] for prompt in prompts]
    given = {"input_ids": ids, "attention_mask": mask}
    if not any(images):
        return given
    return given | IMAGE_INPUTS[name](ids, images)


def _qwen(ids: Tensor, images: Sequence[list[Tensor]]) -> dict[str, Tensor]:
    drawn = [image for row in images for image in row]
    # Each patch has its pixels twice, as two frames.
    patches = [
        image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).permute(1, 2, 0, 3, 4).flatten(0, 1)
        for image in drawn
    ]
    pixels = torch.cat(patches)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
    grids = torch.tensor([[1, PATCHES, PATCHES]] * len(drawn))
    return {
        "pixel_values": pixels,
        "image_grid_thw": grids,
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def _gemma(ids: Tensor, images: Sequence[list[Tensor]]) -> dict[str, Tensor]:
    drawn = torch.stack([image for row in images for image in row])
    return {"pixel_values": drawn, "token_type_ids": (ids == IMAGE).long()}


def _llava(ids: Tensor, images: Sequence[list[Tensor]]) -> dict[str, Tensor]:
    return {"pixel_values": torch.stack([image for row in images for image in row])}


def _smol(ids: Tensor, images: Sequence[list[Tensor]]) -> dict[str, Tensor]:
    most = max(map(len, images))
    absent = torch.zeros(3, SIDE, SIDE)
    rows = [torch.stack(row + [absent] * (most - len(row))) for row in images]
    return {"pixel_values": torch.stack(rows)}


IMAGE_INPUTS = {
    "Qwen2.5-VL": _qwen,
    "Gemma 3 with images": _gemma,
    "Llava": _llava,
    "SmolVLM": _smol,
    "Idefics3": _smol,
}
