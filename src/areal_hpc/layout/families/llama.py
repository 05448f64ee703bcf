"""Llama (2, 3, SmolLM2, ...): grouped queries, no biases. Source: transformers LlamaForCausalLM."""

from __future__ import annotations

from typing import Any

from areal_hpc.config import require
from areal_hpc.layout.families import Attention, decoder_tensors

ARCHITECTURE = "LlamaForCausalLM"
logical_tensors = decoder_tensors


def attention(raw: dict[str, Any], at: str) -> Attention:
    bias = raw.get("attention_bias", False)
    require(not bias, f"{at}: attention_bias", bias, "false (a Llama with it has a bias on o_proj too)")
    heads = raw["num_attention_heads"]
    return Attention(
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        qkv_bias=False,
        qk_norm=False,
    )
