"""The actor: one training step of decoupled PPO, and log-probabilities of given tokens.

Every verb is collective over the trainer ranks (`update`) or over one pipeline (`logp`).
The samples of a DP rank are given alike to all of its TP and PP ranks.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from areal_hpc.config import ActorConfig
from areal_hpc.trainer.model import Model
from areal_hpc.trainer.objective import SUMS, decoupled_ppo, vocab_parallel_logp
from areal_hpc.trainer.optimizer import learning_rate
from areal_hpc.trainer.packing import Sample
from areal_hpc.trainer.pipeline import Microbatch, pack, run


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did, the same on every trainer rank.

    `applied`: minibatches whose optimizer step was made. Not `finite`: the next one had a
    loss or gradient that is not; with applied == 0 nothing has changed and the step's
    ordinals are to be dropped as `nonfinite`, else the step counts and its rest was skipped.
    """

    applied: int
    finite: bool
    metrics: dict[str, float]


@dataclass
class _Minibatch:
    """This DP rank's microbatches of a minibatch, and for each its answers' columns [A]."""

    samples: Sequence[Sample]
    micros: list[Microbatch]
    behave: list[Tensor]
    advantage: list[Tensor]
    proximal: list[Tensor | None]


class Actor:
    """`temperature` is the sampling one: the policies are softmaxes of logits / temperature."""

    def __init__(self, model: Model, config: ActorConfig, temperature: float, total_steps: int) -> None:
        self.model, self.optimizer, self.config = model, model.optimizer, config
        self.temperature, self.total_steps = temperature, total_steps
        self.groups = model.groups
        self.tp_group = parallel_state.get_tensor_model_parallel_group()

    def update(
        self, step: int, minibatches: Sequence[Sequence[Sample]], on_microbatch: Callable[[], None] = _nothing
    ) -> Outcome:
        """Trains this DP rank's share: as many minibatches on every rank, any of them may be empty.

        Raises ValueError when the ranks disagree on the number of minibatches, or none of
        them has a sample in one.
        """
        began = time.perf_counter()
        seconds = {"proximal": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        rate = learning_rate(step, self.total_steps, self.config.optimizer)
        self.optimizer.set_rate(rate)
        tokens = self._tokens(minibatches)
        batch = [self._pack(samples) for samples in minibatches]
        if self.config.use_decoupled_loss:
            for minibatch in batch[1:]:  # pi_p is the policy before the first, whose own forward pass gives it
                minibatch.proximal = self._proximal(minibatch, on_microbatch)
        seconds["proximal"] = time.perf_counter() - began

        kept: list[tuple[Tensor, Tensor]] = []
        norms: list[float] = []
        finite, applied = True, 0
        for minibatch, count in zip(batch, tokens):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            parts = run(
                self.model, minibatch.micros, self._loss(minibatch, count), train=True, on_microbatch=on_microbatch
            )
            middle = time.perf_counter()
            finite, norm = self.optimizer.step(all(bool(sums[0].isfinite()) for sums, _ in parts))
            seconds["forward_backward"] += middle - start
            seconds["optimizer"] += time.perf_counter() - middle
            if not finite:
                break
            kept += parts
            norms.append(norm)
            applied += 1
        metrics = self._metrics(kept)
        metrics |= {
            "grad_norm": sum(norms) / len(norms) if norms else math.nan,
            "lr": rate,
            "minibatches": float(applied),
            **{f"seconds/{phase}": value for phase, value in seconds.items()},
            "seconds/update": time.perf_counter() - began,
        }
        return Outcome(applied, finite, metrics)

    def logp(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """log pi(token i | tokens before it) for i = 1, 2, ... of each sequence, float32.

        Collective over one pipeline, whose ranks all get the result. `temperature` is 1 for
        the probe of an update: vLLM's prompt log-probabilities ignore the sampling one.
        """
        micros = pack(self.model, sequences, [1] * len(sequences))

        def keep(logits_AV: Tensor, micro: Microbatch) -> tuple[Tensor, Tensor]:
            logp_A, _ = self._logp(logits_AV, micro, temperature)
            return logp_A.sum(), logp_A

        parts = run(self.model, micros, keep, train=False, on_microbatch=_nothing)
        rows = sum(len(m.target_A) for m in micros)
        flat = torch.cat(parts) if parts else torch.empty(rows, device=self.groups.device)
        if self.groups.parallel.pp > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        ends = np.cumsum([n for m in micros for n in m.counts])
        by_order = np.split(flat.cpu().numpy(), ends[:-1])
        packed = {i: values for i, values in zip((i for m in micros for i in m.order), by_order)}
        return [packed[i] for i in range(len(sequences))]

    def rng_state(self) -> bytes:
        """Torch's generators on this rank; training itself draws nothing (no dropout)."""
        buffer = io.BytesIO()
        on_gpu = self.groups.device.type == "cuda"
        torch.save([torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None], buffer)
        return buffer.getvalue()

    def load_rng_state(self, state: bytes) -> None:
        """What `rng_state` gave, on the same kind of device."""
        cpu_state, cuda_state = torch.load(io.BytesIO(state), weights_only=True)
        torch.set_rng_state(cpu_state)
        if cuda_state is not None and self.groups.device.type == "cuda":
            torch.cuda.set_rng_state(cuda_state)

    def _tokens(self, minibatches: Sequence[Sequence[Sample]]) -> list[float]:
        """Answer tokens of each minibatch over all DP ranks: known before its first microbatch."""
        number = float(len(minibatches))
        low, high = -number, number
        [low, high] = self.groups.all([low, high], dist.ReduceOp.MAX)
        if -low != high:
            raise ValueError(f"trainer ranks have from {-low:.0f} to {high:.0f} minibatches; all need the same number")
        counts = self.groups.over_dp([float(sum(len(s.logp_A) for s in cut)) for cut in minibatches])
        if not counts or min(counts) == 0:
            raise ValueError(f"minibatches of {counts} answer tokens over all DP ranks; each needs at least one")
        return counts

    def _pack(self, samples: Sequence[Sample]) -> _Minibatch:
        micros = pack(self.model, [s.tokens_S for s in samples], [s.prompt for s in samples])
        behave, advantage = [], []
        for micro in micros:
            columns = [samples[i] for i in micro.order]
            logp = np.concatenate([s.logp_A for s in columns]) if columns else np.zeros(1, np.float32)
            value = np.repeat([s.advantage for s in columns], micro.counts) if columns else np.zeros(1)
            behave.append(torch.from_numpy(logp.astype(np.float32)).to(self.groups.device))
            advantage.append(torch.from_numpy(value.astype(np.float32)).to(self.groups.device))
        return _Minibatch(samples, micros, behave, advantage, [None] * len(micros))

    def _logp(self, logits_AV: Tensor, micro: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
        return vocab_parallel_logp(logits_AV, micro.target_A, self.model.spec.vocab, temperature, self.tp_group)

    def _proximal(self, minibatch: _Minibatch, on_microbatch: Callable[[], None]) -> list[Tensor | None]:
        """log pi_p of each microbatch; on the last stage only, where the loss is."""

        def keep(logits_AV: Tensor, micro: Microbatch) -> tuple[Tensor, Tensor]:
            logp_A, _ = self._logp(logits_AV, micro, self.temperature)
            return logp_A.sum(), logp_A

        parts = run(self.model, minibatch.micros, keep, train=False, on_microbatch=on_microbatch)
        return parts or minibatch.proximal

    def _loss(self, minibatch: _Minibatch, tokens: float) -> Callable[[Tensor, Microbatch], tuple[Tensor, tuple]]:
        """Equation 5 over `tokens`, the minibatch's answer tokens over all DP ranks."""
        columns = iter(zip(minibatch.proximal, minibatch.behave, minibatch.advantage))

        def loss(logits_AV: Tensor, micro: Microbatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            proximal_A, behave_A, advantage_A = next(columns)
            logp_A, entropy_A = self._logp(logits_AV, micro, self.temperature)
            if micro.empty:  # takes part in the pipeline and its collectives, adds nothing
                nothing = torch.zeros(len(SUMS), dtype=torch.float64, device=logp_A.device)
                return logp_A.sum() * 0.0, (nothing, nothing[0])
            total, sums, peak = decoupled_ppo(logp_A, proximal_A, behave_A, advantage_A, entropy_A, self.config)
            return total / tokens, (sums, peak)

        return loss

    def _metrics(self, kept: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Means over the tokens of all minibatches and DP ranks, on every rank."""
        speaks = kept and self.groups.last_stage and self.groups.tp == 0
        sums = torch.stack([s for s, _ in kept]).sum(0).tolist() if speaks else [0.0] * len(SUMS)
        peak = max(float(p) for _, p in kept) if speaks else 0.0
        total = self.groups.all([*sums, float(len(kept)) if speaks else 0.0])
        value = dict(zip(SUMS, total))
        [peak] = self.groups.all([peak], dist.ReduceOp.MAX)
        tokens = max(value.pop("tokens"), 1.0)
        return {
            "loss": value["loss"] / tokens,
            "clip_ratio": value["clipped"] / tokens,
            "entropy": value["entropy"] / tokens,
            "approx_kl/proximal": value["kl_proximal"] / tokens,
            "approx_kl/behave": value["kl_behave"] / tokens,
            "importance_weight/mean": value["importance"] / tokens,
            "importance_weight/max": peak,
            "importance_weight/capped_ratio": value["capped"] / tokens,
            "advantage/mean": value["advantage"] / tokens,
            "tokens": tokens,
            "microbatches": total[-1],
        }
