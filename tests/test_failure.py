"""How a job fails: by name, within its limit, and with nobody left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import Job, command
from test_world import LAYOUT, argv, outcome, said
from world_job import LIMIT_S, ORDINAL

from areal_hpc.ranktable import State, read_table


def start(scenario: str, root: Path, *changes: str) -> Job:
    return Job(command(4, argv(scenario, root, *LAYOUT, *changes)))


def finish(job: Job, limit_s: float = 60.0) -> tuple[int, str]:
    """Exit code and output; nothing of the job is left when its launcher has gone."""
    try:
        code = job.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still there after {limit_s:g} s\n{job.finish(0).stdout}") from None
    deadline = time.monotonic() + 5
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = job.pids()
    text = job.finish(1).stdout
    assert not left, f"{len(left)} processes outlived the job\n{text}"
    return code, text


def wait_for(condition: Callable[[], bool], job: Job, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert job.process.poll() is None and time.monotonic() < deadline, job.text()
        time.sleep(0.02)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "exp/trial/log"


def hang_report(log: Path) -> str:
    (path,) = log.glob("hang.*.txt")
    return path.read_text()


def test_a_stopped_rank_is_named_with_its_phase(tmp_path: Path, log: Path) -> None:
    job = start("stop_one", tmp_path)
    wait_for(lambda: any(log.glob("ranks.*")) and any(r.phase == "exchange" for r in rows(log)), job)
    began = time.monotonic()
    code, text = finish(job)
    assert code not in (0, 75, 78)
    assert time.monotonic() - began < LIMIT_S + 30, "ends within its limit, not that of another phase"
    first, *_ = report = hang_report(log).splitlines()
    assert "rank 1 (trainer): phase forward-backward" in first
    assert "process stopped (T)" in first and "version 4" in first and f"ordinal {ORDINAL}" in first
    table = report[report.index("") + 1 :]
    assert table[0].split()[:3] == ["rank", "role", "phase"]
    assert table[1].split()[:3] == ["1", "trainer", "forward-backward"]
    stacks = "\n".join(report).split("--- stacks of rank ")
    assert len(stacks) == 5 and "it cannot answer" in stacks[1]
    assert all("world_job.py" in text and "in stop_one" in text for text in stacks[2:])
    found = outcome(tmp_path)
    assert (found.code, found.rank, found.role, found.version, found.ordinals) == (1, 1, "trainer", 4, [ORDINAL])
    assert "hang: rank 1 (trainer): phase forward-backward" in text + log_text(log)


def rows(log: Path) -> list:
    (path,) = log.glob("ranks.*")
    return [row for row in read_table(path) if row.state is State.RUNNING]


def log_text(log: Path) -> str:
    return "".join(path.read_text() for path in log.glob("*.log"))


def test_the_peer_that_is_waited_for_is_blamed(tmp_path: Path, log: Path) -> None:
    code, _ = finish(start("spin", tmp_path))
    assert code not in (0, 75, 78)
    first = hang_report(log).splitlines()[0]
    assert "rank 2 (rollout): phase engine" in first and "version 6" in first
    assert hang_report(log).count("past its limit too: ") == 3
    assert outcome(tmp_path).rank == 2


def test_signs_of_life_keep_a_long_phase_alive(tmp_path: Path, log: Path) -> None:
    code, text = finish(start("beats", tmp_path))
    assert code == 0, text
    assert not list(log.glob("hang.*"))


def test_the_second_line_works_without_the_watcher(tmp_path: Path) -> None:
    code, text = finish(start("no_watcher", tmp_path))
    assert code not in (0, 75, 78)
    assert "Timeout (" in text and "in no_watcher" in text


def test_an_exception_aborts_with_rank_role_version_and_ordinals(tmp_path: Path, log: Path) -> None:
    code, text = finish(start("raising", tmp_path))
    message = (
        rf"areal-hpc: trainer rank 1 \(dp 0 tp 1 pp 0\) on \S+, phase optimizer, version 7, ordinals \[{ORDINAL}\]: "
        "ValueError: the gradient went away"
    )
    assert code == 1
    assert len(re.findall(message, text)) == 1, text
    assert "Traceback" in log_text(log) and "Traceback" not in text
    found = outcome(tmp_path)
    assert (found.code, found.rank, found.role, found.version, found.ordinals) == (1, 1, "trainer", 7, [ORDINAL])
    assert "the gradient went away" in found.message


def test_a_fault_that_all_find_is_one_message(tmp_path: Path) -> None:
    code, text = finish(start("misconfigured", tmp_path))
    assert code == 78
    assert text.count("actor.path=model: no config.json there") == 1 and "Traceback" not in text, text
    assert outcome(tmp_path).code == 78


def test_a_killed_rank_has_an_exit_file(tmp_path: Path) -> None:
    code, _ = finish(start("killed", tmp_path))
    assert code not in (0, 75, 78)
    found = outcome(tmp_path)
    # When this machine is slow the launcher has killed the others too before the watcher looks: then none is blamed.
    assert (found.code, found.rank, found.role) in ((1, 3, "rollout"), (1, -1, ""))
    assert "gone without a word" in found.message and "rank 3 (rollout) in phase engine" in found.message


def test_leaving_without_the_orderly_end_is_a_failure(tmp_path: Path) -> None:
    code, text = finish(start("deserted", tmp_path))
    assert code == 1 and "rank 0" in text and "SystemExit" in text
    assert outcome(tmp_path).rank == 0


def test_usr1_twice_within_a_second_is_one_orderly_stop(tmp_path: Path, log: Path) -> None:
    job = start("until_stopped", tmp_path)
    wait_for(lambda: "step of rank" in job.text(), job)
    job.signal(signal.SIGUSR1)
    time.sleep(0.3)
    job.signal(signal.SIGUSR1)
    code, text = finish(job)
    assert code == 75, text
    assert len(set(said(tmp_path))) == 1, "all ranks leave after the same step"
    assert outcome(tmp_path).code == 75 and not list(log.glob("hang.*"))


def test_usr1_during_imports_is_an_orderly_stop(tmp_path: Path) -> None:
    job = start("importing", tmp_path)
    wait_for(lambda: job.text().count("importing") == 4, job)
    job.signal(signal.SIGUSR1)
    code, text = finish(job)
    assert code == 75, text
    assert said(tmp_path) == [0] * 4, "at the first step"


def test_term_to_one_rank_stops_all(tmp_path: Path, log: Path) -> None:
    job = start("until_stopped", tmp_path)
    wait_for(lambda: job.text().count("step of rank") == 4, job)
    os.kill(next(row.pid for row in rows(log) if row.rank == 3), signal.SIGTERM)
    code, text = finish(job)
    assert code == 75, text
    assert len(set(said(tmp_path))) == 1


def test_the_import_of_the_world_is_light() -> None:
    code = "import sys, areal_hpc.world; print([m for m in ('torch', 'mpi4py', 'numpy', 'h5py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
