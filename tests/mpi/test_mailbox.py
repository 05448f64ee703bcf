"""The mailbox on 2 and 4 ranks: nothing lost, order of each pair, credit, and no waiting where none is owed."""

import pickle
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from areal_hpc.records import DropReason, Group, Trajectory
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.stream.messages import Alive, Dropped, Saved, Tombstone, Update
from areal_hpc.stream.slots import MailboxError

LIMIT_S = 20.0


def make_world(comm, homes=None):
    """The first half of the ranks are homes, the others leaders."""
    homes = comm.size // 2 if homes is None else homes
    return SimpleNamespace(
        rank=comm.rank,
        homes=list(range(homes)),
        leaders=list(range(homes, comm.size)),
        control=comm.Dup(),
        mail=comm.Dup(),
    )


@pytest.fixture(params=[2, 4], ids=lambda n: f"{n}ranks")
def place(request, world):
    """A world of 2 and one of 4 ranks, each with homes and leaders; its communicators end after the test."""
    if world.size % request.param:
        pytest.skip(f"a world of {world.size} ranks is not made of groups of {request.param}")
    part = world.Split(world.rank // request.param, world.rank)
    mail_world = make_world(part)
    yield mail_world
    for comm in (mail_world.control, mail_world.mail, part):
        comm.Free()


def make_group(ordinal, tokens, replica=0):
    """A group whose every number follows from ordinal and replica."""
    numbers = np.random.default_rng([ordinal, replica])
    sample = Trajectory(
        numbers.integers(0, 1000, tokens), numbers.random(tokens), np.full(tokens, ordinal), float(numbers.random())
    )
    return Group(ordinal, ordinal * 3, numbers.integers(0, 1000, 5), [sample, sample], 1, replica)


def until(done, box, into=None, limit_s=LIMIT_S):
    """Pump as a loop does until `done`; what came is appended to `into`."""
    into = [] if into is None else into
    limit = time.monotonic() + limit_s
    while not done():
        into += box.pump()
        assert time.monotonic() < limit, f"nothing more came; so far {len(into)}"
        time.sleep(0.001)
    return into


def meet(place):
    """A barrier that leaves the cores to the ranks that still work."""
    barrier = place.control.Ibarrier()
    while not barrier.Test():
        time.sleep(0.001)


def same(a, b):
    return a.pack() == b.pack() if isinstance(b, Group) else a == b


def test_control_messages_keep_their_order(comm):
    world = make_world(comm, homes=comm.size)
    box = Mailbox(world)
    count = 200
    for n in range(count):
        for dest in range(comm.size):  # itself too
            reason = DropReason.REWARD if n % 2 else DropReason.STALE
            box.notify(Dropped(tuple(range(n % 7)), reason) if n % 3 else Alive(comm.rank, n, 0.5), dest)
    came = []
    until(lambda: len(came) == count * comm.size, box, came)
    for source in range(comm.size):
        mine = [message for rank, message in came if rank == source]
        assert len(mine) == count
        assert [m.version for m in mine if isinstance(m, Alive)] == list(range(0, count, 3))
        assert [len(m.ordinals) for m in mine if isinstance(m, Dropped)] == [n % 7 for n in range(count) if n % 3]
    assert box.close(LIMIT_S) == []
    world.control.Free()
    world.mail.Free()


def test_large_control_messages_and_the_limit(place):
    """60 KB goes through a rendezvous; a receiver that probes it must not wait in it for the sender."""
    box = Mailbox(place)
    probe = Update(3, np.arange(7000, dtype=np.int32), np.linspace(-9, 0, 7000, dtype=np.float32))
    if place.rank == place.leaders[0]:
        box.notify(probe, 0)
        time.sleep(1.5)  # in an engine step, outside of MPI
        with pytest.raises(MailboxError, match=r"Update from rank \d to rank 0 has 16\d+ bytes"):
            box.notify(Update(4, np.zeros(20000, np.int32), np.zeros(20000, np.float32)), 0)
        box.flush(LIMIT_S)
    if place.rank == 0:
        came, longest = [], 0.0
        while not came:
            start = time.monotonic()
            came = box.pump()
            longest = max(longest, time.monotonic() - start)
            time.sleep(0.001)
        ((source, update),) = came
        assert source == place.leaders[0] and update.version == 3
        assert np.array_equal(update.probe_logp_S, probe.probe_logp_S)
        assert longest < 1
    box.close(LIMIT_S)


@pytest.mark.parametrize("slot_bytes", [64, 1000, 1 << 20])
def test_groups_larger_and_smaller_than_a_slot(place, slot_bytes):
    box = Mailbox(place, slots=2, slot_bytes=slot_bytes)
    sizes = [0, 1, 40, 700, 3, 150] + ([300_000] if slot_bytes == 1 << 20 else [])  # the last: 7.2 MB
    sent = []
    for n, tokens in enumerate(sizes):
        sent += [make_group(n, tokens, place.rank), Tombstone(n, DropReason.UNIFORM)]
    sent.append(Saved(place.rank, 7))
    if place.rank in place.leaders:
        for item in sent:
            for home in place.homes:
                box.send(item, home)
        until(lambda: box.idle, box)
        assert box.groups_sent == len(sizes) * len(place.homes)
        with pytest.raises(MailboxError, match="mail goes from leaders to homes"):
            box.send(sent[0], place.leaders[0])
    else:
        came = []
        until(lambda: len(came) == len(sent) * len(place.leaders), box, came)
        for leader in place.leaders:
            mine = [item for source, item in came if source == leader]
            theirs = [
                make_group(item.ordinal, sizes[item.ordinal], leader) if isinstance(item, Group) else item
                for item in sent[:-1]
            ]
            assert all(same(a, b) for a, b in zip(mine, [*theirs, Saved(leader, 7)], strict=True))
        assert box.groups_received == len(sizes) * len(place.leaders)
    assert box.close(LIMIT_S) == []


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_under_random_interleavings(place, seed):
    """Ranks pump, pause and send at random times of their own; each pair's order and every byte arrive."""
    box = Mailbox(place, slots=3, slot_bytes=5000)
    numbers = random.Random(1000 * seed + place.rank)
    leader, per_home = place.rank in place.leaders, 60
    todo = {dest: iter(range(per_home)) for dest in (place.homes if leader else place.leaders)}
    expected = per_home * len(place.leaders if not leader else place.homes)
    came, limit = [], time.monotonic() + LIMIT_S
    while len(came) < expected or todo or not box.idle:
        assert time.monotonic() < limit, f"{len(came)} of {expected}"
        for dest in list(todo):
            if numbers.random() < 0.3:
                n = next(todo[dest], None)
                if n is None:
                    del todo[dest]
                elif leader:
                    box.send(make_group(n, random.Random(n).randrange(1500), place.rank), dest)
                else:
                    box.notify(Alive(place.rank, n, 0.0), dest)
        came += box.pump()
        if leader:
            assert all(0 <= box.unacknowledged(home) <= 3 for home in place.homes)
        time.sleep(numbers.choice([0, 0, 0.0005, 0.003]))
    for source in place.homes if leader else place.leaders:
        mine = [item for rank, item in came if rank == source]
        if leader:
            assert [m.version for m in mine] == list(range(per_home))
        else:
            assert [m.ordinal for m in mine] == list(range(per_home))
            assert all(same(m, make_group(n, random.Random(n).randrange(1500), source)) for n, m in enumerate(mine))
    sent, received = place.control.allreduce(box.sent_bytes), place.control.allreduce(box.recv_bytes)
    box.close(LIMIT_S)
    assert abs(sent - received) <= 4 * 3 * len(place.homes) * len(place.leaders)  # credits still on their way


def test_a_home_that_does_not_look_costs_no_wait(place):
    """2 s without a pump: the leader's loop goes on, gives MPI no more than its credit, and nothing is lost."""
    slots, slot_bytes, groups = 2, 4000, 40
    box = Mailbox(place, slots, slot_bytes)
    meet(place)
    if place.rank in place.leaders:
        start, turns, longest, n = time.monotonic(), 0, 0.0, 0
        while time.monotonic() < start + 1.5:
            turn = time.monotonic()
            if n < groups:
                for home in place.homes:
                    box.send(make_group(n, 100, place.rank), home)
                n += 1
            box.pump()
            longest = max(longest, time.monotonic() - turn)
            turns += 1
            time.sleep(0.001)
        assert n == groups and turns > 100 and longest < 1
        assert all(box.unacknowledged(home) == slots and box.queued(home) > 0 for home in place.homes)
        assert box.sent_bytes <= slots * slot_bytes * len(place.homes)
        box.flush(LIMIT_S)
    else:
        time.sleep(2)
        came = []
        until(lambda: len(came) == groups * len(place.leaders), box, came)
        for leader in place.leaders:
            assert [g.ordinal for source, g in came if source == leader] == list(range(groups))
    box.close(LIMIT_S)


def test_flush_ends_at_its_deadline_and_names_the_peers(place):
    box = Mailbox(place, slots=1, slot_bytes=1000)
    meet(place)
    if place.rank in place.leaders:
        for home in place.homes:
            box.send(make_group(1, 500, place.rank), home)
        start, waits = time.monotonic(), []
        with pytest.raises(MailboxError) as error:
            box.flush(0.3, on_wait=lambda: waits.append(1))
        assert time.monotonic() - start >= 0.3 and waits
        for home in place.homes:
            assert f"rank {home} (" in str(error.value) and "1 slots without credit" in str(error.value)
        assert f"mailbox of rank {place.rank}: after 0.3 s of flush" in str(error.value)
    meet(place)
    if place.rank in place.leaders:
        box.flush(LIMIT_S)
    else:
        until(lambda: box.groups_received == len(place.leaders), box)
    box.close(LIMIT_S)


def test_what_arrives_during_a_flush_comes_with_the_next_pump(place):
    box = Mailbox(place)
    first_leader = place.leaders[0]
    if place.rank == 0:
        for n in range(5):
            box.notify(Alive(0, n, 0.0), first_leader)
        box.flush(LIMIT_S)
    meet(place)
    if place.rank == first_leader:
        box.send(make_group(1, 5), 0)
        box.flush(LIMIT_S)
        came = box.pump()
        until(lambda: len(came) == 5, box, came)
        assert [m.version for _, m in came] == list(range(5))
    left = box.close(LIMIT_S)  # the group was never pumped: close hands it over
    assert [item.ordinal for _, item in left] == ([1] if place.rank == 0 else [])
    with pytest.raises(MailboxError, match="after the mailbox was closed"):
        box.notify(Alive(0, 0, 0.0), 0)


def test_close_names_what_did_not_come(place):
    box = Mailbox(place)
    if place.rank != 0:
        with pytest.raises(MailboxError, match=r"mailbox of rank \d: after 0.2 s of close: a rank has not come"):
            box.close(0.2)
    place.mail.Barrier()
    if place.rank == 0:
        meet(place)  # matches the barrier that the others left behind


def test_idle_ranks_leave_the_cores_alone(place):
    box = Mailbox(place)
    meet(place)
    cpu, end = time.process_time(), time.monotonic() + 1.5
    while time.monotonic() < end:
        assert box.pump() == []
        time.sleep(0.001)
    used = time.process_time() - cpu
    meet(place)
    box.close(LIMIT_S)
    assert used < 0.3, f"{used:.2f} CPU seconds in 1.5 s"


def test_messages_are_small():
    """A control message that grows with the run would meet the limit some day."""
    assert len(pickle.dumps(Dropped(tuple(range(5000)), DropReason.STALE), 5)) < 64 * 1024
