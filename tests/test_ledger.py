"""The ledger against equation 3 written out, and its invariants over random drops."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc.config import ConfigError
from areal_hpc.records import DropReason
from areal_hpc.stream.claims import Claims
from areal_hpc.stream.ledger import InvariantError, Ledger, item_of
from areal_hpc.stream.messages import Claim, Claimed

sizes = {"B": st.integers(1, 5), "D": st.integers(0, 4)}


def ledger(B=4, eta=1, total=100, D=8, seed=7):
    return Ledger(B, eta, seed, total, D)


def steps_by_hand(drops, B, D, count):
    """The step of each of the first `count` ordinals, one by one: a step is full with B survivors, or over
    when it lost more than D, that is when B ranks are used up and drops beyond the D-th use one each."""
    steps, step, survivors, lost = [], 0, 0, 0
    for t in range(count):
        if survivors == B or survivors + max(lost - D, 0) == B:
            step, survivors, lost = step + 1, 0, 0
        steps.append(step)
        if t in drops:
            lost += 1
        else:
            survivors += 1
    return steps


def test_each_epoch_is_a_permutation_of_its_own():
    n, seed = 37, 5
    epochs = [[item_of(seed, epoch * n + i, n) for i in range(n)] for epoch in range(3)]
    assert all(sorted(rows) == list(range(n)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[2] == np.random.Generator(np.random.PCG64([seed, 2])).permutation(n).tolist()
    assert [item_of(seed, 2 * n + i, n) for i in (3, 1)] == [epochs[2][3], epochs[2][1]]  # any order, any rank
    assert epochs[0] != [item_of(seed + 1, i, n) for i in range(n)]


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_admission_without_drops_is_equation_3(eta):
    B, total = 3, 7
    for version in range(total + 2):
        may_start = [t for t in range(60) if t // B <= version + eta and t // B < total]
        assert ledger(B, eta, total).claim(1000, version) == may_start


def test_claims_come_in_order_and_once():
    book = ledger(B=4, eta=1)
    assert book.claim(3, 0) == [0, 1, 2]
    assert book.claim(0, 0) == []
    assert book.claim(9, 0) == [3, 4, 5, 6, 7]
    assert book.claim(9, 0) == []
    assert book.claim(9, 1) == [8, 9, 10, 11]


def test_nothing_beyond_the_last_step_starts():
    book = ledger(B=2, eta=9, total=3)
    assert book.claim(99, 0) == list(range(6))
    book.drop([1, 4], DropReason.REWARD)
    assert book.claim(99, 0) == [6, 7]
    assert ledger(total=0).claim(99, 5) == []


@given(st.sets(st.integers(0, 60)), sizes["B"], sizes["D"])
def test_windows_and_ranks_are_those_counted_by_hand(drops, B, D):
    book = ledger(B, D=D)
    book.claim(10**6, 99)
    book.drop(sorted(drops, key=lambda t: hash((t, B))), DropReason.REWARD)
    expected = steps_by_hand(drops, B, D, 80)
    assert [book.step_of(t) for t in range(80)] == expected
    for t in range(80):
        start = expected.index(expected[t])
        lost = len([u for u in drops if start <= u < t])
        assert book.rank(t) == expected[t] * B + (t - start) - min(lost, D)
        assert book.rank(t) // B == expected[t]


@given(st.lists(st.integers(0, 60), unique=True, max_size=30), sizes["B"], sizes["D"])
def test_a_drop_learnt_late_never_raises_a_step(drops, B, D):
    """Why the bound holds although the owner does not know every drop yet."""
    book = ledger(B, D=D)
    before = [book.step_of(t) for t in range(70)]
    for t in drops:
        book.drop([t], DropReason.UNIFORM)
        after = [book.step_of(u) for u in range(70)]
        assert all(a <= b for a, b in zip(after, before, strict=True))
        before = after


@settings(deadline=None)
@given(st.sets(st.integers(0, 60)), sizes["B"], sizes["D"], st.integers(0, 3), st.randoms(use_true_random=False))
def test_order_of_news_does_not_matter(drops, B, D, eta, random):
    """Trained notices and drops come from different ranks; the owner's account ends the same."""
    steps = steps_by_hand(drops, B, D, 70)
    last = steps[60]
    news = [(DropReason.REWARD, (t,)) for t in drops]
    random.shuffle(news)
    trained = [(step, tuple(t for t in range(60) if steps[t] == step and t not in drops)) for step in range(last)]
    for item in trained:  # in their own order, anywhere between the drops
        news.insert(random.randint(max(map(news.index, trained[: item[0]]), default=-1) + 1, len(news)), item)
    book = ledger(B, eta, D=D)
    book.claim(10**6, 99)  # enough for any of these drops
    for what, ordinals in news:
        if isinstance(what, DropReason):
            book.drop(ordinals, what)
        else:
            book.trained(what, ordinals)
    assert book.step == last
    assert book.window(last)[0] == steps.index(last)
    assert book.bound(last) == len([s for s in steps_by_hand(drops, B, D, 400) if s <= last + eta])
    with pytest.raises(ValueError, match="over"):
        book.window(last - 1)


