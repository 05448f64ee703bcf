"""The waits of trainer rank 0 for replicas: what prolongs a limit, and what its messages name."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from areal_hpc.config import DeadlineConfig
from areal_hpc.observe.progress import Progress
from areal_hpc.placement import Role
from areal_hpc.stream.messages import Alive, Ready, Working
from areal_hpc.trainer.replicas import Replicas, RolloutSilentError

LIMIT_S = 0.1


class Mail:
    """A mailbox that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, int]] = []

    def notify(self, message: object, dest: int) -> None:
        self.sent.append((message, dest))


def replicas(pump: Callable[[], None] = lambda: None, **deadlines: float) -> tuple[Replicas, Mail, list[tuple]]:
    """Two replicas on ranks 3 and 5, trainers on ranks 0 to 2; what was written into the rank table."""
    phases: list[tuple] = []
    world = SimpleNamespace(
        rank=0,
        place=SimpleNamespace(role=Role.TRAINER),
        places=[SimpleNamespace(rank=r, role=Role.TRAINER if r < 3 else Role.ROLLOUT) for r in range(6)],
        leaders=[3, 5],
        phase=lambda name, limit_s, *, peer, version: phases.append((name, limit_s, peer, version)),
    )
    mail, progress = Mail(), Progress(io.StringIO(), "test", 1)
    return Replicas(DeadlineConfig(**deadlines), world, mail, progress, pump), mail, phases


def alive(replica: int, engine_step_s: float = 0.0) -> Alive:
    return Alive(replica, 7, engine_step_s, running=4)


def test_a_silent_replica_is_named() -> None:
    it, _, phases = replicas()
    it.heard(alive(1))
    with pytest.raises(RolloutSilentError, match=r"READY; missing replicas \[1\].*0 on rank 3: never heard.*4 samples"):
        it.until(lambda: [1], "publish", LIMIT_S, "READY", 8)
    assert set(phases) == {("publish", 2 * LIMIT_S, 5, 8)}, "the watcher's limit, and whom we wait for"


def test_signs_of_life_prolong_a_wait_for_a_replica() -> None:
    began = time.monotonic()
    it, _, _ = replicas(lambda: it.heard(Ready(1, 8)))
    it.heard(alive(1))
    it.until(lambda: [1] if time.monotonic() - began < 4 * LIMIT_S else [], "publish", LIMIT_S, "READY", 8)


@pytest.mark.parametrize("engine_step_s", [0.2, None])  # None: never heard, it is still building its engine
def test_a_slow_engine_has_more_time(engine_step_s: float | None) -> None:
    it, _, _ = replicas(start_s=0.4)
    if engine_step_s is not None:
        it.heard(alive(0, engine_step_s))
    began = time.monotonic()
    with pytest.raises(RolloutSilentError):
        it.until(lambda: [0], "publish", LIMIT_S, "READY", 0)
    assert time.monotonic() - began > 0.4


def test_signs_of_life_of_a_replica_do_not_prolong_a_wait_for_a_home() -> None:
    it, _, _ = replicas(lambda: it.heard(alive(0)))
    with pytest.raises(RolloutSilentError, match=r"the cut; missing homes \[0, 1\]"):
        it.until_homes(lambda: [0, 1], LIMIT_S, "the cut", 3)


def test_the_other_trainers_hear_that_it_waits() -> None:
    it, mail, _ = replicas()
    it.turn(), it.turn()
    assert [(type(message), dest) for message, dest in mail.sent] == [(Working, 1), (Working, 2)], "once a second"
