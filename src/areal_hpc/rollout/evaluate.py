"""Evaluation: the held-out prompts, one sample each at temperature 1, through the engine that trains.

Kept by the leader of a replica, which gives its requests precedence over those of training.
Each replica takes its share of the prompts and reports a sum; the trainer adds them up. The
seeds follow from the row alone, so two versions are compared on the same draws. A sample that
could not be scored counts as failed, and as a reward of 0.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from areal_hpc.records import Status
from areal_hpc.rollout.groups import Request
from areal_hpc.stream.messages import Evaluated

if TYPE_CHECKING:
    from areal_hpc.rollout.engine import Finished

PREFIX = "heldout."
DRAWS = 1  # SeedSequence spawn key that keeps its seeds apart from those of training


class Evaluation:
    """The share `replica, replica + replicas, ...` of the held-out prompts.

    prompts[i]: token ids of row i of the held-out data. score(sample_id, row, tokens_T) asks for
    the reward of one answer; the answer comes back through `scored`. At most one evaluation is
    open; others wait for its end. While one is open no version should be received: each of its
    tokens must be of the version that it reports (`finished` raises RuntimeError otherwise).
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        score: Callable[[str, int, np.ndarray], None],
        *,
        seed: int,
        replica: int,
        replicas: int,
    ) -> None:
        self._prompts, self._score, self._seed, self._replica = prompts, score, seed, replica
        self._rows = range(replica, len(prompts), replicas)
        self._asked: deque[int] = deque()  # versions, the one under way first
        self._to_start: deque[int] = deque()
        self._unscored = 0
        self._sum, self._failed, self._began = 0.0, 0, 0.0

    @property
    def open(self) -> bool:
        """Whether an evaluation is under way."""
        return bool(self._asked)

    def start(self, version: int) -> None:
        """Evaluate the version that the engine holds now; `version` is that one."""
        self._asked.append(version)
        if len(self._asked) == 1:
            self._begin()

    def requests(self, room: int) -> list[Request]:
        """At most `room` requests for the engine."""
        count = min(room, len(self._to_start))
        return [self._request(self._to_start.popleft()) for _ in range(count)]

    def owns(self, sample_id: str) -> bool:
        return sample_id.startswith(PREFIX)

    def finished(self, sample: Finished) -> None:
        """An answer left the engine: ask for its reward."""
        version = self._asked[0]
        if (sample.version_T != version).any():
            held = sorted(set(sample.version_T.tolist()))
            raise RuntimeError(f"evaluation of version {version}: {sample.request_id} has tokens of versions {held}")
        self._score(sample.request_id, int(sample.request_id.removeprefix(PREFIX)), sample.tokens_T)

    def scored(self, sample_id: str, reward: float, status: Status) -> None:
        self._unscored -= 1
        if status is Status.OK:
            self._sum += reward
        else:
            self._failed += 1

    def test(self) -> Evaluated | None:
        """The result, once, when the last answer is scored; the next evaluation then begins."""
        if not self._asked or self._unscored:
            return None
        seconds = time.monotonic() - self._began
        result = Evaluated(self._replica, self._asked.popleft(), len(self._rows), self._sum, self._failed, seconds)
        if self._asked:
            self._begin()
        return result

    def _begin(self) -> None:
        self._to_start.extend(self._rows)
        self._unscored = len(self._rows)
        self._sum, self._failed, self._began = 0.0, 0, time.monotonic()

    def _request(self, row: int) -> Request:
        draw = np.random.SeedSequence([self._seed, row], spawn_key=(DRAWS,))
        seed = int(draw.generate_state(1)[0])
        return Request(f"{PREFIX}{row}", tuple(self._prompts[row]), seed, temperature=1.0)
