"""Meetings: what the ranks of one communicator tell each other before any of them goes on.

A rank that fails alone and leaves would hang all others in the next collective call. So each
fallible step ends in `agree`: every rank brings its problem or None, and either all go on or
all raise the same error. Waiting is a test and a short sleep (a blocking collective burns the
core that a neighbour computes on) and has a deadline. Only the main thread may meet.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.storage.hdf5 import CheckpointError

if TYPE_CHECKING:
    from mpi4py import MPI

LIMIT_BYTES = 1 << 30  # of one MPI call

_abandoned: list[Any] = []  # requests past their deadline, kept with their buffers: MPI may still write into them


class Meeting:
    """Collective over `comm`; `subject` (a file) opens every message."""

    def __init__(self, comm: MPI.Comm, subject: object, deadline_s: float, on_wait: Callable[[], None]) -> None:
        self.comm, self.subject, self.deadline_s, self.on_wait = comm, subject, deadline_s, on_wait
        self.rank, self.size = comm.rank, comm.size

    def share(self, mine: Any) -> list[Any]:
        """Collective: what each rank brought, by rank. Any picklable object; under 1 GiB together."""
        data = np.frombuffer(pickle.dumps(mine, pickle.HIGHEST_PROTOCOL), np.uint8)
        sizes = np.empty(self.size, np.int64)
        self._finish(self.comm.Iallgather(np.array([data.size], np.int64), sizes), sizes)
        total = int(sizes.sum())
        if total >= LIMIT_BYTES:
            raise CheckpointError(f"{self.subject}: ranks would share {total} bytes in one call; the limit is 1 GiB")
        everything = np.empty(total, np.uint8)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        self._finish(self.comm.Iallgatherv(data, [everything, (sizes, starts[:-1])]), data, everything)
        return [pickle.loads(everything[a:b].data) for a, b in itertools.pairwise(starts)]

    def agree(self, problem: str | None) -> None:
        """Collective: return on every rank, or raise CheckpointError with all problems on every rank."""
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(self.share(problem)):
            if text:
                ranks.setdefault(text, []).append(rank)
        if ranks:
            told = (
                f"{text} (rank {', '.join(map(str, found[:8]))}{', ...' * (len(found) > 8)})"
                for text, found in ranks.items()
            )
            raise CheckpointError(f"{self.subject}: " + "; ".join(told))

    @contextmanager
    def step(self, doing: str) -> Iterator[None]:
        """Collective: run the block, then agree; an exception in it is this rank's problem.

        Communication inside the block must be of a kind that ends on the other ranks when this
        one stops taking part (the exchange has a deadline for that).
        """
        problem = None
        try:
            yield
        except Exception as error:
            problem = str(error) if isinstance(error, CheckpointError) else f"{doing}: {type(error).__name__}: {error}"
        self.agree(problem)

    def _finish(self, request: MPI.Request, *buffers: np.ndarray) -> None:
        end = time.monotonic() + self.deadline_s
        while not request.Test():
            if time.monotonic() > end:
                _abandoned.append((request, buffers))
                raise CheckpointError(
                    f"{self.subject}: rank {self.rank} waited {self.deadline_s:g} s and not all "
                    f"{self.size} ranks of the communicator came"
                )
            self.on_wait()
            time.sleep(0.001)
