"""The CPU's fp32 linear layer: the products of Megatron's, computed by oneDNN.

torch sends fp32 matrix products to MKL, which uses AVX2 only on a CPU that is not Intel's:
97 GFLOP/s on one core of an EPYC (Zen 5) where oneDNN gives 200 forward and for the input's
gradient, 95 to 150 for the weight's (torch 2.13, 4096 x 128 x 1024). On Intel's own MKL is
the faster: 165 to 195 on one core of a Xeon (AVX-512) where oneDNN gives 150 to 185, and 100
to 135 for the weight's gradient (1579 x 128 x 128 to 768); there oneDNN's were 44 % of a
training step of a 1M-parameter model. bf16 goes to oneDNN anyway.

Shapes: N = rows of the input (tokens), K = its columns, M = columns of the output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# x [N, K], w [M, K], bias [M], fused operation, its arguments -> x @ w.T + bias; Inductor's own call
_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
_cpuinfo = Path("/proc/cpuinfo")
_intel = _cpuinfo.exists() and "GenuineIntel" in _cpuinfo.read_text()


def usable(tensor: Tensor) -> bool:
    """Whether `linear` takes this input: fp32 on a CPU that is not Intel's, in a torch that has oneDNN's call."""
    return _onednn is not None and not _intel and tensor.dtype is torch.float32 and tensor.device.type == "cpu"


def _product(a_NK: Tensor, b_MK: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """a @ b.T (+ bias) [N, M]; strides of either are free."""
    return _onednn(a_NK, b_MK, bias_M, "none", [], "")


class _Linear(torch.autograd.Function):
    """x @ w.T + bias, whose input is a replica on every rank of `group` (None: of nobody)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_MK: Tensor, bias_M: Tensor | None, group: Any) -> Tensor:
        x_NK = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_NK, w_MK)
        ctx.shape, ctx.has_bias, ctx.group = x.shape, bias_M is not None, group
        return _product(x_NK, w_MK, bias_M).view(*x.shape[:-1], w_MK.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        x_NK, w_MK = ctx.saved_tensors
        grad_NM = grad.reshape(-1, grad.shape[-1])
        grad_NK = _product(grad_NM, w_MK.t())
        work = None
        if ctx.group is not None:  # each rank has the gradient through its own columns; their sum travels meanwhile
            work = dist.all_reduce(grad_NK, group=ctx.group, async_op=True)
        grad_MK = _product(grad_NM.t(), x_NK.t())
        grad_M = grad_NM.sum(0) if ctx.has_bias else None
        if work is not None:
            work.wait()
        return grad_NK.view(ctx.shape), grad_MK, grad_M, None


def linear(x: Tensor, w_MK: Tensor, bias_M: Tensor | None = None, group: Any = None) -> Tensor:
    """x [..., K] -> [..., M]; collective over `group` in backward, where the input's gradient is summed."""
    return _Linear.apply(x, w_MK, bias_M, group)
