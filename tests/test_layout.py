"""Layout arithmetic against plain NumPy on whole tensors: trainer, rollout, flat intervals and files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_specs import (
    rollout_layouts,
    rollout_tensors,
    small_spec,
    specs,
    trainer_layouts,
    trainer_tensors,
    whole_tensors,
)

from areal_hpc.config import ConfigError, Parallel
from areal_hpc.layout import extents
from areal_hpc.layout.boxes import Box, Piece, flat_boxes, whole
from areal_hpc.layout.families import logical_tensors, names
from areal_hpc.layout.megatron import trainer_pieces, trainer_shapes
from areal_hpc.layout.spec import ModelSpec, read_spec
from areal_hpc.layout.vllm import rollout_pieces, rollout_shapes

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "float32",
}


def read(tmp_path: Path, raw: dict, generation: dict | None = None) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(tmp_path)


def fill(shapes: dict[str, tuple[int, ...]], pieces: list[Piece], hf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The live tensors that the pieces describe, zero where no piece lies."""
    live = {param: np.zeros(shape, np.float32) for param, shape in shapes.items()}
    for piece in pieces:
        region = live[piece.param][piece.region]
        assert not region.any(), f"{piece.param}: two pieces overlap at {piece.at}"
        region[...] = hf[piece.box.name][piece.box.within(whole(piece.box.name, hf[piece.box.name].shape))]
    return live


def assert_same(live: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert live.keys() == expected.keys()
    for param, array in expected.items():
        np.testing.assert_array_equal(live[param], array, param)


@given(specs(), st.data())
def test_trainer_pieces_fill_what_megatron_holds(spec: ModelSpec, data: st.DataObject):
    hf = whole_tensors(spec, 0)
    parallel = data.draw(st.sampled_from(trainer_layouts(spec, 12)))
    for pp_rank in range(parallel.pp):
        for tp_rank in range(parallel.tp):
            pieces = trainer_pieces(spec, parallel, tp_rank, pp_rank, copies=True)
            live = fill(trainer_shapes(spec, parallel, tp_rank, pp_rank), pieces, hf)
            assert_same(live, trainer_tensors(spec, hf, parallel, tp_rank, pp_rank))


@given(specs(), st.data())
def test_rollout_pieces_fill_what_vllm_holds(spec: ModelSpec, data: st.DataObject):
    hf = whole_tensors(spec, 1)
    tp = data.draw(st.sampled_from(rollout_layouts(spec, 8)))
    for tp_rank in range(tp):
        live = fill(rollout_shapes(spec, tp, tp_rank), rollout_pieces(spec, tp, tp_rank), hf)
        assert_same(live, rollout_tensors(spec, hf, tp, tp_rank))


@given(specs(), st.data())
def test_trainer_sources_cover_each_tensor_once(spec: ModelSpec, data: st.DataObject):
    """Without copies, one DP replica holds every element exactly once but for tensors that all TP ranks hold."""
    parallel = data.draw(st.sampled_from(trainer_layouts(spec, 8)))
    counts = {name: np.zeros(shape, int) for name, shape in logical_tensors(spec).items()}
    for pp_rank in range(parallel.pp):
        for tp_rank in range(parallel.tp):
            for box in (piece.box for piece in trainer_pieces(spec, parallel, tp_rank, pp_rank)):
                counts[box.name][box.within(whole(box.name, counts[box.name].shape))] += 1
    for name, count in counts.items():
        assert (count == (parallel.tp if "norm" in name else 1)).all(), name


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (Parallel(1, 4, 1), ["KV heads=2", "t=4"]),
        (Parallel(1, 3, 1), ["heads=4", "t=3"]),
        (Parallel(1, 1, 2), ["layers=1", "p=2"]),
    ],
)
def test_trainer_layouts_that_do_not_divide(parallel: Parallel, said: list[str]):
    with pytest.raises(ConfigError) as error:
        trainer_pieces(small_spec(), parallel, 0, 0)
    assert all(text in str(error.value) for text in said), error.value


@pytest.mark.parametrize(
    ("tp", "changes", "said"),
    [
        (3, {}, ["heads=4", "t=3"]),
        (3, {"heads": 6}, ["KV heads=2", "t=3"]),
        (3, {"heads": 6, "kv_heads": 3}, ["vocabulary padded by vLLM=64", "t=3"]),
    ],
)
def test_rollout_layouts_that_do_not_divide(tp: int, changes: dict, said: list[str]):
    with pytest.raises(ConfigError) as error:
        rollout_pieces(small_spec(**changes), tp, 0)
    assert all(text in str(error.value) for text in said), error.value


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_flat_boxes(shape: list[int], data: st.DataObject):
    size = int(np.prod(shape))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    array = np.arange(size).reshape(shape)
    parts = list(flat_boxes(tuple(shape), start, stop))
    assert len(parts) <= 2 * len(shape) - 1
    taken = [array[tuple(map(slice, low, high))].ravel() for low, high in parts]
    np.testing.assert_array_equal(np.concatenate(taken) if taken else array.ravel()[:0], np.arange(start, stop))


def test_clip_of_a_piece():
    piece = Piece("fused", (4, 0), Box("q", (10, 0), (14, 6)))
    assert piece.clip((5, 2), (7, 4)) == Piece("fused", (5, 2), Box("q", (11, 2), (13, 4)))
    assert piece.clip((0, 0), (4, 6)) is None


# files


