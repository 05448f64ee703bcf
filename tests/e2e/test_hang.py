"""SIGSTOP of one rank in a training step, in a save and in an engine step: the job ends and names rank and phase."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import Job
from runs import Run, finish, wait_for

from areal_hpc import processes
from areal_hpc.ranktable import Row, read_table

LIMIT_S = 12.0
SLACK_S = 30.0  # the watcher looks twice a second and asks every rank for its stacks; the machine may be busy
pytestmark = pytest.mark.timeout(600)


@dataclass
class Case:
    """`rank` is stopped while it is in `phase`, whose limit is `deadline`."""

    phase: str
    role: str
    rank: int
    deadline: str
    changes: dict[str, object]


TRAINERS = {"actor.backend": "megatron:d2t1p1"}
CASES = [
    Case("forward-backward", "trainer", 1, "step_s", TRAINERS),
    Case("save", "trainer", 1, "save_s", TRAINERS),
    Case("engine", "rollout", 2, "engine_step_s", {"rollout.backend": "vllm:d1t2"}),
]


@dataclass
class Hung:
    case: Case
    run: Run
    row: Row  # the stopped rank's, when it was stopped
    code: int
    text: str
    took_s: float


def row_of(run: Run, rank: int) -> Row | None:
    for path in (run.dir / "log").glob("ranks.*"):
        try:
            return next((row for row in read_table(path) if row.rank == rank), None)
        except ValueError:
            continue  # a look while it is made
    return None


def stop_in(run: Run, job: Job, case: Case) -> Row:
    """SIGSTOP to the rank while it is in the phase, some steps into the run; its row then."""

    def stopped() -> Row | None:
        row = row_of(run, case.rank)
        if row is None or row.phase != case.phase or row.version < 1:
            return None
        os.kill(row.pid, signal.SIGSTOP)
        wait_for(lambda: processes.stat(row.pid)[0] == "T", job)
        now = row_of(run, case.rank)
        if (now.phase, now.version) == (row.phase, row.version):
            return now
        os.kill(row.pid, signal.SIGCONT)  # it had left the phase by then
        return None

    return wait_for(stopped, job)


@pytest.fixture(scope="module")
def hung(root: Path, tiny: Path) -> dict[str, Hung]:
    """The three cases side by side: most of the time they only wait."""
    jobs = []
    for case in CASES:
        changes = case.changes | {f"deadlines.{case.deadline}": LIMIT_S}
        run = Run(root, f"hang_{case.phase}", tiny, ranks=3, steps=1000, changes=changes)
        jobs.append((case, run, run.start()))
    found, began = {}, {}
    for case, run, job in jobs:
        found[case.phase], began[case.phase] = stop_in(run, job, case), time.monotonic()
    hung = {}
    for case, run, job in jobs:
        code, text = finish(job, run, LIMIT_S + SLACK_S)
        hung[case.phase] = Hung(case, run, found[case.phase], code, text, time.monotonic() - began[case.phase])
    return hung


@pytest.mark.parametrize("phase", [case.phase for case in CASES])
def test_the_job_ends_and_names_rank_and_phase(phase: str, hung: dict[str, Hung]) -> None:
    it = hung[phase]
    log = it.run.dir / "log"
    assert it.code not in (0, 75, 78), it.text
    (path,) = log.glob("hang.*.txt")
    report = path.read_text()
    first = report.splitlines()[0]
    print(f"{first} (after {it.took_s:.0f} s)")
    assert f"rank {it.case.rank} ({it.case.role}): phase {phase}" in first
    assert "process stopped" in first and f"limit {LIMIT_S:g} s" in first and f"version {it.row.version}" in first
    stacks = report.split("--- stacks of rank ")[1:]
    assert stacks[0].split()[0] == str(it.case.rank) and len(stacks) == it.run.ranks
    assert all("areal_hpc" in text for text in stacks[1:]), "the others say where they wait"
    (outcome,) = it.run.exits()
    assert (outcome["code"], outcome["rank"], outcome["role"]) == (1, it.case.rank, it.case.role)
    assert f"phase {phase}" in outcome["message"]
