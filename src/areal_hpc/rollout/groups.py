"""Groups in flight: from claimed ordinals to requests, from finished samples to scored groups.

Kept by the leader of a replica alone. An ordinal's prompt, its request ids and its seeds follow
from the seed and the ordinal, so any replica of any attempt would ask the engine the same. A
group leaves when every sample has a score or a reason why it has none: a group with fewer than
two scored samples becomes a tombstone (design, section 5, "Who drops").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from areal_hpc.records import DropReason, Group, Status, Trajectory
from areal_hpc.stream.ledger import item_of
from areal_hpc.stream.messages import Tombstone

if TYPE_CHECKING:
    from areal_hpc.rollout.engine import Finished
    from areal_hpc.rollout.rewards import RewardPool


@dataclass(frozen=True, slots=True)
class Request:
    """What every rank of a replica gives its engine for one sample."""

    id: str
    prompt: tuple[int, ...]
    seed: int
    temperature: float | None = None  # None: gconfig.temperature


def sample_seed(seed: int, ordinal: int, sample: int) -> int:
    """The seed of one sample, 32 bits (numpy's SeedSequence over seed, ordinal and sample)."""
    return int(np.random.SeedSequence([seed, ordinal, sample]).generate_state(1)[0])


class Groups:
    """The groups that one replica generates.

    prompts[i]: token ids of row i of the dataset. decode: token ids -> the text that is scored.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        decode: Callable[[np.ndarray], str],
        rewards: RewardPool,
        *,
        seed: int,
        n_samples: int,
        attempt: int,
        replica: int,
        drop_uniform: bool,
    ) -> None:
        self._prompts, self._decode, self._rewards = prompts, decode, rewards
        self._seed, self._n = seed, n_samples
        self._attempt, self._replica, self._drop_uniform = attempt, replica, drop_uniform
        self._open: dict[int, Group] = {}
        self._samples: dict[int, dict[int, Trajectory]] = {}  # by ordinal and number, in any order of arrival
        self._unscored: dict[int, int] = {}

    @property
    def ordinals(self) -> list[int]:
        """The ordinals that are generating or wait for a reward."""
        return sorted(self._open)

    @property
    def samples_open(self) -> int:
        """Samples that count against max_concurrent_rollouts: not yet finished and scored."""
        return sum(self._unscored.values())

    def open(self, ordinals: Iterable[int]) -> list[Request]:
        """Start claimed ordinals: the requests of their samples, in order."""
        requests = []
        for ordinal in ordinals:
            item = item_of(self._seed, ordinal, len(self._prompts))
            prompt = tuple(self._prompts[item])
            self._open[ordinal] = Group(ordinal, item, np.array(prompt, np.int32), [], self._attempt, self._replica)
            self._unscored[ordinal], self._samples[ordinal] = self._n, {}
            requests += [Request(f"{ordinal}.{k}", prompt, sample_seed(self._seed, ordinal, k)) for k in range(self._n)]
        return requests

    def finished(self, sample: Finished) -> None:
        """A sample left the engine: ask for its reward."""
        ordinal, number = map(int, sample.request_id.split("."))
        self._samples[ordinal][number] = Trajectory(
            sample.tokens_T, sample.logp_T, sample.version_T, reward=float("nan"), finish=sample.finish
        )
        self._rewards.start(sample.request_id, self._open[ordinal].item, self._decode(sample.tokens_T))

    def scored(self, sample_id: str, reward: float, status: Status) -> Group | Tombstone | None:
        """A score arrived. Returns the group, or its tombstone, when that was its last sample."""
        ordinal, number = map(int, sample_id.split("."))
        trajectory = self._samples[ordinal][number]
        trajectory.reward, trajectory.status = reward, status
        self._unscored[ordinal] -= 1
        if self._unscored[ordinal]:
            return None
        del self._unscored[ordinal]
        group, samples = self._open.pop(ordinal), self._samples.pop(ordinal)
        group.trajectories = [samples[k] for k in range(self._n)]
        return self._judge(group)

    def _judge(self, group: Group) -> Group | Tombstone:
        rewards = [t.reward for t in group.scored]
        if len(rewards) < 2:
            return Tombstone(group.ordinal, DropReason.REWARD)
        if self._drop_uniform and min(rewards) == max(rewards):
            return Tombstone(group.ordinal, DropReason.UNIFORM)
        return group