def dataset_file(shapes: list[tuple[int, ...]], gaps: list[int]) -> tuple[list[extents.FileTensor], np.ndarray]:
    """Float32 datasets one after the other with gaps between, and the file's bytes."""
    tensors, at = [], 0
    for number, (shape, gap) in enumerate(zip(shapes, gaps)):
        tensors.append(extents.FileTensor(f"t{number}", shape, 4, at + gap))
        at = tensors[-1].stop
    return tensors, np.random.default_rng(0).integers(0, 256, at, np.uint8)


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6),
    st.lists(st.integers(0, 5).map(lambda n: 4 * n), min_size=6, max_size=6),
    st.integers(1, 7),
)
def test_writers_extents_hold_every_element_once(shapes, gaps, writers):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "BLOCK_BYTES", 64)
        tensors, data = dataset_file(shapes, gaps)
        start, stop = extents.data_range(tensors)
        owned = extents.writer_extents(tensors, writers)
        flat = [extent for part in owned for extent in part]
        assert len(owned) == writers and all(len(part) <= 1 for part in owned)
        assert [low for low, _ in flat] == [start, *(high for _, high in flat[:-1])] and flat[-1][1] == stop
        assert all((low - start) % 64 == 0 for low, _ in flat)
        whole_file = {t.name: data[t.offset : t.stop].view(np.float32).reshape(t.shape) for t in tensors}
        seen = {name: np.zeros(array.shape, int) for name, array in whole_file.items()}
        for low, high in flat:
            for box, at in extents.extent_boxes(tensors, low, high):
                where = box.within(whole(box.name, whole_file[box.name].shape))
                stored = data[at : at + box.size * 4]
                np.testing.assert_array_equal(whole_file[box.name][where].ravel().view(np.uint8), stored)
                assert low <= at and at + stored.nbytes <= high
                seen[box.name][where] += 1
        assert all((count == 1).all() for count in seen.values())


def test_writers_extents_at_full_size():
    block = extents.BLOCK_BYTES
    tensors = [extents.FileTensor("a", (block,), 4, 2048), extents.FileTensor("b", (3,), 4, 2048 + 4 * block)]
    assert extents.writer_extents(tensors, 2) == [
        [(2048, 2048 + 2 * block)],
        [(2048 + 2 * block, 2048 + 4 * block + 12)],
    ]
    assert extents.writer_extents([], 2) == [[], []]
    assert list(extents.grid(5, 5 + block + 1)) == [(5, 5 + block), (5 + block, 6 + block)]


def test_extents_refuse():
    a = extents.FileTensor("a", (4,), 4, 0)
    with pytest.raises(ValueError, match="b starts at byte 8, inside a"):
        extents.writer_extents([a, extents.FileTensor("b", (4,), 4, 8)], 1)
    with pytest.raises(ValueError, match="cut an element of a"):
        extents.extent_boxes([a], 0, 6)
    with pytest.raises(ValueError, match="writers=0"):
        extents.writer_extents([a], 0)


# spec


def test_spec_of_every_family(tmp_path: Path):
    assert names() == ["llama", "qwen2", "qwen3"]
    spec = read(tmp_path, QWEN2, {"eos_token_id": [7, 2]})
    assert (spec.family, spec.layers, spec.hidden, spec.ffn, spec.head_dim) == ("qwen2", 4, 32, 48, 8)
    assert (spec.rope_theta, spec.tied, spec.qkv_bias, spec.qk_norm, spec.eos_ids) == (5000, True, True, False, (2, 7))
    old = {key: value for key, value in QWEN2.items() if key not in ("dtype", "rope_parameters")}
    old |= {"torch_dtype": "bfloat16", "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 131072}
    assert (read(tmp_path, old).dtype, read(tmp_path, old).rope_theta) == ("bfloat16", 1e6)
    llama = read(tmp_path, {**QWEN2, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": None})
    assert (llama.kv_heads, llama.qkv_bias, llama.qk_norm) == (4, False, False)
    qwen3 = read(tmp_path, {**QWEN2, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm) == (128, False, True)


def test_spec_names_the_tensors_of_transformers(tmp_path: Path):
    """Names and shapes of each family, tied and not, are those of the transformers class."""
    import torch
    import transformers

    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        for tied in (True, False):
            raw = {**QWEN2, "architectures": [architecture], "tie_word_embeddings": tied, "head_dim": 10}
            raw |= {"layer_types": ["full_attention"] * 4} if architecture != "LlamaForCausalLM" else {}
            kind = getattr(transformers, architecture)
            if architecture == "Qwen2ForCausalLM":
                raw.pop("head_dim")
            with torch.device("meta"):
                model = kind(kind.config_class(**{k: v for k, v in raw.items() if k != "architectures"}))
            theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
            assert logical_tensors(read(tmp_path, raw)) == theirs, (architecture, tied)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures=MambaForCausalLM: expected one of Llama"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_act": "gelu"}, 'hidden_act=gelu: expected "silu"'),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"sliding_window": 64}, "sliding_window=64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.rope_type=yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type=linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["LlamaForCausalLM"], "attention_bias": True}, "attention_bias=True"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias=True"),
    ],
)
def test_spec_refuses_by_key(tmp_path: Path, change: dict, said: str):
    with pytest.raises(ConfigError, match=r"config\.json: ") as error:
        read(tmp_path, {**QWEN2, **change})
    assert said in str(error.value)


def test_spec_of_a_folder_without_a_model(tmp_path: Path):
    with pytest.raises(ConfigError, match="no such file"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_spec(tmp_path)


def test_an_unknown_tensor_of_a_family_is_named(monkeypatch: pytest.MonkeyPatch):
    family = SimpleNamespace(logical_tensors=lambda spec: {"model.layers.0.mlp.router.weight": (4, 8)})
    monkeypatch.setattr("areal_hpc.layout.families.family", lambda name: family)
    for layout in (lambda s: trainer_pieces(s, Parallel(), 0, 0), lambda s: rollout_pieces(s, 1, 0)):
        with pytest.raises(ConfigError, match=r"mlp\.router\.weight"):
            layout(small_spec())
