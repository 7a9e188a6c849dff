"""Families with full attention and sliding windows, in every layer a cache of keys and values."""

from __future__ import annotations

from architectures.families import Family, Status, configured

HEAD = {"head_dim": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES = (
    Family(
        "Llama",
        "Llama 2, 3.x; SmolLM2, Yi, TinyLlama, DeepSeek-R1-Distill-Llama",
        "full",
        "LlamaForCausalLM",
        configured("LlamaConfig"),
    ),
    Family("Qwen2", "Qwen2, Qwen2.5, QwQ", "full", "Qwen2ForCausalLM", configured("Qwen2Config")),
    Family("Qwen3", "Qwen3 (dense)", "full", "Qwen3ForCausalLM", configured("Qwen3Config", **HEAD)),
    Family(
        "Qwen3-MoE",
        "Qwen3-30B-A3B, Qwen3-Coder",
        "full, experts",
        "Qwen3MoeForCausalLM",
        configured(
            "Qwen3MoeConfig", **HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
    ),
    Family(
        "Mistral",
        "Mistral 7B v0.2 and later, Nemo, Small, Ministral",
        "full",
        "MistralForCausalLM",
        configured("MistralConfig", sliding_window=None),
        note="Version 0.1 has a window of 4096 tokens in every layer, which no budget governs.",
    ),
    Family(
        "Mixtral",
        "Mixtral 8x7B, 8x22B",
        "full, experts",
        "MixtralForCausalLM",
        configured("MixtralConfig", **EXPERTS, sliding_window=None),
    ),
    Family("Phi-3", "Phi-3-mini-4k, Phi-4", "full", "Phi3ForCausalLM", configured("Phi3Config")),
    Family(
        "Phi-3 (long-rope)",
        "Phi-3-mini-128k, Phi-3.5, Phi-4-mini",
        "full",
        "Phi3ForCausalLM",
        configured(
            "Phi3Config",
            original_max_position_embeddings=128,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0 + n / 4 for n in range(8)],
                "long_factor": [2.0 + n for n in range(8)],
            },
        ),
        note="Texts and answers within original_max_position_embeddings (4096 tokens), where the "
        "frequencies change; a longer one is refused.",
    ),
    Family(
        "Gemma 3",
        "Gemma 3 (text)",
        "sliding and full",
        "Gemma3ForCausalLM",
        configured("Gemma3TextConfig", **HEAD, **SLIDING, query_pre_attn_scalar=32),
    ),
    Family("OLMo 2", "OLMo 2", "full", "Olmo2ForCausalLM", configured("Olmo2Config")),
    Family(
        "OLMo 3",
        "OLMo 3",
        "sliding and full",
        "Olmo3ForCausalLM",
        configured("Olmo3Config", **SLIDING),
    ),
    Family(
        "Granite",
        "Granite 3.x",
        "full",
        "GraniteForCausalLM",
        configured("GraniteConfig", attention_multiplier=0.2),
    ),
    Family(
        "SmolLM3",
        "SmolLM3",
        "full, some without RoPE",
        "SmolLM3ForCausalLM",
        configured("SmolLM3Config", no_rope_layers=[1, 0]),
    ),
    Family(
        "StarCoder2",
        "StarCoder2",
        "full",
        "Starcoder2ForCausalLM",
        configured("Starcoder2Config", sliding_window=None),
    ),
    Family(
        "Cohere",
        "Command R, Aya",
        "full",
        "CohereForCausalLM",
        configured("CohereConfig", logit_scale=1.0),
    ),
    Family(
        "Cohere 2",
        "Command R7B, Command A",
        "sliding and full, some without RoPE",
        "Cohere2ForCausalLM",
        configured("Cohere2Config", **SLIDING, logit_scale=1.0),
    ),
    Family("GLM-4", "GLM-4-0414", "full", "Glm4ForCausalLM", configured("Glm4Config", **HEAD)),
    Family(
        "GPT-NeoX", "Pythia, GPT-NeoX", "full", "GPTNeoXForCausalLM", configured("GPTNeoXConfig")
    ),
    Family(
        "GPT-2",
        "GPT-2, DistilGPT-2",
        "full, learned positions",
        "GPT2LMHeadModel",
        configured("GPT2Config", n_layer=2, n_head=4, n_embd=64, n_positions=512),
    ),
    Family(
        "Falcon",
        "Falcon 7B, 40B",
        "full",
        "FalconForCausalLM",
        configured("FalconConfig"),
        Status.REFUSED,
        note="Its attention does not go through transformers' AttentionInterface.",
        refusal="AttentionInterface",
    ),
)
