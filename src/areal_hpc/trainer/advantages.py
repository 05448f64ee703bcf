"""Advantages from rewards: one number a sample, the same for each of its tokens.

With gamma = lambda = 1, no critic and the reward at the last token (the paper's settings)
the advantage of every token is the sample's reward; what is left is scaling and
normalisation, each of mean and standard deviation over one level:

- `batch`: over all tokens of the global batch, so a sample weighs as many times as it has
  tokens (the paper's setting, and AReaL's: mean and deviation are masked token means);
- `group`: over the samples of one prompt, each weighing the same (GRPO's);
- `none`: not at all.

The mean goes first; the deviation is that of the centred values about their own mean.
Source: AReaL paper, section 5.2 and appendix; deviations are population deviations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from areal_hpc.config import ActorConfig, Level

Statistic = Callable[[np.ndarray, np.ndarray], float]  # of values and their weights

EPS = 1e-5  # added to a deviation; AReaL's value


def advantages(
    rewards: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], actor: ActorConfig
) -> list[list[float]]:
    """The advantage of each sample of each group.

    rewards[g][n] and tokens[g][n] (tokens of the answer) of all groups of the global batch.
    Where all values of a level are equal the deviation divides by 1, not by EPS: equal
    rewards give an advantage of 0 once centred. Raises ValueError naming the group when the
    two disagree, or a reward is not finite.
    """
    for index, (group, lengths) in enumerate(zip(rewards, tokens, strict=True)):
        if len(group) != len(lengths) or not np.isfinite(group).all():
            raise ValueError(f"group {index} of the batch: rewards {list(group)} for answers of {list(lengths)} tokens")
    sizes = [len(group) for group in rewards]
    weight = np.array([n for group in tokens for n in group], np.float64)
    value = np.array([r for group in rewards for r in group], np.float64)
    value = (value + actor.reward_bias) * actor.reward_scaling
    bounds = np.cumsum([0, *sizes])
    value = value - _level(value, weight, bounds, actor.adv_norm.mean_level, _mean)
    deviation = _level(value, weight, bounds, actor.adv_norm.std_level, _std)
    if actor.adv_norm.std_level is not Level.none:
        value = value / np.where(deviation > 0, deviation + EPS, 1.0)
    return [value[a:b].tolist() for a, b in pairwise(bounds)]


def _mean(value: np.ndarray, weight: np.ndarray) -> float:
    return float(np.average(value, weights=weight))


def _std(value: np.ndarray, weight: np.ndarray) -> float:
    return float(np.sqrt(np.average((value - _mean(value, weight)) ** 2, weights=weight)))


def _level(value: np.ndarray, weight: np.ndarray, bounds: np.ndarray, level: Level, of: Statistic) -> np.ndarray:
    """`of` (a weighted statistic) at the level, spread back to one number a sample."""
    if level is Level.none or not len(value):
        return np.zeros_like(value)
    if level is Level.batch:
        return np.full_like(value, of(value, weight))
    out = np.zeros_like(value)
    for a, b in pairwise(bounds):
        if b > a:
            out[a:b] = of(value[a:b], np.ones(b - a))
    return out
