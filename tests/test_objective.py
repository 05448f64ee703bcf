"""The objective against equation 5 of the AReaL paper, written out in fp64, and against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.config import ActorConfig
from areal_hpc.trainer.objective import SUMS, decoupled_ppo, vocab_parallel_logp

EPS = 0.2


def batch(seed: int, tokens: int = 40) -> dict[str, np.ndarray]:
    """fp64 log-probabilities near each other, advantages of both signs, ratios beyond both clips."""
    rng = np.random.default_rng(seed)
    theta = -rng.exponential(1.0, tokens)
    return {
        "theta": theta,
        "proximal": theta + rng.normal(0, 0.3, tokens),
        "behave": theta + rng.normal(0, 0.5, tokens),
        "advantage": rng.normal(0, 2.0, tokens),
    }


def equation_5(theta: np.ndarray, proximal: np.ndarray, behave: np.ndarray, advantage: np.ndarray) -> float:
    """sum over tokens of  pi_p / pi_b * min(u A, clip(u, 1 - eps, 1 + eps) A),  u = pi_theta / pi_p."""
    total = 0.0
    for t, p, b, a in zip(theta, proximal, behave, advantage):
        u = np.exp(t) / np.exp(p)
        clipped = min(max(u, 1 - EPS), 1 + EPS)
        total += np.exp(p) / np.exp(b) * min(u * a, clipped * a)
    return total


def numeric_gradient(function, theta: np.ndarray) -> np.ndarray:
    step = 1e-6
    out = np.zeros_like(theta)
    for i in range(len(theta)):
        up, down = theta.copy(), theta.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out


def loss_of(values: dict[str, np.ndarray], actor: ActorConfig, proximal: bool = True):
    theta = torch.tensor(values["theta"], requires_grad=True)
    loss, sums, peak = decoupled_ppo(
        theta,
        torch.tensor(values["proximal"]) if proximal else None,
        torch.tensor(values["behave"]),
        torch.tensor(values["advantage"]),
        torch.zeros(len(theta), dtype=torch.float64),
        actor,
    )
    loss.backward()
    return float(loss.detach()), theta.grad.numpy(), dict(zip(SUMS, sums.tolist())), float(peak)


@pytest.mark.parametrize("seed", range(5))
def test_loss_is_equation_5(seed: int) -> None:
    values = batch(seed)
    loss, gradient, sums, peak = loss_of(values, ActorConfig(path="-"))
    assert loss == pytest.approx(-equation_5(**values), rel=1e-12)
    expected = -numeric_gradient(lambda theta: equation_5(**{**values, "theta": theta}), values["theta"])
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    ratio = np.exp(values["proximal"] - values["behave"])
    assert peak == pytest.approx(ratio.max()) and sums["importance"] == pytest.approx(ratio.sum())
    assert sums["tokens"] == len(ratio) and 0 < sums["clipped"] < len(ratio)


def test_first_minibatch_needs_no_proximal_pass() -> None:
    """With pi_p = pi_theta the gradient is that of pi_p / pi_b * u * A at u = 1: nothing is clipped."""
    values = batch(1)
    given_, gradient, sums, _ = loss_of({**values, "proximal": values["theta"]}, ActorConfig(path="-"))
    left_out, same, _, _ = loss_of(values, ActorConfig(path="-"), proximal=False)
    assert left_out == given_ and (same == gradient).all() and sums["clipped"] == 0
    np.testing.assert_allclose(gradient, -np.exp(values["theta"] - values["behave"]) * values["advantage"], rtol=1e-12)


def test_cap_bounds_the_importance_weight_and_nothing_else() -> None:
    values = batch(2)
    cap = 1.2
    loss, _, sums, peak = loss_of(values, ActorConfig(path="-", behave_imp_weight_cap=cap))
    ratio = np.exp(values["proximal"] - values["behave"])
    # w * f(u): scale each token's term by what the cap leaves of its weight
    expected = sum(
        equation_5(*(values[k][i : i + 1] for k in ("theta", "proximal", "behave", "advantage"))) * min(r, cap) / r
        for i, r in enumerate(ratio)
    )
    assert loss == pytest.approx(-expected, rel=1e-12)
    assert sums["capped"] == (ratio > cap).sum() > 0 and peak == pytest.approx(ratio.max())


def test_without_decoupled_loss_it_is_plain_ppo() -> None:
    values = batch(3)
    loss, *_ = loss_of(values, ActorConfig(path="-", use_decoupled_loss=False))
    assert loss == pytest.approx(-equation_5(**{**values, "proximal": values["behave"]}), rel=1e-12)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 6),
    vocab=st.integers(2, 20),
    padding=st.integers(0, 5),
    temperature=st.sampled_from([0.5, 0.7, 1.0, 2.0]),
)
def test_logp_entropy_and_gradient_equal_autograds(
    seed: int, rows: int, vocab: int, padding: int, temperature: float
) -> None:
    """log-softmax over the vocabulary alone: padding columns, however large, change and receive nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab + padding, generator=generator, dtype=torch.float64) * 3
    logits[:, vocab:] = 1e4
    target = torch.randint(0, vocab, (rows,), generator=generator)
    weight = torch.randn(rows, generator=generator, dtype=torch.float64)

    reference = logits[:, :vocab].clone().requires_grad_()
    expected = (reference / temperature).log_softmax(-1)
    expected_logp = expected.gather(1, target[:, None])[:, 0]
    (expected_logp * weight).sum().backward()

    mine = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logp(mine, target, vocab, temperature)
    (logp * weight).sum().backward()
    torch.testing.assert_close(logp.detach(), expected_logp.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1).detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(mine.grad[:, :vocab], reference.grad, rtol=0, atol=1e-10)
    assert (mine.grad[:, vocab:] == 0).all()


def test_bf16_logits_are_widened_before_the_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    target = torch.tensor([1, 2, 3])
    logp, _ = vocab_parallel_logp(logits, target, 50)
    expected = logits.detach().float().log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert logp.dtype is torch.float32
    torch.testing.assert_close(logp.detach(), expected, rtol=0, atol=1e-6)
    logp.sum().backward()
    assert logits.grad.dtype is torch.bfloat16
