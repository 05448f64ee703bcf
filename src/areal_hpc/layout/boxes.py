"""Boxes: the part of a logical tensor that a rank, a replica or a file holds.

Units are elements, never bytes; names and dimensions are those of the Hugging Face
checkpoint. A box knows no framework, dtype or rank, so that the layouts of Megatron,
vLLM and HDF5 can meet here. Source: an HDF5 hyperslab of stride 1 is the same thing.

A `Piece` says where a box lies in a framework's own tensor: a fused QKV parameter is one
tensor and several pieces. Pure arithmetic: no numpy array is touched, no framework known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements with start[d] <= i[d] < stop[d] of the logical tensor `name`."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(a < 0 or b < a for a, b in zip(self.start, self.stop)):
            raise ValueError(f"{self.name}: start {self.start} and stop {self.stop} make no box")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Elements in the box."""
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices of an array that holds `outer`."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


def whole(name: str, shape: Iterable[int]) -> Box:
    """The box that is all of the tensor."""
    shape = tuple(shape)
    return Box(name, (0,) * len(shape), shape)


def intersect(mine: Box, wanted: Box) -> Box | None:
    """What `mine` can give to `wanted`, or None if they share no element.

    Raises ValueError when the two disagree on the number of dimensions: then one
    layout is wrong about this tensor, and so would be every plan made from it.
    """
    if mine.name != wanted.name:
        return None
    if len(mine.start) != len(wanted.start):
        raise ValueError(f"{mine.name}: source box has shape {mine.shape}, destination {wanted.shape}")
    start = tuple(map(max, mine.start, wanted.start))
    stop = tuple(map(min, mine.stop, wanted.stop))
    return Box(mine.name, start, stop) if all(map(int.__lt__, start, stop)) else None


@dataclass(frozen=True, slots=True)
class Piece:
    """The region of the live tensor `param` that starts at `at` and holds `box`.

    The region has the box's shape. `param` is the framework's own name of the tensor;
    elements of it that no piece covers (vocabulary padding) belong to no logical tensor.
    """

    param: str
    at: tuple[int, ...]
    box: Box

    @property
    def region(self) -> tuple[slice, ...]:
        """The region as slices of the live tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.at, self.box.shape, strict=True))

    def clip(self, start: tuple[int, ...], stop: tuple[int, ...]) -> Piece | None:
        """The part of this piece inside start <= i < stop of the live tensor, or None."""
        low = tuple(map(max, self.at, start))
        high = tuple(min(a + n, b) for a, n, b in zip(self.at, self.box.shape, stop, strict=True))
        if not all(map(int.__lt__, low, high)):
            return None
        shift = tuple(b - a for a, b in zip(self.at, self.box.start, strict=True))
        return Piece(
            self.param,
            low,
            Box(self.box.name, tuple(map(int.__add__, low, shift)), tuple(map(int.__add__, high, shift))),
        )


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the flat interval [start, stop) of a row-major array into at most 2d-1 boxes.

    Yields (start, stop) index tuples in flat order; their sizes add up to stop - start,
    and each is contiguous in the flat array. Source: design, section 2 (distributed optimizer).
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"interval [{start}, {stop}) lies outside an array of shape {shape}")
    if start == stop:
        return
    if len(shape) == 1:
        yield (start,), (stop,)
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:  # inside one row
        yield from (((first, *a), (first + 1, *b)) for a, b in flat_boxes(shape[1:], head, tail))
        return
    if head:
        yield from (((first, *a), (first + 1, *b)) for a, b in flat_boxes(shape[1:], head, row))
        first += 1
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last, *shape[1:])
    if tail:
        yield from (((last, *a), (last + 1, *b)) for a, b in flat_boxes(shape[1:], 0, tail))
