"""The trainer's CPU parts against plain torch: emulation, linear layer, packed attention, learning rates."""

from __future__ import annotations

from itertools import pairwise

import megatron.core.tensor_parallel.layers as megatron_layers
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

from areal_hpc.config import OptimizerConfig, Schedule
from areal_hpc.trainer import cpu
from areal_hpc.trainer.attention import Packed, RunAttention
from areal_hpc.trainer.linear import linear
from areal_hpc.trainer.optimizer import learning_rate

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason=f"torch {torch.__version__} has CUDA here: trainer/cpu.py does nothing"
)


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_megatron_still_needs_the_emulation(one_rank) -> None:
    """When this fails outside of it no more, cpu.emulation has become needless."""
    grads = [torch.full((4,), 3.0), torch.full((1,), 8.0)]
    with pytest.raises((AssertionError, RuntimeError), match="CUDA"):
        get_grad_norm_fp32(grads, grad_stats_parallel_group=one_rank)
    with cpu.emulation():
        assert get_grad_norm_fp32(grads, grad_stats_parallel_group=one_rank) == pytest.approx(10.0)


def test_emulation_ends_where_it_ends() -> None:
    before = torch.cuda.current_device, torch.cuda.synchronize
    with pytest.raises(ZeroDivisionError), cpu.emulation(), cpu.emulation():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        assert torch.zeros(1).cuda().type() == "torch.cuda.FloatTensor"
        assert torch.cuda.current_device() == torch.device("cpu")
        raise ZeroDivisionError
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 5), (1, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_equals_torchs(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=generator), torch.randn(6, 5, generator=generator)]
    inputs += [torch.randn(6, generator=generator)] if bias else []
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    got, expected = linear(*mine), torch.nn.functional.linear(*theirs)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    upstream = torch.randn(expected.shape, generator=generator)
    got.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("onednn", [True, False], ids=["oneDNN", "MKL"])
def test_megatrons_linear_is_either_product(onednn: bool, one_rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of CPU, whichever runs the test: values and gradients of the function that Megatron's layers call."""
    monkeypatch.setattr(cpu, "usable", lambda _: onednn)
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(shape, generator=generator) for shape in ((7, 1, 5), (6, 5), (6,))]
    mine = [x.clone().requires_grad_() for x in inputs]
    theirs = [x.clone().requires_grad_() for x in inputs]
    with cpu.emulation():
        got = megatron_layers.linear_with_grad_accumulation_and_async_allreduce(
            *mine, gradient_accumulation_fusion=False, allreduce_dgrad=False, sequence_parallel=False, tp_group=one_rank
        )
    expected = torch.nn.functional.linear(*theirs)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (type(got.grad_fn).__name__ == "_LinearBackward") == onednn
    upstream = torch.randn(expected.shape, generator=generator)
    got.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-5)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), kv_heads=st.sampled_from([1, 2, 4]))
def test_attention_of_a_pack_is_that_of_each_sequence(lengths: list[int], kv_heads: int) -> None:
    """Values and gradients, in fp64, against softmax(q k / sqrt(d)) v written out for each sequence and head."""
    lengths = sorted(lengths)
    heads, width, tokens = 4, 8, sum(lengths)
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, 1, heads, width), (tokens, 1, kv_heads, width), (tokens, 1, kv_heads, width)]
    mine = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    runs = tuple((lengths.count(length), length) for length in sorted(set(lengths)))
    got = RunAttention()(*mine, None, packed_seq_params=Packed(runs=runs))

    theirs = [x.detach().clone().requires_grad_() for x in mine]
    expected = torch.zeros_like(got)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(heads):
            q = theirs[0][rows, 0, head]
            k, v = (x[rows, 0, head * kv_heads // heads] for x in theirs[1:])
            scores = (q @ k.T / width**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
            expected[rows, 0, head * width : (head + 1) * width] = scores.softmax(-1) @ v
        start += length
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    got.backward(upstream)
    expected.backward(upstream)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


def test_learning_rate_warms_up_and_ends_where_it_should() -> None:
    constant = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(step, 10, constant) for step in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    for kind in (Schedule.linear, Schedule.cosine):
        config = OptimizerConfig(lr=2.0, warmup_steps=2, lr_scheduler_type=kind, min_lr_ratio=0.1)
        rates = [learning_rate(step, 12, config) for step in range(12)]
        assert rates[1] == max(rates) == 2.0 and rates[-1] == pytest.approx(0.2)
        assert all(a > b for a, b in pairwise(rates[1:]))
    linear_rate = OptimizerConfig(lr=1.0, lr_scheduler_type=Schedule.linear)
    assert learning_rate(4, 10, linear_rate) == pytest.approx(0.5)
    assert learning_rate(100, 10, linear_rate) == 0.0
