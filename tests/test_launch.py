"""The test harness itself: `launch.py` and `mpi/conftest.py` end whatever hangs and say whose fault it was."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launch import TIMED_OUT, Job, command, mpirun

HERE = Path(__file__).parent


def run_mpi_tests(folder: Path, n: int, body: str, *options: str, timeout: float = 60) -> tuple[int, str]:
    """pytest on `n` ranks over one test file with the suite's MPI conftest; its exit code and output."""
    shutil.copy(HERE / "mpi/conftest.py", folder)
    (folder / "test_body.py").write_text(textwrap.dedent(body))
    argv = [sys.executable, "-m", "pytest", "-c", str(HERE.parent / "pyproject.toml"), "--rootdir", str(folder)]
    result = mpirun(n, [*argv, str(folder), "--color=no", *options], timeout=timeout)
    return result.returncode, result.stdout


def test_ranks_share_a_report(tmp_path: Path) -> None:
    code, out = run_mpi_tests(
        tmp_path,
        4,
        """
        def test_sum(comm, shared_dir):
            (shared_dir / str(comm.rank)).touch()
            comm.Barrier()
            assert len(list(shared_dir.iterdir())) == comm.size
            assert comm.allreduce(1) == comm.size

        def test_one_rank_fails(world):
            assert world.rank != 2, "two is wrong"
        """,
    )
    assert code == 1
    assert "1 failed, 3 passed" in out  # `test_sum` at 1, 2 and 4 ranks
    assert "--- rank 2: failed" in out and "two is wrong" in out
    assert out.count("short test summary") == 1


def test_failure_that_leaves_others_waiting_ends_the_launch(tmp_path: Path) -> None:
    began = time.monotonic()
    code, out = run_mpi_tests(
        tmp_path,
        2,
        """
        def test_deserted(world):
            assert world.rank == 0, "rank 1 left"
            world.Barrier()
        """,
    )
    assert code not in (0, TIMED_OUT)
    assert "rank 1 left" in out and "not all ranks came" in out
    assert time.monotonic() - began < 40


def test_hang_ends_with_stacks_of_the_ranks(tmp_path: Path) -> None:
    code, out = run_mpi_tests(
        tmp_path,
        2,
        """
        def test_stuck(world):
            world.recv(source=world.size - 1 - world.rank)
        """,
        "--timeout=2",
    )
    assert code not in (0, TIMED_OUT)
    assert out.count("in test_stuck") == 2, out


def test_outside_of_mpi_the_tests_fail(tmp_path: Path) -> None:
    shutil.copy(HERE / "mpi/conftest.py", tmp_path)
    (tmp_path / "test_body.py").write_text("def test_it(comm):\n    pass\n")
    argv = [sys.executable, "-m", "pytest", "-c", str(HERE.parent / "pyproject.toml"), str(tmp_path)]
    result = Job(argv).finish(60)
    assert result.returncode == 1
    assert "run `mpirun -n 4 pytest tests/mpi`" in result.stdout


@pytest.mark.parametrize("stubborn", ["setsid sleep 300 & sleep 300", "kill -STOP $$"])
def test_nothing_outlives_a_launch(stubborn: str) -> None:
    job = Job(command(2, ["bash", "-c", stubborn]))
    result = job.finish(timeout=3)
    assert result.returncode == TIMED_OUT
    assert "killed after 3 s" in result.stdout
    assert job.pids() == []
