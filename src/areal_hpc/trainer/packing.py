"""Packing: which sample is trained where. Pure arithmetic, the same on every rank.

A step's samples are first cut into minibatches (one optimizer step each), then each
minibatch is split over DP ranks by tokens; on its rank it is cut into microbatches by
tokens. The first cut fixes the gradient, the others do not change it (beyond rounding),
because the loss divides by the minibatch's tokens over all DP ranks.

Shapes: S = tokens of one sample, prompt and answer; A = its answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_hpc.records import Group, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the objective needs of one sample: tokens_S int32, the first `prompt` of them the
    prompt; logp_A float32, the behaviour policy's; the advantage of every answer token."""

    tokens_S: np.ndarray
    prompt: int
    logp_A: np.ndarray
    advantage: float

    def __post_init__(self) -> None:
        if not 0 < self.prompt < len(self.tokens_S) or len(self.logp_A) != len(self.tokens_S) - self.prompt:
            raise ValueError(
                f"sample: {len(self.tokens_S)} tokens, a prompt of {self.prompt} and {len(self.logp_A)} "
                "log-probabilities; expected a prompt and an answer of at least one token each, and one "
                "log-probability for each token of the answer"
            )

    @classmethod
    def of(cls, group: Group, trajectory: Trajectory, advantage: float) -> Sample:
        """The sample of a scored trajectory of `group`."""
        tokens_S = np.concatenate([group.prompt_P, trajectory.tokens_T])
        return cls(tokens_S, len(group.prompt_P), trajectory.logp_T, advantage)


def assign(lengths: Sequence[int], minibatches: int, dp: int) -> list[list[list[int]]]:
    """Indices of the samples as [DP rank][minibatch], each sample exactly once.

    `lengths`: tokens of every sample of the global batch, in the batch's order. Minibatches
    are consecutive and differ by at most one sample, whatever dp is. Within a minibatch the
    longest sample left goes to the rank with the fewest tokens so far: ranks differ by at
    most one sample's tokens. A minibatch may have fewer samples than ranks (or none), its
    lists are then empty on some; all ranks have the same number of minibatches.
    """
    shares: list[list[list[int]]] = [[[] for _ in range(minibatches)] for _ in range(dp)]
    for index, cut in enumerate(np.array_split(np.arange(len(lengths)), minibatches)):
        load = [0] * dp
        for sample in sorted(cut.tolist(), key=lambda i: (-lengths[i], i)):
            rank = load.index(min(load))
            shares[rank][index].append(sample)
            load[rank] += lengths[sample]
    for share in shares:
        for samples in share:
            samples.sort()
    return shares


def microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices cut into microbatches of at most `max_tokens`; a longer sample is one by itself.

    Lengths ascend within a microbatch and from one to the next: equally long samples lie
    together, which is what attention.py serves with one kernel call.
    """
    cuts: list[list[int]] = []
    tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not cuts or tokens + lengths[index] > max_tokens:
            cuts.append([])
            tokens = 0
        cuts[-1].append(index)
        tokens += lengths[index]
    return cuts
