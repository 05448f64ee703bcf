"""Replicas of several ranks, each launch a program of its own: a process keeps its torch group for life."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launch import mpirun

PROGRAM = Path(__file__).with_name("replicas.py")


@pytest.mark.parametrize(
    ("ranks", "tp", "family", "tied"),
    [
        (4, 2, "qwen2", "tied"),
        pytest.param(4, 4, "qwen3", "untied", marks=pytest.mark.full, id="replicated KV heads"),
        pytest.param(2, 2, "llama", "untied", marks=pytest.mark.full, id="one replica"),
    ],
)
def test_ranks_of_replicas_emit_the_same_bits(tmp_path: Path, ranks: int, tp: int, family: str, tied: str) -> None:
    argv = [sys.executable, "-m", "mpi4py", str(PROGRAM), str(tmp_path / "model"), family, tied, str(tp)]
    result = mpirun(ranks, argv, timeout=240)
    assert result.returncode == 0 and "ok" in result.stdout.splitlines(), result.stdout
