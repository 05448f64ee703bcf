"""Plan rows as messages: transfers cut into units, units packed into messages of bounded size.

Pure arithmetic, computed alike by sender and receiver from the same plan, so that a message needs no
header. Sizes are in elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.layout.boxes import Box
from areal_hpc.reshard.plan import Transfer


@dataclass(frozen=True, slots=True)
class Unit:
    """Part of a transfer that fits in a message; `box` lies inside the transfer's box."""

    transfer: Transfer
    box: Box


def messages_of(transfers: Sequence[Transfer], end: str, rank: int, limit: int) -> dict[int, list[list[Unit]]]:
    """Peer -> messages of units, at most `limit` elements each: the same cut on both sides."""
    found: dict[int, list[list[Unit]]] = {}
    room: dict[int, int] = {}
    for transfer in transfers:
        peer = getattr(transfer, end)
        if peer == rank:
            continue
        for box in _cut(transfer.box, limit):
            if box.size > room.get(peer, 0):
                found.setdefault(peer, []).append([])
                room[peer] = limit
            found[peer][-1].append(Unit(transfer, box))
            room[peer] -= box.size
    return found


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """`box` in parts of at most `limit` elements, cut along its first dims."""
    if box.size <= limit:
        yield box
        return
    axis = next(d for d, n in enumerate(box.shape) if n > 1)
    row = box.size // box.shape[axis]
    step = max(1, limit // row)
    for low in range(box.start[axis], box.stop[axis], step):
        high = min(low + step, box.stop[axis])
        part = Box(
            box.name,
            (*box.start[:axis], low, *box.start[axis + 1 :]),
            (*box.stop[:axis], high, *box.stop[axis + 1 :]),
        )
        yield from _cut(part, limit)


def interleave(messages: dict[int, list[list[Unit]]], rank: int, size: int) -> list[tuple[int, list[Unit]]]:
    """All messages of this rank, one per receiver in turn, beginning with the next rank: no rush on one receiver."""
    order = sorted(messages, key=lambda peer: (peer - rank) % size)
    turns = max(map(len, messages.values()), default=0)
    return [(peer, messages[peer][turn]) for turn in range(turns) for peer in order if turn < len(messages[peer])]
