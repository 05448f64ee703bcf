"""AdamW over a Model: learning-rate schedule, one step with its verdict, and its state.

Megatron's optimizers differ in where the fp32 master copy lies: in the model itself (fp32),
beside it (bf16), or in this DP rank's range of it (distributed). `Shard` hides that: for
every parameter the master and the two moments as flat fp32 tensors, and the range of the
parameter's elements that they hold. Weight decay spares biases and norms (1-D tensors).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from areal_hpc.config import OptimizerConfig, Schedule
from areal_hpc.trainer import cpu

if TYPE_CHECKING:
    from areal_hpc.trainer.model import Model


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of training step `step` (0, 1, ...): linear warm-up, then the schedule to its end.

    The first step of a warm-up has lr / warmup_steps; the last step of the run reaches
    min_lr_ratio * lr unless the schedule is constant.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_scheduler_type is Schedule.constant:
        return config.lr
    done = min(1.0, (step + 1 - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    left = 1 - done if config.lr_scheduler_type is Schedule.linear else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements [start, stop) (row-major) of the parameter `name`: fp32, flat, live."""

    name: str
    start: int
    stop: int
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Optimizer:
    """Collective over all trainer ranks, as `step` and `push` are."""

    def __init__(self, model: Model, config: OptimizerConfig) -> None:
        self.model, self.config = model, config
        bf16 = model.config.bf16
        with cpu.emulation():
            self.megatron = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    adam_beta1=config.beta1,
                    adam_beta2=config.beta2,
                    adam_eps=config.eps,
                    clip_grad=config.gradient_clipping,
                    use_distributed_optimizer=model.distributed_optimizer,
                    bf16=bf16,
                    params_dtype=model.config.params_dtype,
                ),
                [model.ddp],
                use_gloo_process_groups=False,
            )
            for group in self.megatron.param_groups:  # Megatron leaves this to its scheduler
                group["weight_decay"] = config.weight_decay * group["wd_mult"]
                if model.groups.device.type == "cpu":
                    group["fused"] = True  # torch's own default there is a Python loop: a tenth of a small step
            self._make_state()

    def _make_state(self) -> None:
        """Moments exist from the start, as zeros, so that a checkpoint can be loaded into them.

        A step with gradient 0 and rate 0 changes nothing and makes what any AdamW keeps.
        """
        self.set_rate(0.0)
        for parameter in self._parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.megatron.optimizer.step()
        self.megatron.zero_grad()
        self.count = 0

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.megatron.param_groups:
            yield from group["params"]

    @property
    def count(self) -> int:
        """Optimizer steps so far: what Adam's bias correction depends on."""
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value
        # torch keeps it with each tensor, Transformer Engine's FusedAdam with each group
        for state in self.megatron.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(value)
        for group in self.megatron.param_groups:
            if "step" in group:
                group["step"] = value

    def set_rate(self, rate: float) -> None:
        for group in self.megatron.param_groups:
            group["lr"] = rate

    def zero_grad(self) -> None:
        """Before the first microbatch of a step."""
        self.model.ddp.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, finite: bool) -> tuple[bool, float]:
        """Clips and applies the gradients, or leaves everything as it was.

        `finite`: whether this rank's loss was; one rank's False stops all. Returns whether
        the step was made, the same on every rank, and the gradient's norm before clipping.
        """
        with cpu.emulation(), torch.no_grad():
            self.megatron.prepare_grads()
            norm = float(self.megatron.get_grad_norm())
            [bad] = self.model.groups.all([0.0 if finite and math.isfinite(norm) else 1.0])
            if bad:
                return False, norm
            if self.config.gradient_clipping > 0:
                clip_grad_by_total_norm_fp32(list(self._parameters()), self.config.gradient_clipping, norm)
            self.megatron.step_with_ready_grads()
        self._count += 1
        return True, norm

    def push(self) -> None:
        """Master copies into the model's weights, gathered over DP: after the state was loaded."""
        with cpu.emulation(), torch.no_grad():
            for optimizer in self.megatron.chained_optimizers:
                if hasattr(optimizer, "_copy_main_params_to_model_params"):  # not where the master is the model
                    optimizer._copy_main_params_to_model_params()
            if self.model.distributed_optimizer:
                self.model.ddp.start_param_sync()

    def shards(self) -> Iterator[Shard]:
        """What this rank's optimizer holds, in the order of the model's parameters."""
        [optimizer] = self.megatron.chained_optimizers
        for name, parameter in self.model.module.named_parameters():
            start, stop = 0, parameter.numel()
            if self.model.distributed_optimizer:
                if parameter not in optimizer.model_param_gbuf_map:
                    continue  # all of it on other DP ranks
                held = optimizer._get_model_param_range_map(parameter)["param"]
                start, stop = held.start, held.end
                group, index = optimizer.model_param_group_index_map[parameter]
                master = optimizer.optimizer.param_groups[group]["params"][index]
            else:
                master = getattr(parameter, "main_param", parameter)
            state = optimizer.optimizer.state[master]
            flat = (x.detach().view(-1) for x in (master, state["exp_avg"], state["exp_avg_sq"]))
            yield Shard(name, start, stop, *flat)
