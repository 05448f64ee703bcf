"""The trainer loop, on every trainer rank (design, section 4).

    hear     trainer rank 0 decides what is next (`root.py`), all others hear it
    train    deal the batch, update, publish the version; its ordinals are retired together
    save     a consistent cut: state, ledger and undelivered groups
    end      leave, with the exit code that was decided

Mail is pumped wherever the schedule lets it: between microbatches and in every wait. A home (TP 0,
PP 0 of a DP rank) keeps the groups that arrive for it until they are trained.
"""

from __future__ import annotations

import time

import numpy as np

from areal_hpc.config import Config, Verify
from areal_hpc.observe.metrics import Metrics
from areal_hpc.observe.trace import Trace
from areal_hpc.records import Group
from areal_hpc.reshard.exchange import Exchange
from areal_hpc.reshard.update import probe_tokens
from areal_hpc.storage.trajectories import Trained
from areal_hpc.stream.buffer import Decision, Home
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.stream.messages import Arrived, Cut, Discard, Saved, StopRequest, Tombstone, Working
from areal_hpc.trainer.actor import Actor, Outcome
from areal_hpc.trainer.batches import Batches
from areal_hpc.trainer.binding import TrainerBinding
from areal_hpc.trainer.commands import Checkpoint, Command, Commands, End, Enter, Train
from areal_hpc.trainer.measure import measure
from areal_hpc.trainer.root import Root
from areal_hpc.trainer.state import Restored, State
from areal_hpc.world import World


