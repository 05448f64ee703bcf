"""tools/quickstart.sh as users run it, traced, with no network but loopback; and cut short, with TCP between ranks."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from launch import MCA_TCP, Job
from picture import assert_overlap
from runs import REPO

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
TRIAL = "quickstart_arithmetic/seed1"


def script(root: Path, *overrides: str) -> list[str]:
    return [str(REPO / "tools/quickstart.sh"), f"cluster.fileroot={root}", "stats_logger.trace=true", *overrides]


def last_line(job: Job, root: Path) -> dict:
    """What it says of itself. The model is made and warmed up where this checkout has none yet."""
    result = job.finish(900)
    assert result.returncode == 0, result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["run"] == str(root / TRIAL)
    return found


def test_it_learns(tmp_path: Path) -> None:
    argv = script(tmp_path)
    if os.geteuid() == 0:  # only root may make a network namespace
        argv = ["unshare", "--net", "bash", "-c", f"ip link set lo up && exec {shlex.join(argv)}"]
    found = last_line(Job(argv), tmp_path)
    print(found)
    assert 0.3 <= found["heldout_before"] <= 0.6
    assert found["heldout_after"] >= 0.85
    assert found["heldout_after"] - found["heldout_before"] >= 0.25
    assert found["stale_token_share"] > 0.5
    assert_overlap(tmp_path / TRIAL, ranks=2, steps=found["steps"])


def test_it_overlaps_over_tcp(tmp_path: Path) -> None:
    env = {f"OMPI_MCA_{name}": value for name, value in MCA_TCP.items()}
    found = last_line(Job(script(tmp_path, "total_train_steps=20"), env), tmp_path)
    assert_overlap(tmp_path / TRIAL, ranks=2, steps=found["steps"])
