"""What a run keeps: saved as one consistent cut, restored on any layout. Collective over the trainer ranks.

    checkpoints/step-*.h5    master weights and moments; blobs: ledger, segments, groups/<home>,
                             rng/<rank>, config.yaml
    trajectories/*.h5        what was trained since the checkpoint before: one segment per checkpoint

The segment is written first and named in the checkpoint, so a segment without a checkpoint that names
it was trained by weights that did not survive; a restart renames it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc.config import Config
from areal_hpc.configfile import dump
from areal_hpc.layout.families import logical_tensors
from areal_hpc.records import Group, pack_groups, unpack_groups
from areal_hpc.storage import checkpoint, trajectories
from areal_hpc.storage.trajectories import Trained
from areal_hpc.stream.begin import ledger
from areal_hpc.stream.buffer import restorable
from areal_hpc.trainer.actor import Actor
from areal_hpc.trainer.binding import TrainerBinding
from areal_hpc.trainer.model import Model
from areal_hpc.world import World

CHECKPOINTS, TRAJECTORIES = "checkpoints", "trajectories"
STATE_BYTES = 3 * 4  # of a parameter in a checkpoint: weight and two moments, fp32
SLOW_BYTES_PER_S = 100e6  # of one writing node, on a file system that others use too


@dataclass
class Restored:
    """Where a run goes on: at step 0 from the Hugging Face weights, or behind a checkpoint.

    `ledger` is None for a new run. `groups` are the checkpoint's undelivered groups that this home
    takes (none on other ranks), `delivered` the ordinals of all of them (at homes). `refused` names
    newer checkpoints that did not verify, each with the reason.
    """

    step: int = 0
    checkpoint: str = ""
    ledger: dict[str, Any] | None = None
    groups: list[Group] = field(default_factory=list)
    delivered: tuple[int, ...] = ()
    segments: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class State:
    """Saves and restores one trainer rank's part of the run."""

    def __init__(self, config: Config, world: World, model: Model, binding: TrainerBinding, actor: Actor) -> None:
        self.config, self.world = config, world
        self.model, self.binding, self.actor = model, binding, actor
        self.run_dir = Path(world.run_dir)
        self.segments: list[str] = []
        self._first_step = 0  # of the segment to come
        self._comm = world.role_comm.Dup()
        self._writers = writers(world, config.saver.writers_per_node)

    def restore(self) -> Restored:
        """The newest checkpoint that verifies, else the weights of `actor.path`.

        Raises CheckpointError where there are checkpoints and none verifies: a run never
        starts over unless `recover: fresh` says so, and not again when its job is requeued.
        """
        found = None
        if self.config.recover == "auto" or self.world.restart > 0:
            found = checkpoint.load_newest(
                self.run_dir / CHECKPOINTS,
                self._comm,
                self.binding.state_views(copies=True),
                blobs=self._mine,
                deadline_s=2 * self.config.deadlines.save_s,
            )
        elif self._comm.rank == 0:
            checkpoint.supersede(self.run_dir / CHECKPOINTS)  # else the next saves, of lower steps, would be pruned
        if found is None:
            self.binding.load_hf(self.config.actor.path)
            restored = Restored()
        else:
            restored = self._read(found)
        self.segments, self._first_step = list(restored.segments), restored.step
        if self._comm.rank == 0:
            trajectories.supersede(self.run_dir / TRAJECTORIES, self.segments)
        return restored

    def _mine(self, name: str) -> bool:
        """Groups may go to another home now, so every home looks at them all; RNG is a rank's own."""
        groups = self.world.is_home and name.startswith("groups/")
        return groups or name in ("ledger", "segments", f"rng/{self._comm.rank}")

    def _read(self, found: checkpoint.Restored) -> Restored:
        attrs, blobs = found.attrs, found.blobs
        self.binding.step_count = int(attrs["optimizer_steps"])
        self.binding.after_load()
        rng = blobs.get(f"rng/{self._comm.rank}")
        if rng is not None and attrs["trainer_ranks"] == self._comm.size:
            self.actor.load_rng_state(rng)
        groups = [g for name, data in sorted(blobs.items()) if name.startswith("groups/") for g in unpack_groups(data)]
        state = json.loads(blobs["ledger"])
        groups = restorable(groups, ledger(self.config, state), self.config.rollout.order)
        delivered = tuple(sorted(g.ordinal for g in groups))
        mine = [g for g in groups if g.ordinal % len(self.world.homes) == self.world.place.dp]
        step, segments = int(attrs["step"]), json.loads(blobs["segments"])
        return Restored(step, found.path.name, state, mine, delivered, segments, found.refused)

    def save(
        self,
        step: int,
        attempt: int,
        trained: Sequence[Trained],
        waiting: Sequence[Group],
        book: dict[str, Any] | None,
        pump: Callable[[], None],
    ) -> float:
        """Write segment and checkpoint of `step`; the seconds it took.

        trained: what this home trained since the last save; waiting: the groups that wait in it;
        book: the ledger's state at trainer rank 0, None elsewhere. Raises CheckpointError on all ranks.
        """
        began = time.monotonic()
        # Twice the phase's limit: the watcher names the rank that is silent, a meeting only the one that waited for it.
        options = {"writers": self._writers, "deadline_s": 2 * self.config.deadlines.save_s, "on_wait": pump}
        # A save at the step where the attempt began (evaluation only) has trained nothing.
        if step > self._first_step:
            path = trajectories.segment_path(self.run_dir / TRAJECTORIES, attempt, self._first_step, step)
            span = {"attempt": attempt, "first_step": self._first_step, "stop_step": step}
            trajectories.write_segment(path, self._comm, trained, span, **options)
            self.segments.append(path.name)
        attrs = {
            "step": step,
            "attempt": attempt,
            "optimizer_steps": self.binding.step_count,
            "trainer_ranks": self._comm.size,
            "backend": self.config.actor.backend,
        }
        checkpoint.save(
            checkpoint.checkpoint_path(self.run_dir / CHECKPOINTS, step),
            self._comm,
            self.binding.state_views(),
            logical_tensors(self.model.spec),
            self._blobs(waiting, book),
            attrs,
            **options,
        )
        self._first_step = step
        if self._comm.rank == 0:
            checkpoint.prune(self.run_dir / CHECKPOINTS, self.config.saver.keep_last)
        return time.monotonic() - began

    def first_save_s(self) -> float:
        """What a save may take as long as none was measured, on the cautious side: seconds."""
        parameters = sum(math.prod(shape) for shape in logical_tensors(self.model.spec).values())
        nodes = {place.node for place in self.world.places if place.role == "trainer"}
        return parameters * STATE_BYTES / (len(nodes) * SLOW_BYTES_PER_S)

    def _blobs(self, waiting: Sequence[Group], book: dict[str, Any] | None) -> dict[str, bytes]:
        blobs = {f"rng/{self._comm.rank}": self.actor.rng_state()}
        if self.world.is_home:
            blobs[f"groups/{self.world.place.dp}"] = pack_groups(waiting)
        if book is not None:
            blobs |= {
                "ledger": json.dumps(book).encode(),
                "segments": json.dumps(self.segments).encode(),
                "config.yaml": dump(self.config).encode(),
            }
        return blobs

    def close(self) -> None:
        self._comm.Free()


def writers(world: World, per_node: int) -> list[int]:
    """Ranks of the trainer communicator that write: the first `per_node` trainers of each node."""
    by_node: dict[str, list[int]] = {}
    for place in sorted((p for p in world.places if p.role == "trainer"), key=lambda p: p.index):
        by_node.setdefault(place.node, []).append(place.index)
    return sorted(index for ranks in by_node.values() for index in ranks[:per_node])
