"""The leader of a replica: the only one of its ranks that talks to the world.

It claims ordinals, starts their samples, sends samples to the reward workers and groups to their
homes, and turns the trainer's messages into the replica's next turn. The leader of replica 0 owns
the live ledger as well, and answers the claims of all (`Owner`). Nothing here blocks: what other
ranks answer is taken in a later turn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from areal_hpc.config import Config
from areal_hpc.records import Group
from areal_hpc.rollout.engine import Finished
from areal_hpc.rollout.evaluate import Evaluation
from areal_hpc.rollout.groups import Groups, Request
from areal_hpc.rollout.rewards import RewardPool
from areal_hpc.stream.claims import Claims
from areal_hpc.stream.ledger import Ledger
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.stream.messages import (
    Alive,
    Claim,
    Claimed,
    Committed,
    Dropped,
    Evaluate,
    Ready,
    Save,
    Saved,
    Stop,
    StopRequest,
    Tombstone,
    Trained,
    Update,
)
from areal_hpc.world import World

ALIVE_S = 1.0
IDLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Turn:
    """What a replica does next, the same on each of its ranks: receive a version, admit samples, or end."""

    update: Update | None = None
    requests: tuple[Request, ...] = ()
    end: int | None = None

    @property
    def empty(self) -> bool:
        return self.update is None and not self.requests and self.end is None


class Owner:
    """The live ledger and the open claims on it, at the leader of replica 0."""

    def __init__(self, ledger: Ledger, world: World, mailbox: Mailbox) -> None:
        self.ledger, self._world, self._mailbox = ledger, world, mailbox
        self._claims = Claims(ledger)

    def handle(self, message: Claim | Committed | Trained | Dropped) -> None:
        """Books a message and answers the claims that it made answerable."""
        match message:
            case Claim():
                self._claims.ask(message)
            case Committed():
                self._claims.committed(message.replica, message.version)
            case Trained():
                self.ledger.trained(message.step, message.ordinals)
            case Dropped():
                self.ledger.drop(message.ordinals, message.reason)
        for replica, answer in self._claims.answers():
            self._mailbox.notify(answer, self._world.leaders[replica])


class Leader:
    """`decide` gives the next turn, `collect` takes the samples that a step finished.

    `rewards` scores training samples, `heldout` those of evaluations (None where there are none).
    """

    def __init__(
        self,
        config: Config,
        world: World,
        mailbox: Mailbox,
        groups: Groups,
        rewards: RewardPool,
        evaluation: Evaluation,
        heldout: RewardPool | None,
        owner: Owner | None,
    ) -> None:
        self.config, self.world, self.mailbox = config, world, mailbox
        self.groups, self.rewards, self.owner = groups, rewards, owner
        self.evaluation, self.heldout = evaluation, heldout
        self.replica = world.place.dp
        self.root = world.homes[0]
        self.version = -1  # the newest that this replica has proved
        self.tokens = 0  # generated in this attempt
        self.engine_s = self.longest_step_s = 0.0
        self._limit = config.rollout.max_concurrent_rollouts // config.rollout.parallel.dp
        self._queue: deque[Request] = deque()  # started, and not yet admitted to the engine
        self._updates: deque[Update] = deque()
        self._claim_open = False
        self._end: int | None = None
        self._stop_told = False
        self._alive_at = 0.0

    # -- one turn -----------------------------------------------------------------------------

    def decide(self, room: int, busy: bool, proving: bool) -> Turn:
        """The next turn. Returns at once when the engine is busy, else waits until there is something to do,
        or a second: the other ranks of the replica wait for this one and hear that it lives.

        room: samples that the engine still takes. proving: a version is received and not yet proved;
        until it is, nothing is admitted and no other version accepted. Nor is one while held-out
        prompts are under way: an evaluation is of one version.
        """
        began = time.monotonic()
        while True:
            self.serve()
            if self._end is not None:
                return Turn(end=self._end)
            if self._updates and not proving and not self.evaluation.open:
                return Turn(update=self._updates.popleft())
            turn = Turn() if proving else Turn(requests=tuple(self._admit(room)))
            if busy or not turn.empty or time.monotonic() - began >= ALIVE_S:
                return turn
            self.world.phase("idle", self.config.deadlines.batch_s, version=self.version)
            time.sleep(IDLE_S)

    def serve(self) -> None:
        """Mail, rewards and signs of life; never blocks. Also called while an exchange waits."""
        for _, message in self.mailbox.pump():
            self._handle(message)
        for sample_id, reward, status in self.rewards.test():
            self._deliver(self.groups.scored(sample_id, reward, status))
        if self.heldout is not None:
            for sample_id, reward, status in self.heldout.test():
                self.evaluation.scored(sample_id, reward, status)
        if (result := self.evaluation.test()) is not None:
            self.mailbox.notify(result, self.root)
        if self.world.stop_requested() and not self._stop_told:
            self._stop_told = True
            self.mailbox.notify(StopRequest(self.world.rank), self.root)
        if time.monotonic() - self._alive_at >= ALIVE_S:
            self.sign_of_life()

    def sign_of_life(self) -> None:
        self._alive_at = time.monotonic()
        running = self.groups.samples_open
        self.mailbox.notify(
            Alive(self.replica, self.version, self.longest_step_s, running, self.tokens, self.engine_s), self.root
        )

    def stepped(self, seconds: float, tokens: int) -> None:
        """Books an engine step; `tokens` were generated so far."""
        self.engine_s += seconds
        self.longest_step_s = max(self.longest_step_s, seconds)
        self.tokens = tokens

    def collect(self, finished: Iterable[Finished]) -> None:
        """Samples that left the engine under proved weights."""
        for sample in finished:
            if self.evaluation.owns(sample.request_id):
                self.evaluation.finished(sample)
            else:
                self.groups.finished(sample)

    # -- versions -----------------------------------------------------------------------------

    def ready(self, version: int) -> None:
        self.mailbox.notify(Ready(self.replica, version), self.root)

    def committed(self, version: int, report: dict) -> None:
        """The replica holds `version` and it is proved: say so, and claim under it."""
        self.version = version
        message = Committed(self.replica, version, report)
        self.mailbox.notify(message, self.root)
        self._tell_owner(message)
        self.sign_of_life()

    # -- inside -------------------------------------------------------------------------------

    def _handle(self, message: object) -> None:
        match message:
            case Update():
                self._updates.append(message)
            case Claimed():
                self._claim_open = False
                self._queue.extend(self.groups.open(message.ordinals))
            case Claim() | Committed() | Trained() | Dropped():
                self.owner.handle(message)
            case Save():
                # Behind the last group queued for each home: what comes later is not in the checkpoint.
                for home in self.world.homes:
                    self.mailbox.send(Saved(self.replica, message.step), home)
            case Evaluate():
                self.evaluation.start(message.version)
            case Stop():
                self._end = message.code
            case _:
                raise TypeError(f"rollout leader rank {self.world.rank}: no leader is sent {message!r}")

    def _admit(self, room: int) -> list[Request]:
        """Requests for the engine: held-out prompts first, then claimed ordinals, as far as there is room."""
        if self.version < 0:
            return []
        self._claim()
        requests = self.evaluation.requests(room)
        while self._queue and len(requests) < room:
            requests.append(self._queue.popleft())
        return requests

    def _claim(self) -> None:
        """Ask for as many ordinals as could start at once; the owner's own replica takes them directly."""
        count = (self._limit - self.groups.samples_open) // self.config.gconfig.n_samples
        if count < 1 or self._claim_open:
            return
        if self.owner is not None:
            self._queue.extend(self.groups.open(self.owner.ledger.claim(count, self.version)))
        else:
            self._claim_open = True
            self.mailbox.notify(Claim(self.replica, count, self.version), self.world.leaders[0])

    def _deliver(self, result: Group | Tombstone | None) -> None:
        if result is None:
            return
        homes = self.world.homes
        self.mailbox.send(result, homes[result.ordinal % len(homes)])
        if isinstance(result, Tombstone):
            self._tell_owner(Dropped((result.ordinal,), result.reason))

    def _tell_owner(self, message: Committed | Dropped) -> None:
        if self.owner is not None:
            self.owner.handle(message)
        else:
            self.mailbox.notify(message, self.world.leaders[0])

    def close(self) -> None:
        """End the reward workers."""
        self.rewards.close()
        if self.heldout is not None:
            self.heldout.close()
