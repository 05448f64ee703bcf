"""Begin: what every rank must know before the first ordinal, told once over the world.

Trainers read the checkpoint, rollout ranks do not open files; the owner of the live ledger needs
its state and the ordinals of the groups that wait already.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_hpc.communicators import broadcast
from areal_hpc.config import Config
from areal_hpc.stream.ledger import Ledger

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SLEEP_S = 0.005


def ledger(config: Config, state: dict[str, Any] | None, delivered: Iterable[int] = ()) -> Ledger:
    """The book of a new run (state None), or of one that goes on behind a checkpoint (`Ledger.from_state`)."""
    sizes = {
        "B": config.train_dataset.batch_size,
        "eta": config.rollout.max_head_offpolicyness,
        "seed": config.seed,
        "total_steps": config.total_train_steps,
        "max_drops_per_step": config.rollout.max_drops_per_step,
    }
    return Ledger(**sizes) if state is None else Ledger.from_state(state, delivered=delivered, **sizes)


@dataclass(frozen=True, slots=True)
class Begin:
    """Where an attempt begins: `ledger` is None for a new run; `delivered` are the ordinals of the
    checkpoint's groups."""

    attempt: int
    ledger: dict[str, Any] | None
    delivered: tuple[int, ...]


def share(comm: Intracomm, begin: Begin | None, root: int) -> Begin:
    """The root's `begin` on every rank of `comm`. Collective; ranks that wait sleep (an engine may
    be built meanwhile), and the caller's phase has the deadline."""
    payload = pickle.dumps(begin, protocol=5) if comm.rank == root else b""
    return pickle.loads(broadcast(comm, payload, root, _wait))


def _wait(request: Any) -> None:
    while not request.Test():
        time.sleep(SLEEP_S)
