"""What trainer rank 0 hears of the replicas, and its waits for them.

A limit counts from the last sign of life of the one that is waited for (a leader gives one a second
between its engine steps), and is at least twice the longest engine step seen. While rank 0 waits so,
maybe for long, the other trainer ranks wait for it: it tells them once a second that it lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from areal_hpc.communicators import IDLE_S
from areal_hpc.config import DeadlineConfig
from areal_hpc.observe.progress import Progress
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.stream.messages import Alive, Working
from areal_hpc.world import World

WORKING_S = 1.0


class RolloutSilentError(RuntimeError):
    """A replica that gave no sign of life, or an answer that did not come in time."""


class Replicas:
    """`alive[replica]` is its newest sign of life."""

    def __init__(
        self, deadlines: DeadlineConfig, world: World, mailbox: Mailbox, progress: Progress, pump: Callable[[], None]
    ) -> None:
        self._deadlines, self._world, self._mailbox = deadlines, world, mailbox
        self._progress, self._pump = progress, pump
        self.alive: dict[int, Alive] = {}
        self._heard: dict[int, float] = {}  # replica -> when it was heard last
        self._others = [p.rank for p in world.places if p.role == world.place.role and p.rank != world.rank]
        self._told_at = 0.0

    def heard(self, message: object) -> None:
        """Any message of a leader is a sign of life."""
        replica = getattr(message, "replica", None)
        if replica is not None:
            self._heard[replica] = time.monotonic()
        if isinstance(message, Alive):
            self.alive[message.replica] = message

    def tell(self, message: object) -> None:
        """To all leaders."""
        for leader in self._world.leaders:
            self._mailbox.notify(message, leader)

    def missing(self, present: object) -> list[int]:
        return [r for r in range(len(self._world.leaders)) if r not in present]

    def turn(self) -> None:
        """One turn of a wait: mail, the display, and the sign of life to the other trainer ranks."""
        self._pump()
        self._progress.tick()
        if time.monotonic() - self._told_at >= WORKING_S:
            self._told_at = time.monotonic()
            for rank in self._others:
                self._mailbox.notify(Working(), rank)

    def until(self, missing: Callable[[], list[int]], phase: str, limit_s: float, what: str, version: int) -> None:
        """Until no replica is missing. Raises RolloutSilentError naming them past the limit.

        A replica that was never heard is still building its engine: it has `start_s` at least.
        """
        began = time.monotonic()
        while silent := missing():
            self.turn()
            first = silent[0]
            heard = max(began, self._heard.get(first, began))
            slow_s = 2 * self.alive[first].engine_step_s if first in self.alive else self._deadlines.start_s
            self._check(f"replicas {silent}", phase, max(limit_s, slow_s), what, began, heard, version, first)

    def until_homes(self, missing: Callable[[], list[int]], limit_s: float, what: str, version: int) -> None:
        """Until no home is missing, which waits for all replicas: their signs of life prolong nothing."""
        began = time.monotonic()
        while silent := missing():
            self.turn()
            slow_s = max((2 * alive.engine_step_s for alive in self.alive.values()), default=0.0)
            self._check(f"homes {silent}", "save", max(limit_s, slow_s), what, began, began, version)

    def _check(
        self, who: str, phase: str, limit_s: float, what: str, began: float, heard: float, version: int, first: int = -1
    ) -> None:
        """One look at a wait: the watcher's limit is twice ours, for the case that our own loop is stuck."""
        now, peer = time.monotonic(), self._world.leaders[first] if first >= 0 else -1
        self._world.phase(phase, 2 * limit_s, peer=peer, version=version)
        if now - heard > limit_s:
            raise RolloutSilentError(
                f"waited {now - began:.0f} s for {what}; missing {who}, {now - heard:.0f} s without a sign of life; "
                f"replicas: {self.describe()}"
            )
        time.sleep(IDLE_S)

    def describe(self) -> str:
        """Where each replica is, in words."""
        return "; ".join(
            f"{replica} on rank {leader}: "
            + (
                f"version {self.alive[replica].version}, {self.alive[replica].running} samples running"
                if replica in self.alive
                else "never heard"
            )
            for replica, leader in enumerate(self._world.leaders)
        )
