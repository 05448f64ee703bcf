"""Tests that run on every rank under `mpirun -n 4 pytest tests/mpi`: one report, and never a hang.

- `comm` gives the same body communicators of 1, 2 and 4 ranks: the world is cut into groups of that size, so every
  rank runs every body, and all ranks run all tests in one order.
- Ranks agree on each phase (set-up, call, tear-down) of each test: what failed on any rank fails on rank 0, with
  that rank's traceback. A rank that failed waits GRACE_S for the others (they may be caught in a call that it will
  not join), then prints its traceback and aborts the launch.
- A test past its timeout ends the launch from C, without the interpreter lock (parallel HDF5 can hold it while it
  waits): every rank writes its stacks, rank 0 first, and is then ended by SIGALRM.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SIZES = (1, 2, 4)
GRACE_S = 10.0
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "SLURM_STEP_ID")
UNDER_MPI = any(name in os.environ for name in LAUNCHERS)

if UNDER_MPI:
    from mpi4py import MPI

    WORLD = MPI.COMM_WORLD
    AGREE = WORLD.Dup()  # the reports' own: a test cannot reach it
    RANK, SIZE = WORLD.rank, WORLD.size
else:
    RANK, SIZE = 0, 1

stderr_fd = 2  # the real one; pytest captures fd 2 while tests run


@pytest.hookimpl(trylast=True)  # the terminal reporter registers itself in this hook
def pytest_configure(config: pytest.Config) -> None:
    global stderr_fd
    stderr_fd = os.dup(2)
    if RANK != 0:  # one report, rank 0's
        from _pytest.config import create_terminal_writer

        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter._tw = create_terminal_writer(config, open(os.devnull, "w"))  # noqa: SIM115


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "comm" in metafunc.fixturenames:
        metafunc.parametrize("comm", [n for n in SIZES if SIZE % n == 0], indirect=True, ids=lambda n: f"{n}ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.mpi)


def pytest_collection_finish(session: pytest.Session) -> None:
    if SIZE > 1:
        mine = ([item.nodeid for item in session.items], session.testsfailed)
        everyone = AGREE.allgather(mine)
        if any(other != mine for other in everyone):
            counts = ", ".join(f"rank {r}: {len(ids)} tests, {bad} errors" for r, (ids, bad) in enumerate(everyone))
            abort(f"the ranks did not collect the same tests ({counts})")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not UNDER_MPI:
        pytest.fail("an MPI test outside of MPI: run `mpirun -n 4 pytest tests/mpi`", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if SIZE == 1:
        return report
    failure = f"{report.longreprtext}\n" if report.failed else ""
    deadline = time.monotonic() + GRACE_S if report.failed else float("inf")  # others: until the test's timeout
    barrier = AGREE.Ibarrier()
    while not barrier.Test():
        if time.monotonic() > deadline:
            abort(f"{item.nodeid} ({report.when}) failed here, and not all ranks came to say how it went\n{failure}")
        time.sleep(0.001)
    outcomes = AGREE.allgather((report.outcome, failure))
    if len({outcome for outcome, _ in outcomes}) > 1 or report.failed:
        report.outcome = "failed"
        said = [f"--- rank {r}: {outcome}\n{text}" for r, (outcome, text) in enumerate(outcomes)]
        report.longrepr = "\n".join(said)
    return report


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    yield
    if SIZE > 1:
        AGREE.Barrier()
        if RANK != 0:  # rank 0 holds the outcome; a code of ours would make mpirun end it while it prints
            session.exitstatus = 0


def pytest_internalerror(excrepr: object) -> None:
    if SIZE > 1:  # the others would wait for this rank in their next agreement
        abort(f"pytest itself failed\n{excrepr}")


def abort(message: str) -> None:
    os.write(stderr_fd, f"\nrank {RANK}: {message}\n".encode())
    MPI.COMM_WORLD.Abort(1)


# pytest-timeout's own timers need the interpreter lock (thread) or Python code that runs (signal); these need neither.


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: object) -> bool:
    limit_s = settings.timeout
    # Ranks write one after the other; SIGALRM keeps its default action, the end of the process.
    faulthandler.dump_traceback_later(limit_s + 0.3 * RANK, file=stderr_fd)
    signal.setitimer(signal.ITIMER_REAL, limit_s + 0.3 * SIZE + 1)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return True


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    """A communicator of `request.param` ranks of this test's own, this rank in it."""
    split = WORLD.Split(RANK // request.param, RANK)
    yield split
    split.Free()


@pytest.fixture
def world() -> Iterator[MPI.Intracomm]:
    """All ranks, on a communicator of this test's own."""
    copy = WORLD.Dup()
    yield copy
    copy.Free()


@pytest.fixture
def shared_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """One empty folder for all ranks of the test's communicator (`comm`, else the world); its rank 0 makes it."""
    group = request.getfixturevalue("comm" if "comm" in request.fixturenames else "world")
    path = Path(group.bcast(tempfile.mkdtemp(prefix="areal-hpc-") if group.rank == 0 else None))
    yield path
    group.Barrier()
    if group.rank == 0:
        shutil.rmtree(path)
