"""A rollout replica as a layout: what a rank of a vLLM tensor-parallel group holds.

Parameter names and shapes are those of `model.named_parameters()` before a kernel packs them.
Sources: vLLM 0.32, `QKVParallelLinear` (all queries of the rank, then its keys, then its values;
KV heads are replicated when there are fewer than TP ranks), `MergedColumnParallelLinear` (gate,
then up), `VocabParallelEmbedding` (vocabulary padded to a multiple of 64, then cut evenly).
"""

from __future__ import annotations

from areal_hpc.config import ConfigError, require
from areal_hpc.layout.boxes import Box, Piece
from areal_hpc.layout.families import logical_tensors
from areal_hpc.layout.spec import ModelSpec

VOCAB_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE

# Hugging Face module -> (vLLM's fused module, its place in there)
FUSED = {
    "self_attn.q_proj": ("self_attn.qkv_proj", 0),
    "self_attn.k_proj": ("self_attn.qkv_proj", 1),
    "self_attn.v_proj": ("self_attn.qkv_proj", 2),
    "mlp.gate_proj": ("mlp.gate_up_proj", 0),
    "mlp.up_proj": ("mlp.gate_up_proj", 1),
}
COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
WHOLE = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)


def padded_vocab(spec: ModelSpec, tp: int) -> int:
    """Rows of the whole vocabulary as vLLM holds it; the rows from `spec.vocab` on never travel."""
    rows = -(-spec.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    require(rows % tp == 0, "rollout.backend: vocabulary padded by vLLM", rows, f"a multiple of t={tp}")
    return rows


def check_rollout(spec: ModelSpec, tp: int) -> None:
    """Raises ConfigError naming the numbers when vLLM cannot cut the model in `tp` parts."""
    at = f"rollout.backend: t{tp} for a model of"
    require(spec.heads % tp == 0, f"{at} heads", spec.heads, f"a multiple of t={tp}")
    require(spec.ffn % tp == 0, f"{at} intermediate size", spec.ffn, f"a multiple of t={tp}")
    divides = spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0
    require(divides, f"{at} KV heads", spec.kv_heads, f"a multiple or a divisor of t={tp}")
    padded_vocab(spec, tp)


def kv_heads(spec: ModelSpec, tp: int) -> int:
    """KV heads that a rank holds: neighbours share one where there are fewer than ranks."""
    return max(1, spec.kv_heads // tp)


def rollout_pieces(spec: ModelSpec, tp: int, tp_rank: int) -> list[Piece]:
    """The pieces of one rank, the same in every replica. Raises ConfigError when the model does not divide."""
    check_rollout(spec, tp)
    return [_piece(spec, tp, tp_rank, name, shape) for name, shape in _held(spec, tp, tp_rank)]


def rollout_shapes(spec: ModelSpec, tp: int, tp_rank: int) -> dict[str, tuple[int, ...]]:
    """Shape of every live parameter of the rank, vocabulary padding included, by vLLM's name."""
    vocabulary = (padded_vocab(spec, tp) // tp, spec.hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
    for piece in rollout_pieces(spec, tp, tp_rank):
        end = tuple(map(int.__add__, piece.at, piece.box.shape))
        shapes[piece.param] = tuple(map(max, shapes.get(piece.param, end), end))
    shapes["model.embed_tokens.weight"] = vocabulary
    if not spec.tied:
        shapes["lm_head.weight"] = vocabulary
    return shapes


def _held(spec: ModelSpec, tp: int, tp_rank: int) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors of which the rank holds anything: its share of the vocabulary may be all padding."""
    empty = tp_rank * (padded_vocab(spec, tp) // tp) >= spec.vocab
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    return [(name, shape) for name, shape in logical_tensors(spec).items() if not (empty and name in vocabulary)]


def _piece(spec: ModelSpec, tp: int, tp_rank: int, name: str, shape: tuple[int, ...]) -> Piece:
    rest, tail = (0,) * (len(shape) - 1), shape[1:]

    def rows(param: str, at: int, start: int, count: int) -> Piece:
        return Piece(param, (at, *rest), Box(name, (start, *rest), (start + count, *tail)))

    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        count = padded_vocab(spec, tp) // tp
        start = tp_rank * count
        return rows(name, 0, start, min(count, spec.vocab - start))
    if name == "model.norm.weight":
        return rows(name, 0, 0, shape[0])
    prefix, number, suffix = name.removeprefix("model.").split(".", 2)
    module, kind = suffix.rsplit(".", 1)
    if module in FUSED:
        fused, place = FUSED[module]
        param = f"model.{prefix}.{number}.{fused}.{kind}"
        if fused == "mlp.gate_up_proj":
            count = spec.ffn // tp
            return rows(param, place * count, tp_rank * count, count)
        queries, keys = spec.heads // tp * spec.head_dim, kv_heads(spec, tp) * spec.head_dim
        if place == 0:
            return rows(param, 0, tp_rank * queries, queries)
        replicas = max(1, tp // spec.kv_heads)  # neighbours share a KV head
        return rows(param, queries + (place - 1) * keys, tp_rank // replicas * keys, keys)
    if module in COLUMNS and kind == "weight":
        count = shape[1] // tp
        return Piece(name, (0, 0), Box(name, (0, tp_rank * count), (shape[0], (tp_rank + 1) * count)))
    if module in WHOLE:
        return rows(name, 0, 0, shape[0])
    raise ConfigError(f"{name}: a tensor of the model's family that the vLLM layout has no entry for")
