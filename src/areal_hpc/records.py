"""Trajectory and Group: the one record that travels, waits, is trained and is stored.

Shapes: P = tokens of the prompt, T = new tokens of one sample. Token ids are int32,
log-probabilities float32 in nats, versions int32 (the version of the weights that made
the token). A record knows neither MPI nor HDF5: `Group.pack` gives the bytes that the
mailbox carries and a checkpoint keeps, `Group.unpack` reads them back bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

MAGIC = b"AHG1"


class Status(StrEnum):
    """How the scoring of a sample ended; only `ok` samples are trained."""

    OK = "ok"
    TIMEOUT = "timeout"  # the reward worker was killed at its deadline
    ERROR = "error"  # the reward function raised, or its worker died


class DropReason(StrEnum):
    """Why an ordinal leaves the ledger untrained. Leaders decide the first two, trainers the rest."""

    REWARD = "reward"  # fewer than two samples of the group could be scored
    UNIFORM = "uniform"  # dynamic sampling: all rewards equal, no gradient
    NONFINITE = "nonfinite"  # loss or gradient not finite in a step's first minibatch
    STALE = "stale"  # order `ready`, `stale: drop`: a token older than eta


@dataclass(slots=True, eq=False)
class Trajectory:
    """One sampled answer to a prompt.

    tokens_T int32, the new tokens (the prompt is the group's); logp_T float32, the
    behaviour policy's log-probability of each under the sampling distribution (after
    temperature); version_T int32, the version that made each. `finish` is vLLM's
    finish reason: "stop" or "length".
    """

    tokens_T: np.ndarray
    logp_T: np.ndarray
    version_T: np.ndarray
    reward: float
    status: Status = Status.OK
    finish: str = "stop"

    def __post_init__(self) -> None:
        self.tokens_T = np.ascontiguousarray(self.tokens_T, np.int32)
        self.logp_T = np.ascontiguousarray(self.logp_T, np.float32)
        self.version_T = np.ascontiguousarray(self.version_T, np.int32)
        lengths = {len(self.tokens_T), len(self.logp_T), len(self.version_T)}
        if len(lengths) != 1:
            raise ValueError(
                f"trajectory: {len(self.tokens_T)} tokens, {len(self.logp_T)} log-probabilities, "
                f"{len(self.version_T)} versions; each token needs one of each"
            )


@dataclass(slots=True, eq=False)
class Group:
    """The samples of one ordinal. `prompt_P` int32; `item` is the row of the dataset;
    `attempt` the attempt that generated it; `replica` the replica that did."""

    ordinal: int
    item: int
    prompt_P: np.ndarray
    trajectories: list[Trajectory] = field(default_factory=list)
    attempt: int = 0
    replica: int = 0

    def __post_init__(self) -> None:
        self.prompt_P = np.ascontiguousarray(self.prompt_P, np.int32)

    @property
    def scored(self) -> list[Trajectory]:
        """The samples that may be trained (status ok)."""
        return [t for t in self.trajectories if t.status is Status.OK]

    @property
    def tokens(self) -> int:
        """Tokens a trainer must process: prompt and answer of every scored sample."""
        return sum(len(self.prompt_P) + len(t.tokens_T) for t in self.scored)

    @property
    def oldest_version(self) -> int:
        """The oldest version that made one of its tokens; staleness counts from it."""
        return min((int(t.version_T.min()) for t in self.trajectories if len(t.version_T)), default=0)

    def pack(self) -> bytes:
        """A header (JSON, length-prefixed) and the arrays behind it, little-endian."""
        head = json.dumps(
            {
                "ordinal": self.ordinal,
                "item": self.item,
                "attempt": self.attempt,
                "replica": self.replica,
                "prompt": len(self.prompt_P),
                "samples": [
                    # repr of a Python float survives JSON exactly; rewards need no rounding
                    [len(t.tokens_T), float(t.reward), str(t.status), t.finish]
                    for t in self.trajectories
                ],
            }
        ).encode()
        parts = [MAGIC, len(head).to_bytes(4, "little"), head, self.prompt_P.tobytes()]
        for t in self.trajectories:
            parts += [t.tokens_T.tobytes(), t.logp_T.tobytes(), t.version_T.tobytes()]
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Group:
        """The group that `pack` wrote. Raises ValueError when the bytes are not one."""
        data = memoryview(data)
        if bytes(data[:4]) != MAGIC:
            raise ValueError(f"not a packed group: starts with {bytes(data[:4])!r}, expected {MAGIC!r}")
        head_bytes = int.from_bytes(data[4:8], "little")
        head = json.loads(bytes(data[8 : 8 + head_bytes]))
        offset = 8 + head_bytes

        def take(count: int, dtype: type) -> np.ndarray:
            nonlocal offset
            array = np.frombuffer(data, dtype, count, offset).copy()
            offset += array.nbytes
            return array

        prompt_P = take(head["prompt"], np.int32)
        trajectories = [
            Trajectory(
                take(count, np.int32), take(count, np.float32), take(count, np.int32), reward, Status(status), finish
            )
            for count, reward, status, finish in head["samples"]
        ]
        if offset != len(data):
            raise ValueError(f"packed group of ordinal {head['ordinal']}: {len(data)} bytes, its header names {offset}")
        return cls(head["ordinal"], head["item"], prompt_P, trajectories, head["attempt"], head["replica"])


def pack_groups(groups: Iterable[Group]) -> bytes:
    """Groups one behind the other, each after its length (8 bytes, little-endian): a checkpoint's blob."""
    return b"".join(len(data).to_bytes(8, "little") + data for data in (group.pack() for group in groups))


def unpack_groups(data: bytes) -> list[Group]:
    """What `pack_groups` wrote, in its order. Raises ValueError when the bytes are cut short."""
    view, groups, start = memoryview(data), [], 0
    while start < len(view):
        stop = start + 8 + int.from_bytes(view[start : start + 8], "little")
        if stop > len(view):
            raise ValueError(f"packed groups: group {len(groups)} ends at byte {stop} of {len(view)}")
        groups.append(Group.unpack(view[start + 8 : stop]))
        start = stop
    return groups