class Worker:
    """One trainer rank. `root` and `metrics` are trainer rank 0's, None elsewhere."""

    def __init__(
        self,
        config: Config,
        world: World,
        mailbox: Mailbox,
        actor: Actor,
        binding: TrainerBinding,
        state: State,
        exchange: Exchange,
        trace: Trace,
        attempt: int,
    ) -> None:
        self.config, self.world, self.mailbox = config, world, mailbox
        self.actor, self.binding, self.state = actor, binding, state
        self.exchange, self.trace, self.attempt = exchange, trace, attempt
        self.home = Home()  # what waits here; empty on ranks that are no home
        self.archive: list[Trained] = []  # what was trained here since the last save
        self._saved: set[int] = set()  # replicas whose answer to SAVE is here
        self.batches = Batches(world.role_comm, config.actor, self.pump)
        self.commands = Commands(world.role_comm, self.pump)
        self.root: Root | None = None
        self.metrics: Metrics | None = None
        self._stop_told = False
        self._moved_bytes = 0  # counted up to the last step
        self._generated: dict[int, tuple[int, float]] = {}  # replica -> tokens and engine seconds told so far
        self._dropped = 0
        self._save_s = self._eval_s = 0.0  # since the last record
        self._first_version = 0

    def run(self, restored: Restored) -> int:
        """Publish the version that the run goes on from, then follow trainer rank 0 to the end."""
        for group in restored.groups:
            self._take(group)
        restored.groups.clear()  # they live in the home only, until they are trained
        if self.root is not None:
            self._drops()  # the first record counts from here
        self._first_version = restored.step
        self._publish(restored.step)
        self._moved()  # the first step's record is of its own update
        while True:
            command = self._next()
            match command:
                case Train():
                    self._train(command.decision)
                case Checkpoint():
                    self._save(command.version)
                case End():
                    return command.code

    def _next(self) -> Command:
        if self.root is None:
            return self._hear("take", 2 * self.config.deadlines.batch_s)
        self.world.phase("take", 2 * self.config.deadlines.batch_s)
        with self.trace.span("take"):
            command = self.root.next()
        for version, parts in self.root.evaluations:
            self._evaluated(version, parts)
        self.root.evaluations.clear()
        return self.commands.tell(command)

    def _hear(self, phase: str, limit_s: float, version: int = -1) -> Command:
        """The next command of trainer rank 0, which gives signs of life while it waits itself."""
        self.world.phase(phase, limit_s, peer=self.world.homes[0], version=version)
        return self.commands.hear()

    # -- mail ---------------------------------------------------------------------------------

    def pump(self) -> None:
        """Take what has arrived. Called between microbatches and in every wait; never blocks."""
        root = self.world.homes[0]
        for _, message in self.mailbox.pump():
            match message:
                case Group():
                    self._take(message)
                case Tombstone() if self.root is None:
                    self.mailbox.notify(message, root)
                case Saved():
                    self._saved.add(message.replica)
                    if len(self._saved) == len(self.world.leaders):
                        self._saved.clear()
                        self.mailbox.notify(Cut(self.world.place.dp, message.step), root)
                case Discard():
                    self.home.discard(message.ordinals)
                case Working():
                    self.world.beat()
                case _:
                    self.root.handle(message)
        if self.world.stop_requested() and not self._stop_told:
            self._stop_told = True
            self.mailbox.notify(StopRequest(self.world.rank), root)

    def _take(self, group: Group) -> None:
        self.home.add(group)
        self.trace.instant("delivery", ordinal=group.ordinal, replica=group.replica)
        arrived = Arrived(self.world.place.dp, group.ordinal, group.tokens, group.oldest_version)
        self.mailbox.notify(arrived, self.world.homes[0])

    # -- one step -----------------------------------------------------------------------------

    def _train(self, decision: Decision) -> None:
        step, began = decision.step, time.monotonic()
        self._show(f"train step {step}")
        with self.trace.span("train", step=step, groups=len(decision.ordinals)):
            self.world.phase("forward-backward", self.config.deadlines.step_s, version=step)
            outcome = self._update(decision)
            if outcome is not None and not outcome.finite and outcome.applied == 0:
                self._nonfinite(decision)
                return
            updated = time.monotonic()
            mine = self._retire(decision)
        self._publish(step + 1)
        published = time.monotonic()
        facts = measure(self.world.role_comm, step, mine, self._moved(), self.pump)
        if self.root is not None:
            self.root.trained(decision)
            self.root.step_s = published - began
            self._record(decision, outcome, facts, update_s=updated - began, publish_s=published - updated)

    def _update(self, decision: Decision) -> Outcome | None:
        """The optimizer steps of the batch; None when nothing of it survived (the step counts all the same)."""
        if not decision.ordinals:
            return None
        minibatches = self.batches.deal(decision, self.home)
        return self.actor.update(decision.step, minibatches, self._between_microbatches)

    def _between_microbatches(self) -> None:
        self.world.beat()
        self.pump()

    def _retire(self, decision: Decision) -> list[Group]:
        """The groups of the batch that waited in this home move to its archive."""
        if not self.world.is_home:
            return []
        here = self.world.place.dp
        mine = self.home.take(t for t, home in zip(decision.ordinals, decision.homes) if home == here)
        self.archive += [(decision.step, group) for group in mine]
        return mine

    def _nonfinite(self, decision: Decision) -> None:
        if self.root is not None:
            self.root.nonfinite(decision)

    # -- publish ------------------------------------------------------------------------------

    def _publish(self, version: int) -> None:
        """Send the present weights as `version` to all replicas. Collective over the trainer ranks."""
        with self.trace.span("publish", version=version):
            self._show(f"publish version {version}")
            tokens_S, logp_S = np.empty(0, np.int32), np.empty(0, np.float32)
            if self._proves(version):
                self.world.phase("probe", self.config.deadlines.step_s, version=version)
                tokens_S = probe_tokens(self.actor.model.spec, version)
                logp_S = np.concatenate([[0.0], *self.actor.logp([tokens_S])]).astype(np.float32)
            limit_s = 2 * self.config.deadlines.exchange_s
            if self.root is not None:
                self.root.announce(version, tokens_S, logp_S)
                self.commands.tell(Enter(version))
            else:
                self._hear("publish", limit_s, version)
            self.world.phase("exchange", limit_s, version=version)
            self.exchange.start([view for _, view in self.binding.weight_views()], [])
            self.exchange.wait()

    def _proves(self, version: int) -> bool:
        verify = self.config.rollout.verify
        return verify is Verify.always or (verify is Verify.first and version == self._first_version)

    def _moved(self) -> int:
        """Bytes that this rank sent in the newest update."""
        before, self._moved_bytes = self._moved_bytes, self.exchange.sent_bytes
        return self._moved_bytes - before

    # -- save ---------------------------------------------------------------------------------

    def _save(self, step: int) -> None:
        self._show(f"save step {step}")
        with self.trace.span("save", step=step):
            self.world.phase("save", self.config.deadlines.save_s, version=step)
            if self.metrics is not None:
                self.metrics.sync()
            ledger = self.root.inventory.ledger.state() if self.root is not None else None
            self._save_s = self.state.save(step, self.attempt, self.archive, self.home.undelivered(), ledger, self.pump)
        self.archive.clear()
        if self.root is not None:
            self.root.saved(step, self._save_s)
            self.root.progress.say(f"checkpoint of step {step} in {self._save_s:.1f} s")

    # -- records ------------------------------------------------------------------------------

    def _record(self, decision: Decision, outcome: Outcome | None, facts: dict, **seconds: float) -> None:
        asked = self.config.actor.ppo_n_minibatches
        record = self.metrics.step(
            decision.step,
            **(outcome.metrics if outcome is not None else {}),
            **facts,
            **seconds,
            **self._generation(),
            trained_groups=len(decision.ordinals),
            wait_s=decision.waited_s,
            wait_ordinal=decision.waited_ordinal,
            dropped=self._drops(),
            skipped_minibatches=asked - outcome.applied if outcome is not None and not outcome.finite else 0,
            save_s=self._save_s,
            eval_s=self._eval_s,
            **self._proof(),
        )
        self._save_s = self._eval_s = 0.0
        self.root.progress.step(record)

    def _generation(self) -> dict[str, float]:
        """Tokens and engine seconds since the last record, as the leaders told them."""
        tokens, seconds = 0, []
        for replica, alive in self.root.replicas.alive.items():
            before = self._generated.get(replica, (0, 0.0))
            tokens += alive.tokens - before[0]
            seconds.append(alive.engine_s - before[1])
            self._generated[replica] = (alive.tokens, alive.engine_s)
        return {"generated_tokens": tokens, "generate_s": float(np.mean(seconds)) if seconds else 0.0}

    def _proof(self) -> dict[str, float]:
        """What the probe of the newest version that was proved has found; nothing where none was asked for."""
        found = [report["probe_max"] for report in self.root.reports.values() if "probe_max" in report]
        return {"probe_max": max(found)} if found else {}

    def _drops(self) -> int:
        total = sum(self.root.inventory.ledger.dropped_total.values())
        before, self._dropped = self._dropped, total
        return total - before

    def _evaluated(self, version: int, parts: list) -> None:
        prompts = sum(part.prompts for part in parts)
        mean = sum(part.reward_sum for part in parts) / max(prompts, 1)
        self._eval_s = max(part.seconds for part in parts)
        self.metrics.evaluation(version, prompts=prompts, reward_mean=mean, failed=sum(p.failed for p in parts))
        self.root.progress.say(f"version {version}: {mean:.3f} on {prompts} held-out prompts")

    def _show(self, what: str) -> None:
        if self.root is not None:
            self.root.progress.phase(what)

    def close(self) -> None:
        self.batches.close()
        self.commands.close()
        self.state.close()
