"""Checkpoints: one file that is complete or not there, whatever the number of ranks that wrote it.

Format `areal-hpc checkpoint`, version 1. Plain h5py and `h5ls` read it; nothing is compressed.

    attributes        format, format_version, software (versions, JSON), and those of `save` (step, ...).
                      Numbers are numbers; text is UTF-8; anything else is JSON text after `json:`.
    /<kind>/<name>    float32, contiguous: a logical tensor by its Hugging Face name and full shape.
                      Kinds: master (the optimizer's fp32 weights), exp_avg, exp_avg_sq (Adam's moments).
    /blobs/<name>     uint8: bytes that only their owner reads (ledger, RNG of each rank, undelivered
                      groups, resolved configuration, ...). A name may have `/` in it.
    /checksums        uint32: crc32c of each block of 16 MiB, counted from the first dataset's offset to
                      the last one's end, across datasets; its last value is the crc32c of those before.

All datasets but the last lie back to back, kinds first. HDF5's own checksums (libver v110) cover the
metadata, so every byte that means something is covered. Another version of the format is refused.

What survives a kill: before the rename, a hidden `.<name>.tmp`, which `find` does not see and `prune`
removes, and all earlier checkpoints; after it, the new checkpoint too. `save` returns after the
directory is synced. `load` changes no tensor unless all blocks that it needs have verified.

`save`, `load` and `load_newest` are collective over `comm`, the trainer's, in the main thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.layout.boxes import Box, whole
from areal_hpc.storage import hdf5
from areal_hpc.storage.hdf5 import CheckpointError, Entry, Structure
from areal_hpc.storage.meeting import Meeting
from areal_hpc.storage.reading import read_blocks, read_boxes
from areal_hpc.storage.software import software_versions
from areal_hpc.storage.writing import SaveReport, remove_stale, write_file

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

__all__ = [
    "CheckpointError",
    "Restored",
    "SaveReport",
    "checkpoint_path",
    "find",
    "load",
    "load_newest",
    "prune",
    "read_attrs",
    "save",
    "supersede",
    "verify",
]

FORMAT = "areal-hpc checkpoint"
FORMAT_VERSION = 1
BLOBS = "blobs"
NAME = re.compile(r"step-(\d{8})\.h5")

Tensors = Mapping[str, Sequence[tuple[Box, "torch.Tensor"]]]  # kind -> boxes of logical tensors, each with its view


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` training steps lies."""
    return directory / f"step-{step:08d}.h5"


