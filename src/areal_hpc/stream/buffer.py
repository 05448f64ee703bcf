"""What waits for the trainer: the inventory at trainer rank 0, and the groups in each trainer home.

The inventory knows every finished ordinal by a few numbers and decides the batches; the homes hold
the groups themselves. Neither sends anything: both worker loops do, with what is returned here.

Order `fifo`: step i trains the survivors of its window (`ledger.Ledger.window`): exactly the next B,
or fewer when more than max_drops_per_step of the window were dropped.

Order `ready`: step i trains the B groups that arrived first, by arrival at trainer rank 0 and not by
ordinal. It trains fewer only when all ordinals up to the end of window i are trained, dropped or
waiting and still fewer than B wait; these ordinals may all start by version i, so the wait always
ends. With `stale: drop` the caller drops what `Inventory.stale` names before it asks for a decision.

A step is decided by `decide`, which changes no account: what was decided and then dropped (a loss
that is not finite) is told by `dropped`, and the step asked for again; else `trained` retires it.

Time is passed in, in seconds of any one clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from areal_hpc.config import Order, Stale
from areal_hpc.records import DropReason, Group
from areal_hpc.stream.ledger import InvariantError, Ledger


@dataclass(frozen=True, slots=True)
class Decision:
    """The batch of a step: ordinals with the home and the trainable tokens of each, in training order.

    `short`: fewer than B, possibly none, survived. `waited_s`, `waited_ordinal`: the longest wait for
    one missing ordinal at the head of the line since the last step, 0 and -1 if there was none.
    """

    step: int
    ordinals: tuple[int, ...]
    homes: tuple[int, ...]
    tokens: tuple[int, ...]
    short: bool
    waited_s: float = 0.0
    waited_ordinal: int = -1


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the next batch still lacks, lowest first; `since` is when the first became the head of the line."""

    ordinals: tuple[int, ...]
    since: float | None


@dataclass(frozen=True, slots=True)
class _Finished:
    home: int
    tokens: int
    oldest_version: int


