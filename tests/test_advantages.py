"""Advantages against their definitions, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from areal_hpc.config import ActorConfig, Level, NormConfig
from areal_hpc.trainer.advantages import EPS, advantages

REWARDS = [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0]]
TOKENS = [[4, 9, 2], [7, 7, 1], [3, 12]]


def actor(mean: str, std: str, bias: float = 0.0, scaling: float = 1.0) -> ActorConfig:
    return ActorConfig(path="-", reward_bias=bias, reward_scaling=scaling, adv_norm=NormConfig(Level(mean), Level(std)))


def flat(values: list[list[float]]) -> np.ndarray:
    return np.array([v for group in values for v in group])


def test_paper_setting_is_normalised_over_the_tokens_of_the_global_batch() -> None:
    """Rewards +5 / -5 on every token, minus the token mean, over the token deviation."""
    result = advantages(REWARDS, TOKENS, actor("batch", "batch", -0.5, 10.0))
    rewards, counts = flat(REWARDS), flat(TOKENS).astype(int)
    token_rewards = np.repeat((rewards - 0.5) * 10, counts)
    assert set(token_rewards) == {-5.0, 5.0}
    expected = (token_rewards - token_rewards.mean()) / (token_rewards.std() + EPS)
    np.testing.assert_allclose(np.repeat(flat(result), counts), expected, rtol=1e-12)
    assert np.repeat(flat(result), counts).mean() == pytest.approx(0, abs=1e-12)


def test_group_level_is_grpos() -> None:
    result = advantages(REWARDS, TOKENS, actor("group", "group"))
    for got, rewards in zip(result, REWARDS):
        values = np.array(rewards)
        expected = (values - values.mean()) / (values.std() + EPS) if values.std() else np.zeros(len(values))
        np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_group_mean_and_batch_deviation() -> None:
    result = advantages(REWARDS, TOKENS, actor("group", "batch"))
    centred = np.concatenate([np.array(r) - np.mean(r) for r in REWARDS])
    deviation = np.repeat(centred, flat(TOKENS).astype(int)).std()
    np.testing.assert_allclose(flat(result), centred / (deviation + EPS), rtol=1e-12)


def test_no_normalisation_leaves_the_scaled_reward() -> None:
    assert advantages(REWARDS, TOKENS, actor("none", "none", 1.0, 2.0)) == [[2, 4, 4], [2, 2, 2], [4, 2]]


def test_equal_rewards_give_zero_or_themselves_never_a_huge_number() -> None:
    same = [[1.0, 1.0], [1.0]]
    tokens = [[2, 3], [4]]
    assert flat(advantages(same, tokens, actor("batch", "batch"))).tolist() == [0, 0, 0]
    assert flat(advantages(same, tokens, actor("none", "group"))).tolist() == [1, 1, 1]


def test_empty_groups_are_kept_in_place() -> None:
    assert advantages([[], [2.0]], [[], [3]], actor("none", "none")) == [[], [2.0]]
    assert advantages([], [], actor("batch", "batch")) == []


@pytest.mark.parametrize(("rewards", "tokens"), [([1.0, float("nan")], [2, 2]), ([1.0], [2, 2])])
def test_what_is_wrong_is_named(rewards: list[float], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="group 1 of the batch"):
        advantages([[1.0], rewards], [[1], tokens], actor("batch", "batch"))
