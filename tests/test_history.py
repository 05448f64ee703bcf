"""All the accounts together (invariants 1 to 3): random claims, drops, delays, crashes and restarts.

`Run` is the whole stream without MPI, models or time: replicas whose answers are a function of the
ordinal, queues with the order that the mailbox keeps, and a scheduler that picks any next event.
What the surviving history trained is then counted again by code that uses nothing of the ledger.
"""

from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import Order, Stale
from areal_hpc.records import DropReason, Group, Trajectory
from areal_hpc.stream.buffer import Home, Inventory, restorable
from areal_hpc.stream.claims import Claims
from areal_hpc.stream.ledger import Ledger
from areal_hpc.stream.messages import Arrived, Claim, Committed, Dropped, Tombstone, Trained

SEED = 3


def make_group(ordinal, version=0, tokens=3):
    return Group(ordinal, ordinal, [1, 2], [Trajectory([5] * tokens, [-1.0] * tokens, [version] * tokens, 1.0)])


class Run:
    """One attempt: from a checkpoint (or none) until it is done or the test ends it."""

    def __init__(self, sizes, start, random):
        self.B, self.eta, self.D, self.replicas, self.homes, self.order, self.stale, self.total = sizes
        self.random = random
        keep = {"B": self.B, "eta": self.eta, "seed": SEED, "total_steps": self.total, "max_drops_per_step": self.D}
        self.history = list(start["history"]) if start else []
        if start:
            book = Ledger.from_state(start["ledger"], **keep)
            kept = restorable(start["groups"], book, self.order)
            self.owner = Ledger.from_state(start["ledger"], **keep, delivered=[g.ordinal for g in kept])
        else:
            book, kept, self.owner = Ledger(**keep), [], Ledger(**keep)
        self.box = Inventory(book, self.order, self.stale)
        self.home = [Home() for _ in range(self.homes)]
        for group in kept:
            self.put(group.ordinal % self.homes, group)
        self.claims = Claims(self.owner)
        self.version = [book.step] * self.replicas
        self.published = book.step
        self.asked = [False] * self.replicas
        self.running = [{} for _ in range(self.replicas)]
        self.queues = {}
        self.started = []  # (ordinal, version) of this attempt
        self.save()

    def put(self, at, group):
        self.home[at].add(group)
        self.box.arrived(group.ordinal, at, group.tokens, group.oldest_version)

    def tell(self, pair, message):
        self.queues.setdefault(pair, deque()).append(message)

    def save(self):
        groups = [group for home in self.home for group in home.undelivered()]
        self.saved = {"ledger": self.box.ledger.state(), "groups": groups, "history": list(self.history)}

    def events(self):
        """Everything that may happen next."""
        out = [(self.deliver, pair) for pair, queue in self.queues.items() if queue]
        for r in range(self.replicas):
            if not self.asked[r] and len(self.running[r]) < 3:
                out.append((self.ask, r))
            out += [(self.finish, (r, t)) for t in self.running[r]]
            if self.version[r] < self.published:
                out.append((self.commit, r))
        if self.box.ledger.step < self.total and all(v == self.published for v in self.version):
            out.append((self.train, None))
        return out

    def ask(self, r):
        self.asked[r] = True
        count = 3 - len(self.running[r])
        self.tell((r, "owner"), Claim(r, count, self.version[r]))

    def commit(self, r):
        self.version[r] = self.published
        self.tell((r, "owner"), Committed(r, self.published))

    def finish(self, which):
        r, t = which
        version = self.running[r].pop(t)
        if self.drops_of(t):
            self.tell((r, f"home{t % self.homes}"), Tombstone(t, DropReason.REWARD))
            self.tell((r, "owner"), Dropped((t,), DropReason.REWARD))
        else:
            self.tell((r, f"home{t % self.homes}"), make_group(t, version, 1 + t % 3))

    def drops_of(self, t):
        return Random(t).random() < 0.3

    def deliver(self, pair):
        dest = pair[1]
        message = self.queues[pair].popleft()
        if dest == "owner":
            self.to_owner(message)
        elif dest == "trainer":
            if isinstance(message, Arrived):
                self.box.arrived(message.ordinal, message.home, message.tokens, message.oldest_version)
            else:
                self.box.dropped([message.ordinal], message.reason)
                self.history.append(("drop", message.ordinal))
        elif isinstance(dest, int):
            self.asked[dest] = False
            for t in message.ordinals:
                assert self.version[dest] >= message.version
                self.running[dest][t] = self.version[dest]
                self.started.append((t, self.version[dest]))
        else:
            home = int(dest[4:])
            if isinstance(message, Group):
                self.home[home].add(message)
                message = Arrived(home, message.ordinal, message.tokens, message.oldest_version)
            self.tell((home, "trainer"), message)

    def to_owner(self, message):
        match message:
            case Claim():
                self.claims.ask(message)
            case Committed():
                self.claims.committed(message.replica, message.version)
            case Dropped():
                self.owner.drop(message.ordinals, message.reason)
            case Trained():
                self.owner.trained(message.step, message.ordinals)
        for r, answer in self.claims.answers():
            self.tell(("owner", r), answer)

    def lose(self, ordinals, reason):
        self.box.dropped(ordinals, reason)
        self.history += [("drop", t) for t in ordinals]
        self.tell(("trainer", "owner"), Dropped(tuple(ordinals), reason))

    def train(self, _):
        step = self.box.ledger.step
        if stale := self.box.stale(step):
            self.lose(stale, DropReason.STALE)
            for home in self.home:
                home.discard(stale)
        decision = self.box.decide(step, 0.0)
        if decision is None:
            return
        assert self.order is Order.ready or len(self.box) <= self.capacity()
        batch = {}
        for t, h in zip(decision.ordinals, decision.homes, strict=True):
            (batch[t],) = self.home[h].take([t])
        if decision.ordinals and self.random.random() < 0.05:
            self.lose(decision.ordinals, DropReason.NONFINITE)
            return
        self.box.trained(step, decision.ordinals)
        self.tell(("trainer", "owner"), Trained(step, decision.ordinals))
        oldest = min((g.oldest_version for g in batch.values()), default=step)
        self.history.append(("step", step, decision.ordinals, oldest, self.B, self.D, self.eta, self.order))
        self.published = step + 1
        if self.random.random() < 0.4:
            self.save()

    def capacity(self):
        """The bound of design section 4 on groups that exist; a restart may bring more with it."""
        return max((self.eta + 1) * self.B, len(self.saved["groups"]))

    def play(self, turns):
        """Up to `turns` events, any first; whether all is done. No event may be owed and not come."""
        for _ in range(turns):
            if self.box.ledger.step == self.total:
                return True
            events = self.events()
            if [what for what, _ in events] == [self.train]:
                before = self.box.ledger.step, len(self.history)
                self.train(None)
                assert (self.box.ledger.step, len(self.history)) != before, f"stuck: {self.box.waiting_for()}"
                continue
            what, argument = self.random.choice(events)
            what(argument)
        return self.box.ledger.step == self.total


