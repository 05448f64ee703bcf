"""The trainer as a layout: what a rank of a Megatron-core GPTModel holds.

Parameter names are those of `GPTModel.named_parameters()` on that pipeline stage, layers
numbered from 0 on each stage. Sources: megatron-core 0.16, `SelfAttention` (linear_qkv holds,
per query group, the group's queries, then its key, then its value), `MLP` (linear_fc1 holds the
gate's shard, then the up projection's), `get_transformer_layer_offset` (even split), `GPTModel`
(tied embeddings: the last of several stages holds a copy as output_layer.weight).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from areal_hpc.config import ConfigError, Parallel, require
from areal_hpc.layout.boxes import Box, Piece
from areal_hpc.layout.families import logical_tensors
from areal_hpc.layout.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Hugging Face suffix in a layer -> Megatron suffix
LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.q_proj.weight": "self_attention.linear_qkv.weight",
    "self_attn.k_proj.weight": "self_attention.linear_qkv.weight",
    "self_attn.v_proj.weight": "self_attention.linear_qkv.weight",
    "self_attn.q_proj.bias": "self_attention.linear_qkv.bias",
    "self_attn.k_proj.bias": "self_attention.linear_qkv.bias",
    "self_attn.v_proj.bias": "self_attention.linear_qkv.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate_proj.weight": "mlp.linear_fc1.weight",
    "mlp.up_proj.weight": "mlp.linear_fc1.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}


def padded_vocab(spec: ModelSpec, tp: int) -> int:
    """Rows of the whole vocabulary as the trainer holds it: the next multiple of tp.

    The rows from `spec.vocab` on are in no logical tensor and never travel; the objective masks them.
    """
    return -(-spec.vocab // tp) * tp


def check_trainer(spec: ModelSpec, parallel: Parallel) -> None:
    """Raises ConfigError naming the numbers when the model does not divide over the layout."""
    tp, pp = parallel.tp, parallel.pp
    at = f"actor.backend: {parallel} for a model of"
    require(spec.heads % tp == 0, f"{at} heads", spec.heads, f"a multiple of t={tp}")
    require(spec.ffn % tp == 0, f"{at} intermediate size", spec.ffn, f"a multiple of t={tp}")
    require(spec.kv_heads % tp == 0, f"{at} KV heads", spec.kv_heads, f"a multiple of t={tp}; choose a smaller t")
    require(spec.layers % pp == 0, f"{at} layers", spec.layers, f"a multiple of p={pp}: stages are even")


def trainer_pieces(
    spec: ModelSpec,
    parallel: Parallel,
    tp_rank: int,
    pp_rank: int,
    *,
    copies: bool = False,
) -> list[Piece]:
    """The pieces of a trainer rank, the same for all its DP peers.

    `copies` adds the tied embedding that the last of several stages holds as output_layer.weight:
    it must be loaded, and is never a source. Raises ConfigError when the model
    does not divide over the layout.
    """
    check_trainer(spec, parallel)
    stage = spec.layers // parallel.pp
    pieces = []
    for name, shape in logical_tensors(spec).items():
        if name.startswith("model.layers."):
            number, suffix = name.removeprefix("model.layers.").split(".", 1)
            owner, local = divmod(int(number), stage)
            if owner == pp_rank:
                param = f"decoder.layers.{local}.{_layer_param(suffix)}"
                pieces += _layer_pieces(spec, parallel.tp, tp_rank, name, suffix, param, shape)
            continue
        for param, owner in _outer_params(name, parallel.pp, spec.tied and copies):
            if owner == pp_rank:
                pieces += _rows(spec, parallel.tp, tp_rank, name, param, shape)
    return pieces


def trainer_shapes(spec: ModelSpec, parallel: Parallel, tp_rank: int, pp_rank: int) -> dict[str, tuple[int, ...]]:
    """Shape of every live parameter of the rank, padding and copies included, by Megatron's name."""
    shapes: dict[str, tuple[int, ...]] = {}
    vocabulary = (padded_vocab(spec, parallel.tp) // parallel.tp, spec.hidden)
    if pp_rank == 0:
        shapes["embedding.word_embeddings.weight"] = vocabulary
    for piece in trainer_pieces(spec, parallel, tp_rank, pp_rank, copies=True):
        end = tuple(map(int.__add__, piece.at, piece.box.shape))
        shapes[piece.param] = tuple(map(max, shapes.get(piece.param, end), end))
    if pp_rank == parallel.pp - 1 and (parallel.pp > 1 or not spec.tied):
        shapes["output_layer.weight"] = vocabulary
    if pp_rank == 0:
        shapes["embedding.word_embeddings.weight"] = vocabulary
    return shapes


def _layer_param(suffix: str) -> str:
    if suffix not in LAYER:
        raise ConfigError(f"{suffix}: a tensor of the model's family that the Megatron layout has no entry for")
    return LAYER[suffix]


def _outer_params(name: str, pp: int, copies: bool) -> Iterator[tuple[str, int]]:
    """(parameter, pipeline stage) of a tensor outside the layers."""
    if name == EMBEDDING:
        yield "embedding.word_embeddings.weight", 0
        if copies and pp > 1:
            yield "output_layer.weight", pp - 1
    elif name == HEAD:
        yield "output_layer.weight", pp - 1
    elif name == "model.norm.weight":
        yield "decoder.final_layernorm.weight", pp - 1
    else:
        raise ConfigError(f"{name}: a tensor of the model's family that the Megatron layout has no entry for")


def _rows(spec: ModelSpec, tp: int, tp_rank: int, name: str, param: str, shape: tuple[int, ...]) -> list[Piece]:
    """Vocabulary rows of one TP rank without the padding, or all of a norm."""
    if len(shape) == 1:
        return [Piece(param, (0,), Box(name, (0,), shape))]
    rows = padded_vocab(spec, tp) // tp
    start, stop = min(tp_rank * rows, shape[0]), min((tp_rank + 1) * rows, shape[0])
    return [Piece(param, (0, 0), Box(name, (start, 0), (stop, shape[1])))] if start < stop else []


def _layer_pieces(
    spec: ModelSpec, tp: int, tp_rank: int, name: str, suffix: str, param: str, shape: tuple[int, ...]
) -> list[Piece]:
    """The part of a layer's tensor that one TP rank holds."""
    rest = (0,) * (len(shape) - 1)

    def rows(at: int, start: int, count: int) -> Piece:
        return Piece(param, (at, *rest), Box(name, (start, *rest), (start + count, *shape[1:])))

    module, kind = suffix.rsplit(".", 2)[-2:]
    if module in ("q_proj", "k_proj", "v_proj"):
        groups, queries = spec.kv_heads // tp, spec.heads // spec.kv_heads * spec.head_dim
        stride = queries + 2 * spec.head_dim
        at, count = {
            "q_proj": (0, queries),
            "k_proj": (queries, spec.head_dim),
            "v_proj": (queries + spec.head_dim, spec.head_dim),
        }[module]
        return [rows(g * stride + at, (tp_rank * groups + g) * count, count) for g in range(groups)]
    if module in ("gate_proj", "up_proj"):
        count = spec.ffn // tp
        return [rows(0 if module == "gate_proj" else count, tp_rank * count, count)]
    if module in ("o_proj", "down_proj") and kind == "weight":
        count = shape[1] // tp
        return [Piece(param, (0, 0), Box(name, (0, tp_rank * count), (shape[0], (tp_rank + 1) * count)))]
    return [rows(0, 0, math.prod(shape[:1]))]
