"""MPI started at the right level, the map of nodes, and the communicators of a placed world.

Each kind of traffic has a communicator of its own, so that no message of one can match a
receive of another. All functions here are collective over the communicator they are given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_hpc.placement import Place, Role

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

CHUNK_BYTES = 1 << 29  # of one broadcast
IDLE_S = 0.001  # between two tests of a request: a blocking wait burns a core


def initialise() -> Any:
    """Start MPI, if it has not been, and return `mpi4py.MPI`. Raises RuntimeError below FUNNELED."""
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_FUNNELED or not MPI.Is_thread_main():
        raise RuntimeError(
            f"MPI runs at thread level {MPI.Query_thread()}, needed is FUNNELED ({MPI.THREAD_FUNNELED}) "
            "with the main thread as the one that calls it"
        )
    return MPI


@dataclass
class Communicators:
    """`comm` for what all ranks do together; the next three carry what their names say.

    `role` has the ranks of one's role in the order of `Place.index`; `replica` the ranks of
    one rollout replica by tp, None on trainers.
    """

    comm: Intracomm
    mail: Intracomm
    control: Intracomm
    exchange: Intracomm
    role: Intracomm
    replica: Intracomm | None


def split(base: Intracomm, places: Sequence[Place]) -> Communicators:
    """The communicators of a world whose rank r has `places[r]`."""
    from mpi4py import MPI

    mine = places[base.rank]
    trains = mine.role is Role.TRAINER
    comm, mail, control, exchange = (base.Dup() for _ in range(4))
    role = base.Split(0 if trains else 1, mine.index)
    replica = base.Split(MPI.UNDEFINED if trains else mine.dp, mine.tp)
    return Communicators(comm, mail, control, exchange, role, None if replica == MPI.COMM_NULL else replica)


def map_nodes(base: Intracomm) -> tuple[list[str], Intracomm]:
    """The node of each rank, and the communicator of this node's ranks in rank order.

    A node is where memory can be shared; its name is the processor name of its lowest rank.
    Two of one name (containers with one host name) are told apart by a number.
    """
    from mpi4py import MPI

    local = base.Split_type(MPI.COMM_TYPE_SHARED, base.rank)
    everyone = base.allgather(local.bcast((MPI.Get_processor_name(), base.rank), 0))
    firsts: dict[str, list[int]] = {}  # name -> lowest rank of each node of that name
    for name, first in everyone:
        if first not in firsts.setdefault(name, []):
            firsts[name].append(first)
    numbers = [firsts[name].index(first) for name, first in everyone]
    return [f"{name}.{n}" if n else name for (name, _), n in zip(everyone, numbers)], local


def wait(request: Request, what: str, limit_s: float) -> None:
    """Test and sleep until the request is complete. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not all ranks came within {limit_s:g} s")
        time.sleep(IDLE_S)


def broadcast(comm: Intracomm, payload: bytes, root: int, finish: Callable[[Request], None]) -> bytes:
    """The root's bytes on every rank of `comm`, in calls of less than 1 GiB; `payload` is the root's alone.

    Collective. `finish` completes a request in its caller's way (pumping mail, sleeping), never blocking
    in MPI; the deadline is the caller's phase.
    """
    import numpy as np

    size = np.array([len(payload)], np.int64)
    finish(comm.Ibcast(size, root))
    buffer = np.frombuffer(payload, np.uint8).copy() if comm.rank == root else np.empty(int(size[0]), np.uint8)
    for start in range(0, len(buffer), CHUNK_BYTES):
        finish(comm.Ibcast(buffer[start : start + CHUNK_BYTES], root))
    return buffer.tobytes()