def recount(history, total):
    """The surviving history by hand: exactly once, staleness and, under fifo, which ordinals and no others."""
    trained, dropped, order_so_far, pointer = [], {}, Order.fifo, 0
    for event in history:
        if event[0] == "drop":
            assert event[1] not in dropped and event[1] not in trained
            dropped[event[1]] = True
    steps = [event for event in history if event[0] == "step"]
    assert [event[1] for event in steps] == list(range(total))
    for _, step, ordinals, oldest, B, D, eta, order in steps:
        assert len(set(ordinals)) == len(ordinals) <= B
        assert not set(ordinals) & set(trained) and not set(ordinals) & set(dropped)
        trained += ordinals
        if order is Order.ready:
            order_so_far = Order.ready
            continue
        assert oldest >= step - eta
        if order_so_far is Order.fifo:
            survivors, lost = [], 0
            while len(survivors) + max(lost - D, 0) < B:
                if pointer in dropped:
                    lost += 1
                else:
                    survivors.append(pointer)
                pointer += 1
            assert list(ordinals) == survivors
    settled = set(trained) | set(dropped)
    if order_so_far is Order.fifo:
        assert set(range(pointer)) <= settled
    return settled


orders = {"fifo": [Order.fifo], "ready": [Order.ready], "both": [Order.fifo, Order.ready]}


@settings(max_examples=120)
@given(seed=st.integers(0, 10**6), total=st.integers(1, 7), crashes=st.integers(0, 4))
@pytest.mark.parametrize("allowed", orders)
def test_every_ordinal_once_over_crashes_and_restarts(allowed, seed, total, crashes):
    random = Random(seed)
    start, done = None, False
    for attempt in range(crashes + 1):
        D = random.randint(0, 4)
        sizes = (
            random.randint(1, 5), random.randint(0, 3), D, random.randint(1, 3), random.randint(1, 2),
            random.choice(orders[allowed]), random.choice(list(Stale)), total,
        )  # fmt: skip
        run = Run(sizes, start, random)
        done = run.play(random.randint(0, 150) if attempt < crashes else 20_000)
        if done:
            break
        start = run.saved  # a crash: all that is not in the last checkpoint is gone
    assert done
    settled = recount(run.history, total)
    book = run.box.ledger
    assert settled == {t for t in range(max(settled, default=0) + 1) if t not in book.unsettled(0, max(settled) + 1)}
    summary = book.summary()
    assert summary["trained"] + sum(summary["dropped"].values()) == len(settled)


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), order=st.sampled_from(Order))
def test_no_ordinal_starts_above_its_bound(seed, order):
    """Against the drops that are true in the end, counted one by one."""
    random = Random(seed)
    B, eta, D, total = random.randint(1, 4), random.randint(0, 3), random.randint(0, 3), 6
    run = Run((B, eta, D, 2, 2, order, Stale.keep, total), None, random)
    assert run.play(20_000)
    dropped = {event[1] for event in run.history if event[0] == "drop"}
    step, survivors, lost, step_of = 0, 0, 0, {}
    for t in range(max(t for t, _ in run.started) + 1):
        if survivors + max(lost - D, 0) == B:
            step, survivors, lost = step + 1, 0, 0
        step_of[t] = step
        survivors, lost = survivors + (t not in dropped), lost + (t in dropped)
    assert all(step_of[t] <= min(version + eta, total - 1) for t, version in run.started)
    assert sorted(t for t, _ in run.started) == list(range(len(run.started)))
