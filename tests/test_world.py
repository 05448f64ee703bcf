"""A real world on 4 ranks: places, communicators, stores, logs, refusals and orderly ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import Job, command, mpirun

from areal_hpc import runlock, stopfile
from areal_hpc.exits import Outcome, exit_path, read_exit
from areal_hpc.processes import scrubbed

PROGRAM = str(Path(__file__).with_name("world_job.py"))
LAYOUT = ["actor.backend=megatron:d1t2p1", "rollout.backend=vllm:d1t2"]
REPLICAS = ["actor.backend=megatron:d2t1p1", "rollout.backend=vllm:d2t1"]


def argv(scenario: str, root: Path, *changes: str) -> list[str]:
    return [sys.executable, PROGRAM, scenario, str(root), *changes]


def run(scenario: str, root: Path, *changes: str, tcp: bool = False) -> subprocess.CompletedProcess[str]:
    return mpirun(4, argv(scenario, root, *changes), tcp=tcp, timeout=90)


def outcome(root: Path) -> Outcome:
    """The only exit file of the run."""
    (path,) = (root / "exp/trial/log").glob("exit.*.json")
    found = read_exit(path)
    assert found is not None
    return found


def job_of(lock: Path) -> tuple[str, int]:
    holder = runlock.read(lock)
    return holder.job, holder.restart


def said(root: Path) -> list[dict]:
    return [json.loads((root / f"exp/trial/rank{r}.json").read_text()) for r in range(4)]


@pytest.mark.parametrize("tcp", [False, True], ids=["shm", "tcp"])
def test_communicators(tmp_path: Path, tcp: bool) -> None:
    result = run("places", tmp_path, *LAYOUT, tcp=tcp)
    assert result.returncode == 0, result.stdout
    ranks = said(tmp_path)
    everyone = [0, 1, 2, 3]
    for r, rank in enumerate(ranks):
        assert rank["level"], "MPI was not started at level FUNNELED"
        for name in ("comm", "mail", "control", "exchange"):
            assert rank["members"][name] == everyone
        assert rank["members"]["role_comm"] == ([0, 1] if r < 2 else [2, 3])
        assert rank["distinct"] == len(rank["members"])
        assert rank["index"] == rank["role_rank"]
        assert (rank["homes"], rank["leaders"]) == ([0], [2])
        assert rank["job"].startswith("local-")
        assert rank["gloo"] == "lo"
    assert [r["flags"] for r in ranks] == [
        [True, False, True, False], [True, False, False, False], [False, True, False, True], [False, True, False, False]
    ]  # fmt: skip
    assert [r["members"].get("replica_comm") for r in ranks] == [None, None, [2, 3], [2, 3]]
    assert [r["spawner"] for r in ranks] == [True, False, True, False], "only who watches or starts keeps its spawner"
    assert [r["local_rank"] for r in ranks] == everyone
    assert outcome(tmp_path).code == 0
    assert runlock.read(runlock.lock_path(tmp_path / "exp/trial")) is None, "the lock is released at an orderly end"


def test_all_ranks_may_train(tmp_path: Path) -> None:
    assert run("trainers_only", tmp_path, "actor.backend=megatron:d4t1p1").returncode == 0
    assert said(tmp_path) == [{"trainer": True, "trainers": 4, "leaders": []}] * 4


def test_starts_of_one_second_have_names_of_their_own() -> None:
    code = (
        "from datetime import UTC, datetime; from areal_hpc import world; "
        "world.datetime = type('Stopped', (), {'now': lambda zone: datetime(2026, 1, 1, tzinfo=UTC)}); "
        "print(world._job().name)"
    )
    names = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env=scrubbed(os.environ),
        ).stdout
        for _ in range(2)
    ]
    assert all(name.startswith("local-20260101T000000") for name in names) and names[0] != names[1], names


def test_a_whole_job(tmp_path: Path) -> None:
    """Replicas and homes, one log per node, workers, and the worst code: what one job leaves behind."""
    result = run("whole", tmp_path, *REPLICAS)
    assert result.returncode == 75, result.stdout
    ranks, logs = said(tmp_path), tmp_path / "exp/trial/log"
    assert {(*r["homes"], *r["leaders"]) for r in ranks} == {(0, 1, 2, 3)}
    assert [r["members"].get("replica_comm") for r in ranks] == [None, None, [2], [3]]
    found = outcome(tmp_path)
    assert (found.code, found.rank, found.message) == (75, 0, "stopped in good order; to be started again")
    assert "terminal of rank 0" in result.stdout
    assert "descriptor" not in result.stdout and "terminal of rank 1" not in result.stdout
    (log,) = logs.glob("*.log")
    text = log.read_text()
    for r, role in enumerate(["trainer", "trainer", "rollout", "rollout"]):
        assert f"from descriptor 1 of rank {r}" in text
        assert f"rank {r} {role} INFO areal_hpc: a record" in text
    assert len(list(logs.iterdir())) == 3, "log, rank table, exit file"
    assert "outlived" not in result.stdout, "a process was left behind"


REFUSALS = {
    "size": (["actor.backend=megatron:d1t2p2", REPLICAS[1]], r"has 4 ranks, needed are 6: .*4 \+ 2 = 6"),
    "interface": ([*LAYOUT, "cluster.interface=nope0"], r"cluster\.interface=nope0: no IPv4 address .*: .*lo"),
    "fileroot": ([*LAYOUT, "cluster.fileroot=/proc/nowhere"], r"cluster\.fileroot=/proc/nowhere: "),
    "differ": (LAYOUT, r"the configuration of rank 1 is not that of rank 0"),
    "unreadable": (LAYOUT, r"--config here\.yaml: no such file"),
    "end_time": (LAYOUT, r"AREAL_HPC_END_TIME=soon: expected seconds"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_message_and_78(tmp_path: Path, name: str) -> None:
    changes, pattern = REFUSALS[name]
    began = time.monotonic()
    scenario = name if name in ("differ", "unreadable") else "places"
    env = {"AREAL_HPC_END_TIME": "soon"} if name == "end_time" else {}
    result = mpirun(4, argv(scenario, tmp_path, *changes), env=env, timeout=90)
    assert result.returncode == 78, result.stdout
    assert len(re.findall(pattern, result.stdout)) == 1, result.stdout
    assert result.stdout.count("areal-hpc: ") == 1 and "Traceback" not in result.stdout
    assert time.monotonic() - began < 30, "within seconds"
    if name == "size":
        assert outcome(tmp_path).code == 78


@pytest.mark.parametrize("name", ["", "77"], ids=["another job", "a step of the same Slurm job"])
def test_an_owned_folder_is_refused(tmp_path: Path, name: str) -> None:
    env = {"SLURM_JOB_ID": name}
    first = Job(command(4, argv("until_stopped", tmp_path, *LAYOUT)), env)
    try:
        lock, deadline = runlock.lock_path(tmp_path / "exp/trial"), time.monotonic() + 30
        while runlock.read(lock) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        result = mpirun(4, argv("places", tmp_path, *LAYOUT), env=env, timeout=90)
        assert result.returncode == 78, result.stdout
        assert len(re.findall(rf"trial_name=trial: .*run\.lock: held by job {name or 'local-'}", result.stdout)) == 1
        own = exit_path(tmp_path / "exp/trial", *job_of(lock))
        assert not own.exists(), "the exit file of the one that lives"
        assert len(list(own.parent.glob("exit.*.json"))) == (0 if name else 1)
    finally:
        first.kill()
    assert run("places", tmp_path, *LAYOUT).returncode == 0, "its process is gone on this host"


def test_starts_of_one_allocation_inherit_nothing(tmp_path: Path) -> None:
    """Two starts under one Slurm number: the first one's outcome and stop are not the second's."""
    run_dir, env = tmp_path / "exp/trial", {"SLURM_JOB_ID": "77"}
    first = Job(command(4, argv("until_stopped", tmp_path, *LAYOUT)), env)
    deadline = time.monotonic() + 60
    while first.text().count("step of rank") < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    stopfile.ask(run_dir, "77", 0)
    first.signal(signal.SIGUSR1)
    assert first.finish(60).returncode == 75
    assert stopfile.asked(run_dir, "77", 0) and outcome(tmp_path).code == 75
    second = mpirun(4, argv("places", tmp_path, *LAYOUT), env=env, timeout=90)
    assert second.returncode == 0, second.stdout
    assert not stopfile.asked(run_dir, "77", 0) and outcome(tmp_path).code == 0