def test_what_cannot_be_is_refused_by_name():
    book = ledger(B=2, eta=1)
    book.claim(4, 0)
    book.drop([1], DropReason.REWARD)
    with pytest.raises(InvariantError, match=r"ordinal 1 was trained in step 0, but it was dropped before \(reward\)"):
        book.trained(0, [1])
    with pytest.raises(InvariantError, match="ordinal 1 was dropped"):
        book.drop([1], DropReason.STALE)
    with pytest.raises(InvariantError, match="step 1 was trained, but step 0 is the next"):
        book.trained(1, [0])
    with pytest.raises(InvariantError, match="ordinal 9 was trained in step 0, but never claimed"):
        book.trained(0, [9])
    book.trained(0, [0, 2])
    for again in ([0], [2]):
        with pytest.raises(InvariantError, match="trained in step 1, but it was trained or dropped in a step"):
            book.trained(1, again)
    with pytest.raises(InvariantError, match="ordinal 0 was delivered"):
        book.delivered([0])
    book.delivered([3])
    with pytest.raises(InvariantError, match="ordinal 3 was delivered, but it was delivered before"):
        book.delivered([3])
    with pytest.raises(ValueError, match="B=0"):
        ledger(B=0)


def test_state_is_small_and_goes_through_json():
    book = ledger(B=3, eta=2, D=2)
    book.claim(99, 0)
    book.drop([1, 7], DropReason.REWARD)
    book.trained(0, [0, 2, 3])
    state = json.loads(json.dumps(book.state()))
    assert state["step"] == 1 and state["start"] == 4 and state["watermark"] == 4 and state["rank0"] == 3
    assert state["trained"] == [] and state["dropped"] == {"reward": [7]}
    again = Ledger.from_state(state, B=3, eta=2, seed=7, total_steps=100, max_drops_per_step=2, delivered=[5])
    assert again.claim(99, 1) == [4, 6, 8, 9, 10, 11, 12, 13]  # neither 7 (dropped) nor 5 (waits)
    assert [again.step_of(t) for t in range(4, 16)] == [book.step_of(t) for t in range(4, 16)]
    assert [again.rank(t) for t in range(4, 16)] == [book.rank(t) for t in range(4, 16)]
    again.trained(1, [4, 5, 6])
    assert again.summary() == {
        "step": 2, "claimed": 8, "generating": 6, "delivered": 0, "trained": 6, "dropped": {"reward": 2},
        "settled_below": 8,
    }  # fmt: skip


def test_sizes_may_change_at_a_restart():
    book = ledger(B=4, eta=0)
    book.claim(99, 2)
    for step in range(2):
        book.trained(step, range(4 * step, 4 * step + 4))
    again = Ledger.from_state(book.state(), B=2, eta=1, seed=7, total_steps=4, max_drops_per_step=0)
    assert again.rank(8) == 8 and again.step_of(8) == 2
    assert again.claim(99, 2) == [8, 9, 10, 11]  # steps 2 and 3; there is no step 4
    assert again.claim(99, 3) == []


def test_stragglers_of_order_ready_are_first_in_line_after_a_restart():
    book = ledger(B=2, eta=2, D=0)
    book.claim(99, 0)
    book.trained(0, [1, 4])  # 0, 2, 3 and 5 go on
    state = json.loads(json.dumps(book.state()))
    assert state["watermark"] == 0 and state["trained"] == [1, 4]
    again = Ledger.from_state(state, B=2, eta=1, seed=7, total_steps=9, max_drops_per_step=0)
    assert [again.step_of(t) for t in (0, 2, 3, 5, 6)] == [1, 1, 2, 2, 3]
    assert again.claim(99, 1) == [0, 2, 3, 5]
    again.trained(1, [0, 2])
    assert again.state()["watermark"] == 3 and again.state()["trained"] == [4]


def test_another_seed_or_format_is_refused():
    state = ledger().state()
    sizes = {"B": 4, "eta": 1, "total_steps": 9, "max_drops_per_step": 0}
    with pytest.raises(ConfigError, match="seed=8: the checkpoint's prompts are numbered by seed=7"):
        Ledger.from_state(state, seed=8, **sizes)
    with pytest.raises(ConfigError, match="format 9"):
        Ledger.from_state(state | {"format": 9}, seed=7, **sizes)


def test_a_claim_waits_until_there_is_something_for_it():
    book = ledger(B=2, eta=0)
    claims = Claims(book)
    claims.ask(Claim(1, 5, 0))
    claims.ask(Claim(2, 5, 0))
    assert claims.answers() == [(1, Claimed((0, 1), 0))]
    assert claims.answers() == []
    with pytest.raises(InvariantError, match="replica 2 claims again"):
        claims.ask(Claim(2, 1, 0))
    book.drop([0], DropReason.REWARD)
    assert claims.answers() == [(2, Claimed((2,), 0))]  # a drop makes room
    claims.ask(Claim(2, 1, 0))
    claims.committed(2, 1)
    claims.committed(1, 1)  # has no claim open
    assert claims.answers() == [(2, Claimed((3,), 1))]  # so does a version
