"""Slurm's commands as the tests in this folder use them."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True)
class Slurm:
    """The commands of Slurm in this environment. `folder` is seen by both nodes and ends with the session."""

    folder: Path
    env: dict[str, str]

    def run(self, *argv: str, timeout: float = 60, **env: str) -> str:
        """A command from the repository's root; its output, or an error with it."""
        done = subprocess.run(
            argv, cwd=REPO, env={**self.env, **env}, timeout=timeout, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, timeout: float) -> dict[str, str]:
        """The job when it has ended. A job that takes longer is cancelled, and the test fails with its state."""
        deadline = time.monotonic() + timeout
        while (job := self.job(number))["JobState"] not in ENDED:
            if time.monotonic() > deadline:
                self.run("scancel", number)
                pytest.fail(f"job {number} had not ended after {timeout:g} s: {job['JobState']} ({job['Reason']})")
            time.sleep(0.5)
        return job
