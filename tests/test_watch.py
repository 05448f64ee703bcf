"""The watcher's judgement: whom to blame, what the table says, and whom it must leave alone."""

from __future__ import annotations

import faulthandler
import math
import os
import time
from pathlib import Path

import pytest

from areal_hpc import processes, ranktable
from areal_hpc.exits import read_exit
from areal_hpc.phases import SLACK_S, Phases, SecondLine
from areal_hpc.ranktable import Row, Slot, State, Table, create_table, read_table
from areal_hpc.watch import Watcher, WatchFiles, blame, describe, table_text

NOW = 1000.0


def row(rank: int, silent_s: float, limit_s: float = 10.0, peer: int = -1) -> Row:
    return Row(State.RUNNING, rank, 100 + rank, 1, 1, "trainer", "save", limit_s, peer, 3, -1, 0.0, NOW - silent_s, 9)


def order(rows: list[Row], states: dict[int, str] | None = None) -> list[int]:
    return [r.rank for r in blame(rows, {r.rank: "S" for r in rows} | (states or {}), NOW)]


def test_the_longest_silence_comes_first() -> None:
    assert order([row(0, 11), row(1, 30), row(2, 20)]) == [1, 2, 0]


def test_silence_within_the_limit_is_not_blamed() -> None:
    assert order([row(0, 11), row(1, 30, limit_s=100)]) == [0, 1]


@pytest.mark.parametrize("state", ["T", "t", "Z", ""])
def test_who_cannot_act_comes_before_who_waits(state: str) -> None:
    assert order([row(0, 30), row(1, 5), row(2, 20)], {1: state}) == [1, 0, 2]


def test_the_peer_at_the_end_of_the_chain_is_blamed() -> None:
    assert order([row(0, 30, peer=1), row(1, 20, peer=2), row(2, 5)]) == [2, 0, 1]


def test_a_peer_on_another_node_leaves_the_waiting_rank_first() -> None:
    rows = [row(0, 30, peer=7), row(1, 20)]
    assert order(rows) == [0, 1]
    assert "peer 7" in describe(rows[0], "S", NOW)


def test_ranks_that_wait_for_each_other() -> None:
    assert order([row(0, 30, peer=1), row(1, 31, peer=0)]) == [1, 0]


def test_table_has_a_line_per_rank() -> None:
    lines = table_text([row(0, 11), row(12, 3.25)], {0: "D", 12: ""}, NOW).splitlines()
    assert lines[0].split() == [
        "rank", "role", "phase", "phase_s", "silent_s", "limit_s", "beats", "peer", "version", "ordinal", "pid", "state"
    ]  # fmt: skip
    assert lines[1].split() == ["0", "trainer", "save", "1000.0", "11.0", "10", "9", "-1", "3", "-1", "100", "D"]
    assert lines[2].split()[0] == "12" and lines[2].split()[-1] == "gone"


def test_slots_are_read_as_written(tmp_path: Path) -> None:
    path = ranktable.table_path(tmp_path, "n1")
    path.parent.mkdir()
    create_table(path, 3)
    assert path.name == "ranks.n1" and read_table(path) == []
    slot = Slot(path, 1, 5, "rollout")
    slot.write("forward-backward", 7.5, 2, 11, 1 << 40)
    (found,) = read_table(path)
    assert (found.state, found.rank, found.pid, found.role) == (State.RUNNING, 5, os.getpid(), "rollout")
    assert (found.phase, found.limit_s, found.peer, found.version) == ("forward-backward", 7.5, 2, 11)
    assert found.ordinal == 1 << 40 and found.ticks == processes.ticks(os.getpid())
    slot.beat()
    (later,) = read_table(path)
    assert later.beats == found.beats + 1 and later.last > found.last and later.started == found.started
    slot.mark(State.ENDED)
    assert read_table(path)[0].state is State.ENDED


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "ranks.n1").write_bytes(b"x" * 500)
    with pytest.raises(ValueError, match=r"ranks\.n1: not a rank table"):
        Table(tmp_path / "ranks.n1")


def watched(tmp_path: Path, limit_s: float) -> tuple[Watcher, Slot, WatchFiles]:
    paths = [str(tmp_path / name) for name in ("ranks", "log", "hang", "exit")]
    create_table(paths[0], 1)
    slot = Slot(paths[0], 0, 0, "trainer")
    slot.write("save", limit_s, -1, -1, -1)
    files = WatchFiles("n1", *paths)
    return Watcher(files), slot, files


def test_a_rank_of_another_container_is_timed_but_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(processes, "pid_namespace", lambda: 1)
        watcher, _, files = watched(tmp_path, 0.0)
    watcher._namespace = 2
    time.sleep(0.01)
    assert [watcher.look(), watcher.look()] == [False, True], "late twice, with one beat"
    assert "process state ?" in Path(files.hang).read_text()
    found = read_exit(files.exit)
    assert found is not None and found.message.startswith("n1: hang: rank 0 (trainer): phase save")


def test_a_beat_between_two_looks_is_life(tmp_path: Path) -> None:
    watcher, slot, files = watched(tmp_path, 0.0)
    for _ in range(5):
        time.sleep(0.002)
        assert not watcher.look()
        slot.beat()
    slot.mark(State.ENDED)
    assert not watcher.look() and not Path(files.hang).exists()


def test_phases_nest_and_the_error_keeps_the_inner_one(tmp_path: Path) -> None:
    _, slot, files = watched(tmp_path, math.inf)
    phases = Phases(slot, SecondLine())
    phases.phase("take", math.inf, version=1)
    with phases.phase("exchange", math.inf, peer=3, version=2):
        assert read_table(files.table)[0].phase == "exchange"
    assert (read_table(files.table)[0].phase, read_table(files.table)[0].peer) == ("take", -1)
    with pytest.raises(KeyError), phases.phase("save", math.inf):
        raise KeyError
    assert phases.doing[0] == "save"


def test_the_second_line_is_armed_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[float] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda timeout, **_: armed.append(timeout))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: armed.append(math.inf))
    line, now = SecondLine(), time.monotonic()
    for i in range(1000):  # 8 s of steps with a limit of 300 s
        line.want(now + 300 + 0.008 * i)
    assert len(armed) == 1 and 300 + SLACK_S - 1 < armed[0] < 300 + SLACK_S + 1
    line.want(now + 50)
    assert len(armed) == 2 and armed[1] < 50 + SLACK_S + 1, "a shorter limit is not missed"
    line.want(now + 300)
    line.want(math.inf)
    assert armed[3:] == [math.inf]
