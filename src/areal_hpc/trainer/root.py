"""Trainer rank 0: it alone decides. What is next for all trainer ranks, and when replicas get what.

It keeps the inventory of what waits, sends UPDATE, SAVE and EVALUATE to the leaders, takes their
answers and their signs of life, and tells the ledger's owner what was trained or dropped. Its waits
pump mail and have deadlines that name what is missing and who has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from areal_hpc import stopfile
from areal_hpc.config import Config, ShortBatch
from areal_hpc.exits import Exit
from areal_hpc.observe.progress import Progress
from areal_hpc.records import DropReason
from areal_hpc.stream.buffer import Decision, Inventory
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.stream.messages import (
    Alive,
    Arrived,
    Committed,
    Cut,
    Discard,
    Dropped,
    Evaluate,
    Evaluated,
    Ready,
    Save,
    Stop,
    StopRequest,
    Tombstone,
    Trained,
    Update,
)
from areal_hpc.trainer.commands import IDLE_S, Checkpoint, Command, End, Train
from areal_hpc.trainer.replicas import Replicas, RolloutSilentError
from areal_hpc.world import World

STOP_FILE_S = 1.0  # how often the run's folder is looked at for a stop file
MARGIN_S = 30.0  # left at the end of the walltime for closing files and MPI


class ShortBatchError(RuntimeError):
    """A step that lost more groups than `rollout.max_drops_per_step`, where that ends the run."""


class Root:
    """`version` is the newest published; a step's weights are `version == step` at its start.

    evaluated: versions of the surviving history that were evaluated. save_s: what a save may take (seconds)
    until this start has made one.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        mailbox: Mailbox,
        inventory: Inventory,
        progress: Progress,
        pump: Callable[[], None],
        *,
        attempt_start: int,
        evaluated: set[int],
        save_s: float,
    ) -> None:
        self.config, self.world, self.mailbox = config, world, mailbox
        self.inventory, self.progress = inventory, progress
        self.replicas = Replicas(config.deadlines, world, mailbox, progress, pump)
        self.version = -1
        self.evaluations: list[tuple[int, list[Evaluated]]] = []  # finished, and not yet written
        self._ready: set[int] = set()
        self._committed = dict.fromkeys(range(len(world.leaders)), -1)
        self.reports: dict[int, dict] = {}  # of the newest version, by replica
        self._cuts: set[int] = set()
        self._evaluated: dict[int, Evaluated] = {}
        self._versions_evaluated = evaluated
        self._last_arrival = time.monotonic()
        self._stop_reason = ""
        self._stop_file_at = 0.0
        self._saved_step = self._start = attempt_start  # the newest checkpoint's step
        self._saved_at = time.monotonic()
        self.save_s = save_s
        self.step_s = self._eval_s = 0.0  # what the last ones took

    @property
    def step(self) -> int:
        """The next step to be trained."""
        return self.inventory.ledger.step

    # -- what comes next ----------------------------------------------------------------------

    def next(self) -> Command:
        """What all trainer ranks do now, at a step boundary."""
        while True:
            finished, stopping = self.step >= self.config.total_train_steps, self.stopping()
            if self._evaluation_due(finished, stopping):
                self._evaluate(self.step)
                continue  # it may have taken long: look again whether the run is to stop
            if self.step != self._saved_step and (finished or stopping or self._save_due()):
                self._cut(self.step)
                return Checkpoint(self.step)
            if finished or stopping:
                return self._end(finished)
            decision = self._batch()
            if decision is not None:
                return Train(decision)

    def stopping(self) -> bool:
        """Whether the run ends at this boundary: a signal, a stop file, or too little walltime left."""
        now = time.monotonic()
        if not self._stop_reason and self.world.stop_requested():
            self._stop_reason = "a signal"
        if not self._stop_reason and now - self._stop_file_at > STOP_FILE_S:
            self._stop_file_at = now
            if stopfile.asked(self.world.run_dir, self.world.job, self.world.restart):
                self._stop_reason = "areal-hpc stop"
        left = self.world.time_left()
        if not self._stop_reason and left < self.step_s + self._eval_s + 1.5 * self.save_s + MARGIN_S:
            self._stop_reason = f"the walltime ({left:.0f} s left)"
        return bool(self._stop_reason)

    def _save_due(self) -> bool:
        saver = self.config.saver
        by_step = saver.freq_steps and self.step % saver.freq_steps == 0
        by_time = saver.freq_secs and time.monotonic() - self._saved_at >= saver.freq_secs
        return bool(by_step or by_time)

    def saved(self, step: int, seconds: float) -> None:
        self._saved_step, self._saved_at, self.save_s = step, time.monotonic(), seconds

    def _end(self, finished: bool) -> End:
        """75 is for a run that gained something; a stop before the first new checkpoint ends with 1.

        A run that is stopped between its last step and the evaluation of it is not done.
        """
        done = finished and not (self.config.evaluator.at_end and self.step not in self._versions_evaluated)
        code = Exit.DONE if done else Exit.REQUEUE if self._saved_step > self._start else Exit.CRASH
        if not done:
            gained = f"checkpoint of step {self._saved_step}" if code == Exit.REQUEUE else "no new checkpoint"
            self.progress.say(f"stopped at step {self.step} by {self._stop_reason}: {gained}")
        self.replicas.tell(Stop(int(code)))
        return End(int(code))

    # -- batches ------------------------------------------------------------------------------

    def _batch(self) -> Decision | None:
        """The next batch, or None when the run is to stop first."""
        limit_s, step = self.config.deadlines.batch_s, self.step
        self._last_arrival = time.monotonic()
        while True:
            self.replicas.turn()
            if stale := self.inventory.stale(step):
                self._drop(stale, DropReason.STALE)
            decision = self.inventory.decide(step, time.monotonic())
            if decision is not None:
                self._look_at(decision)
                return decision
            if self.stopping():
                return None
            waiting = self.inventory.waiting_for()
            head = waiting.ordinals[0] if waiting.ordinals else -1
            self.world.phase("take", 2 * limit_s, version=self.version, ordinal=head)
            if time.monotonic() - self._last_arrival > limit_s:
                raise RolloutSilentError(
                    f"step {step}: no group arrived for {limit_s:g} s (deadlines.batch_s); missing ordinals "
                    f"{list(waiting.ordinals[:8])}; replicas: {self.replicas.describe()}"
                )
            self.progress.phase(f"wait for ordinal {head}")
            time.sleep(IDLE_S)

    def _look_at(self, decision: Decision) -> None:
        """Raises ShortBatchError where a batch that lost too many groups is to end the run."""
        if not decision.short:
            return
        rollout, B = self.config.rollout, self.config.train_dataset.batch_size
        reasons = {reason: n for reason, n in self.inventory.ledger.dropped_total.items() if n}
        text = (
            f"step {decision.step}: {len(decision.ordinals)} of {B} groups survived, for more than rollout."
            f"max_drops_per_step={rollout.max_drops_per_step} were dropped; of the whole run, by reason: {reasons}"
        )
        if rollout.short_batch is ShortBatch.stop:
            raise ShortBatchError(f"{text} (rollout.short_batch=stop)")
        if not decision.ordinals:
            self.progress.say(f"{text}; nothing is trained")

    def trained(self, decision: Decision) -> None:
        self.inventory.trained(decision.step, decision.ordinals)
        self.mailbox.notify(Trained(decision.step, decision.ordinals), self.world.leaders[0])

    def nonfinite(self, decision: Decision) -> None:
        """The batch made no finite gradient: its ordinals are dropped and the step is tried with the next."""
        self._drop(decision.ordinals, DropReason.NONFINITE)
        self.progress.say(f"step {decision.step}: loss or gradient not finite, dropped ordinals {decision.ordinals}")

    def _drop(self, ordinals: tuple[int, ...], reason: DropReason) -> None:
        """A drop of the trainer's own: booked here, told to the ledger's owner and to the homes."""
        self.inventory.dropped(ordinals, reason)
        self.mailbox.notify(Dropped(ordinals, reason), self.world.leaders[0])
        for home in self.world.homes:
            self.mailbox.notify(Discard(ordinals), home)

    # -- versions -----------------------------------------------------------------------------

    def announce(self, version: int, tokens_S: np.ndarray, logp_S: np.ndarray) -> None:
        """UPDATE to all leaders, and wait until each replica is paused; then all may enter the exchange."""
        self.await_committed(self.version)
        self._ready.clear()
        self.replicas.tell(Update(version, tokens_S, logp_S))
        self.replicas.until(
            lambda: self.replicas.missing(self._ready),
            "publish",
            self.config.deadlines.exchange_s,
            f"READY of version {version}",
            version,
        )
        self.version = version

    def await_committed(self, version: int) -> None:
        """Until every replica holds and has proved `version`."""
        self.replicas.until(
            lambda: [r for r, v in self._committed.items() if v < version],
            "publish",
            self.config.deadlines.exchange_s,
            f"version {version} to be proved",
            version,
        )

    # -- saves and evaluations ----------------------------------------------------------------

    def _cut(self, step: int) -> None:
        """SAVE to all leaders; until every home has all their answers, and so all that was finished before."""
        self._cuts.clear()
        self.await_committed(self.version)
        self.replicas.tell(Save(step))
        homes = range(len(self.world.homes))
        self.replicas.until_homes(
            lambda: [h for h in homes if h not in self._cuts],
            self.config.deadlines.save_s,
            f"the cut of step {step} at every home",
            step,
        )

    def _evaluation_due(self, finished: bool, stopping: bool) -> bool:
        evaluator = self.config.evaluator
        if stopping or self.step in self._versions_evaluated:
            return False
        at_start = evaluator.at_start and self.step == 0
        at_end = evaluator.at_end and finished
        periodic = evaluator.freq_steps and self.step > 0 and self.step % evaluator.freq_steps == 0
        return bool(at_start or at_end or periodic)

    def _evaluate(self, version: int) -> None:
        self.progress.phase(f"evaluate version {version}")
        self.await_committed(version)
        self._evaluated = {}
        self.replicas.tell(Evaluate(version))
        began = time.monotonic()
        self.replicas.until(
            lambda: self.replicas.missing(self._evaluated),
            "evaluate",
            self.config.deadlines.batch_s,
            f"the evaluation of version {version}",
            version,
        )
        self._versions_evaluated.add(version)
        self._eval_s = time.monotonic() - began
        self.evaluations.append((version, [self._evaluated[r] for r in sorted(self._evaluated)]))

    # -- mail ---------------------------------------------------------------------------------

    def handle(self, message: object) -> None:
        """Takes a control message; signs of life count for every deadline."""
        self.replicas.heard(message)
        match message:
            case Arrived():
                self._last_arrival = time.monotonic()
                self.inventory.arrived(message.ordinal, message.home, message.tokens, message.oldest_version)
            case Tombstone():
                self._last_arrival = time.monotonic()
                self.inventory.dropped([message.ordinal], message.reason)
            case Alive():
                pass
            case Ready():
                self._ready.add(message.replica)
            case Committed():
                self._committed[message.replica] = message.version
                self.reports[message.replica] = message.report
            case Cut():
                self._cuts.add(message.home)
            case Evaluated():
                self._evaluated[message.replica] = message
            case StopRequest():
                self._stop_reason = self._stop_reason or f"a signal at rank {message.rank}"
            case _:
                raise TypeError(f"trainer rank 0 is sent {message!r}")
