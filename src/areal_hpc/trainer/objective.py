"""The objective: log-probabilities of a vocabulary-parallel model, and decoupled PPO.

Equation 5 of the AReaL paper, in design.md's symbols: behaviour policy b, proximal policy p,
current policy theta, u = pi_theta / pi_p; maximise

    J = 1/N * sum over tokens of  pi_p / pi_b * min(u * A, clip(u, 1 - eps, 1 + eps) * A)

with N the minibatch's tokens over all DP ranks. Log-probabilities are of logits /
temperature; the columns that pad the vocabulary are masked before softmax and entropy.

Shapes: A = answer tokens of a microbatch, V = vocabulary columns on this tensor-parallel
rank (the whole padded vocabulary is TP * V). Natural logarithms throughout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_hpc.config import ActorConfig

MASKED = -1e30  # finite: exp gives 0, and 0 * MASKED is 0, not NaN


class _VocabParallelLogp(torch.autograd.Function):
    """Cross-entropy over a softmax whose columns lie on the ranks of a TP group.

    Keeps one fp32 matrix [A, V] (the probabilities) for backward. Source: the algorithm of
    megatron.core.tensor_parallel.vocab_parallel_cross_entropy, with temperature, masked
    columns and entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_AV: Tensor, target_A: Tensor, vocab: int, temperature: float, group: Any, rank: int
    ) -> tuple[Tensor, Tensor]:
        width = logits_AV.shape[1]
        wide = torch.promote_types(logits_AV.dtype, torch.float32)
        z_AV = logits_AV.to(wide, copy=True).div_(temperature)
        valid = min(max(vocab - rank * width, 0), width)
        z_AV[:, valid:] = MASKED
        peak_A = z_AV.max(-1).values
        _reduce(peak_A, group, dist.ReduceOp.MAX)
        z_AV -= peak_A[:, None]

        local_A = target_A - rank * width
        mine_A = (local_A >= 0) & (local_A < width)
        local_A = local_A.clamp(0, width - 1)
        zt_A = z_AV.gather(1, local_A[:, None])[:, 0].masked_fill(~mine_A, 0.0)
        e_AV = z_AV.exp()
        # one message: target logit, sum of exponentials, sum of z exp z
        sums_3A = torch.stack([zt_A, e_AV.sum(-1), torch.linalg.vecdot(e_AV, z_AV)])
        _reduce(sums_3A, group, dist.ReduceOp.SUM)
        zt_A, e_A, ez_A = sums_3A
        logp_A, entropy_A = zt_A - e_A.log(), e_A.log() - ez_A / e_A

        ctx.save_for_backward(e_AV.div_(e_A[:, None]), local_A, mine_A)
        ctx.temperature, ctx.dtype = temperature, logits_AV.dtype
        ctx.mark_non_differentiable(entropy_A)
        return logp_A, entropy_A

    @staticmethod
    def backward(ctx: Any, grad_A: Tensor, _entropy_grad: Tensor) -> tuple:
        p_AV, local_A, mine_A = ctx.saved_tensors
        # d logp / d z = onehot - p
        grad_A = grad_A / ctx.temperature
        grad_AV = p_AV * -grad_A[:, None]
        grad_AV.scatter_add_(1, local_A[:, None], (grad_A * mine_A)[:, None])
        return grad_AV.to(ctx.dtype), None, None, None, None, None


def _reduce(tensor: Tensor, group: Any, op: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)


def vocab_parallel_logp(
    logits_AV: Tensor, target_A: Tensor, vocab: int, temperature: float = 1.0, group: Any = None
) -> tuple[Tensor, Tensor]:
    """log pi(target) and the entropy of each row; collective over `group`, the TP ranks (None: one).

    logits_AV: this rank's columns, rank r holding r*V .. (r+1)*V; target_A int64, ids below
    `vocab`. Columns from `vocab` on are padding. Both results are at least fp32 [A] and equal
    on all TP ranks; only the log-probability has a gradient.
    """
    rank = 0 if group is None else dist.get_rank(group)
    return _VocabParallelLogp.apply(logits_AV, target_A, vocab, temperature, group, rank)


# Sums over tokens that add up over microbatches and DP ranks; the maximum is kept apart.
SUMS = ("loss", "tokens", "clipped", "entropy", "kl_proximal", "kl_behave", "importance", "capped", "advantage")


def decoupled_ppo(
    logp_A: Tensor,
    proximal_A: Tensor | None,
    behave_A: Tensor,
    advantage_A: Tensor,
    entropy_A: Tensor,
    actor: ActorConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """-J * N of a microbatch (a sum over tokens), its `SUMS` [len(SUMS)], and its largest pi_p / pi_b.

    logp_A: log pi_theta, with gradient; proximal_A: log pi_p, or None where theta is still p
    (the first minibatch of a step); behave_A: log pi_b as recorded; entropy_A of theta.
    Without decoupled loss the behaviour policy is the proximal one: plain PPO.
    """
    theta_A = logp_A.detach()
    if not actor.use_decoupled_loss:
        proximal_A = behave_A
    elif proximal_A is None:
        proximal_A = theta_A
    # w = pi_p / pi_b
    w_A = importance_A = (proximal_A - behave_A).exp()
    if actor.behave_imp_weight_cap:
        w_A = importance_A.clamp(max=actor.behave_imp_weight_cap)
    # u = pi_theta / pi_p
    u_A = (logp_A - proximal_A).exp()
    clipped_A = u_A.clamp(1 - actor.eps_clip, 1 + actor.eps_clip)
    # w * min(u A, clip(u) A)
    objective_A = w_A * torch.minimum(u_A * advantage_A, clipped_A * advantage_A)
    loss = -objective_A.sum()
    with torch.no_grad():
        sums = torch.stack(
            [
                loss,
                torch.tensor(float(len(logp_A)), device=loss.device),
                (clipped_A * advantage_A < u_A * advantage_A).sum(),
                entropy_A.sum(),
                _k3(theta_A - proximal_A).sum(),
                _k3(theta_A - behave_A).sum(),
                importance_A.sum(),
                (importance_A != w_A).sum(),
                advantage_A.sum(),
            ]
        ).double()
    return loss, sums, importance_A.max()


def _k3(log_ratio_A: Tensor) -> Tensor:
    """Schulman's estimator of KL(old || theta) from samples of old: r - 1 - log r with r = pi_theta / pi_old."""
    return log_ratio_A.exp() - 1 - log_ratio_A
