"""How data gets out of a file of ours: whole blocks, read once, verified, and only then resharded.

Each rank takes its share of the blocks that anyone needs. Memory: the needed data / ranks, and the
exchange's bounded staging; a serial reader holds one dataset.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from areal_hpc import native
from areal_hpc.layout.extents import BLOCK_BYTES, FileTensor
from areal_hpc.storage.hdf5 import CheckpointError, Structure, raise_errno
from areal_hpc.storage.meeting import Meeting
from areal_hpc.storage.moving import Extents, Held, block_checksums, boxes_in, by_unit, move, views_of


def read_boxes(meeting: Meeting, structure: Structure, wanted: Held) -> None:
    """Collective over the meeting: fill the views of `wanted` from the file, verified; each rank names its own.

    Views are float32 for entries that move as elements, uint8 for bytes. Raises CheckpointError on
    every rank, before any view is written, when a block that someone needs is damaged.
    """
    tensors = list(structure.tensors.values())
    everyone = meeting.share([box for box, _ in wanted])
    names = {box.name for boxes in everyone for box in boxes}
    extents = _shares(structure, names, meeting.size)
    mine = extents[meeting.rank]
    with meeting.step("reading"):
        staging = [read_blocks(structure, start, stop) for start, stop in mine]
    for unit, group in by_unit(tensor for tensor in tensors if tensor.name in names).items():
        group_names = {tensor.name for tensor in group}
        move(
            meeting,
            [boxes_in(group, owned) for owned in extents],
            [[box for box in boxes if box.name in group_names] for boxes in everyone],
            views_of(group, mine, staging),
            [view for box, view in wanted if box.name in group_names],
            unit,
        )


def _covering(structure: Structure, tensor: FileTensor) -> range:
    """The numbers of the blocks that hold any byte of the tensor."""
    first, last = tensor.offset - structure.start, tensor.stop - 1 - structure.start
    return range(first // BLOCK_BYTES, last // BLOCK_BYTES + 1)


def _extent(structure: Structure, first: int, last: int) -> tuple[int, int]:
    """The bytes of the blocks number `first` to `last`, both included."""
    return structure.start + first * BLOCK_BYTES, min(structure.start + (last + 1) * BLOCK_BYTES, structure.stop)


def _shares(structure: Structure, names: Iterable[str], ranks: int) -> list[Extents]:
    """The blocks that hold any of these tensors, dealt evenly and in order; neighbours are one extent."""
    needed = sorted({number for name in names for number in _covering(structure, structure.tensors[name])})
    shares: list[Extents] = []
    for rank in range(ranks):
        extents: Extents = []
        for number in needed[rank * len(needed) // ranks : (rank + 1) * len(needed) // ranks]:
            low, high = _extent(structure, number, number)
            if extents and extents[-1][1] == low:
                extents[-1] = (extents[-1][0], high)
            else:
                extents.append((low, high))
        shares.append(extents)
    return shares


def read_blocks(structure: Structure, start: int, stop: int) -> np.ndarray:
    """The bytes [start, stop), which are whole blocks, verified. uint8. Raises CheckpointError naming the block."""
    data = np.empty(stop - start, np.uint8)
    raise_errno(native.read_extent(structure.path, start, data), f"reading {stop - start} bytes at {start}")
    first = (start - structure.start) // BLOCK_BYTES
    for number, found in enumerate(block_checksums(data), first):
        if found != structure.checksums[number]:
            low, high = _extent(structure, number, number)
            inside = [t.name for t in structure.tensors.values() if t.offset < high and low < t.stop]
            some = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
            raise CheckpointError(
                f"block {number}, bytes [{low}, {high}), does not match its checksum; it holds {some}"
            )
    return data


def read_dataset(structure: Structure, name: str) -> np.ndarray:
    """Serial: the whole dataset, its blocks verified, in its own shape and dtype. CheckpointError as in read_blocks."""
    dtype, shape = np.dtype(structure.dtypes[name]), structure.shapes[name]
    tensor = structure.tensors.get(name)
    if tensor is None:
        return np.empty(shape, dtype)
    covering = _covering(structure, tensor)
    start, stop = _extent(structure, covering[0], covering[-1])
    try:
        data = read_blocks(structure, start, stop)
    except CheckpointError as error:
        raise CheckpointError(f"{structure.path}: {error}") from None
    return np.frombuffer(data[tensor.offset - start : tensor.stop - start].tobytes(), dtype).reshape(shape)
