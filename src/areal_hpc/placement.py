"""Placement: which rank does what. Pure arithmetic over the map (rank -> node).

Nodes come in the order of their lowest rank, ranks of a node in rank order: the seats.
Trainers take the first seats, so they fill whole nodes first; rollout ranks take the rest.
Within a role TP varies fastest, then DP, then PP (for rollout: TP, then replicas), which is
Megatron's own order. A TP group talks in every layer, so it may not cross a node unless
`cluster.tp_across_nodes` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from areal_hpc.config import ConfigError, Parallel


class Role(StrEnum):
    TRAINER = "trainer"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True)
class Place:
    """What world rank `rank` is. For rollout ranks dp is the replica and pp is 0.

    `index` is its rank in the role's communicator: tp + TP * (dp + DP * pp).
    """

    rank: int
    node: str
    local_rank: int
    role: Role
    dp: int
    tp: int
    pp: int
    index: int

    def __str__(self) -> str:
        where = f"replica {self.dp} tp {self.tp}" if self.role is Role.ROLLOUT else f"dp {self.dp} tp {self.tp}"
        stage = f" pp {self.pp}" if self.role is Role.TRAINER else ""
        return f"{self.role} rank {self.rank} ({where}{stage}) on {self.node}"


def place(
    nodes: Sequence[str], trainer: Parallel, rollout: Parallel | None, tp_across_nodes: bool = False
) -> list[Place]:
    """The place of each world rank; `nodes[rank]` is the node that rank runs on.

    rollout None: every rank trains (supervised warm-up). Raises ConfigError for a world of
    the wrong size (with the arithmetic), nodes with unequal numbers of ranks, and a TP group
    that would cross a node, naming ranks, nodes and the flag to change.
    """
    _check_size(len(nodes), trainer, rollout)
    by_node = _by_node(nodes)
    _check_equal(by_node)
    seats = [(rank, node, local) for node, ranks in by_node.items() for local, rank in enumerate(ranks)]
    places = []
    for seat, (rank, node, local) in enumerate(seats):
        role, sizes, index = Role.TRAINER, trainer, seat
        if seat >= trainer.size and rollout is not None:
            role, sizes, index = Role.ROLLOUT, rollout, seat - trainer.size
        tp, dp, pp = index % sizes.tp, index // sizes.tp % sizes.dp, index // (sizes.tp * sizes.dp)
        places.append(Place(rank, node, local, role, dp, tp, pp, index))
    if not tp_across_nodes:
        _check_crossing(places, trainer, rollout)
    return sorted(places, key=lambda p: p.rank)


def _by_node(nodes: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return found


def _check_size(size: int, trainer: Parallel, rollout: Parallel | None) -> None:
    need = trainer.size + (rollout.size if rollout else 0)
    if size == need:
        return
    sums = f"actor.backend: dp {trainer.dp} * tp {trainer.tp} * pp {trainer.pp} = {trainer.size}"
    if rollout:
        sums += f" trainer ranks; rollout.backend: replicas {rollout.dp} * tp {rollout.tp} = {rollout.size}"
        sums += f" rollout ranks; {trainer.size} + {rollout.size} = {need}"
    raise ConfigError(f"the world has {size} ranks, needed are {need}: {sums}. Start {need} ranks or change the sizes")


def _check_equal(by_node: dict[str, list[int]]) -> None:
    counts = {len(ranks) for ranks in by_node.values()}
    if len(counts) <= 1:
        return
    most, fewest = max(by_node.items(), key=_count), min(by_node.items(), key=_count)
    size, need = sum(map(len, by_node.values())), len(by_node)
    advice = f"--ntasks-per-node={size // need}" if size % need == 0 else f"a number of nodes that divides {size}"
    raise ConfigError(
        f"nodes have unequal numbers of ranks: {most[0]} has {len(most[1])} (ranks {_list(most[1])}), "
        f"{fewest[0]} has {len(fewest[1])} (ranks {_list(fewest[1])}). Start as many on each: srun {advice}"
    )


def _count(item: tuple[str, list[int]]) -> int:
    return len(item[1])


def _check_crossing(places: list[Place], trainer: Parallel, rollout: Parallel | None) -> None:
    groups: dict[tuple[Role, int, int], list[Place]] = {}
    for p in places:
        groups.setdefault((p.role, p.dp, p.pp), []).append(p)
    per_node = sum(p.node == places[0].node for p in places)
    for (role, dp, pp), group in groups.items():
        if len({p.node for p in group}) == 1:
            continue
        key, sizes = ("actor.backend", trainer) if role is Role.TRAINER else ("rollout.backend", rollout)
        name = f"dp {dp} pp {pp}" if role is Role.TRAINER else f"replica {dp}"
        where = ", ".join(f"rank {p.rank} on {p.node}" for p in group)
        raise ConfigError(
            f"{key}: the tensor-parallel group of {role} {name} would cross nodes ({where}): tp {sizes.tp} with "
            f"{per_node} ranks per node and {trainer.size} trainer ranks. Choose sizes that keep each group on one "
            "node, or allow it with cluster.tp_across_nodes=true"
        )


def _list(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
