"""Supervised training on (prompt, answer) pairs with the actor's model.

The loss is the mean negative log-likelihood of the answers' tokens over all DP ranks, at
temperature 1. Model, optimizer, packing and pipeline are the actor's, so every layout of
it works here. The result leaves as any other: `storage.checkpoint.save` of the masters,
then `storage.hf.export`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from megatron.core import parallel_state
from torch import Tensor

from areal_hpc.config import SftConfig
from areal_hpc.trainer.model import Model
from areal_hpc.trainer.objective import vocab_parallel_logp
from areal_hpc.trainer.optimizer import learning_rate
from areal_hpc.trainer.pipeline import Microbatch, pack, run

SMOOTH = 20  # steps that the loss is averaged over before it is compared with `until_loss`

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt and of its answer, neither empty


def train_sft(
    model: Model,
    batches: Iterable[Sequence[Pair]],
    config: SftConfig,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
    on_microbatch: Callable[[], None] = lambda: None,
) -> int:
    """Collective over the trainer ranks: one optimizer step for each of `batches`; returns how many were made.

    Each batch is this DP rank's share, given alike to its TP and PP ranks; every rank gets
    as many batches. `on_step(step, metrics)` is called on every rank with loss (nats a
    token), grad_norm, lr, tokens and seconds. Raises FloatingPointError, on every rank, when
    loss or gradient is not finite: nothing was changed by that step. Ends before the batches do
    when `until_loss` is set and the mean loss of the last SMOOTH steps is below it.
    """
    recent: deque[float] = deque(maxlen=SMOOTH)
    optimizer = model.optimizer
    schedule = replace(model.actor.optimizer, lr=config.lr, warmup_steps=config.warmup_steps)
    step = -1
    for step, pairs in enumerate(batches):
        began = time.perf_counter()
        rate = learning_rate(step, config.steps, schedule)
        optimizer.set_rate(rate)
        optimizer.zero_grad()
        [tokens] = model.groups.over_dp([float(sum(len(answer) for _, answer in pairs))])
        micros = pack(model, [np.array([*p, *a], np.int32) for p, a in pairs], [len(p) for p, _ in pairs])
        parts = run(model, micros, _loss(model, tokens), train=True, on_microbatch=on_microbatch)
        nll = float(sum(parts)) if parts else 0.0
        finite, norm = optimizer.step(np.isfinite(nll))
        speaks = model.groups.last_stage and model.groups.tp == 0
        [loss] = model.groups.all([nll if speaks else 0.0])
        if not finite:
            raise FloatingPointError(f"sft step {step}: loss {loss}, gradient norm {norm}; its update was not made")
        seconds = time.perf_counter() - began
        on_step(step, {"loss": loss, "grad_norm": norm, "lr": rate, "tokens": tokens, "seconds": seconds})
        recent.append(loss)
        if len(recent) == SMOOTH and sum(recent) / SMOOTH < config.until_loss:
            break
    return step + 1


def _loss(model: Model, tokens: float) -> Callable[[Tensor, Microbatch], tuple[Tensor, Tensor]]:
    group = parallel_state.get_tensor_model_parallel_group()

    def loss(logits_AV: Tensor, micro: Microbatch) -> tuple[Tensor, Tensor]:
        logp_A, _ = vocab_parallel_logp(logits_AV, micro.target_A, model.spec.vocab, 1.0, group)
        value = -logp_A.sum() / tokens * (not micro.empty)
        return value, value.detach()

    return loss
