"""From a decision to each rank's samples.

Groups wait in their home (ordinal mod DP). Homes first tell all trainer ranks the lengths and
rewards of the batch (small); from these every rank computes the same advantages and the same
balanced split, so each home knows what it gives and what it gets. Tokens move once between
homes, then once from a home over the TP and PP ranks of its DP rank.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from areal_hpc.config import ActorConfig, Parallel
from areal_hpc.records import Group
from areal_hpc.stream.buffer import Decision, Home
from areal_hpc.trainer.advantages import advantages
from areal_hpc.trainer.commands import IDLE_S, broadcast, wait
from areal_hpc.trainer.packing import Sample, assign

TAG = 3


@dataclass(frozen=True, slots=True)
class Sheet:
    """What all trainer ranks learn of one group of the batch: scored samples only, in order."""

    prompt: int  # tokens
    answers: list[int]  # tokens of each answer
    rewards: list[float]

    @classmethod
    def of(cls, group: Group) -> Sheet:
        scored = group.scored
        return cls(len(group.prompt_P), [len(t.tokens_T) for t in scored], [t.reward for t in scored])


class Batches:
    """Deals the batches of a run to the trainer ranks of `comm` (ranks as `Place.index`)."""

    def __init__(self, comm: MPI.Comm, actor: ActorConfig, pump: Callable[[], None]) -> None:
        self._actor, self._parallel, self._pump = actor, actor.parallel, pump
        self._comm = comm.Dup()
        self._dp = dp_of(comm.rank, actor.parallel)
        self._is_home = comm.rank == self._dp * actor.parallel.tp
        self._peers = comm.Split(self._dp, comm.rank)  # the TP and PP ranks of this DP rank; its home is rank 0

    def deal(self, decision: Decision, held: Home) -> list[list[Sample]]:
        """This DP rank's samples as [minibatch][sample], the same on all its TP and PP ranks.

        Collective over the trainer ranks. `held` is the home's store, only read; it is not
        looked at on other ranks.
        """
        sheets = self._sheets(decision, held)
        value = advantages([s.rewards for s in sheets], [s.answers for s in sheets], self._actor)
        samples = [(k, j) for k, sheet in enumerate(sheets) for j in range(len(sheet.answers))]
        lengths = [sheets[k].prompt + sheets[k].answers[j] for k, j in samples]
        # A short batch may have fewer samples than minibatches; each needs one.
        minibatches = min(self._actor.ppo_n_minibatches, len(samples))
        shares = assign(lengths, minibatches, self._parallel.dp)
        wanted = [_by_group(samples, share) for share in shares]  # [DP rank] -> {k: [j, ...]}
        groups = self._between_homes(decision, wanted, held) if self._is_home else {}
        groups = self._over_peers(groups)
        mine = {
            (k, j): Sample.of(groups[k], trajectory, value[k][j])
            for k, numbers in wanted[self._dp].items()
            for j, trajectory in zip(numbers, groups[k].trajectories, strict=True)
        }
        return [[mine[samples[i]] for i in minibatch] for minibatch in shares[self._dp]]

    def _sheets(self, decision: Decision, held: Home) -> list[Sheet]:
        """The sheets of the whole batch, in its order, on every trainer rank."""
        mine = {}
        if self._is_home:
            mine = {
                k: Sheet.of(held[ordinal])
                for k, (ordinal, home) in enumerate(zip(decision.ordinals, decision.homes, strict=True))
                if home == self._dp
            }
        merged: dict[int, Sheet] = {}
        for home in range(self._parallel.dp):
            payload = pickle.dumps(mine, protocol=5) if self._is_home and home == self._dp else b""
            merged |= pickle.loads(broadcast(self._comm, payload, home * self._parallel.tp, self._pump))
        return [merged[k] for k in range(len(decision.ordinals))]

    def _between_homes(self, decision: Decision, wanted: list[dict[int, list[int]]], held: Home) -> dict[int, Group]:
        requests, kept, buffers = [], {}, []
        for dp, parts in enumerate(wanted):
            for k, numbers in parts.items():
                if decision.homes[k] != self._dp:
                    continue
                part = _part(held[decision.ordinals[k]], numbers)
                if dp == self._dp:
                    kept[k] = part
                else:
                    buffers.append(np.frombuffer(part.pack(), np.uint8))
                    requests.append(self._comm.Isend(buffers[-1], dp * self._parallel.tp, TAG))
        for k in wanted[self._dp]:
            if k not in kept:
                kept[k] = self._receive(decision.homes[k] * self._parallel.tp)
        wait(requests, self._pump)
        return kept

    def _receive(self, source: int) -> Group:
        status = MPI.Status()
        while (message := self._comm.Improbe(source, TAG, status)) is None:
            self._pump()
            time.sleep(IDLE_S)
        buffer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        wait([message.Irecv(buffer)], self._pump)
        return Group.unpack(buffer)

    def _over_peers(self, groups: dict[int, Group]) -> dict[int, Group]:
        if self._peers.size == 1:
            return groups
        packed = pickle.dumps({k: group.pack() for k, group in groups.items()}, protocol=5) if self._is_home else b""
        data = broadcast(self._peers, packed, 0, self._pump)
        return groups if self._is_home else {k: Group.unpack(part) for k, part in pickle.loads(data).items()}

    def close(self) -> None:
        self._peers.Free()
        self._comm.Free()


def dp_of(index: int, parallel: Parallel) -> int:
    """The DP rank of the trainer rank with this `Place.index` (TP varies fastest, then DP)."""
    return index // parallel.tp % parallel.dp


def _by_group(samples: list[tuple[int, int]], share: list[list[int]]) -> dict[int, list[int]]:
    """Which samples of which groups one DP rank gets, as {k: [j, ...]}, both ascending."""
    out: dict[int, list[int]] = {}
    for i in sorted(i for minibatch in share for i in minibatch):
        k, j = samples[i]
        out.setdefault(k, []).append(j)
    return out


def _part(group: Group, numbers: list[int]) -> Group:
    scored = group.scored
    chosen = [scored[j] for j in numbers]
    return Group(group.ordinal, group.item, group.prompt_P, chosen, group.attempt, group.replica)
