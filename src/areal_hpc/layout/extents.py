"""A checkpoint file as a layout: datasets at byte offsets, cut into extents that writers own.

Offsets and extents are in bytes of the file, boxes in elements. The data range runs from the
first dataset's offset to the last one's end; a grid of 16 MiB blocks starts at the first offset.
Extents start and end on the grid (or at the range's end) and span datasets, so a writer's I/O is
large whatever the tensors' sizes, and a checksum of a block is one writer's. Source: design, section 8.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.layout.boxes import Box, flat_boxes

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A contiguous row-major dataset: `name` is that of its boxes, `offset` its first byte in the file."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    offset: int

    @property
    def stop(self) -> int:
        """The byte after its last."""
        return self.offset + math.prod(self.shape) * self.itemsize


def data_range(tensors: Sequence[FileTensor]) -> tuple[int, int]:
    """(first byte, byte after the last) of all datasets. Raises ValueError when two of them overlap."""
    if not tensors:
        return 0, 0
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if after.offset < before.stop:
            raise ValueError(f"{after.name} starts at byte {after.offset}, inside {before.name} up to {before.stop}")
    return ordered[0].offset, ordered[-1].stop


def grid(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The blocks of [start, stop), each BLOCK_BYTES long, the last one shorter."""
    for low in range(start, stop, BLOCK_BYTES):
        yield low, min(low + BLOCK_BYTES, stop)


def writer_extents(tensors: Sequence[FileTensor], writers: int) -> list[list[tuple[int, int]]]:
    """The byte extents [start, stop) that each of `writers` owns: disjoint, and together the data range.

    Whole blocks, dealt evenly and in order, so each writer has at most one extent; with fewer
    blocks than writers some have none.
    """
    if writers < 1:
        raise ValueError(f"writers={writers}: expected at least 1")
    start, stop = data_range(tensors)
    blocks = -(-(stop - start) // BLOCK_BYTES)
    cuts = [min(start + w * blocks // writers * BLOCK_BYTES, stop) for w in range(writers + 1)]
    return [[(low, high)] if low < high else [] for low, high in itertools.pairwise(cuts)]


def extent_boxes(tensors: Sequence[FileTensor], start_byte: int, stop_byte: int) -> list[tuple[Box, int]]:
    """The boxes stored in [start_byte, stop_byte), each with its byte offset in the file, in file order.

    Each box is contiguous in the file. Bytes between datasets belong to no box. Raises ValueError
    when the interval cuts an element in two.
    """
    found = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        low, high = max(start_byte, tensor.offset), min(stop_byte, tensor.stop)
        if low >= high:
            continue
        first, cut_low = divmod(low - tensor.offset, tensor.itemsize)
        last, cut_high = divmod(high - tensor.offset, tensor.itemsize)
        if cut_low or cut_high:
            raise ValueError(
                f"bytes [{start_byte}, {stop_byte}) cut an element of {tensor.name}, which starts at "
                f"byte {tensor.offset} with {tensor.itemsize} bytes each: align all datasets alike"
            )
        at = low
        for start, stop in flat_boxes(tensor.shape, first, last):
            box = Box(tensor.name, start, stop)
            found.append((box, at))
            at += box.size * tensor.itemsize
    return found
