"""Families whose cache holds less than a key and a value per layer: shared layers, latents."""

from __future__ import annotations

from architectures.families import Family, configured

HEAD = {"head_dim": 16}
SLIDING, FULL = "sliding_attention", "full_attention"

FAMILIES = (
    Family(
        "Gemma 3n",
        "Gemma 3n E2B, E4B (text)",
        "sliding and full, the last ones share entries",
        "Gemma3nForCausalLM",
        configured(
            "Gemma3nTextConfig",
            **HEAD,
            num_hidden_layers=6,
            layer_types=[SLIDING, FULL] * 3,
            sliding_window=8,
            num_kv_shared_layers=3,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=8,
            laurel_rank=8,
        ),
        note="Scores come from the layers that hold entries; offloading and recomputing policies "
        "are refused.",
    ),
)
