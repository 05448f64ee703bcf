"""Model families: which logical tensors a model of that family has.

One small file per family, found by its name; every file offers the same:

- `ARCHITECTURE`: the name in the config's `architectures`.
- `attention(raw, at)`: what differs between families in the attention, read from the raw
  config; raises ConfigError for what the family allows and this code does not support.
- `logical_tensors(spec)`: Hugging Face names and full shapes, in the model's order.

To add one, add a file here. Where its tensors bear names that the tables of `megatron.py`
and `vllm.py` know, nothing else changes; a new kind of tensor is one entry in each table.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from areal_hpc.config import ConfigError

if TYPE_CHECKING:
    from areal_hpc.layout.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Attention:
    """What a family decides about its attention: sizes in heads and elements."""

    kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool


def names() -> list[str]:
    """The families, by file name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def family(name: str) -> ModuleType:
    return import_module(f"{__name__}.{name}")


def family_of(architecture: str, at: str) -> str:
    """The family of a Hugging Face architecture. Raises ConfigError naming the known ones."""
    known = {family(name).ARCHITECTURE: name for name in names()}
    if architecture not in known:
        raise ConfigError(f"{at}: architectures={architecture}: expected one of {', '.join(sorted(known))}")
    return known[architecture]


def logical_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> full shape of every tensor, in the model's order; tied: no lm_head.weight."""
    return family(spec.family).logical_tensors(spec)


def decoder_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The tensors of a dense decoder with RMS norms, gated MLP and rotary positions."""
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab, spec.hidden)}
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = (spec.hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = (rows, spec.hidden)
            if spec.qkv_bias:
                tensors[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        if spec.qk_norm:
            tensors[f"{at}.self_attn.q_norm.weight"] = (spec.head_dim,)
            tensors[f"{at}.self_attn.k_norm.weight"] = (spec.head_dim,)
        tensors[f"{at}.self_attn.o_proj.weight"] = (spec.hidden, q)
        tensors[f"{at}.post_attention_layernorm.weight"] = (spec.hidden,)
        tensors[f"{at}.mlp.gate_proj.weight"] = (spec.ffn, spec.hidden)
        tensors[f"{at}.mlp.up_proj.weight"] = (spec.ffn, spec.hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = (spec.hidden, spec.ffn)
    tensors["model.norm.weight"] = (spec.hidden,)
    if not spec.tied:
        tensors["lm_head.weight"] = (spec.vocab, spec.hidden)
    return tensors