class Inventory:
    """Trainer rank 0's account: its own ledger, and what is finished and waits.

    `ledger` is a book of its own beside the live one; its `state` is the checkpoint's. Groups that a
    checkpoint holds come in by `arrived` like all others (their ledger needs no `delivered`).
    """

    def __init__(self, ledger: Ledger, order: Order, stale: Stale = Stale.keep) -> None:
        self.ledger = ledger
        self._order, self._stale = order, stale
        self._finished: dict[int, _Finished] = {}  # in order of arrival
        self._missing: tuple[int, ...] = ()
        self._since: float | None = None
        self._longest: tuple[float, int] = (0.0, -1)

    def arrived(self, ordinal: int, home: int, tokens: int, oldest_version: int) -> None:
        """A group waits in `home`. Raises InvariantError when the ordinal waits or is settled already."""
        self.ledger.delivered([ordinal])
        self._finished[ordinal] = _Finished(home, tokens, oldest_version)

    def dropped(self, ordinals: Iterable[int], reason: DropReason) -> None:
        """Tombstones, or what the trainer itself drops: then the same step is decided again, with the next."""
        ordinals = tuple(ordinals)
        self.ledger.drop(ordinals, reason)
        for t in ordinals:
            self._finished.pop(t, None)

    def trained(self, step: int, ordinals: Iterable[int]) -> None:
        """The step is done: its ordinals leave the inventory and are retired in the ledger, together."""
        ordinals = tuple(ordinals)
        self.ledger.trained(step, ordinals)
        for t in ordinals:
            del self._finished[t]
        self._missing, self._since, self._longest = (), None, (0.0, -1)

    def decide(self, step: int, now: float) -> Decision | None:
        """The batch of `step`, or None while it is not complete.

        Asking again gives the same batch until something is trained or dropped (under `ready` the
        groups that arrived first stay first). Raises InvariantError when `step` is not the next one,
        or when a group of a `fifo` batch has a token older than step - eta.
        """
        if step != self.ledger.step:
            raise InvariantError(f"step {step} is to be decided, but step {self.ledger.step} is the next")
        missing, chosen = self._fifo(step) if self._order is Order.fifo else self._ready(step)
        self._watch(missing, now)
        if missing:
            return None
        finished = [self._finished[t] for t in chosen]
        return Decision(
            step,
            chosen,
            tuple(f.home for f in finished),
            tuple(f.tokens for f in finished),
            len(chosen) < self.ledger.B,
            *self._longest,
        )

    def stale(self, step: int) -> tuple[int, ...]:
        """What waits and has a token older than step - eta, if the settings drop such groups; else nothing.

        The caller drops them (`dropped` here, `Dropped` to the owner, `Discard` to the homes).
        """
        if self._order is Order.fifo or self._stale is Stale.keep:
            return ()
        return tuple(t for t, f in self._finished.items() if f.oldest_version < step - self.ledger.eta)

    def waiting_for(self) -> Waiting:
        """What the last `decide` found missing: for the deadline's message and the progress line."""
        return Waiting(self._missing, self._since)

    def __len__(self) -> int:
        """Finished groups that wait."""
        return len(self._finished)

    def _fifo(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        survivors = self.ledger.unsettled(*self.ledger.window(step))
        missing = tuple(t for t in survivors if t not in self._finished)
        for t in () if missing else survivors:
            oldest = self._finished[t].oldest_version
            if oldest < step - self.ledger.eta:
                raise InvariantError(
                    f"ordinal {t} of step {step} has a token made by version {oldest}; "
                    f"eta {self.ledger.eta} allows {step - self.ledger.eta} and newer"
                )
        return missing, tuple(survivors)

    def _ready(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        oldest = tuple(self._finished)[: self.ledger.B]
        if len(oldest) == self.ledger.B:
            return (), oldest
        due = self.ledger.unsettled(0, self.ledger.window(step)[1])
        return tuple(t for t in due if t not in self._finished), oldest

    def _watch(self, missing: tuple[int, ...], now: float) -> None:
        """Keep since when the head of the line has been missing, and the longest such wait of this step."""
        head, last = missing[:1], self._missing[:1]
        if head != last:
            if last and self._since is not None:
                self._longest = max(self._longest, (now - self._since, last[0]))
            self._since = now if head else None
        self._missing = missing


def restorable(groups: Iterable[Group], ledger: Ledger, order: Order) -> list[Group]:
    """Of a checkpoint's undelivered groups those that may still be trained under this run's B and eta.

    A group whose ordinal is settled is left out: trainer rank 0 has dropped it, and its home had not heard
    so when it saved (`Discard` and the command to save go by two communicators). Under `fifo` a group
    whose oldest token would be staler than eta in the step that now takes it (B or eta became smaller)
    is left out too, so its ordinal is claimed and generated again. With unchanged sizes every other
    group passes. `ledger` is the restored one.
    """
    groups = [g for g in groups if ledger.unsettled(g.ordinal, g.ordinal + 1)]
    if order is not Order.fifo:
        return groups
    return [g for g in groups if g.oldest_version >= ledger.step_of(g.ordinal) - ledger.eta]


class Home:
    """The groups that wait in one trainer home, by ordinal."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def add(self, group: Group) -> None:
        """Raises InvariantError when a group of this ordinal is here already."""
        if group.ordinal in self._groups:
            raise InvariantError(f"ordinal {group.ordinal} was delivered twice, last by replica {group.replica}")
        self._groups[group.ordinal] = group

    def __getitem__(self, ordinal: int) -> Group:
        """A group that stays here, to be read."""
        return self._groups[ordinal]

    def take(self, ordinals: Iterable[int]) -> list[Group]:
        """The groups of these ordinals, in this order; they leave. Raises InvariantError for one that is not here."""
        ordinals = list(ordinals)
        absent = [t for t in ordinals if t not in self._groups]
        if absent:
            raise InvariantError(f"ordinals {absent} are to be taken, but only {sorted(self._groups)} are here")
        return [self._groups.pop(t) for t in ordinals]

    def discard(self, ordinals: Iterable[int]) -> None:
        """Throw these away where they are here: they were dropped."""
        for t in ordinals:
            self._groups.pop(t, None)

    def undelivered(self) -> list[Group]:
        """What a checkpoint keeps: every group that waits, by ordinal."""
        return [self._groups[t] for t in sorted(self._groups)]

    def __len__(self) -> int:
        return len(self._groups)
