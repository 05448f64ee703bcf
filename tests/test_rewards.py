"""Reward workers: real processes that answer, raise, hang and die; never a silent 0."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc import tasks
from areal_hpc.config import DatasetConfig
from areal_hpc.records import Status
from areal_hpc.rollout.rewards import AHEAD, STARTS, RewardPool
from areal_hpc.spawner import Spawner

# A task whose score does what the completion says, in the real worker.
ODD_TASK = """
import os, time
from areal_hpc.tasks import worker

class Odd:
    def item(self, i): return i
    def score(self, item, completion):
        verb, _, rest = completion.partition(" ")
        if verb == "raise": raise ValueError(rest)
        if verb == "hang": time.sleep(100)
        if verb == "die": os._exit(3)
        if verb == "abort": os.abort()
        if verb == "pid": print("a task may print", os.getpid())
        if verb == "slow": time.sleep(0.3)
        return float(rest or 0.5)

if __name__ == "__main__":
    worker.main(lambda config, seed, split: Odd())
"""


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    started = Spawner()
    yield started
    started.close()


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "odd.py"
    script.write_text(ODD_TASK)
    return (sys.executable, str(script))


def odd_pool(spawner: Spawner, command: tuple[str, ...], workers: int = 1, timeout_s: float = 1.0) -> RewardPool:
    return RewardPool(spawner, DatasetConfig(), 1, "train", workers, timeout_s, command)


def results(pool: RewardPool, limit_s: float = 60.0) -> dict[object, tuple[float, Status]]:
    """All results of what was started."""
    found: dict[object, tuple[float, Status]] = {}
    deadline = time.monotonic() + limit_s
    while len(pool):
        assert time.monotonic() < deadline, f"{len(pool)} samples without a result"
        for sample_id, reward, status in pool.test():
            assert sample_id not in found
            found[sample_id] = (reward, status)
        time.sleep(0.005)
    assert pool.test() == []
    return found


def test_scores_of_a_real_task(spawner: Spawner) -> None:
    config = DatasetConfig(type="arithmetic", size=50)
    task = tasks.load(config, 3, "train")
    pool = RewardPool(spawner, config, 3, "train", 2, 10.0)
    for i in range(50):
        pool.start((i, "right"), i, task.item(i).answer)
        pool.start((i, "wrong"), i, "no number")
    found = results(pool)
    assert {k: v for k, v in found.items() if k[1] == "right"} == {(i, "right"): (1.0, Status.OK) for i in range(50)}
    assert {k: v for k, v in found.items() if k[1] == "wrong"} == {(i, "wrong"): (0.0, Status.OK) for i in range(50)}
    assert pool.counts == {Status.OK: 100}
    pool.close()


def test_an_exception_is_an_error_and_the_worker_lives(spawner: Spawner, command: tuple[str, ...]) -> None:
    pool = odd_pool(spawner, command)
    pool.start("bad", 0, "raise no such answer")
    pool.start("good", 1, "be 0.25")
    number = pool._workers[0].number
    found = results(pool)
    assert found["bad"][1] is Status.ERROR and math.isnan(found["bad"][0])
    assert found["good"] == (0.25, Status.OK)
    assert pool._workers[0].number == number
    pool.close()


@pytest.mark.parametrize("score", ["nan", "inf", "1.5", "-1"])
def test_a_score_that_is_none_is_an_error(spawner: Spawner, command: tuple[str, ...], score: str) -> None:
    pool = odd_pool(spawner, command)
    pool.start(0, 0, f"be {score}")
    assert results(pool)[0][1] is Status.ERROR
    pool.close()


def test_a_hang_is_a_timeout_and_only_its_own(spawner: Spawner, command: tuple[str, ...]) -> None:
    pool = odd_pool(spawner, command)
    for i in range(AHEAD + 4):
        pool.start(i, i, "hang" if i == 2 else "be 1")
    found = results(pool)
    assert found[2][1] is Status.TIMEOUT and math.isnan(found[2][0])
    assert all(found[i] == (1.0, Status.OK) for i in range(AHEAD + 4) if i != 2)
    pool.close()


@pytest.mark.parametrize("verb", ["die", "abort"])
def test_a_death_is_an_error_and_the_worker_is_replaced(spawner: Spawner, command: tuple[str, ...], verb: str) -> None:
    pool = odd_pool(spawner, command, timeout_s=20.0)
    pool.start("before", 0, "be 1")
    pool.start("dead", 1, verb)
    pool.start("after", 2, "pid 0.75")
    found = results(pool)
    assert found["before"] == (1.0, Status.OK)
    assert found["dead"][1] is Status.ERROR and math.isnan(found["dead"][0])
    assert found["after"] == (0.75, Status.OK)
    pool.close()


def test_time_counts_per_sample_not_per_queue(spawner: Spawner, command: tuple[str, ...]) -> None:
    pool = odd_pool(spawner, command, timeout_s=1.0)
    for i in range(6):  # 1.8 s of work on one worker
        pool.start(i, i, "slow 1")
    assert results(pool) == {i: (1.0, Status.OK) for i in range(6)}
    pool.close()


def test_no_call_waits_and_long_answers_pass(spawner: Spawner, command: tuple[str, ...]) -> None:
    pool = odd_pool(spawner, command, timeout_s=30.0)
    long = "pid 1" + " " * 4_000_000
    longest = 0.0
    for i in range(3):
        began = time.monotonic()
        pool.start(i, i, long)
        pool.test()
        longest = max(longest, time.monotonic() - began)
    assert longest < 1.0
    assert all(value == (1.0, Status.OK) for value in results(pool).values())
    pool.close()


def test_a_task_that_cannot_be_loaded_is_said(spawner: Spawner, tmp_path: Path) -> None:
    spawner.log(tmp_path / "log")
    config = DatasetConfig(type="no_such_task")
    pool = RewardPool(spawner, config, 1, "train", 1, 1.0)
    pool.start(0, 0, "1")
    with pytest.raises(RuntimeError, match=f"{STARTS} reward workers in a row ended before they were ready"):
        results(pool)
    assert "no_such_task" in (tmp_path / "log").read_text()
    pool.close()


def test_close_leaves_no_worker(spawner: Spawner, command: tuple[str, ...]) -> None:
    pool = odd_pool(spawner, command, workers=2)
    pool.start(0, 0, "hang")
    pool.close()
    deadline = time.monotonic() + 10
    children = f"/proc/{spawner.pid}/task/{spawner.pid}/children"
    while os.path.exists(children) and Path(children).read_text().strip() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(children).read_text().strip()
