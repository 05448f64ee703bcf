"""Megatron-core without CUDA: the one place that knows, and a no-op where CUDA is there.

megatron-core 0.16.1 names the CUDA device in four ways that matter to a dense model:
`device="cuda"` and `torch.cuda.current_device()` for small buffers, `Tensor.cuda()`,
`torch.cuda.synchronize()`, and comparisons of `Tensor.type()` with 'torch.cuda.*' when an
optimizer sorts its parameters and clips their gradients. Activation recomputing also saves
the CUDA generator's state. Inside `emulation()` each of them means the CPU; outside of it
torch is untouched. The random-number tracker is not needed: no dropout, nothing initialised
(weights come from files), no sequence parallelism.

It also gives Megatron's fp32 linear layers the faster products of linear.py.

tests/mpi/test_trainer_parity.py fails inside when a new release names the device in another
way, and `tests/test_trainer_cpu.py` when this has become needless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from areal_hpc.trainer.linear import linear as onednn_linear
from areal_hpc.trainer.linear import usable

CPU = torch.device("cpu")


def device() -> torch.device:
    """The device of this rank's model: the current CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


class _OnCpu(TorchFunctionMode):
    """Reads "cuda" as "cpu" in every torch call made while it is entered (by this thread)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **(kwargs or {}))


def _current_device() -> torch.device:
    return CPU


@contextmanager
def emulation() -> Iterator[None]:
    """Around every call into Megatron. Nested use is fine; with CUDA it does nothing."""
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        yield
        return
    import megatron.core.tensor_parallel.layers as megatron_layers
    import megatron.core.tensor_parallel.random as megatron_random

    megatron_linear = megatron_layers.linear_with_grad_accumulation_and_async_allreduce

    @wraps(megatron_linear)  # Megatron keeps a flag on the function
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **named: Any) -> Tensor:
        if not usable(input):
            return megatron_linear(input, weight, bias, *rest, **named)
        return onednn_linear(input, weight, bias, named["tp_group"] if named["allreduce_dgrad"] else None)

    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_device", _current_device),
            (torch.cuda, "synchronize", lambda *_: None),
            (megatron_layers, "linear_with_grad_accumulation_and_async_allreduce", linear),
            # recomputing: without dropout there is no CUDA generator whose state matters
            (megatron_random, "_get_cuda_rng_state", lambda *_, **__: None),
            (megatron_random, "_set_cuda_rng_state", lambda *_, **__: None),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_OnCpu())
        yield
