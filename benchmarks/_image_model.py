"""Model of random weights that reads images, in a folder: Llava over the bundled tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

SIDE, PATCH = 32, 8  # pixels of a square image, and of a patch
IMAGE_TOKEN = "<image>"
HIDDEN, HEADS, LAYERS = 64, 4, 2


def save_image_model(tokenizer: Any, folder: Path) -> None:
    """Save a model and its processor.

    Args:
        tokenizer: of transformers; a token that stands for images is added.
    """
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS}
    sizes["num_attention_heads"] = HEADS
    text = {"model_type": "llama", "num_key_value_heads": 2, "vocab_size": len(tokenizer)} | sizes
    tower = {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH} | sizes
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config={**text, "eos_token_id": tokenizer.eos_token_id},
        vision_config=tower,
        image_token_index=image_token,
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(str(folder))
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(str(folder))