def save(
    path: Path,
    comm: MPI.Comm,
    tensors: Tensors,
    shapes: Mapping[str, tuple[int, ...]],
    blobs: Mapping[str, bytes],
    attrs: Mapping[str, Any],
    writers: Sequence[int],
    *,
    deadline_s: float = 1800.0,
    on_wait: Callable[[], None] = lambda: None,
) -> SaveReport:
    """Collective: write the checkpoint `path`; on return it is complete, renamed and synced.

    tensors: this rank's part, float32, on any device and in any layout (flat ranges of a distributed
    optimizer as their boxes); the same box on several ranks is sent by one of them, and together they
    must cover every element of every name in `shapes`, for every kind. blobs: this rank's; no two
    ranks use one name. shapes, attrs and writers (ranks of `comm` that write) are taken from rank 0.

    Raises CheckpointError, the same on every rank and naming the ranks with a problem; `path` is then
    as it was before. No wait within it lasts longer than `deadline_s`; `on_wait` may not use `comm`.
    """
    import torch

    meeting = Meeting(comm, path, deadline_s, on_wait)
    lead = (dict(shapes), {**attrs}, list(writers), software_versions()) if comm.rank == 0 else None
    everyone = meeting.share((lead, sorted(tensors), {name: len(data) for name, data in blobs.items()}))
    shapes, attrs, writers, software = everyone[0][0]
    attrs = {"format": FORMAT, "format_version": FORMAT_VERSION, "software": software} | attrs
    kinds = sorted({kind for _, found, _ in everyone for kind in found})
    entries = [Entry(f"{kind}/{name}", shape, "<f4") for kind in kinds for name, shape in shapes.items()]
    entries += _blob_entries(path, [sizes for _, _, sizes in everyone])
    held = [(_prefixed(kind, box), view) for kind in sorted(tensors) for box, view in tensors[kind]]
    for name, data in blobs.items():
        if data:
            held.append((whole(f"{BLOBS}/{name}", [len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)))
    return write_file(path, meeting, entries, attrs, held, writers)


def _blob_entries(path: Path, sizes: list[dict[str, int]]) -> list[Entry]:
    """The blobs of all ranks by name. Raises CheckpointError (on all ranks alike) for a name used twice."""
    owners: dict[str, int] = {}
    for rank, found in enumerate(sizes):
        for name in found:
            if owners.setdefault(name, rank) != rank:
                raise CheckpointError(f"{path}: ranks {owners[name]} and {rank} both bring a blob named {name}")
    return [Entry(f"{BLOBS}/{name}", (sizes[owners[name]][name],), "|u1", as_bytes=True) for name in sorted(owners)]


def _prefixed(kind: str, box: Box) -> Box:
    return Box(f"{kind}/{box.name}", box.start, box.stop)


def load(
    path: Path,
    comm: MPI.Comm,
    wanted: Tensors,
    *,
    blobs: Callable[[str], bool] = lambda name: True,
    deadline_s: float = 1800.0,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Collective: fill the views of `wanted` (float32) from `path`; this rank's blobs and all attributes.

    Any number of ranks and any boxes; a box may be wanted by several ranks. `blobs` chooses by name
    what this rank is given. Each needed block of the file is read once, by one rank.

    Raises CheckpointError, the same on every rank, for a torn or damaged file, another format, a
    tensor that the file lacks or holds in another shape. No view is changed unless all blocks verified.
    """
    import torch

    meeting = Meeting(comm, path, deadline_s, on_wait)
    structure: Structure | None = None
    with meeting.step("opening"):
        if comm.rank == 0:
            structure = read_structure(path)
    structure = meeting.share(structure)[0]
    boxes = [(_prefixed(kind, box), view) for kind in sorted(wanted) for box, view in wanted[kind]]
    with meeting.step("comparing with what is wanted"):
        for box, _ in boxes:
            _check_box(structure, box)
    names = [name for name in structure.names(BLOBS) if blobs(name)]
    bytes_of = {name: np.empty(structure.shapes[f"{BLOBS}/{name}"], np.uint8) for name in names}
    boxes += [(whole(f"{BLOBS}/{n}", data.shape), torch.from_numpy(data)) for n, data in bytes_of.items() if data.size]
    read_boxes(meeting, structure, boxes)
    return {name: data.tobytes() for name, data in bytes_of.items()}, structure.attrs


def _check_box(structure: Structure, box: Box) -> None:
    shape = structure.shapes.get(box.name)
    if shape is None:
        kind, _, name = box.name.partition("/")
        kinds = sorted({known.partition("/")[0] for known in structure.shapes} - {BLOBS})
        raise CheckpointError(f"it has no tensor {name} of kind {kind}; its kinds are {', '.join(kinds)}")
    if len(shape) != len(box.stop) or any(stop > size for stop, size in zip(box.stop, shape)):
        raise CheckpointError(f"{box.name} has shape {shape} in the file, wanted is {box.start}..{box.stop}")


@dataclass(frozen=True, slots=True)
class Restored:
    """The checkpoint that was loaded, and the newer ones that were passed over, each with the reason."""

    path: Path
    blobs: dict[str, bytes]
    attrs: dict[str, Any]
    refused: list[str] = field(default_factory=list)


def load_newest(directory: Path, comm: MPI.Comm, wanted: Tensors, **options: Any) -> Restored | None:
    """Collective: `load` (with its options) the newest checkpoint that verifies; None where there is none.

    Files that were passed over are renamed to `*.refused` (kept, but no longer counted by `find` and
    `prune`). Raises CheckpointError listing every file and why it was refused where none can be loaded.
    """
    meeting = Meeting(comm, directory, options.get("deadline_s", 1800.0), options.get("on_wait", lambda: None))
    paths = meeting.share(find(directory) if comm.rank == 0 else None)[0]
    refused: list[str] = []
    for path in paths:
        try:
            blobs, attrs = load(path, comm, wanted, **options)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            with meeting.step("setting aside what was refused"):
                if comm.rank == 0:
                    _rename(paths[: len(refused)], ".refused")
            return Restored(path, blobs, attrs, refused)
    if refused:
        raise CheckpointError(f"{directory}: no checkpoint can be loaded:\n  " + "\n  ".join(refused))
    return None


def read_structure(path: Path) -> Structure:
    """Serial: what the checkpoint holds; metadata verified, no data read. Raises CheckpointError."""
    return hdf5.read_structure(path, FORMAT, FORMAT_VERSION)


def read_attrs(path: Path) -> dict[str, Any]:
    """Serial: the attributes (step and the rest). Raises CheckpointError."""
    return read_structure(path).attrs


def verify(path: Path) -> list[str]:
    """Serial: read the whole file, one block at a time; every problem found, none for a good checkpoint."""
    try:
        structure = read_structure(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for start, stop in structure.blocks:
        try:
            read_blocks(structure, start, stop)
        except CheckpointError as error:
            problems.append(f"{path}: {error}")
    return problems


def find(directory: Path) -> list[Path]:
    """The checkpoints in a directory by name, newest (highest step) first; none where it does not exist."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted((path for path in found if NAME.fullmatch(path.name)), reverse=True)


def supersede(directory: Path) -> list[Path]:
    """Rank 0, where a run starts over in its folder: rename its checkpoints to `*.superseded`; the new paths."""
    return _rename(find(directory), ".superseded")


def _rename(paths: Sequence[Path], suffix: str) -> list[Path]:
    return [path.rename(path.with_name(path.name + suffix)) for path in paths]


def prune(directory: Path, keep_last: int) -> list[Path]:
    """Rank 0, after a save and with none under way: remove all but the newest, and what kills left behind.

    Returns what was removed. `keep_last` is at least 1, so a save never removes the last good one.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: expected at least 1")
    removed = find(directory)[keep_last:]
    for path in removed:
        path.unlink(missing_ok=True)
    return removed + remove_stale(directory)
