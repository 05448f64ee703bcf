"""The plan from one layout to another: who sends which box to whom.

Pure arithmetic on boxes, the same on every rank that is given the same lists. Boxes are grouped by
tensor, equal ones merged, and the rest met by a plane sweep along the tensor's most finely cut dim:
time and memory grow with the boxes that overlap there, not with sources x destinations.

Promises: every element of every destination box is written exactly once; a rank that holds what it
wants sends nothing; ranks that hold the same box share the sending, the least loaded first (in
elements), so that no sender's bytes dominate. Source: design, section 6.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.layout.boxes import Box, intersect

Boxes = Sequence[Box]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`box` goes from rank `src`, inside its box number `src_index`, to rank `dst`, inside `dst_index`."""

    src: int
    dst: int
    box: Box
    src_index: int
    dst_index: int


class Plan:
    """The transfers between `sources[rank]` and `destinations[rank]`, both lists of boxes of that rank."""

    def __init__(self, sources: Sequence[Boxes], destinations: Sequence[Boxes], transfers: Sequence[Transfer]) -> None:
        self.sources = sources
        self.destinations = destinations
        self._sends: dict[int, list[Transfer]] = defaultdict(list)
        self._receives: dict[int, list[Transfer]] = defaultdict(list)
        for transfer in sorted(transfers, key=lambda t: (t.dst, t.dst_index, t.box.start)):
            self._sends[transfer.src].append(transfer)
            self._receives[transfer.dst].append(transfer)

    def sends(self, rank: int) -> list[Transfer]:
        """What `rank` gives, itself included; for each receiver in the order of its `receives`."""
        return self._sends.get(rank, [])

    def receives(self, rank: int) -> list[Transfer]:
        """What `rank` gets, itself included, in the order of its destination boxes."""
        return self._receives.get(rank, [])


@dataclass(slots=True)
class _Owned:
    """A distinct box and who has it: rank -> index in that rank's list (sources), or all (rank, index)."""

    box: Box
    ranks: list[tuple[int, int]]


def make_plan(sources: Sequence[Boxes], destinations: Sequence[Boxes]) -> Plan:
    """The plan that fills every box of `destinations[rank]` from the boxes of `sources[rank]`.

    Raises ValueError naming tensor, box and ranks when an element of a destination is in no source,
    or in two different source boxes, or when the layouts disagree on a tensor's number of dims.
    """
    held, wanted = _by_tensor(sources), _by_tensor(destinations)
    jobs: list[tuple[int, Box, _Owned, _Owned]] = []
    for name, takers in wanted.items():
        givers = held.get(name, [])
        parts = list(_overlaps(givers, takers))
        _check_coverage(name, givers, takers, parts)
        jobs += [(box.size, box, giver, taker) for giver, taker, box in parts]
    jobs.sort(key=lambda job: -job[0])  # the largest first, so that the small ones even out what is left
    return Plan(sources, destinations, _assign(jobs))


def _by_tensor(layout: Sequence[Boxes]) -> dict[str, list[_Owned]]:
    """Tensor -> its distinct boxes, each with the ranks that list it (empty boxes left out)."""
    distinct: dict[Box, _Owned] = {}
    tensors: dict[str, list[_Owned]] = defaultdict(list)
    for rank, boxes in enumerate(layout):
        for index, box in enumerate(boxes):
            owned = distinct.get(box)
            if owned is None:
                if not box.size:
                    continue
                owned = distinct[box] = _Owned(box, [])
                tensors[box.name].append(owned)
            owned.ranks.append((rank, index))
    return tensors


def _overlaps(left: list[_Owned], right: list[_Owned]) -> Iterator[tuple[_Owned, _Owned, Box]]:
    """Every (of left, of right, their intersection): a plane sweep along the most finely cut dim.

    An entry that has ended is dropped when the sweep next looks at its list, so the work is the
    sort plus the pairs that meet in that dim.
    """
    events = [(owned, 0) for owned in left] + [(owned, 1) for owned in right]
    dims = min((len(owned.box.start) for owned, _ in events), default=0)
    axis = max(range(dims), key=lambda d: len({owned.box.start[d] for owned, _ in events}), default=0)
    events.sort(key=lambda event: event[0].box.start[axis])
    active: tuple[list[_Owned], list[_Owned]] = ([], [])
    for owned, side in events:
        at = owned.box.start[axis]
        active[1 - side][:] = [other for other in active[1 - side] if other.box.stop[axis] > at]
        for other in active[1 - side]:
            giver, taker = (owned, other) if side == 0 else (other, owned)
            box = intersect(giver.box, taker.box)
            if box is not None:
                yield giver, taker, box
        active[side].append(owned)


def _check_coverage(
    name: str, givers: list[_Owned], takers: list[_Owned], parts: list[tuple[_Owned, _Owned, Box]]
) -> None:
    """Raises ValueError for a destination element without exactly one source box."""
    twice = [(a, b, box) for a, b, box in _overlaps(givers, givers) if a is not b]
    for a, b, box in twice:
        for taker in takers:
            if intersect(box, taker.box) is not None:
                raise ValueError(
                    f"{name}: ranks {_ranks(a)} hold {_range(a.box)} and ranks {_ranks(b)} hold {_range(b.box)}, "
                    f"which overlap inside {_range(taker.box)} wanted by ranks {_ranks(taker)}"
                )
    covered = {id(taker): 0 for taker in takers}
    for _, taker, box in parts:
        covered[id(taker)] += box.size
    for taker in takers:
        if covered[id(taker)] != taker.box.size:
            holders = "; ".join(f"ranks {_ranks(g)} hold {_range(g.box)}" for g in givers[:8]) or "nobody holds any"
            raise ValueError(
                f"{name}: only {covered[id(taker)]} of {taker.box.size} elements of {_range(taker.box)} wanted by "
                f"ranks {_ranks(taker)} are in a source box ({holders})"
            )


def _range(box: Box) -> str:
    """[0:4, 2:8], as in an index."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop)) + "]"


def _ranks(owned: _Owned) -> str:
    ranks = sorted({rank for rank, _ in owned.ranks})
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _assign(jobs: list[tuple[int, Box, _Owned, _Owned]]) -> Iterator[Transfer]:
    """A sender for each taker of each job: itself, else the holder with the fewest elements so far."""
    load: dict[int, int] = defaultdict(int)
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    index_of: dict[int, dict[int, int]] = {}
    heap_of: dict[int, list[tuple[int, int]]] = {}
    for size, box, giver, taker in jobs:
        key = id(giver)
        if key not in index_of:
            index_of[key] = dict(reversed(giver.ranks))  # the first of a rank that lists the box twice
            ranks = tuple(sorted(index_of[key]))
            heap_of[key] = heaps.setdefault(ranks, [(0, rank) for rank in ranks])
        indices, heap = index_of[key], heap_of[key]
        for dst, dst_index in taker.ranks:
            src = dst
            if dst not in indices:
                src = _least_loaded(heap, load)
                load[src] += size
            yield Transfer(src, dst, box, indices[src], dst_index)


def _least_loaded(heap: list[tuple[int, int]], load: dict[int, int]) -> int:
    """The rank with the smallest load; loads only grow, so an entry that is out of date sinks once seen."""
    while heap[0][0] != load[heap[0][1]]:
        heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
    return heap[0][1]
