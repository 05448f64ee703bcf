"""What trainer rank 0 decides, told to every trainer rank: they all do the same next thing.

Collective over the trainer communicator, and never blocking in MPI: while a rank waits for the
next command it pumps its mail and sleeps (a blocking broadcast would hold a core and the mail).
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpi4py import MPI

from areal_hpc import communicators
from areal_hpc.stream.buffer import Decision

IDLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Train:
    """Train this batch, then publish the version that it makes."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Enter:
    """Every replica is paused: enter the exchange of `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write the checkpoint of `version`."""

    version: int


@dataclass(frozen=True, slots=True)
class End:
    """Leave the loop; the job ends with `code`."""

    code: int


Command = Train | Enter | Checkpoint | End


def wait(requests: Sequence[MPI.Request], pump: Callable[[], None]) -> None:
    """Pump until all are complete. The deadline is the phase's (`world.phase`): a peer that never
    comes is named by the hang report."""
    while not MPI.Request.Testall(list(requests)):
        pump()
        time.sleep(IDLE_S)


def broadcast(comm: MPI.Comm, payload: bytes, root: int, pump: Callable[[], None]) -> bytes:
    """The root's bytes on every rank of `comm`; mail is pumped meanwhile. Collective."""
    return communicators.broadcast(comm, payload, root, lambda request: wait([request], pump))


class Commands:
    """The channel from trainer rank 0 to all trainer ranks, itself included."""

    def __init__(self, comm: MPI.Comm, pump: Callable[[], None]) -> None:
        self._comm, self._pump = comm.Dup(), pump

    def tell(self, command: Command) -> Command:
        """By trainer rank 0: collective with every other rank's `hear`."""
        broadcast(self._comm, pickle.dumps(command, protocol=5), 0, self._pump)
        return command

    def hear(self) -> Command:
        """By all others: the next command."""
        return pickle.loads(broadcast(self._comm, b"", 0, self._pump))

    def close(self) -> None:
        self._comm.Free()
