"""The first and last lines of a rank: before MPI, and the ends that come before there is a world.

`boot` must precede every heavy import: it starts the spawner (nothing forks after MPI_Init),
installs the signal flags and arms a timer, so that no start waits for ever. `agree` is how
ranks that found different faults, or none, end with one code and one message: a code does not
survive `srun` when one rank ends alone.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from areal_hpc import communicators, runlock, signals
from areal_hpc.config import Config, ConfigError
from areal_hpc.exits import Exit, Outcome, exit_path, write_exit
from areal_hpc.phases import STDERR, SecondLine
from areal_hpc.spawner import Spawner

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BOOT_LIMIT_S = 900.0  # from boot to a placed world: imports from a busy file system, MPI_Init
MEET_LIMIT_S = 120.0  # for all ranks to come to an end, once one is there


@dataclass(frozen=True, slots=True)
class Job:
    """Whose start of the run this is."""

    name: str
    restart: int


@dataclass
class Booted:
    """What `boot` leaves for `start`."""

    argv0: str
    spawner: Spawner
    second_line: SecondLine


_booted: Booted | None = None


def boot(argv0: str = "areal-hpc") -> None:
    """First call of a rank, before mpi4py, torch or vllm are imported; `argv0` begins its messages.

    Raises RuntimeError when MPI is there already: then a fork is no longer safe.
    """
    global _booted
    if "mpi4py.MPI" in sys.modules:
        raise RuntimeError("boot: mpi4py.MPI is imported already; the spawner must be started before MPI_Init")
    signals.install()
    faulthandler.enable(file=STDERR)
    faulthandler.register(signal.SIGUSR2, file=STDERR, all_threads=True)
    second_line = SecondLine()
    second_line.want(time.monotonic() + BOOT_LIMIT_S)
    _booted = Booted(argv0, Spawner(), second_line)


def refuse(error: Exception) -> NoReturn:
    """End every rank with 78 and one message. Collective over the world, and meets `start`.

    For ranks that could not load their configuration; those that could are in `start` and
    end with the same message.
    """
    base = communicators.initialise().COMM_WORLD
    agree(base, error, None)
    raise AssertionError("an agreement on an error returns to nobody")


def booted() -> Booted:
    """What `boot` has left. Raises RuntimeError where it was not called."""
    if _booted is None:
        raise RuntimeError("boot() must come first, before anything imports mpi4py, torch or vllm")
    return _booted


def agree(base: Intracomm, error: ConfigError | None, config: Config | None, job: Job | None = None) -> None:
    """Return when no rank has an error and all have one configuration; else end all with 78.

    Collective over `base`. The message is the lowest failing rank's, said by rank 0, which
    also writes the exit file where the folder is known.
    """
    from areal_hpc.configfile import dump  # handlers come before what takes a while to import

    digest = hashlib.sha256(dump(config).encode()).hexdigest() if config else ""
    said = base.allgather((str(error) if error else "", digest))
    errors = [(rank, text) for rank, (text, _) in enumerate(said) if text]
    if not errors and len({digest for _, digest in said}) > 1:
        odd = next(rank for rank, (_, digest) in enumerate(said) if digest != said[0][1])
        errors = [(odd, f"the configuration of rank {odd} is not that of rank 0: do all nodes see one file?")]
    if not errors:
        return
    if base.rank == 0:
        rank, message = errors[0]
        if job is not None and config is not None:
            _write_refusal(config.run_dir, job, Outcome(Exit.BAD_CONFIG, message, rank))
        say(message)
    booted().spawner.close()
    communicators.wait(base.Ibarrier(), "end", MEET_LIMIT_S)
    leave(Exit.BAD_CONFIG, sys.stdout)


def _write_refusal(run_dir: Path, job: Job, outcome: Outcome) -> None:
    """The exit file of a start that is refused; none where the folder's live owner goes by the same name.

    That is a second step of one Slurm job: whoever reads the file would take the first for ended.
    """
    path = exit_path(run_dir, job.name, job.restart)
    with suppress(OSError):  # a folder that cannot be written may be what is refused: then stderr says it alone
        owner = runlock.read(runlock.lock_path(run_dir))
        namesake = owner is not None and (owner.job, owner.restart) == (job.name, job.restart)
        if namesake and not runlock.free_for(owner, job.name, job.restart, socket.gethostname(), time.time()):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_exit(path, outcome)


def say(message: str, descriptor: int = STDERR) -> None:
    os.write(descriptor, f"{_booted.argv0 if _booted else 'areal-hpc'}: {message}\n".encode())


def leave(code: int, terminal: TextIO) -> NoReturn:
    """Finalise MPI and exit, with everything that was printed."""
    communicators.initialise().Finalize()
    for stream in (terminal, sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads any more
            stream.flush()
    os._exit(code)
