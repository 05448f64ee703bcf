"""The rollout loop: one thread, one turn after the other (design, section 4).

    decide   the leader pumps mail and rewards, admits, or accepts a version; the replica hears it
    update   pause, READY, exchange, verify, commit, resume, probe; requests go on under the new version
    step     one engine step; finished samples go to the reward workers, complete groups to their homes

A replica's ranks differ in one thing: only the leader has a `Leader`. All make the same calls on
their engines in the same order.
"""

from __future__ import annotations

import pickle
import time

import numpy as np

from areal_hpc.communicators import broadcast
from areal_hpc.config import Config, Dtype
from areal_hpc.observe.trace import Trace
from areal_hpc.reshard.exchange import Exchange
from areal_hpc.rollout.engine import Engine, Finished
from areal_hpc.rollout.leader import IDLE_S, Leader, Turn
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.stream.messages import StopRequest, Update
from areal_hpc.world import World

SPIN_S = 0.0005  # a follower looks this long before it sleeps: its leader decides in microseconds


class VersionError(RuntimeError):
    """A received version whose log-probabilities are not those of the trainer; it must not be used."""


class Worker:
    """One rollout rank. `leader` is None on all ranks of a replica but its first."""

    def __init__(
        self,
        config: Config,
        world: World,
        mailbox: Mailbox,
        engine: Engine,
        exchange: Exchange,
        trace: Trace,
        leader: Leader | None,
    ) -> None:
        self.config, self.world, self.mailbox = config, world, mailbox
        self.engine, self.leader, self.exchange, self.trace = engine, leader, exchange, trace
        self._stop_told = False
        self._proving: Update | None = None
        self._report: dict[str, float] = {}
        self._withheld: list[Finished] = []  # made by a version that is not proved yet

    def run(self) -> int:
        """Until the trainer says stop; the exit code that it gave."""
        while True:
            turn = self._share(self._decide() if self.leader else None)
            if turn.end is not None:
                return turn.end
            if turn.update is not None:
                self._update(turn.update)
            for request in turn.requests:
                self._add(request)
            if self.engine.busy:
                self._step()
            if self.leader is None:
                self._follow()

    def _follow(self) -> None:
        """A signal may have come to this rank alone: trainer rank 0 decides for all."""
        if self.world.stop_requested() and not self._stop_told:
            self._stop_told = True
            self.mailbox.notify(StopRequest(self.world.rank), self.world.homes[0])
        self.mailbox.pump()

    # -- decide -------------------------------------------------------------------------------

    def _decide(self) -> Turn:
        return self.leader.decide(self.engine.room, self.engine.busy, self._proving is not None)

    def _share(self, turn: Turn | None) -> Turn:
        """The leader's turn, on every rank of the replica. Collective over the replica's communicator."""
        comm = self.world.replica_comm
        if comm.size == 1:
            return turn
        if turn is None:
            leader = self.world.leaders[self.world.place.dp]
            self.world.phase("turn", self.config.deadlines.engine_step_s, peer=leader, version=self.engine.version)
        payload = pickle.dumps(turn, protocol=5) if turn else b""
        data = broadcast(comm, payload, 0, self._wait)
        return turn or pickle.loads(data)

    def _wait(self, request) -> None:
        """For the other ranks of the replica; the deadline is the phase's."""
        since = time.monotonic()
        while not request.Test():
            if time.monotonic() - since > SPIN_S:
                time.sleep(IDLE_S)

    def _add(self, request) -> None:
        gconfig = self.config.gconfig
        self.engine.add(
            request.id,
            request.prompt,
            seed=request.seed,
            max_new_tokens=gconfig.max_new_tokens,
            temperature=gconfig.temperature if request.temperature is None else request.temperature,
            ignore_eos=gconfig.ignore_eos,
        )

    # -- update -------------------------------------------------------------------------------

    def _update(self, update: Update) -> None:
        """Pause, receive, commit, resume; what is made from here on is withheld until the probe is back."""
        version = update.version
        with self.trace.span("update", version=version):
            started = time.monotonic()
            self.world.phase("exchange", 2 * self.exchange.deadline_s, version=version)
            self.engine.pause()
            if self.leader:
                self.leader.ready(version)
            self.engine.update(version, self._receive)
            # Every rank of the replica has the version before any of them goes on with it.
            self._wait(self.world.replica_comm.Ibarrier())
            received = time.monotonic()
            self.engine.resume()
        self._report = {"update_s": received - started, "recomputed": self.engine.running}
        self._proving = update
        if len(update.probe_tokens_S):
            self.engine.probe_start(update.probe_tokens_S)
        else:
            self._commit()

    def _receive(self, views: list) -> None:
        """Fill the views with the version that the trainer sends now. Raises ExchangeError."""
        self.exchange.start([], views)
        self.exchange.wait()

    def _prove(self, logp: np.ndarray) -> None:
        """Compare the probe with the trainer's log-probabilities. Raises VersionError beyond the tolerance."""
        expected = self._proving.probe_logp_S[1:]
        difference = np.abs(logp - expected)
        worst, mean = float(difference.max()), float(difference.mean())
        tolerance = self.config.rollout.verify_tolerance
        fp32 = self.config.rollout.dtype is Dtype.float32 and self.config.actor.dtype is Dtype.float32
        good = worst <= tolerance.fp32_max if fp32 else mean <= tolerance.bf16_mean and worst <= tolerance.bf16_max
        if not good or not np.isfinite(worst):
            at = int(difference.argmax()) + 1  # a NaN counts as the largest
            allowed = (
                f"at most {tolerance.fp32_max} (rollout.verify_tolerance.fp32_max)"
                if fp32
                else f"mean at most {tolerance.bf16_mean}, at most {tolerance.bf16_max} (rollout.verify_tolerance)"
            )
            raise VersionError(
                f"version {self._proving.version} on replica {self.world.place.dp} (rank {self.world.rank}): the "
                f"probe's log-probabilities differ from the trainer's by {worst:.3g} at token {at}, mean {mean:.3g}; "
                f"allowed {allowed}. None of its tokens left this rank"
            )
        self._report |= {"probe_max": worst, "probe_mean": mean}
        self._commit()

    def _commit(self) -> None:
        version, self._proving = self._proving.version, None
        if self.leader:
            self.leader.committed(version, self._report)
            self.leader.collect(self._withheld)
        self._withheld = []

    # -- step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        self.world.phase("engine", self.config.deadlines.engine_step_s, version=self.engine.version)
        started = time.monotonic()
        with self.trace.span("engine", version=self.engine.version, running=self.engine.running):
            finished = self.engine.step()
        if self.leader:
            self.leader.stepped(time.monotonic() - started, self.engine.tokens)
        if self._proving is None:
            if self.leader:
                self.leader.collect(finished)
            return
        self._withheld += finished
        if (logp := self.engine.probe_result()) is not None:
            self._prove(logp)
