"""Qwen2 and Qwen2.5: biases on Q, K and V, none on O. Source: transformers Qwen2ForCausalLM."""

from __future__ import annotations

from typing import Any

from areal_hpc.layout.families import Attention, decoder_tensors

ARCHITECTURE = "Qwen2ForCausalLM"
logical_tensors = decoder_tensors


def attention(raw: dict[str, Any], at: str) -> Attention:
    heads = raw["num_attention_heads"]
    return Attention(
        kv_heads=raw.get("num_key_value_heads", 32),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        qkv_bias=True,
        qk_norm=False,
    )
