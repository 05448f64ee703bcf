"""The batch scripts on a real Slurm (two nodes on this machine), by `sbatch`."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path

import pytest
from cluster import REPO, Slurm

from areal_hpc.observe import jsonl

STEPS = 60  # enough to be stopped in the middle: a step takes about 0.1 s, and the signal comes after two
ENDLESS = 10**6
SMALL = [
    # hardly warmed up, so that all answers of a group are wrong: it trains on them all the same
    *("train_dataset.batch_size=4", "gconfig.n_samples=4", "rollout.dynamic_sampling=false"),
    *("evaluator.at_start=false", "evaluator.at_end=false", "rollout.max_concurrent_rollouts=16"),
    *("sft.steps=3", "sft.batch_size=16"),
]


def test_srun_starts_mpi_on_two_nodes(slurm: Slurm) -> None:
    out = slurm.run(
        "srun", "-N2", "-n4", "--ntasks-per-node=2", "--mpi=pmix", sys.executable, str(REPO / "tests/slurm/hello.py")
    )
    places = ast.literal_eval(out.strip())
    assert len({node for node, _ in places}) == 2
    assert sorted(local for _, local in places) == [0, 0, 1, 1]


def submit(slurm: Slurm, trial: str, steps: int) -> tuple[str, Path, Path]:
    """Submits the quickstart and waits until it has trained two steps; its number, its run, its output."""
    run, output = slurm.folder / "runs" / "quickstart_arithmetic" / trial, slurm.folder / f"{trial}.out"
    keys = [*SMALL, f"total_train_steps={steps}", f"trial_name={trial}"]
    number = slurm.run(
        "sbatch", "--parsable", f"--output={output}", "slurm/quickstart.sh", *keys, RUNS=str(slurm.folder / "runs")
    ).strip()
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 240
    while len(jsonl.read(metrics)) < 2:
        assert time.monotonic() < deadline, f"no step done\n{output.read_text()}"
        assert slurm.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), output.read_text()
        time.sleep(0.1)
    return number, run, output


def outcomes(run: Path, number: str) -> list[int]:
    """The codes in the exit files of the job's starts, oldest first."""
    return [json.loads(path.read_text())["code"] for path in sorted(run.glob(f"log/exit.{number}.*.json"))]


@pytest.mark.timeout(600)
def test_quickstart_stopped_requeued_and_finished(slurm: Slurm) -> None:
    """One batch job: warm-up, training, USR1 to the ranks after two steps, exit 75, requeued by its script, done."""
    number, run, output = submit(slurm, "requeued", STEPS)
    slurm.run("scancel", "--signal=USR1", number)
    job = slurm.wait(number, 300)
    text = output.read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), text
    assert outcomes(run, number) == [75, 0], text
    assert len(jsonl.read(run / "attempts.jsonl")) == 2
    assert list(run.glob("checkpoints/*.h5"))
    assert {entry.name for entry in run.iterdir()} >= {"config.yaml", "tensorboard", "trajectories", "log"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["areal-hpc stop", "scancel"])
def test_a_stop_for_good_saves_and_is_not_requeued(slurm: Slurm, how: str) -> None:
    number, run, output = submit(slurm, how.split()[-1], ENDLESS)
    if how == "scancel":
        slurm.run("scancel", number)
    else:
        slurm.run(sys.executable, "-m", "areal_hpc.cli", "stop", str(run))
    deadline = time.monotonic() + 60  # also after a cancelled job has its state its script goes on
    while "exit code 75\nnot requeued" not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    job = slurm.wait(number, 60)
    ended = {"areal-hpc stop": "FAILED", "scancel": "CANCELLED"}[how]
    assert (job["JobState"], job["Restarts"]) == (ended, "0"), output.read_text()
    assert outcomes(run, number) == [75]
    assert list(run.glob("checkpoints/*.h5"))
