"""The ledger: which ordinals exist, which may start, what became of each. Arithmetic only.

Admission (equation 3 of the paper, with drops): ordinal t may start under version v when

    step_of(t) = step0 + floor((rank(t) - rank0) / B) <= v + eta   and   step_of(t) < total

Windows. Ordinals are cut, in order, into one window per step. With c ordinals of the window and d
of them dropped, a window ends where

    c - min(d, D) = B            B = prompts of a step, D = max_drops_per_step

that is at its B-th survivor, or, when more than D of it were dropped, after B + D ordinals: then
fewer than B survive and the step trains them (a short batch). Either way the window uses up exactly
B ranks, so `rank(t)` is rank0 + B per whole window + the same expression inside t's own, and
`step_of(t)` is the window it lies in. Of one step's drops at most D are subtracted.

Why late knowledge is safe: with one more ordinal known as dropped, no window ends earlier (its B-th
survivor cannot come sooner, B + D does not move, and a later start moves both on). So a drop only
lowers `step_of`, and an ordinal started by what was known then is within the bound of what is known
later. Under `fifo` step i trains the survivors of window i, hence every token it trains was made by
a version >= i - eta.

`rank0` is the number of ranks used up before `step0`: a restart counts on from there, with its own B.

Two books of the same class are kept. The leader of replica 0 owns the live one, which hands out
claims. Trainer rank 0 has its own (in `buffer.Inventory`), which decides batches and whose `state`
goes into checkpoints; it hears of every drop in the order of delivery. Neither waits for the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

from areal_hpc.config import ConfigError
from areal_hpc.records import DropReason

FORMAT = 1


class InvariantError(RuntimeError):
    """The account of ordinals contradicts itself; going on would train a prompt twice or never."""


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)


def item_of(seed: int, ordinal: int, n: int) -> int:
    """The row, 0 <= row < n, of the prompt with this ordinal: each epoch is a permutation of its own."""
    return int(_permutation(seed, ordinal // n, n)[ordinal % n])


class Ledger:
    """The account of one run, from ordinal 0 or from a checkpoint's `state` (`from_state`).

    `step` is the next step to be trained. Raises ValueError for sizes that make no sense.
    """

    def __init__(self, B: int, eta: int, seed: int, total_steps: int, max_drops_per_step: int) -> None:
        if B < 1 or eta < 0 or max_drops_per_step < 0:
            raise ValueError(f"ledger: B={B} (>= 1), eta={eta} (>= 0), max_drops_per_step={max_drops_per_step} (>= 0)")
        self.B, self.eta, self.seed, self.total, self.max_drops = B, eta, seed, total_steps, max_drops_per_step
        self.step = 0
        self.trained_total = 0
        self.dropped_total: dict[str, int] = {reason.value: 0 for reason in DropReason}
        self.claimed_total = 0
        # The first window that is not over: where it starts, its step, the ranks used up before it.
        self._base, self._base_step, self._base_rank = 0, 0, 0
        self._stops: list[int] = []  # ends of the windows from the base on, as far as computed
        # Settled ordinals from the base on; every ordinal below the watermark is settled.
        self._trained: set[int] = set()
        self._dropped: dict[int, DropReason] = {}
        self._watermark = 0
        self._absent: set[int] = set()  # settled before the attempt began: they take no place in a window
        self._delivered: set[int] = set()  # known to wait as a group, not settled
        self._open: set[int] = set()  # claimed in this attempt, not settled
        self._next = 0

    # -- admission ----------------------------------------------------------------------------

    def window(self, step: int) -> tuple[int, int]:
        """Start and stop of the ordinals that step `step` goes through, with the drops known now.

        Raises ValueError for a step whose window is over.
        """
        at = step - self._base_step
        if at < 0:
            raise ValueError(f"ledger: window of step {step} is over; the oldest open one is step {self._base_step}")
        while len(self._stops) <= at:
            self._stops.append(self._stop_after(self._stops[-1] if self._stops else self._base))
        return (self._stops[at - 1] if at else self._base), self._stops[at]

    def _stop_after(self, start: int) -> int:
        t, count, drops = start, 0, 0
        while count - min(drops, self.max_drops) < self.B:
            if t not in self._absent:
                count += 1
                drops += t in self._dropped
            t += 1
        return t

    def step_of(self, ordinal: int) -> int:
        """The step whose window holds `ordinal` (the left side of equation 3)."""
        if ordinal < self._base:
            raise ValueError(f"ledger: ordinal {ordinal} lies in a window that is over (before {self._base})")
        while not self._stops or self._stops[-1] <= ordinal:
            self.window(self._base_step + len(self._stops))
        return self._base_step + bisect_right(self._stops, ordinal)

    def rank(self, ordinal: int) -> int:
        """Ordinals before this one, less the drops that count: `rank(t)` of equation 3."""
        step = self.step_of(ordinal)
        start, _ = self.window(step)
        before = [t for t in range(start, ordinal) if t not in self._absent]
        inside = len(before) - min(sum(t in self._dropped for t in before), self.max_drops)
        return self._base_rank + (step - self._base_step) * self.B + inside

    def bound(self, version: int) -> int:
        """The first ordinal that may not start under `version`, nor before a newer one."""
        last = min(version + self.eta, self.total - 1)
        return self.window(last)[1] if last >= self._base_step else self._base

    def claim(self, count: int, version: int) -> list[int]:
        """Up to `count` ordinals, ascending, that a replica holding `version` may start; never given again."""
        given: list[int] = []
        bound = self.bound(version)
        while self._next < bound and len(given) < count:
            t = self._next
            self._next += 1
            if not (self._settled(t) or t in self._delivered):
                given.append(t)
        for t in given:
            if self.step_of(t) > version + self.eta or self.step_of(t) >= self.total:
                raise InvariantError(
                    f"ordinal {t} (step {self.step_of(t)}) would start above its bound: version {version} + "
                    f"eta {self.eta}, {self.total} steps in all"
                )
        self._open.update(given)
        self.claimed_total += len(given)
        return given

    # -- what became of them ------------------------------------------------------------------

    def delivered(self, ordinals: Iterable[int]) -> None:
        """These wait as finished groups. Raises InvariantError for one that waits or is settled already."""
        for t in ordinals:
            if self._settled(t) or t in self._delivered:
                raise InvariantError(f"ordinal {t} was delivered, but it {self._fate(t)}")
            self._delivered.add(t)

    def drop(self, ordinals: Iterable[int], reason: DropReason) -> None:
        """These leave untrained, for `reason`. Raises InvariantError for one that is settled already."""
        for t in ordinals:
            if self._settled(t):
                raise InvariantError(f"ordinal {t} was dropped ({reason}), but it {self._fate(t)}")
            self._dropped[t] = reason
            self.dropped_total[reason.value] += 1
            self._forget(t)
            del self._stops[bisect_right(self._stops, t) :]  # windows that end after t change
        self._advance()

    def trained(self, step: int, ordinals: Iterable[int]) -> None:
        """Step `step` is done: its ordinals are retired together (none, if all were dropped).

        Raises InvariantError when it is not the next step, or for an ordinal that is settled
        already or was neither claimed nor delivered.
        """
        ordinals = tuple(ordinals)
        if step != self.step:
            raise InvariantError(f"step {step} was trained, but step {self.step} is the next")
        for t in ordinals:
            if self._settled(t):
                raise InvariantError(f"ordinal {t} was trained in step {step}, but it {self._fate(t)}")
            if t not in self._open and t not in self._delivered:
                raise InvariantError(f"ordinal {t} was trained in step {step}, but never claimed nor delivered")
            self._trained.add(t)
            self._forget(t)
        self.trained_total += len(ordinals)
        self.step += 1
        self._advance()

    def unsettled(self, start: int, stop: int) -> list[int]:
        """The ordinals t with start <= t < stop that are neither trained nor dropped."""
        return [t for t in range(max(start, self._watermark), stop) if not self._settled(t)]

    def _settled(self, t: int) -> bool:
        return t < self._watermark or t in self._trained or t in self._dropped

    def _fate(self, t: int) -> str:
        if t in self._dropped:
            return f"was dropped before ({self._dropped[t]})"
        if t in self._delivered:
            return "was delivered before and still waits"
        if t in self._trained:
            return "was trained before"
        return f"was trained or dropped in a step that is over (all below {self._watermark} are)"

    def _forget(self, t: int) -> None:
        self._open.discard(t)
        self._delivered.discard(t)

    def _advance(self) -> None:
        """Move the watermark on, and the base over windows that are trained and wholly settled.

        Every ordinal of such a window has its last state, so the window as known is the true one,
        whatever drop is still on its way.
        """
        while self._watermark in self._trained or self._watermark in self._dropped:
            self._watermark += 1
        before = self._base
        while self._base_step < self.step and self.window(self._base_step)[1] <= self._watermark:
            self._base = self._stops.pop(0)
            self._base_step += 1
            self._base_rank += self.B
        if self._base != before:
            self._trained = {t for t in self._trained if t >= self._base}
            self._absent = {t for t in self._absent if t >= self._base}
            self._dropped = {t: reason for t, reason in self._dropped.items() if t >= self._base}

    # -- kept and shown -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (JSON): a watermark and the exceptions above it; no claims.

        Everything below `watermark` is settled; `start` is where the next step's window begins and
        `rank0` the ranks used up before it. `trained` and `dropped` list the settled ordinals from
        the lower of the two on.
        """
        start, _ = self.window(self.step)
        low = min(start, self._watermark)
        dropped = {t: reason for t, reason in sorted(self._dropped.items()) if t >= low}
        return {
            "format": FORMAT,
            "seed": self.seed,
            "step": self.step,
            "start": start,
            "rank0": self._base_rank + (self.step - self._base_step) * self.B,
            "watermark": self._watermark,
            "trained": sorted(t for t in self._trained if t >= low),
            "dropped": {
                str(reason): [t for t, why in dropped.items() if why is reason] for reason in set(dropped.values())
            },
            "trained_total": self.trained_total,
            "dropped_total": dict(self.dropped_total),
        }

    @classmethod
    def from_state(
        cls,
        state: dict[str, Any],
        *,
        B: int,
        eta: int,
        seed: int,
        total_steps: int,
        max_drops_per_step: int,
        delivered: Iterable[int] = (),
    ) -> Ledger:
        """The ledger of a run that goes on at `state["step"]`, maybe with other sizes.

        `delivered` are the ordinals of the groups that the checkpoint holds; whatever is neither
        settled nor among them can be claimed again, in order. An ordinal settled before this window
        takes no place in the windows to come (its rank is used up), so order `ready`, which
        leaves stragglers behind, may change to `fifo`. Raises ConfigError for another seed (then
        ordinals would name other prompts) or another format.
        """
        if state["format"] != FORMAT:
            raise ConfigError(f"ledger of format {state['format']} in the checkpoint; this version reads {FORMAT}")
        if state["seed"] != seed:
            raise ConfigError(f"seed={seed}: the checkpoint's prompts are numbered by seed={state['seed']}; keep it")
        book = cls(B, eta, seed, total_steps, max_drops_per_step)
        book.step = book._base_step = state["step"]
        book._base_rank = state["rank0"]
        book._watermark = state["watermark"]
        book._base = book._next = min(state["start"], state["watermark"])
        book._trained = set(state["trained"])
        book._dropped = {t: DropReason(reason) for reason, ts in state["dropped"].items() for t in ts}
        book._absent = book._trained | {t for t in book._dropped if t < state["start"]}
        book.trained_total = state["trained_total"]
        book.dropped_total.update(state["dropped_total"])
        book.delivered(delivered)
        return book

    def summary(self) -> dict[str, Any]:
        """Counts for status: totals over all attempts, `claimed` in this one; `generating` and `delivered` now."""
        return {
            "step": self.step,
            "claimed": self.claimed_total,
            "generating": len(self._open - self._delivered),
            "delivered": len(self._delivered),
            "trained": self.trained_total,
            "dropped": {reason: n for reason, n in self.dropped_total.items() if n},
            "settled_below": self._watermark,
        }
