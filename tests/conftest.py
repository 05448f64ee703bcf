"""What every test gets: long matrices are left out unless asked for, and Hypothesis is repeatable."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# One draw for everybody: ranks of an MPI test must draw the same cases, and a failure here is one there.
settings.register_profile("areal_hpc", derandomize=True, database=None, deadline=None)
settings.load_profile("areal_hpc")

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A TERM ends pytest as Ctrl-C does: fixtures are torn down, and jobs and daemons with them.
signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`full` tests run with `-m full` only (tools/test.sh --full)."""
    if "full" in config.getoption("-m"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
