"""Plans against NumPy: every wanted element once, from a rank that holds it; sharing, order, errors, scale."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_specs import rollout_layouts, specs, trainer_layouts

from areal_hpc.config import Parallel
from areal_hpc.layout.boxes import Box, flat_boxes, whole
from areal_hpc.layout.families import logical_tensors
from areal_hpc.layout.megatron import trainer_pieces
from areal_hpc.layout.spec import ModelSpec
from areal_hpc.layout.vllm import rollout_pieces
from areal_hpc.reshard.plan import Plan, make_plan
from areal_hpc.reshard.units import interleave, messages_of

Layout = list[list[Box]]


def trainer(spec: ModelSpec, parallel: Parallel) -> Layout:
    """Boxes by rank: TP varies fastest, then DP, then PP."""
    sizes = range(parallel.pp), range(parallel.dp), range(parallel.tp)
    return [[p.box for p in trainer_pieces(spec, parallel, t, s)] for s, _, t in itertools.product(*sizes)]


def replicas(spec: ModelSpec, tp: int, count: int) -> Layout:
    one = [[p.box for p in rollout_pieces(spec, tp, rank)] for rank in range(tp)]
    return one * count


def optimizer(shards: list[Box], dp: int) -> Layout:
    """Each box cut flat and unevenly over DP ranks, as a distributed optimizer cuts its buffer."""
    owned: Layout = [[] for _ in range(dp)]
    for number, box in enumerate(shards):
        cuts = [box.size * (r * r + number % 2 * r) // (dp * dp + number % 2 * dp) for r in range(dp + 1)]
        for rank, (low, high) in enumerate(itertools.pairwise(cuts)):
            for start, stop in flat_boxes(box.shape, low, high):
                shift = tuple(map(int.__add__, box.start, start)), tuple(map(int.__add__, box.start, stop))
                owned[rank].append(Box(box.name, *shift))
    return owned


def assert_exact(plan: Plan, shapes: dict[str, tuple[int, ...]], ranks: int) -> None:
    """Carried out on arrays of element numbers, the plan fills each destination once, and both sides agree."""
    number = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
    out = {r: [np.full(box.shape, -1) for box in plan.destinations[r]] for r in range(len(plan.destinations))}
    sent = [transfer for rank in range(ranks) for transfer in plan.sends(rank)]
    assert Counter(sent) == Counter(transfer for rank in range(ranks) for transfer in plan.receives(rank))
    for t in sent:
        source, wanted = plan.sources[t.src][t.src_index], plan.destinations[t.dst][t.dst_index]
        held = number[t.box.name][source.within(whole(t.box.name, shapes[t.box.name]))]
        region = out[t.dst][t.dst_index][t.box.within(wanted)]
        assert (region == -1).all(), f"{t} is written twice"
        region[...] = held[t.box.within(source)]
    for rank, boxes in enumerate(plan.destinations):
        for box, array in zip(boxes, out[rank]):
            np.testing.assert_array_equal(array, number[box.name][box.within(whole(box.name, shapes[box.name]))])
    for src, dst in itertools.product(range(ranks), repeat=2):
        to = [t for t in plan.sends(src) if t.dst == dst]
        assert to == [t for t in plan.receives(dst) if t.src == src], "the two sides order a pair's boxes differently"


@settings(max_examples=60)
@given(specs(max_layers=2), st.data())
def test_trainer_to_rollout(spec: ModelSpec, data: st.DataObject):
    parallel = data.draw(st.sampled_from(trainer_layouts(spec, 8)))
    tp = data.draw(st.sampled_from(rollout_layouts(spec, 4)))
    count = data.draw(st.integers(1, 3))
    trainers, rollout = trainer(spec, parallel), replicas(spec, tp, count)
    plan = make_plan(trainers + [[]] * len(rollout), [[]] * len(trainers) + rollout)
    assert_exact(plan, logical_tensors(spec), len(trainers) + len(rollout))


@settings(max_examples=20)
@given(specs(max_layers=2), st.data())
def test_optimizer_ranges_to_another_layout_and_back(spec: ModelSpec, data: st.DataObject):
    """Flat ranges over DP (up to 2d-1 boxes each) on one layout, to flat ranges on another."""
    layouts = trainer_layouts(spec, 4)
    sides = []
    for _ in range(2):
        parallel = data.draw(st.sampled_from(layouts))
        shards = trainer(spec, Parallel(1, parallel.tp, parallel.pp))
        # norms are the same on all TP ranks: the first one's optimizer state is the source
        distinct = {box: None for boxes in shards for box in boxes}
        sides.append(optimizer(list(distinct), parallel.dp * parallel.tp * parallel.pp))
    ranks = max(map(len, sides))
    sides = [side + [[]] * (ranks - len(side)) for side in sides]
    plan = make_plan(*sides)
    assert_exact(plan, logical_tensors(spec), ranks)
    same = make_plan(sides[0], sides[0])
    assert all(t.src == t.dst for rank in range(ranks) for t in same.sends(rank)), "a rank asks others for its own"


def test_plan_does_not_depend_on_the_rank_or_the_run():
    a, b = [[Box("w", (0, 0), (4, 4))]] * 3, [[Box("w", (i, 0), (i + 1, 4))] for i in range(4)]
    first, second = (make_plan([*a, []], b) for _ in range(2))
    assert [first.sends(r) for r in range(4)] == [second.sends(r) for r in range(4)]
    assert first.sends(99) == [] and first.receives(99) == []


def test_holders_share_the_sending():
    """Eight holders of one tensor, 24 takers: each sends the same. A holder serves itself at no cost."""
    box = [Box("w", (0,), (100,))]
    plan = make_plan([box] * 8 + [[]] * 24, [[]] * 8 + [box] * 24)
    assert [len(plan.sends(rank)) for rank in range(8)] == [3] * 8
    plan = make_plan([box] * 2 + [[]] * 2, [box, [], box, box])
    assert [[t.dst for t in plan.sends(rank)] for rank in range(2)] == [[0, 2], [3]]


def test_uneven_tensors_are_balanced_by_elements():
    sizes = [1000, 400, 300, 200, 90, 10]
    boxes = [Box(f"w{i}", (0,), (n,)) for i, n in enumerate(sizes)]
    plan = make_plan([boxes, boxes, []], [[], [], boxes])
    assert [sum(t.box.size for t in plan.sends(rank)) for rank in (0, 1)] == [1000, 1000]


def test_a_destination_listed_twice_is_filled_twice():
    """A tied copy on a later pipeline stage is the same box again, on the same rank or another."""
    box = Box("embed", (0, 0), (6, 2))
    plan = make_plan([[box], []], [[box, box], [box]])
    assert_exact(plan, {"embed": (6, 2)}, 2)
    assert [t.dst_index for t in plan.receives(0)] == [0, 1]


def test_a_hole_is_named():
    held = [[Box("model.norm.weight", (0,), (3,))], [Box("model.norm.weight", (4,), (8,))], []]
    with pytest.raises(ValueError) as error:
        make_plan(held, [[], [], [whole("model.norm.weight", (8,))]])
    for text in ("model.norm.weight", "7 of 8 elements of [0:8]", "ranks 2", "ranks 0 hold [0:3]", "ranks 1 hold"):
        assert text in str(error.value)
    with pytest.raises(ValueError, match=r"lm_head.*nobody holds any"):
        make_plan([[]], [[whole("lm_head", (2, 2))]])


def test_different_sources_of_one_element_are_named():
    held = [[Box("w", (0, 0), (5, 4))], [Box("w", (4, 0), (8, 4))], []]
    with pytest.raises(ValueError) as error:
        make_plan(held, [[], [], [whole("w", (8, 4))]])
    for text in ("w: ", "ranks 0 hold [0:5, 0:4]", "ranks 1 hold [4:8, 0:4]", "overlap inside [0:8, 0:4]", "ranks 2"):
        assert text in str(error.value)
    make_plan(held, [[], [], [Box("w", (5, 0), (8, 4))]])  # they agree on what this rank wants


def test_layouts_that_disagree_on_dims():
    with pytest.raises(ValueError, match=r"w: source box has shape \(4,\), destination \(2, 2\)"):
        make_plan([[whole("w", (4,))]], [[whole("w", (2, 2))]])


def test_empty_boxes_travel_nowhere():
    empty = Box("w", (2, 0), (2, 4))
    plan = make_plan([[whole("w", (4, 4)), empty], []], [[], [empty]])
    assert plan.sends(0) == [] and plan.receives(1) == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 10))
def test_messages_are_bounded_and_cover_each_transfer_once(shape: list[int], limit: int):
    boxes = [whole("a", shape), whole("b", (7,)), whole("c", (2, 2))]
    plan = make_plan([boxes, []], [[], boxes])
    sent, received = messages_of(plan.sends(0), "dst", 0, limit), messages_of(plan.receives(1), "src", 1, limit)
    assert list(sent) == [1] and sent[1] == received[0]
    seen = {box.name: np.zeros(box.shape, int) for box in boxes}
    for units in sent[1]:
        assert 0 < sum(unit.box.size for unit in units) <= limit
        for unit in units:
            seen[unit.box.name][unit.box.within(unit.transfer.box)] += 1
    assert all((count == 1).all() for count in seen.values())


def test_messages_take_turns_from_the_next_rank():
    queue = interleave({0: [["a"], ["b"]], 2: [["c"]], 3: [["d"]]}, 1, 4)
    assert queue == [(2, ["c"]), (3, ["d"]), (0, ["a"]), (0, ["b"])]


def test_plan_at_scale():
    """1,024 trainer and 1,024 rollout ranks of a quarter (16 layers) of a 32B dense model: inside 7 s of one core."""
    sizes = dict(layers=16, hidden=5120, ffn=27648, heads=40, kv_heads=8, head_dim=128, vocab=152064)
    other = dict(max_position=32768, rope_theta=1e6, norm_eps=1e-6, qk_norm=False, tied=False, dtype="bfloat16")
    spec = ModelSpec(family="qwen2", qkv_bias=True, **sizes, **other)
    stages = [[[p.box for p in trainer_pieces(spec, Parallel(16, 8, 8), t, s)] for t in range(8)] for s in range(8)]
    trainers = [boxes for stage in stages for boxes in stage * 16]
    rollout = replicas(spec, 8, 128)
    began = time.process_time()
    plan = make_plan(trainers + [[]] * 1024, [[]] * 1024 + rollout)
    assert time.process_time() - began < 7
    wanted = sum(box.size for boxes in rollout for box in boxes)
    sent = [sum(t.box.size for t in plan.sends(rank)) for rank in range(1024)]
    assert sum(sent) == wanted
    for stage in range(8):  # what a stage holds, only its ranks can send: they share it evenly
        loads = sent[stage * 128 : (stage + 1) * 128]
        assert max(loads) <= 1.02 * sum(loads) / 128
