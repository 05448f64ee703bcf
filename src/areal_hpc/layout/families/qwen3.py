"""Qwen3 dense: RMS norms on the heads of Q and K, no biases. Source: transformers Qwen3ForCausalLM."""

from __future__ import annotations

from typing import Any

from areal_hpc.config import require
from areal_hpc.layout.families import Attention, decoder_tensors

ARCHITECTURE = "Qwen3ForCausalLM"
logical_tensors = decoder_tensors


def attention(raw: dict[str, Any], at: str) -> Attention:
    bias = raw.get("attention_bias", False)
    require(not bias, f"{at}: attention_bias", bias, "false (a Qwen3 with it has a bias on o_proj too)")
    return Attention(
        kv_heads=raw.get("num_key_value_heads", 32), head_dim=raw.get("head_dim", 128), qkv_bias=False, qk_norm=True
    )
