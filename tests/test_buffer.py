"""The inventory at trainer rank 0 and the groups in a home: which batch a step gets, and why."""

import pytest

from areal_hpc.config import Order, Stale
from areal_hpc.records import DropReason, Group, Trajectory
from areal_hpc.stream.buffer import Home, Inventory, Waiting, restorable
from areal_hpc.stream.ledger import InvariantError, Ledger

SEED = 3


def inventory(B=2, eta=1, D=2, order=Order.fifo, stale=Stale.keep, total=50):
    return Inventory(Ledger(B, eta, SEED, total, D), order, stale)


def make_group(ordinal, version=0, tokens=3):
    return Group(ordinal, ordinal, [1, 2], [Trajectory([5] * tokens, [-1.0] * tokens, [version] * tokens, 1.0)])


def arrive(box, *ordinals, version=0):
    for t in ordinals:
        box.arrived(t, t % 2, 10 + t, version)


def test_fifo_takes_the_next_survivors_in_order():
    box = inventory()
    arrive(box, 2, 1)
    assert box.decide(0, 5.0) is None
    assert box.waiting_for() == Waiting((0,), 5.0)
    box.dropped([0], DropReason.REWARD)
    decision = box.decide(0, 7.5)
    assert (decision.ordinals, decision.homes, decision.tokens) == ((1, 2), (1, 0), (11, 12))
    assert not decision.short and (decision.waited_s, decision.waited_ordinal) == (2.5, 0)
    assert box.decide(0, 9.0) == decision
    assert box.waiting_for() == Waiting((), None)
    box.trained(0, decision.ordinals)
    assert len(box) == 0
    assert box.decide(1, 10.0) is None and box.waiting_for() == Waiting((3, 4), 10.0)
    with pytest.raises(InvariantError, match="step 2 is to be decided, but step 1 is the next"):
        box.decide(2, 0.0)


def test_the_longest_wait_at_the_head_is_told():
    box = inventory(B=3, D=0)
    box.decide(0, 0.0)
    arrive(box, 0, 2)
    box.decide(0, 1.0)  # 0 was waited for from 0 to 1, now 1 is
    box.decide(0, 4.0)
    arrive(box, 1)
    decision = box.decide(0, 6.0)
    assert (decision.waited_s, decision.waited_ordinal) == (5.0, 1)
    box.trained(0, decision.ordinals)
    arrive(box, 3, 4, 5)
    assert box.decide(1, 9.0).waited_ordinal == -1


@pytest.mark.parametrize("order", Order)
def test_a_step_that_loses_too_much_is_short(order):
    box = inventory(B=3, D=1, order=order)
    box.dropped([0, 2], DropReason.REWARD)  # more than 1: the step ends after B + D = 4 ordinals
    arrive(box, 1)
    assert box.decide(0, 0.0) is None and box.waiting_for().ordinals == (3,)
    arrive(box, 3)
    decision = box.decide(0, 0.0)
    assert decision.ordinals == (1, 3) and decision.short
    box.trained(0, decision.ordinals)
    assert box.ledger.window(1) == (4, 7) and box.ledger.rank(4) == 3  # it used up B ranks


def test_a_step_may_lose_all_it_had():
    box = inventory(B=2, D=0)
    box.dropped([0, 1], DropReason.UNIFORM)
    decision = box.decide(0, 0.0)
    assert decision.ordinals == () and decision.short
    box.trained(0, ())
    arrive(box, 2, 3)
    assert box.decide(1, 0.0).ordinals == (2, 3)


def test_a_step_that_was_not_finite_is_decided_again():
    box = inventory(B=2, D=3)
    arrive(box, 0, 1, 2, 3)
    decision = box.decide(0, 0.0)
    box.dropped(decision.ordinals, DropReason.NONFINITE)
    assert box.decide(0, 0.0).ordinals == (2, 3)
    box.trained(0, (2, 3))
    assert box.ledger.summary()["dropped"] == {"nonfinite": 2}


