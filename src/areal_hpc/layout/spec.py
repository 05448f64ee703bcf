"""ModelSpec: what the layouts, the trainer and the planner know of a model.

Read once from a Hugging Face directory's config.json (and generation_config.json for the
ids that end a sample), with nothing but json: no transformers, torch or vLLM. What is not
supported is refused here, by key, before any model is built. Sizes are in elements.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.config import ConfigError, require
from areal_hpc.layout import families


@dataclass(frozen=True)
class ModelSpec:
    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    dtype: str
    rope_scaling: None = None
    eos_ids: tuple[int, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)


def read_spec(path: str | Path) -> ModelSpec:
    """The model in the Hugging Face directory `path`.

    Raises ConfigError naming file and key: a file or key that is missing, a value that is
    not supported (architecture, activation, rope scaling, sliding window, biases, quantised weights).
    """
    at = str(Path(path) / "config.json")
    raw = _json(Path(at))
    architectures = raw.get("architectures") or ["(none)"]
    name = families.family_of(architectures[0], at)
    for key in SIZES:
        value = raw.get(key)
        require(isinstance(value, int) and value > 0, f"{at}: {key}", value, "a whole number of at least 1")
    _refuse(raw, at)
    attention = families.family(name).attention(raw, at)
    heads = raw["num_attention_heads"]
    divides = attention.kv_heads > 0 and heads % attention.kv_heads == 0
    require(divides, f"{at}: num_key_value_heads", attention.kv_heads, f"a divisor of num_attention_heads={heads}")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return ModelSpec(
        family=name,
        layers=raw["num_hidden_layers"],
        hidden=raw["hidden_size"],
        ffn=raw["intermediate_size"],
        heads=heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        rope_theta=_rope_theta(raw, at),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        qkv_bias=attention.qkv_bias,
        qk_norm=attention.qk_norm,
        tied=bool(raw.get("tie_word_embeddings", False)),
        dtype=dtype.removeprefix("torch."),
        eos_ids=_eos_ids(Path(path), raw),
        raw=raw,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected the directory of a Hugging Face model") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


def _refuse(raw: dict[str, Any], at: str) -> None:
    """What some model of these families has and neither side of this code supports."""

    def only(key: str, default: Any, expected: Any) -> None:
        require(raw.get(key, default) == expected, f"{at}: {key}", raw.get(key, default), json.dumps(expected))

    only("hidden_act", "silu", "silu")
    only("mlp_bias", False, False)
    only("use_sliding_window", False, False)
    only("quantization_config", None, None)
    kinds = set(raw.get("layer_types") or ["full_attention"])
    require(kinds == {"full_attention"}, f"{at}: layer_types", sorted(kinds), "full_attention in every layer")
    if "use_sliding_window" not in raw:  # Qwen2 and Qwen3 name a window and switch it off by use_sliding_window
        only("sliding_window", None, None)


def _rope_theta(raw: dict[str, Any], at: str) -> float:
    """The base of the rotary positions: transformers 5 keeps it in rope_parameters, 4 at the top level."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    require(kind == "default", f"{at}: {key}.rope_type", kind, "default; scaled rotary positions are not supported")
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    require(partial == 1, f"{at}: partial_rotary_factor", partial, "1: rotary positions on whole heads")
    return float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))


def _eos_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a sample: those of config.json and generation_config.json, as in vLLM."""
    ids: set[int] = set()
    generation = path / "generation_config.json"
    for source in (raw, _json(generation) if generation.exists() else {}):
        value = source.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))
