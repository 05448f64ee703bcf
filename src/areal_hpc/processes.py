"""Facts about processes from /proc, and what a helper process must not inherit.

Linux only, standard library only: the spawner uses it. A pid alone names nobody for long,
so a process is known by pid and start time (`ticks` since boot). Source: proc(5), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping

PR_SET_PDEATHSIG = 1
LAUNCHER_PREFIXES = (
    "OMPI_", "ORTE_", "OPAL_", "PRTE_", "PMI", "MPI_", "MPIR_", "MPIEXEC_", "MPICH_", "HYDRA_", "HYDI_", "I_MPI_",
    "MV2_", "PALS_", "FLUX_", "SLURM", "SRUN_", "SBATCH_",
)  # fmt: skip


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what MPI libraries and launchers put there.

    A child that inherits it and touches MPI would take itself for the rank, and a child of
    Slurm's step would be counted and signalled as one.
    """
    return {name: value for name, value in environment.items() if not name.startswith(LAUNCHER_PREFIXES)}


def stat(pid: int) -> tuple[str, int] | None:
    """State letter (R, S, D, T stopped, t traced, Z zombie) and start ticks; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[19])


def ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it is gone."""
    found = stat(pid)
    return found[1] if found else 0


def alive(pid: int, since_ticks: int) -> bool:
    """Whether this very process (not another one with its pid) still runs. A zombie does not."""
    found = stat(pid)
    return found is not None and found[1] == since_ticks and found[0] not in "ZX"


def pid_namespace() -> int:
    """Which namespace this process's pids are of: in another one (a container) they name nobody, or others."""
    return os.stat("/proc/self/ns/pid").st_ino


def signal_when_parent_dies(number: int) -> None:
    """Ask the kernel for signal `number` at the death of the thread that created this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")


def signal_name(number: int) -> str:
    """`SIGKILL (9)`: name and number, as messages give it."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def ended_by(returncode: int) -> str:
    """A child's return code (negative for a signal, as subprocess gives it) in words."""
    return f"killed by {signal_name(-returncode)}" if returncode < 0 else f"exit code {returncode}"
