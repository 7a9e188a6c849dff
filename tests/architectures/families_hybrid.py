"""Families with recurrent layers beside attention: convolution, linear attention, state space."""

from __future__ import annotations

from typing import Any

from architectures.families import Family, Status, configured

HEAD = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR, FULL = "linear_attention", "full_attention"
THREE: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
# Sizes of gated delta rules, by the names of Qwen.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Sizes of state-space layers, by the names of Bamba, Granite and Falcon-H1.
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}

FAMILIES = (
    Family(
        "LFM2",
        "LFM2-350M to 2.6B",
        "convolution and full",
        "Lfm2ForCausalLM",
        configured("Lfm2Config", num_hidden_layers=4, layer_types=["conv", FULL, "conv", FULL]),
    ),
    Family(
        "LFM2-MoE",
        "LFM2-8B-A1B",
        "convolution and full, experts",
        "Lfm2MoeForCausalLM",
        configured(
            "Lfm2MoeConfig",
            **EXPERTS,
            num_hidden_layers=3,
            layer_types=["conv", FULL, "conv"],
            num_dense_layers=1,
        ),
    ),
    Family(
        "Qwen3-Next",
        "Qwen3-Next-80B-A3B",
        "linear and full, experts",
        "Qwen3NextForCausalLM",
        configured(
            "Qwen3NextConfig",
            **HEAD,
            **THREE,
            **EXPERTS,
            **DELTA,
            shared_expert_intermediate_size=32,
        ),
    ),
    Family(
        "Qwen3.5",
        "Qwen3.5 (text, dense)",
        "linear and full",
        "Qwen3_5ForCausalLM",
        configured("Qwen3_5TextConfig", **HEAD, **THREE, **DELTA),
    ),
    Family(
        "OLMo Hybrid",
        "OLMo Hybrid",
        "linear and full",
        "OlmoHybridForCausalLM",
        configured("OlmoHybridConfig", **THREE, **{**DELTA, "linear_num_key_heads": 4}),
    ),
    Family(
        "Granite hybrid",
        "Granite 4.0 Micro, Tiny, Small",
        "state space and full, experts",
        "GraniteMoeHybridForCausalLM",
        configured(
            "GraniteMoeHybridConfig",
            **MAMBA,
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=64,
        ),
    ),
    Family(
        "Nemotron-H",
        "Nemotron-H, Nemotron Nano 2",
        "state space, full, feed-forward",
        "NemotronHForCausalLM",
        configured(
            "NemotronHConfig",
            **HEAD,
            layers_block_type=[LINEAR, "mlp", FULL, LINEAR],
            num_hidden_layers=4,
            mamba_num_heads=4,
            mamba_head_dim=32,
            n_groups=1,
            ssm_state_size=16,
            chunk_size=8,
            time_step_min=1e-6,
        ),
        note="In transformers `time_step_min` holds in texts but not in single tokens, here too.",
    ),
    Family(
        "Bamba",
        "Bamba 9B",
        "state space and full",
        "BambaForCausalLM",
        configured("BambaConfig", **MAMBA, num_hidden_layers=3, attn_layer_indices=[1]),
    ),
    Family(
        "Falcon-H1",
        "Falcon-H1",
        "state space beside full",
        "FalconH1ForCausalLM",
        configured("FalconH1Config", **HEAD, **MAMBA, mamba_d_ssm=128),
    ),
    Family(
        "Jamba",
        "Jamba 1.5, 1.6",
        "state space and full, experts",
        "JambaForCausalLM",
        configured(
            "JambaConfig",
            num_hidden_layers=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            use_mamba_kernels=False,
        ),
        Status.REFUSED,
        note="In transformers it drops the state of a text that is read in parts.",
        refusal="recurrent",
    ),
    Family(
        "MiniMax",
        "MiniMax-Text-01, M1",
        "linear and full, experts",
        "MiniMaxForCausalLM",
        configured(
            "MiniMaxConfig",
            **HEAD,
            **THREE,
            num_local_experts=2,
            num_experts_per_tok=1,
            block_size=8,
        ),
        Status.REFUSED,
        note="In transformers it has a cache of its own.",
        refusal="does not take a DynamicCache",
    ),
)
