"""The batch scripts on a real Slurm (two nodes on this machine), by `sbatch`."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path

import pytest
from cluster import REPO, Slurm

TRIAL = "quickstart_arithmetic/seed1"
STEPS = 60  # enough to be stopped in the middle: a step takes about 0.1 s
SMALL = [
    *(f"total_train_steps={STEPS}", "train_dataset.batch_size=4", "gconfig.n_samples=4"),
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


def lines(path: Path) -> list[dict]:
    """The records of a JSONL file that may be growing."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.timeout(600)
def test_quickstart_stopped_requeued_and_finished(slurm: Slurm) -> None:
    """One batch job: warm-up, training, USR1 to the ranks after two steps, exit 75, requeued by its script, done."""
    runs = slurm.folder / "runs"
    run, output = runs / TRIAL, slurm.folder / "job.out"
    number = slurm.run(
        "sbatch", "--parsable", f"--output={output}", "slurm/quickstart.sh", *SMALL, RUNS=str(runs)
    ).strip()

    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.is_file() and len(lines(metrics)) >= 2):
        assert time.monotonic() < deadline, f"no step done\n{output.read_text()}"
        assert slurm.job(number)["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), output.read_text()
        time.sleep(0.2)
    slurm.run("scancel", "--signal=USR1", number)

    job = slurm.wait(number, 300)
    text = output.read_text()
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), text
    first, second = (json.loads((run / f"log/exit.{number}.{restart}.json").read_text()) for restart in (0, 1))
    assert (first["code"], second["code"]) == (75, 0), text
    assert len(lines(run / "attempts.jsonl")) == 2
    assert list(run.glob("checkpoints/*.h5"))
    assert {entry.name for entry in run.iterdir()} >= {"config.yaml", "tensorboard", "trajectories", "log"}
