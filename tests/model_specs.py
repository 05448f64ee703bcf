"""Models and layouts to draw from, and the frameworks' tensors built from whole HF tensors by NumPy alone.

The oracles follow the frameworks' own loaders (concatenate, reshape, split), not boxes. No element is zero, so
what a layout leaves out (it stays zero) shows.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from areal_hpc.config import Parallel
from areal_hpc.layout.families import logical_tensors
from areal_hpc.layout.spec import ModelSpec

Tensors = dict[str, np.ndarray]


@st.composite
def specs(draw: st.DrawFn, max_layers: int = 4) -> ModelSpec:
    """Small models of every family, with sizes that divide badly where they may."""
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3"]))
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    heads = kv_heads * draw(st.integers(1, 4))
    return ModelSpec(
        family=family,
        layers=draw(st.integers(1, max_layers)),
        hidden=draw(st.sampled_from([6, 8, 20])),
        ffn=draw(st.sampled_from([4, 12, 24])),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 6])),
        vocab=draw(st.integers(5, 300)),
        max_position=64,
        rope_theta=1e4,
        norm_eps=1e-6,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=draw(st.booleans()),
        dtype="float32",
    )


def small_spec(**changes) -> ModelSpec:
    """One fixed Llama, but for `changes`."""
    sizes = dict(family="llama", layers=1, hidden=8, ffn=12, heads=4, kv_heads=2, head_dim=2, vocab=10)
    other = dict(max_position=8, rope_theta=1e4, norm_eps=1e-6, qkv_bias=False, qk_norm=False, tied=False)
    return ModelSpec(**{**sizes, **other, "dtype": "float32", **changes})


def trainer_layouts(spec: ModelSpec, ranks: int) -> list[Parallel]:
    """Every layout of at most `ranks` ranks that the model divides over."""
    sizes = range(1, ranks + 1)
    fits = [n for n in sizes if spec.heads % n == spec.kv_heads % n == spec.ffn % n == 0]
    return [
        Parallel(dp, tp, pp)
        for tp in fits
        for pp in sizes
        for dp in sizes
        if spec.layers % pp == 0 and dp * tp * pp <= ranks
    ]


def rollout_layouts(spec: ModelSpec, ranks: int) -> list[int]:
    """Every TP size of at most `ranks` that vLLM can cut the model in."""
    kv = spec.kv_heads
    return [
        tp
        for tp in range(1, ranks + 1)
        if spec.heads % tp == spec.ffn % tp == 0
        and (kv % tp == 0 or tp % kv == 0)
        and -(-spec.vocab // 64) * 64 % tp == 0
    ]


def whole_tensors(spec: ModelSpec, seed: int) -> Tensors:
    """The model as a Hugging Face directory holds it: float32, all elements different from zero."""
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(0.5, 2, shape).astype(np.float32) for name, shape in logical_tensors(spec).items()}


def split(array: np.ndarray, parts: int, part: int, axis: int) -> np.ndarray:
    return np.split(array, parts, axis)[part]


def vocabulary(table: np.ndarray, multiple: int, tp: int, tp_rank: int) -> np.ndarray:
    """One rank's rows of the table padded with zeros."""
    padding = -table.shape[0] % multiple
    return split(np.pad(table, ((0, padding), (0, 0))), tp, tp_rank, 0)


def trainer_tensors(spec: ModelSpec, hf: Tensors, parallel: Parallel, tp_rank: int, pp_rank: int) -> Tensors:
    """What Megatron-core holds, by its names; padding rows are zero."""
    tp, pp, G, D = parallel.tp, parallel.pp, spec.kv_heads, spec.head_dim
    live: Tensors = {}
    embedding = hf["model.embed_tokens.weight"]
    if pp_rank == 0:
        live["embedding.word_embeddings.weight"] = vocabulary(embedding, tp, tp, tp_rank)
    stage = spec.layers // pp
    for local in range(stage):
        at, to = f"model.layers.{pp_rank * stage + local}", f"decoder.layers.{local}"
        live[f"{to}.input_layernorm.weight"] = hf[f"{at}.input_layernorm.weight"]
        live[f"{to}.pre_mlp_layernorm.weight"] = hf[f"{at}.post_attention_layernorm.weight"]
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            q, k, v = (hf[f"{at}.self_attn.{n}_proj.{kind}"] for n in "qkv")
            rest = q.shape[1:]
            groups = [q.reshape(G, -1, *rest), k.reshape(G, D, *rest), v.reshape(G, D, *rest)]
            fused = np.concatenate(groups, 1).reshape(-1, *rest)
            live[f"{to}.self_attention.linear_qkv.{kind}"] = split(fused, tp, tp_rank, 0)
        if spec.qk_norm:
            for n in "qk":
                live[f"{to}.self_attention.{n}_layernorm.weight"] = hf[f"{at}.self_attn.{n}_norm.weight"]
        live[f"{to}.self_attention.linear_proj.weight"] = split(hf[f"{at}.self_attn.o_proj.weight"], tp, tp_rank, 1)
        halves = [split(hf[f"{at}.mlp.{n}_proj.weight"], tp, tp_rank, 0) for n in ("gate", "up")]
        live[f"{to}.mlp.linear_fc1.weight"] = np.concatenate(halves)
        live[f"{to}.mlp.linear_fc2.weight"] = split(hf[f"{at}.mlp.down_proj.weight"], tp, tp_rank, 1)
    if pp_rank == pp - 1:
        live["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not spec.tied or pp > 1:
            head = embedding if spec.tied else hf["lm_head.weight"]
            live["output_layer.weight"] = vocabulary(head, tp, tp, tp_rank)
    return live


def rollout_tensors(spec: ModelSpec, hf: Tensors, tp: int, tp_rank: int) -> Tensors:
    """What vLLM holds, by its names; padding rows are zero."""
    live: Tensors = {"model.norm.weight": hf["model.norm.weight"]}
    for name in ("model.embed_tokens.weight",) if spec.tied else ("model.embed_tokens.weight", "lm_head.weight"):
        live[name] = vocabulary(hf[name], 64, tp, tp_rank)
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        for name in norms + (["self_attn.q_norm", "self_attn.k_norm"] if spec.qk_norm else []):
            live[f"{at}.{name}.weight"] = hf[f"{at}.{name}.weight"]
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            q, k, v = (hf[f"{at}.self_attn.{n}_proj.{kind}"] for n in "qkv")
            if tp > spec.kv_heads:  # each KV head is on tp / kv_heads neighbours
                heads = (x.reshape(spec.kv_heads, spec.head_dim, *x.shape[1:]) for x in (k, v))
                k, v = (np.repeat(x, tp // spec.kv_heads, 0).reshape(-1, *x.shape[2:]) for x in heads)
            live[f"{at}.self_attn.qkv_proj.{kind}"] = np.concatenate([split(x, tp, tp_rank, 0) for x in (q, k, v)])
        halves = [split(hf[f"{at}.mlp.{n}_proj.weight"], tp, tp_rank, 0) for n in ("gate", "up")]
        live[f"{at}.mlp.gate_up_proj.weight"] = np.concatenate(halves)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            live[f"{at}.{name}.weight"] = split(hf[f"{at}.{name}.weight"], tp, tp_rank, 1)
    return live
