"""Microbatches as tensors, and their way through Megatron's pipeline schedule.

Shapes: T = packed tokens of a microbatch, A = its rows that get a log-probability, V =
vocabulary columns on this TP rank. Different DP ranks may run different numbers of
microbatches (each pipeline is its own); the ranks of one pipeline must agree, and do when
they are given the same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from areal_hpc.trainer import cpu
from areal_hpc.trainer.attention import Packed
from areal_hpc.trainer.model import Model
from areal_hpc.trainer.packing import microbatches


@dataclass
class Microbatch:
    """tokens_T int64; target_A int64, the token that follows each row of `packed.rows_A`.

    `order`: index of each sequence in the list that was packed, in packed order; `counts`:
    rows of each. An empty share still runs one microbatch (its pipeline peers and the
    collectives of the step wait for it), whose one row has weight 0: then `counts` is (0,).
    """

    tokens_T: Tensor
    target_A: Tensor
    packed: Packed
    order: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def empty(self) -> bool:
        return not self.order


def pack(model: Model, sequences: Sequence[np.ndarray], first: Sequence[int]) -> list[Microbatch]:
    """Microbatches of at most `actor.mb_spec.max_tokens_per_mb` tokens.

    Of sequence n the tokens from index first[n] >= 1 on get a log-probability.
    """
    limit = model.actor.mb_spec.max_tokens_per_mb
    cuts = microbatches([len(s) for s in sequences], limit)
    if not cuts:
        return [_microbatch(model, [np.zeros(2, np.int32)], [1], (), (0,))]
    return [
        _microbatch(
            model,
            [sequences[i] for i in cut],
            [first[i] for i in cut],
            tuple(cut),
            tuple(len(sequences[i]) - first[i] for i in cut),
        )
        for cut in cuts
    ]


def _microbatch(
    model: Model, sequences: list[np.ndarray], first: list[int], order: tuple[int, ...], counts: tuple[int, ...]
) -> Microbatch:
    device = model.groups.device
    lengths = np.array([len(s) for s in sequences])
    ends = lengths.cumsum()
    starts = ends - lengths
    rows = np.concatenate([np.arange(a + f, b) for a, b, f in zip(starts, ends, first)]) - 1
    tokens_T = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(device)
    rows_A = torch.from_numpy(rows).to(device)
    run_lengths, run_counts = np.unique(lengths, return_counts=True)
    cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    packed = Packed(
        qkv_format=model.packed_format,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        runs=tuple(zip(run_counts.tolist(), run_lengths.tolist())),
        position_T=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device),
        rows_A=rows_A,
    )
    return Microbatch(tokens_T, tokens_T[rows_A + 1], packed, order, counts)


# (logits [A, V], the microbatch) -> (loss to differentiate, what to keep)
Loss = Callable[[Tensor, Microbatch], tuple[Tensor, Any]]


def run(
    model: Model, batch: Sequence[Microbatch], loss: Loss, *, train: bool, on_microbatch: Callable[[], None]
) -> list[Any]:
    """Collective over the pipeline (and TP): every microbatch forward and, if `train`, backward.

    Returns what `loss` kept, one entry a microbatch, on the last stage; [] on the others.
    With `train` the gradients are added up, summed over DP and left in the gradient buffers.
    `on_microbatch` is called before each forward, so that a rank pumps its mail.
    """

    def forward(data: Iterator[Microbatch], module: torch.nn.Module) -> tuple[Tensor, Any]:
        on_microbatch()
        micro = next(data)
        out = module(micro.tokens_T[None], micro.packed.position_T[None], None, packed_seq_params=micro.packed)
        return out, partial(ending, micro)

    def ending(micro: Microbatch, logits_1AV: Tensor) -> tuple[Tensor, Tensor, Any]:
        value, kept = loss(logits_1AV[0], micro)
        # Megatron adds up a token count here; ours was agreed before the first microbatch
        return value, torch.zeros((), dtype=torch.int), kept

    with cpu.emulation(), torch.set_grad_enabled(train):
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batch),
            model=[model.ddp],
            num_microbatches=len(batch),
            seq_length=1,  # sizes are sent along, see variable_seq_lengths
            micro_batch_size=1,
            forward_only=not train,
        )
