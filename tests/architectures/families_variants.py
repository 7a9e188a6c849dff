"""Families whose attention has sinks, a softcap or chunks."""

from __future__ import annotations

from architectures.families import Family, configured

HEAD = {"head_dim": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES = (
    Family(
        "Gemma 2",
        "Gemma 2",
        "sliding and full, softcap",
        "Gemma2ForCausalLM",
        configured(
            "Gemma2Config", **HEAD, **SLIDING, attn_logit_softcapping=2.0, query_pre_attn_scalar=32
        ),
    ),
    Family(
        "GPT-OSS",
        "gpt-oss-20b, gpt-oss-120b",
        "sliding and full, sinks, experts",
        "GptOssForCausalLM",
        configured("GptOssConfig", **HEAD, **SLIDING, num_local_experts=4, num_experts_per_tok=2),
    ),
    Family(
        "Llama 4",
        "Llama 4 Scout, Maverick (text)",
        "chunked and full, experts",
        "Llama4ForCausalLM",
        configured(
            "Llama4TextConfig",
            **HEAD,
            attention_chunk_size=16,
            intermediate_size_mlp=32,
            num_local_experts=2,
            no_rope_layers=[1, 0],
            floor_scale=8,
        ),
    ),
)
