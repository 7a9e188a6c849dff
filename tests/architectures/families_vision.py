"""Families with a vision tower: images are merged into the embeddings of the language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from architectures.families import TINY, Family

IMAGE = 100  # token id of an image token
SIDE, PATCH = 8, 2  # pixels of a square image, and of a patch
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def vision(
    name: str, text: str, tower: dict[str, Any], words: dict[str, Any] | None = None, **options: Any
) -> Callable[[], Any]:
    """Builder of a configuration of transformers from those of its two parts.

    Args:
        text: type of the language model.
        words: further options of the language model.
    """
    language = TINY | {"model_type": text} | (words or {})
    return lambda: getattr(transformers, name)(text_config=language, vision_config=tower, **options)


FAMILIES = (
    Family(
        "Qwen2.5-VL",
        "Qwen2.5-VL 3B to 72B",
        "full, M-RoPE, images",
        "Qwen2_5_VLForConditionalGeneration",
        vision(
            "Qwen2_5_VLConfig",
            "qwen2_5_vl_text",
            {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "patch_size": PATCH,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [0],
                "window_size": SIDE,
            },
            words={"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            image_token_id=IMAGE,
            video_token_id=101,
        ),
        note="policies that rotate keys are refused",
    ),
    Family(
        "Gemma 3 with images",
        "Gemma 3 4B, 12B, 27B",
        "sliding and full, images in both directions",
        "Gemma3ForConditionalGeneration",
        vision(
            "Gemma3Config",
            "gemma3_text",
            {"model_type": "siglip_vision_model", **TOWER},
            words={
                "head_dim": 16,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 32,
            },
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
        ),
    ),
    Family(
        "Llava",
        "Llava 1.5",
        "full, images",
        "LlavaForConditionalGeneration",
        vision(
            "LlavaConfig",
            "llama",
            {"model_type": "clip_vision_model", **TOWER, "projection_dim": 32},
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
    ),
    Family(
        "SmolVLM",
        "SmolVLM2",
        "full, images",
        "SmolVLMForConditionalGeneration",
        vision("SmolVLMConfig", "llama", {**TOWER}, image_token_id=IMAGE),
    ),
    Family(
        "Idefics3",
        "Idefics3 8B, SmolVLM Instruct",
        "full, images",
        "Idefics3ForConditionalGeneration",
        vision("Idefics3Config", "llama", {**TOWER}, image_token_id=IMAGE),
    ),
)
