"""Hugging Face directories: slices of safetensors in, a directory that transformers loads out.

Reference: transformers' own model and safetensors' own reader.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_hpc.layout.boxes import Box, whole
from areal_hpc.storage import hf
from areal_hpc.storage.checkpoint import CheckpointError, save
from areal_hpc.storage.hf import HFError, export, read_boxes


def make_model(directory: Path, tied: bool = True, **save_options):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory, **save_options)
    for name in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja"):
        (directory / name).write_text(f"{name} \u00e9")
    return model


def trained(model, tied: bool) -> dict[str, torch.Tensor]:
    """Other weights of the same names, as the trainer's master copy would be."""
    torch.manual_seed(2)
    names = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    return {name: torch.randn(tensor.shape) for name, tensor in names.items()}


def save_checkpoint(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    from mpi4py import MPI

    held = {"master": [(whole(name, tensor.shape), tensor) for name, tensor in tensors.items()]}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    save(path, MPI.COMM_SELF, held, shapes, {"ledger": b"{}"}, {"step": 1}, [0], deadline_s=60)
    return path


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "60KB"}], ids=["one file", "shards"])
def test_boxes_are_slices_of_the_tensors(tmp_path: Path, options: dict) -> None:
    state = make_model(tmp_path, **options).state_dict()
    q, norm = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
    wanted = [Box(q, (3, 5), (60, 9)), whole(norm, (64,)), Box(q, (0, 0), (1, 64)), Box(norm, (7,), (8,))]
    found = list(read_boxes(tmp_path, wanted))
    assert sorted(map(repr, wanted)) == sorted(repr(box) for box, _ in found)
    for box, values in found:
        assert torch.equal(values, state[box.name][tuple(map(slice, box.start, box.stop))])


def test_what_a_directory_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(HFError, match="there is nothing"):
        list(read_boxes(tmp_path, [whole("x", (1,))]))
    make_model(tmp_path, max_shard_size="60KB")
    with pytest.raises(HFError, match="no tensor x among its"):
        list(read_boxes(tmp_path, [whole("x", (1,))]))
    with pytest.raises(HFError, match=r"model.norm.weight has shape \(64,\)"):
        list(read_boxes(tmp_path, [whole("model.norm.weight", (65,))]))
    shard = hf.tensor_files(tmp_path)["model.norm.weight"]
    shard.unlink()
    with pytest.raises(HFError, match=f"{shard.name}: missing"):
        list(read_boxes(tmp_path, [whole("model.norm.weight", (64,))]))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_loads_in_transformers(tmp_path: Path, monkeypatch, tied: bool, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(hf, "SHARD_BYTES", 100_000)  # several shards of a small model
    original, out = tmp_path / "original", tmp_path / "deep" / "out"
    tensors = trained(make_model(original, tied), tied)
    assert export(save_checkpoint(tmp_path / "step-00000001.h5", tensors), original, out, dtype) == out
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == getattr(torch, dtype)
    state = model.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor.to(model.dtype)), name
    if tied:
        assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 1 and all(path.stat().st_size < 110_000 for path in shards)
    assert set().union(*(load_file(path) for path in shards)) == set(tensors)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "chat_template.jinja",
        "generation_config.json",
    ):
        assert (out / name).read_bytes() == (original / name).read_bytes()
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_export_refuses(tmp_path: Path) -> None:
    original, out = tmp_path / "original", tmp_path / "out"
    tensors = trained(make_model(original), tied=True)
    path = save_checkpoint(tmp_path / "step-00000001.h5", tensors)
    with pytest.raises(HFError, match=r"no config\.json"):
        export(path, tmp_path, out, "float32")
    other = save_checkpoint(tmp_path / "step-00000002.h5", tensors | {"model.norm.weight": torch.zeros(65)})
    with pytest.raises(HFError, match="the run began from another model"):
        export(other, original, out, "float32")
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(HFError, match="exists and is not empty"):
        export(path, original, out, "float32")
    (out / "mine").unlink()
    data = bytearray(path.read_bytes())
    at = data.index(tensors["model.norm.weight"].numpy().tobytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="block 0"):
        export(path, original, out, "float32")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["original", "out", path.name, other.name]
    assert list(out.iterdir()) == []
