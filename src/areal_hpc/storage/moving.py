"""Between what ranks hold in memory and extents of a file: the exchange, and the file's side of it.

An extent is a byte interval of the file that one rank stages in memory. Datasets move in units of 4
bytes (float32 elements, cast at the sender) or of 1 (bytes), one exchange for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_hpc import native
from areal_hpc.layout.boxes import Box
from areal_hpc.layout.extents import BLOCK_BYTES, FileTensor, extent_boxes
from areal_hpc.storage.meeting import Meeting

if TYPE_CHECKING:
    import torch

Extents = list[tuple[int, int]]  # [start, stop) each
Held = Sequence[tuple[Box, "torch.Tensor"]]


def block_checksums(data: np.ndarray) -> list[int]:
    """The crc32c of each block of bytes that start on the grid; the last may be short."""
    return [native.crc32c(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]


def by_unit(tensors: Iterable[FileTensor]) -> dict[int, list[FileTensor]]:
    """Tensors by the bytes of the unit they move in: 4 (float32 elements) and 1 (bytes)."""
    groups: dict[int, list[FileTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.itemsize, []).append(tensor)
    return dict(sorted(groups.items(), reverse=True))  # one order on every rank


def boxes_in(tensors: Sequence[FileTensor], extents: Extents) -> list[Box]:
    """What these extents hold of the tensors, in file order."""
    return [box for start, stop in extents for box, _ in extent_boxes(tensors, start, stop)]


def views_of(tensors: Sequence[FileTensor], extents: Extents, staging: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """The boxes of `boxes_in` as tensors over the staged bytes, in the same order."""
    import torch

    views = []
    for (start, stop), data in zip(extents, staging):
        for box, offset in extent_boxes(tensors, start, stop):
            size = tensors[0].itemsize * box.size
            part = torch.from_numpy(data[offset - start : offset - start + size])
            views.append(part.view(torch.float32 if tensors[0].itemsize == 4 else torch.uint8).view(box.shape))
    return views


def move(
    meeting: Meeting,
    sources: Sequence[Sequence[Box]],
    destinations: Sequence[Sequence[Box]],
    held: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    unit: int,
) -> int:
    """Collective: run the exchange from `sources` to `destinations`; bytes sent by this rank over MPI.

    The ranks agree before it, so that none enters an exchange that another could not plan. Its
    deadline is half the meeting's: who fails early waits for those who notice by their deadline.
    """
    import torch

    from areal_hpc.reshard.exchange import Exchange
    from areal_hpc.reshard.plan import make_plan

    with meeting.step("planning"):
        exchange = Exchange(
            meeting.comm,
            make_plan(sources, destinations),
            torch.float32 if unit == 4 else torch.uint8,
            deadline_s=meeting.deadline_s / 2,
            on_wait=meeting.on_wait,
        )
        exchange.start(held, wanted)
    with meeting.step("resharding"):
        exchange.wait()
    return exchange.sent_bytes
