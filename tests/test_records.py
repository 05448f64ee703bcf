"""Group and Trajectory: packed and read back bit for bit, and what they say about themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.records import Group, Status, Trajectory

FLOATS = st.floats(width=32, allow_nan=True)  # a log-probability is never NaN, but must not change on the way either
INTS = st.integers(-(2**31), 2**31 - 1)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(0, 40))

    def array(values: st.SearchStrategy, dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    return Trajectory(
        array(INTS, np.int32),
        array(FLOATS, np.float32),
        array(INTS, np.int32),
        draw(st.floats(allow_nan=False, allow_infinity=False)),
        draw(st.sampled_from(Status)),
        draw(st.sampled_from(["stop", "length"])),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    return Group(
        draw(st.integers(0, 2**62)),
        draw(st.integers(0, 2**40)),
        np.array(draw(st.lists(INTS, max_size=30)), np.int32),
        draw(st.lists(trajectories(), max_size=4)),
        draw(st.integers(0, 100)),
        draw(st.integers(0, 4096)),
    )


def plain(group: Group) -> tuple:
    """Every bit of a group in types that compare (NaN by its bits)."""
    samples = [
        (t.tokens_T.tobytes(), t.logp_T.tobytes(), t.version_T.tobytes(), t.reward, t.status, t.finish)
        for t in group.trajectories
    ]
    return group.ordinal, group.item, group.attempt, group.replica, group.prompt_P.tobytes(), samples


@given(groups())
def test_pack_and_unpack(group: Group) -> None:
    data = group.pack()
    assert plain(Group.unpack(data)) == plain(group)
    assert plain(Group.unpack(memoryview(bytearray(data)))) == plain(group)


@given(groups(), st.data())
def test_cut_or_foreign_bytes_are_refused(group: Group, data: st.DataObject) -> None:
    packed = group.pack()
    with pytest.raises(ValueError):
        Group.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])
    with pytest.raises(ValueError, match="its header names"):
        Group.unpack(packed + b"\0")
    with pytest.raises(ValueError, match="not a packed group"):
        Group.unpack(b"HDF5" + packed[4:])


def sample(n: int, oldest: int, status: Status = Status.OK) -> Trajectory:
    return Trajectory(np.arange(n), np.zeros(n), np.arange(n) + oldest, 1.0, status)


def test_what_a_group_says() -> None:
    group = Group(7, 3, np.arange(5), [sample(4, 9), sample(2, 6), sample(3, 8, Status.TIMEOUT)])
    assert [len(t.tokens_T) for t in group.scored] == [4, 2]
    assert group.tokens == (5 + 4) + (5 + 2)
    assert group.oldest_version == 6
    assert Group(0, 0, np.arange(2)).oldest_version == 0


def test_arrays_have_their_types() -> None:
    group = Group(0, 0, [1, 2], [Trajectory([1], [-0.5], [0], 1.0)])
    t = group.trajectories[0]
    assert [a.dtype for a in (group.prompt_P, t.tokens_T, t.logp_T, t.version_T)] == [
        "int32",
        "int32",
        "float32",
        "int32",
    ]


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 log-probabilities, 2 versions"):
        Trajectory([1, 2], [-0.5], [0, 0], 1.0)
