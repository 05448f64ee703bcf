"""Exchanges on real MPI: any trainer layout to any rollout layout to the bit, and each way of failing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_specs import (
    rollout_layouts,
    rollout_tensors,
    small_spec,
    specs,
    trainer_layouts,
    trainer_tensors,
    whole_tensors,
)
from mpi4py import MPI

from areal_hpc.config import Parallel
from areal_hpc.layout.boxes import Box, whole
from areal_hpc.layout.extents import FileTensor, extent_boxes
from areal_hpc.layout.megatron import trainer_pieces
from areal_hpc.layout.spec import ModelSpec
from areal_hpc.layout.vllm import rollout_pieces
from areal_hpc.reshard.exchange import Exchange, ExchangeError
from areal_hpc.reshard.plan import make_plan

DEADLINE_S = 60.0


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> tuple[ModelSpec, Parallel, int, int, torch.dtype, int]:
    """(model, trainer layout, rollout TP, replicas, wire dtype, chunk bytes) for at most `ranks` ranks in all.

    With one rank it holds both ends; else trainers come first.
    """
    spec = draw(specs(max_layers=2))
    room = max(1, ranks - 1)
    parallel = draw(st.sampled_from(trainer_layouts(spec, room)))
    left = max(1, ranks - parallel.size)
    tp = draw(st.sampled_from(rollout_layouts(spec, left)))
    replicas = draw(st.integers(1, max(1, left // tp)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return spec, parallel, tp, replicas, dtype, draw(st.sampled_from([64, 1000, 64 << 20]))


def place(
    parallel: Parallel, tp: int, replicas: int, size: int
) -> tuple[list[tuple[int, int] | None], list[int | None]]:
    """By rank: (tp rank, pp rank) of the trainers, tp rank of the rollout; the rest of the ranks hold nothing."""
    trainers = [(t, s) for s in range(parallel.pp) for _ in range(parallel.dp) for t in range(parallel.tp)]
    rollout = list(range(tp)) * replicas
    if size == 1:
        return [trainers[0]], [rollout[0]]
    idle = size - len(trainers) - len(rollout)
    return trainers + [None] * (size - len(trainers)), [None] * len(trainers) + rollout + [None] * idle


def check_case(comm: MPI.Comm, case: tuple[ModelSpec, Parallel, int, int, torch.dtype, int], seed: int) -> None:
    """Two versions through one exchange, each compared with the tensors that vLLM would have loaded."""
    spec, parallel, tp, replicas, dtype, chunk_bytes = case
    trainers, rollout = place(parallel, tp, replicas, comm.size)
    held_pieces = [trainer_pieces(spec, parallel, *at) if at is not None else [] for at in trainers]
    wanted_pieces = [rollout_pieces(spec, tp, rank) if rank is not None else [] for rank in rollout]
    plan = make_plan([[p.box for p in pieces] for pieces in held_pieces], [[p.box for p in ps] for ps in wanted_pieces])
    exchange = Exchange(comm, plan, dtype, deadline_s=DEADLINE_S, chunk_bytes=chunk_bytes)
    for version in range(2):
        hf = whole_tensors(spec, seed + version)
        mine, yours = trainers[comm.rank], rollout[comm.rank]
        source = trainer_tensors(spec, hf, parallel, *mine) if mine is not None else {}
        expected = rollout_tensors(spec, hf, tp, yours) if yours is not None else {}
        live = {name: torch.zeros(array.shape, dtype=dtype) for name, array in expected.items()}
        held = [torch.from_numpy(source[p.param])[p.region] for p in held_pieces[comm.rank]]
        wanted = [live[p.param][p.region] for p in wanted_pieces[comm.rank]]
        exchange.start(held, wanted)
        exchange.wait()
        for name, array in expected.items():
            assert torch.equal(live[name], torch.from_numpy(array).to(dtype)), f"{name}, version {version}, {case}"
    minimum = sum(p.box.size for rank, ps in enumerate(wanted_pieces) for p in ps) if comm.size > 1 else 0
    assert comm.allreduce(exchange.sent_bytes) == 2 * minimum * dtype.itemsize


def test_any_trainer_to_any_rollout(comm: MPI.Comm):
    """Cases are drawn first, by rank 0: a failing body inside `given` would be tried again by its rank alone."""
    drawn = []

    @settings(max_examples=40)
    @given(cases(comm.size))
    def draw(case):
        drawn.append(case)

    draw()
    for seed, case in enumerate(comm.bcast(drawn)):
        check_case(comm, case, seed)


def test_pipeline_stages_to_a_tensor_parallel_replica(world: MPI.Comm):
    """A case that draws may miss: a KV head on both ranks, biases, vocabulary padding, a tied embedding."""
    spec = small_spec(family="qwen2", qkv_bias=True, layers=2, kv_heads=1, vocab=70, tied=True)
    parts = max(1, world.size // 2)
    check_case(world, (spec, Parallel(1, 1, parts), parts, 1, torch.bfloat16, 1000), 3)


def test_checkpoint_extents(comm: MPI.Comm):
    """Rows by rank to the extents of a file that a single writer's block boundaries cut anywhere, and back."""
    tensors = [FileTensor("a", (4, 9), 4, 8), FileTensor("b", (10,), 4, 8 + 144 + 12)]
    cuts = [8 + (196 * rank // comm.size // 4) * 4 for rank in range(comm.size + 1)]
    extents = [[box for box, _ in extent_boxes(tensors, low, high)] for low, high in itertools.pairwise(cuts)]
    rows = [np.array_split(np.arange(n), comm.size) for n in (4, 10)]
    by_row = [
        [
            Box("a", (int(a[0]), 0), (int(a[-1]) + 1, 9)),
            Box("b", (int(b[0]),), (int(b[-1]) + 1,)),
        ]
        for a, b in zip(*rows)
    ]
    full = {"a": torch.randn(4, 9, generator=torch.manual_seed(1)), "b": torch.arange(10.0)}

    def views(boxes: list[Box]) -> list[torch.Tensor]:
        return [full[box.name][box.within(whole(box.name, full[box.name].shape))] for box in boxes]

    for one, other in ((by_row, extents), (extents, by_row)):
        wanted = [torch.full(box.shape, torch.nan) for box in other[comm.rank]]
        exchange = Exchange(comm, make_plan(one, other), torch.float32, deadline_s=DEADLINE_S, chunk_bytes=16)
        exchange.start(views(one[comm.rank]), wanted)
        exchange.wait()
        assert all(map(torch.equal, wanted, views(other[comm.rank])))


def test_versions_do_not_mix_when_one_peer_is_ahead(world: MPI.Comm):
    """Rank 0 has sent three versions of small messages before the others take the first."""
    boxes = [whole("w", (3,))]
    ranks = range(world.size)
    plan = make_plan([boxes if r == 0 else [] for r in ranks], [boxes if r else [] for r in ranks])
    exchange = Exchange(world, plan, torch.float32, deadline_s=DEADLINE_S)
    if world.rank:
        time.sleep(0.1)
    for version in range(3):
        tensors = [torch.full((3,), float(version))], [torch.empty(3)]
        exchange.start(*(tensors[0], []) if world.rank == 0 else ([], tensors[1]))
        exchange.wait()
        assert world.rank == 0 or torch.equal(*tensors[0], *tensors[1])


def test_unverified_run_sends_no_tables(world: MPI.Comm):
    boxes, ranks = [whole("w", (1000,))], range(world.size)
    plan = make_plan([boxes if r == 0 else [] for r in ranks], [boxes] * world.size)
    sent = []
    for verify in (True, False):
        wanted = [torch.empty(1000)]
        exchange = Exchange(world, plan, torch.float32, deadline_s=DEADLINE_S, verify=verify, chunk_bytes=2000)
        exchange.start([torch.arange(1000.0)] if world.rank == 0 else [], wanted)
        exchange.wait()
        assert torch.equal(wanted[0], torch.arange(1000.0))
        sent.append((exchange.sent_bytes, exchange.table_bytes))
    peers = world.size - 1 if world.rank == 0 else 0
    assert sent == [(4000 * peers, 8 * peers), (4000 * peers, 0)]


def test_on_wait_is_called_while_a_peer_is_late(world: MPI.Comm):
    boxes, ranks = [whole("w", (4,))], range(world.size)
    plan = make_plan([boxes if r == 0 else [] for r in ranks], [boxes if r else [] for r in ranks])
    turns = []
    exchange = Exchange(world, plan, torch.float32, deadline_s=DEADLINE_S, on_wait=lambda: turns.append(1))
    if world.rank == 0:
        time.sleep(0.2)
    cpu = time.process_time()
    exchange.start([torch.ones(4)] if world.rank == 0 else [], [torch.empty(4)] if world.rank else [])
    exchange.wait()
    assert world.rank == 0 or len(turns) > 10
    assert time.process_time() - cpu < 0.15, "an idle wait must sleep"


# failures: trainers on the lower half of the ranks, one taker each on the upper half


class Wire:
    """A communicator whose messages to one rank suffer one flipped bit; all else is the real one's."""

    def __init__(self, comm: MPI.Comm, bit: int) -> None:
        self._comm, self._bit = comm, bit

    def __getattr__(self, name: str):
        return getattr(self._comm, name)

    def Isend(self, buffer, dest: int, tag: int) -> MPI.Request:
        buffer[0][self._bit // 8] ^= 1 << self._bit % 8
        return self._comm.Isend(buffer, dest, tag)


@pytest.fixture
def pair(world: MPI.Comm) -> Iterator[MPI.Comm]:
    """Two ranks: the first sends, the second receives."""
    if world.size % 2:
        pytest.fail("needs an even number of ranks: run with mpirun -n 2 or -n 4")
    split = world.Split(world.rank // 2, world.rank)
    yield split
    split.Free()


def two_tensors() -> tuple[list[list[Box]], list[list[Box]]]:
    return [[whole("model.a", (5, 3)), whole("model.b", (7,))], []], [
        [],
        [whole("model.a", (5, 3)), whole("model.b", (7,))],
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flipped_bit_is_named(pair: MPI.Comm, dtype: torch.dtype):
    """Any bit of the message, of the second tensor here and of the table, fails the run."""
    a_bits = 15 * dtype.itemsize * 8
    table_bits = (15 + 7) * dtype.itemsize * 8
    for bit, name in ((0, "model.a"), (a_bits, "model.b"), (table_bits - 1, "model.b"), (table_bits + 5, "model.a")):
        wire = pair.Dup()
        exchange = Exchange(Wire(wire, bit), make_plan(*two_tensors()), dtype, deadline_s=DEADLINE_S)
        if pair.rank == 0:
            exchange.start([torch.randn(5, 3), torch.randn(7)], [])
            exchange.wait()
        else:
            exchange.start([], [torch.empty(5, 3, dtype=dtype), torch.empty(7, dtype=dtype)])
            with pytest.raises(ExchangeError) as error:
                exchange.wait()
            for text in (f"{name}: checksum", "from rank 0 to rank 1", "changed on the way"):
                assert text in str(error.value)
            assert not exchange.running
        wire.Free()


def test_a_peer_that_never_answers_is_named(pair: MPI.Comm):
    """The receiver names who owes what; a sender of more than MPI buffers names who has not taken it."""
    big = [whole("model.big", (4 << 20,))]
    for silent in (0, 1):
        wire = pair.Dup()
        if pair.rank != silent:
            exchange = Exchange(wire, make_plan([big, []], [[], big]), torch.float32, deadline_s=0.3)
            tensors = [torch.zeros(4 << 20)]
            exchange.start(*(tensors, []) if pair.rank == 0 else ([], tensors))
            began = time.monotonic()
            with pytest.raises(ExchangeError, match=f"rank {pair.rank} for 0.3 s: rank {silent} has not .* model.big"):
                exchange.wait()
            assert 0.3 <= time.monotonic() - began < 20
        pair.Barrier()
        if pair.rank == 1 and silent == 1:  # take what was sent, so that the communicator can be freed
            message = wire.Mprobe(0, MPI.ANY_TAG)
            message.Recv([np.empty((4 << 20) * 4 + 4, np.uint8), MPI.BYTE])
        wire.Barrier()
        wire.Free()


def test_ranks_that_disagree_on_the_cut_are_named(pair: MPI.Comm):
    wire = pair.Dup()
    chunk_bytes = 32 if pair.rank == 0 else 64 << 20
    exchange = Exchange(wire, make_plan(*two_tensors()), torch.float32, deadline_s=DEADLINE_S, chunk_bytes=chunk_bytes)
    if pair.rank == 0:
        exchange.start([torch.randn(5, 3), torch.randn(7)], [])
        exchange.wait()
    else:
        exchange.start([], [torch.empty(5, 3), torch.empty(7)])
        with pytest.raises(ExchangeError, match=r"model\.a: message of \d+ bytes from rank 0 .* expected 96"):
            exchange.wait()
    wire.Barrier()
    wire.Free()


def test_wrong_tensors_are_refused_before_anything_is_sent(comm: MPI.Comm):
    boxes = [[whole("w", (2, 2))]] * comm.size
    exchange = Exchange(comm, make_plan(boxes, boxes), torch.float32, deadline_s=DEADLINE_S)
    good = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="0 held tensors for 1 boxes"):
        exchange.start([], [good])
    with pytest.raises(ValueError, match=r"w: wanted tensor has shape \(4,\), its box \(2, 2\)"):
        exchange.start([good], [torch.zeros(4)])
    with pytest.raises(ValueError, match=r"w: wanted tensor is torch\.float64, the exchange carries torch\.float32"):
        exchange.start([good], [good.double()])
    with pytest.raises(ValueError, match="chunk_bytes=1: "):
        Exchange(comm, exchange.plan, torch.float32, deadline_s=DEADLINE_S, chunk_bytes=1)
    assert exchange.sent_bytes == 0 and exchange.test()


def test_start_before_the_last_run_is_done(pair: MPI.Comm):
    exchange = Exchange(pair, make_plan(*two_tensors()), torch.float32, deadline_s=DEADLINE_S)
    tensors = [torch.zeros(5, 3), torch.zeros(7)]
    sides = (tensors, []) if pair.rank == 0 else ([], tensors)
    exchange.start(*sides)
    with pytest.raises(RuntimeError, match="not done"):
        exchange.start(*sides)
    exchange.wait()
