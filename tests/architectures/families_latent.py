"""Families whose cache holds less than a key and a value per layer: shared layers, latents."""

from __future__ import annotations

from typing import Any

from architectures.families import Family, Status, configured

HEAD = {"head_dim": 16}
SLIDING, FULL = "sliding_attention", "full_attention"

SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "sliding_window": 8,
    "num_kv_shared_layers": 3,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
LATENT_NOTE = (
    "Policies see one head of latents; those that turn RoPE, quantize, offload or merge values "
    "alone are refused."
)

FAMILIES = (
    Family(
        "DeepSeek-V2",
        "DeepSeek-V2, V2-Lite, DeepSeek-Coder-V2",
        "latents (MLA), experts",
        "DeepseekV2ForCausalLM",
        configured(
            "DeepseekV2Config",
            **(LATENT | EXPERTS | {"q_lora_rank": None}),
            first_k_dense_replace=1,
        ),
        note=LATENT_NOTE,
    ),
    Family(
        "DeepSeek-V3",
        "DeepSeek-V3, V3.1, R1; Kimi K2, Moonlight",
        "latents (MLA), experts",
        "DeepseekV3ForCausalLM",
        configured("DeepseekV3Config", **LATENT, **EXPERTS, first_k_dense_replace=1),
        note="As DeepSeek-V2.",
    ),
    Family(
        "GLM-4.7-Flash",
        "GLM-4.7-Flash (Glm4MoeLite)",
        "latents (MLA), experts",
        "Glm4MoeLiteForCausalLM",
        configured("Glm4MoeLiteConfig", **LATENT, **EXPERTS),
        note="As DeepSeek-V2.",
    ),
    Family(
        "Mistral 4",
        "Mistral Small 4",
        "latents (MLA), experts",
        "Mistral4ForCausalLM",
        configured("Mistral4Config", **LATENT, **EXPERTS),
        note="As DeepSeek-V2.",
    ),
    Family(
        "MiniCPM3",
        "MiniCPM3-4B",
        "latents (MLA)",
        "MiniCPM3ForCausalLM",
        configured("MiniCPM3Config", **LATENT, dim_model_base=32),
        note="As DeepSeek-V2.",
    ),
    Family(
        "Youtu",
        "Youtu-LLM-2B",
        "latents (MLA)",
        "YoutuForCausalLM",
        configured("YoutuConfig", **LATENT),
        note="As DeepSeek-V2.",
    ),
    Family(
        "LongCat-Flash",
        "LongCat-Flash-Chat",
        "latents (MLA), two per layer, experts",
        "LongcatFlashForCausalLM",
        configured(
            "LongcatFlashConfig",
            **(LATENT | {"head_dim": 8}),
            num_layers=1,
            ffn_hidden_size=96,
            expert_ffn_hidden_size=32,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
        ),
        note="As DeepSeek-V2.",
    ),
    Family(
        "Kimi Linear",
        "Kimi-Linear-48B-A3B",
        "linear and latents (MLA), experts",
        "KimiLinearForCausalLM",
        configured(
            "KimiLinearConfig",
            **(LATENT | {"q_lora_rank": None}),
            layer_types=["linear_attention", FULL],
            linear_head_dim=16,
            linear_num_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        note="As DeepSeek-V2.",
    ),
    Family(
        "DeepSeek-V3.2",
        "DeepSeek-V3.2, GLM-5",
        "latents (MLA) with an indexer, experts",
        "DeepseekV32ForCausalLM",
        configured("DeepseekV32Config", **LATENT, **EXPERTS, index_head_dim=16, index_n_heads=2),
        Status.REFUSED,
        note="An indexer of the model selects the tokens that a query attends to.",
        refusal="indexer",
    ),
    Family(
        "Gemma 4",
        "Gemma 4 (text)",
        "sliding and full with wider heads, the last ones share entries",
        "Gemma4ForCausalLM",
        configured(
            "Gemma4TextConfig", **HEAD, **SHARED, global_head_dim=32, num_global_key_value_heads=1
        ),
        note="As Gemma 3n.",
    ),
    Family(
        "Gemma 3n",
        "Gemma 3n E2B, E4B (text)",
        "sliding and full, the last ones share entries",
        "Gemma3nForCausalLM",
        configured("Gemma3nTextConfig", **HEAD, **SHARED, laurel_rank=8),
        note="Scores come from the layers that hold entries; offloading and recomputing policies "
        "are refused.",
    ),
)
