"""`areal-hpc sft` as a job: on a layout of two ranks it makes what one rank makes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from launch import Job, command
from runs import Run, finish
from safetensors.numpy import load_file

pytestmark = pytest.mark.timeout(300)


def warmed(tiny: Path, root: Path, ranks: int, backend: str) -> dict[str, np.ndarray]:
    run = Run(root, f"sft{ranks}", tiny, ranks=ranks, changes={"sft": {"steps": 3, "batch_size": 8, "warmup_steps": 1}})
    out = root / f"warm{ranks}"
    keys = ["--config", str(run.config), f"actor.backend={backend}", f"sft.output={out}"]
    job = Job(command(ranks, [sys.executable, "-m", "areal_hpc.cli", "sft", *keys]), {"HF_HUB_OFFLINE": "1"})
    code, text = finish(job, run)
    assert code == 0, f"{text}\n{run.log()}"
    assert f"sft: {out}" in text
    return load_file(out / "model.safetensors")


def test_two_ranks_make_what_one_makes(tiny: Path, tmp_path: Path) -> None:
    before = load_file(tiny / "model.safetensors")
    one = warmed(tiny, tmp_path, 1, "megatron:d1t1p1")
    two = warmed(tiny, tmp_path, 2, "megatron:d1t2p1")
    assert one.keys() == two.keys() == before.keys()
    for name, expected in one.items():
        np.testing.assert_allclose(two[name], expected, rtol=0, atol=1e-5, err_msg=name)
    assert max(np.abs(one[name] - before[name]).max() for name in before) > 1e-4, "it has learned something"
