"""A real Slurm of two nodes for the tests in this folder, started once and stopped at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Slurm
from launch import kill_carriers

from areal_hpc.processes import scrubbed

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("slurmd of a second node needs root: a host name and /dev/shm of its own (unshare)")
    lacking = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    assert not lacking, f"not installed: {', '.join(lacking)}; tools/setup.sh --tests does it on Debian"
    folder = Path(tempfile.mkdtemp(prefix="areal-hpc-slurm-"))
    script, conf = str(HERE / "one_machine_slurm.sh"), str(folder / "slurm.conf")
    try:
        # the daemons inherit its output and outlive it: a file, not a pipe
        with open(folder / "start.log", "w") as log:
            command = [script, "start", str(folder)]
            started = subprocess.run(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=60, check=False)
        assert started.returncode == 0, (folder / "start.log").read_text()
        yield Slurm(folder, {**scrubbed(os.environ), "SLURM_CONF": conf})
    finally:
        subprocess.run([script, "stop", str(folder)], timeout=60, check=False)
        kill_carriers("SLURM_CONF", conf)  # what a test that failed left running outlives the daemons
        shutil.rmtree(folder, ignore_errors=True)