def test_fifo_refuses_a_token_that_is_too_old():
    box = inventory(B=1, eta=1)
    arrive(box, 0, 1, 2, version=0)
    for step in range(2):
        box.trained(step, box.decide(step, 0.0).ordinals)
    with pytest.raises(InvariantError, match="ordinal 2 of step 2 has a token made by version 0; eta 1 allows 1"):
        box.decide(2, 0.0)


def test_ready_takes_what_arrived_first():
    box = inventory(B=2, order=Order.ready)
    arrive(box, 3)
    assert box.decide(0, 1.0) is None and box.waiting_for() == Waiting((0, 1), 1.0)
    arrive(box, 2, 0)
    decision = box.decide(0, 2.0)
    assert decision.ordinals == (3, 2) and not decision.short
    arrive(box, 1)
    assert box.decide(0, 3.0).ordinals == (3, 2)
    box.trained(0, decision.ordinals)
    assert box.decide(1, 4.0).ordinals == (0, 1)


def test_ready_drops_what_is_stale_if_told_to():
    for stale, expected in ((Stale.keep, ()), (Stale.drop, (1,))):
        box = inventory(B=1, eta=0, order=Order.ready, stale=stale)
        arrive(box, 0)
        assert box.stale(0) == ()
        box.trained(0, box.decide(0, 0.0).ordinals)
        arrive(box, 1, version=0)
        arrive(box, 2, version=1)
        assert box.stale(1) == expected
        box.dropped(box.stale(1), DropReason.STALE)
        assert box.decide(1, 0.0).ordinals == ((2,) if expected else (1,))


def test_an_ordinal_arrives_once():
    box = inventory()
    arrive(box, 1)
    with pytest.raises(InvariantError, match="ordinal 1 was delivered"):
        arrive(box, 1)
    home = Home()
    home.add(make_group(1))
    with pytest.raises(InvariantError, match="ordinal 1 was delivered twice, last by replica 0"):
        home.add(make_group(1))


def test_a_home_keeps_groups_until_they_are_taken():
    home = Home()
    for t in (4, 2, 8, 6):
        home.add(make_group(t))
    assert [g.ordinal for g in home.undelivered()] == [2, 4, 6, 8]
    assert [g.ordinal for g in home.take([8, 2])] == [8, 2]
    home.discard([4, 99])
    assert [g.ordinal for g in home.undelivered()] == [6] and len(home) == 1
    with pytest.raises(InvariantError, match=r"ordinals \[4\] are to be taken, but only \[6\] are here"):
        home.take([6, 4])


def test_groups_too_old_for_a_smaller_eta_are_generated_again():
    book = Ledger(2, 4, SEED, 9, 0)
    state = book.state()
    smaller = Ledger.from_state(state, B=2, eta=1, seed=SEED, total_steps=9, max_drops_per_step=0)
    groups = [make_group(t, version=0) for t in range(6)]
    assert [g.ordinal for g in restorable(groups, book, Order.fifo)] == [0, 1, 2, 3, 4, 5]
    assert [g.ordinal for g in restorable(groups, smaller, Order.fifo)] == [0, 1, 2, 3]
    assert len(restorable(groups, smaller, Order.ready)) == 6


def test_a_group_that_was_dropped_while_its_home_saved_is_not_restored():
    book = Ledger(2, 4, SEED, 9, 2)
    book.claim(6, 0)
    book.drop([0, 3], DropReason.STALE)  # 0 lies below the watermark, 3 above it
    restored = Ledger.from_state(book.state(), B=2, eta=4, seed=SEED, total_steps=9, max_drops_per_step=2)
    for order in Order:
        kept = [g.ordinal for g in restorable([make_group(t) for t in range(6)], restored, order)]
        assert kept == [1, 2, 4, 5]
    restored.delivered(kept)
