"""Hugging Face directories in and out: safetensors by box, and a checkpoint as a directory.

Reading touches only the slices that a box names, so every rank reads its own part. Writing is
serial, from a checkpoint whose blocks are verified as they are read; the directory appears under
its name only when it is complete.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_hpc import native
from areal_hpc.layout.boxes import Box, whole
from areal_hpc.storage.checkpoint import read_structure
from areal_hpc.storage.hdf5 import CheckpointError, Structure, raise_errno
from areal_hpc.storage.reading import read_dataset

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 << 30
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class HFError(RuntimeError):
    """A Hugging Face directory that lacks a file or tensor; names both."""


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> its safetensors file. Raises HFError where the directory has none."""
    from safetensors import safe_open

    directory = Path(directory)
    index = directory / INDEX
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: directory / file for name, file in weight_map.items()}
    single = directory / SINGLE
    if not single.is_file():
        here = ", ".join(sorted(path.name for path in directory.glob("*"))) or "nothing"
        raise HFError(f"{directory}: neither {INDEX} nor {SINGLE}; there is {here}")
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def read_boxes(directory: Path, boxes: Iterable[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Each box with its values, in the file's own dtype, file by file (not in the order given).

    Only the box's slices are read. Raises HFError naming directory, tensor and shapes when a
    tensor is missing or has other dimensions than its box.
    """
    for box, values in _slices(directory, boxes):
        shape = tuple(values.get_shape())
        if len(shape) != len(box.stop) or any(stop > size for stop, size in zip(box.stop, shape)):
            raise HFError(f"{directory}: {box.name} has shape {shape}, wanted is {box.start}..{box.stop}")
        yield box, values[tuple(slice(a, b) for a, b in zip(box.start, box.stop))]


def _slices(directory: Path, boxes: Iterable[Box]) -> Iterator[tuple[Box, Any]]:
    """Each box with safetensors' lazy slice of its tensor, valid until the next one is taken."""
    from safetensors import safe_open

    files = tensor_files(directory)
    by_file: dict[Path, list[Box]] = defaultdict(list)
    for box in boxes:
        if box.name not in files:
            raise HFError(f"{directory}: no tensor {box.name} among its {len(files)}")
        by_file[files[box.name]].append(box)
    for path, wanted in by_file.items():
        if not path.is_file():
            raise HFError(f"{path}: missing, though {INDEX} names it for {wanted[0].name}")
        with safe_open(path, "pt") as file:
            for box in wanted:
                yield box, file.get_slice(box.name)


def export(checkpoint: Path, original: Path, out: Path, dtype: str) -> Path:
    """Serial: write the master weights of `checkpoint` as the Hugging Face directory `out`.

    `original` is the directory that the run began from: its configuration and tokenizer files are
    copied. `dtype` is float32, bfloat16 or float16. Raises CheckpointError for a damaged checkpoint,
    HFError where `out` exists and is not empty, `original` has no config.json, or its weights, where
    it has any, are of another model.
    """
    structure = read_structure(checkpoint)
    names = structure.names("master")
    if not names:
        raise CheckpointError(f"{checkpoint}: it holds no tensors of kind master")
    original, out = Path(original), Path(out)
    if not (original / "config.json").is_file():
        raise HFError(f"{original}: no config.json; export needs the directory that the run began from")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HFError(f"{out}: exists and is not empty")
    _check_same_model(checkpoint, original, {name: structure.shapes[f"master/{name}"] for name in names})
    out.parent.mkdir(parents=True, exist_ok=True)
    temp = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir()
    try:
        _copy_files(original, temp, dtype)
        _write_shards(temp, structure, names, dtype)
        temp.rename(out)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    raise_errno(native.sync_dir(out.parent), f"syncing {out.parent}")
    return out


def _check_same_model(checkpoint: Path, original: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises HFError where the original has weights and lacks one of the names, or has another shape."""
    if not (original / INDEX).is_file() and not (original / SINGLE).is_file():
        return
    for box, values in _slices(original, [whole(name, shape) for name, shape in shapes.items()]):
        if tuple(values.get_shape()) != box.shape:
            raise HFError(
                f"{original}: {box.name} has shape {tuple(values.get_shape())}, and {box.shape} in {checkpoint}: "
                "the run began from another model"
            )


def _copy_files(original: Path, target: Path, dtype: str) -> None:
    """Everything of the original but weights and their index; config.json with the new dtype."""
    for path in sorted(original.iterdir()):
        weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not weights and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
    config = json.loads((original / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of the same key
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(target: Path, structure: Structure, names: Sequence[str], dtype: str) -> None:
    """Safetensors files of at most SHARD_BYTES (or one tensor) and, where there are several, their index."""
    import torch
    from safetensors.torch import save_file

    kind: torch.dtype = getattr(torch, dtype)
    sizes = {name: math.prod(structure.shapes[f"master/{name}"]) * kind.itemsize for name in names}
    shards = _split(sizes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.from_numpy(read_dataset(structure, f"master/{name}").copy()).to(kind) for name in shard}
        save_file(tensors, target / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _split(sizes: dict[str, int]) -> list[list[str]]:
    """Names in order, cut where the next tensor would make a shard larger than SHARD_BYTES."""
    shards: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards
