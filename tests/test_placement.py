"""Placement: whole nodes for trainers, TP fastest, and refusals that say numbers, nodes and ranks."""

from __future__ import annotations

import pytest

from areal_hpc.config import ConfigError, Parallel
from areal_hpc.placement import Role, place


def test_trainers_fill_whole_nodes_first() -> None:
    nodes = ["a"] * 4 + ["b"] * 4
    places = place(nodes, Parallel(dp=1, tp=2, pp=2), Parallel(dp=2, tp=2))
    assert [p.role for p in places] == [Role.TRAINER] * 4 + [Role.ROLLOUT] * 4
    assert [(p.dp, p.tp, p.pp) for p in places[:4]] == [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    assert [(p.dp, p.tp, p.pp) for p in places[4:]] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [p.index for p in places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [p.local_rank for p in places] == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(("dp", "tp", "pp"), [(2, 2, 2), (3, 1, 2), (1, 4, 1), (4, 2, 1)])
def test_order_is_tp_then_dp_then_pp(dp: int, tp: int, pp: int) -> None:
    places = place(["n"] * (dp * tp * pp), Parallel(dp=dp, tp=tp, pp=pp), None)
    expected = [(d, t, p) for p in range(pp) for d in range(dp) for t in range(tp)]
    assert [(p.dp, p.tp, p.pp) for p in places] == expected
    assert [p.index for p in places] == list(range(len(expected)))


def test_cyclic_ranks_are_placed_by_node_not_by_number() -> None:
    # srun --distribution=cyclic: even ranks on a, odd ones on b
    places = place(["a", "b"] * 4, Parallel(dp=1, tp=4), Parallel(dp=1, tp=4))
    assert [p.rank for p in places] == list(range(8))
    assert {p.node for p in places if p.role is Role.TRAINER} == {"a"}
    assert [p.rank for p in places if p.role is Role.TRAINER] == [0, 2, 4, 6]
    assert [p.tp for p in places if p.role is Role.ROLLOUT] == [0, 1, 2, 3]


def test_rank_0_trains_at_index_0_on_any_distribution() -> None:
    for nodes in (["b", "a"] * 2, ["b", "b", "a", "a"]):
        first = place(nodes, Parallel(dp=2), Parallel(dp=2))[0]
        assert (first.role, first.index, first.local_rank) == (Role.TRAINER, 0, 0)


def test_wrong_size_gives_the_arithmetic() -> None:
    with pytest.raises(ConfigError) as caught:
        place(["a"] * 5, Parallel(dp=1, tp=2, pp=2), Parallel(dp=2, tp=2))
    text = str(caught.value)
    assert "the world has 5 ranks, needed are 8" in text
    assert "dp 1 * tp 2 * pp 2 = 4" in text
    assert "replicas 2 * tp 2 = 4" in text
    assert "4 + 4 = 8" in text


def test_wrong_size_without_rollout() -> None:
    with pytest.raises(ConfigError, match=r"the world has 3 ranks, needed are 2: actor.backend: dp 2 .* = 2\."):
        place(["a"] * 3, Parallel(dp=2), None)


def test_unequal_nodes_name_nodes_ranks_and_flag() -> None:
    with pytest.raises(ConfigError) as caught:
        place(["a", "a", "a", "b"], Parallel(dp=2), Parallel(dp=2))
    assert "a has 3 (ranks 0, 1, 2), b has 1 (ranks 3)" in str(caught.value)
    assert "--ntasks-per-node=2" in str(caught.value)


def test_crossing_group_names_ranks_nodes_and_key() -> None:
    nodes = ["a"] * 3 + ["b"] * 3
    with pytest.raises(ConfigError) as caught:
        place(nodes, Parallel(dp=2), Parallel(dp=2, tp=2))
    text = str(caught.value)
    assert "rollout.backend" in text and "replica 0" in text
    assert "rank 2 on a, rank 3 on b" in text
    assert "cluster.tp_across_nodes=true" in text
    allowed = place(nodes, Parallel(dp=2), Parallel(dp=2, tp=2), tp_across_nodes=True)
    assert [p.tp for p in allowed[2:]] == [0, 1, 0, 1]


def test_crossing_trainer_group_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"actor\.backend: the tensor-parallel group of trainer dp 0 pp 0"):
        place(["a", "a", "b", "b"], Parallel(dp=1, tp=4), None)


def test_a_place_says_what_it_is() -> None:
    places = place(["n"] * 2, Parallel(), Parallel())
    assert str(places[0]) == "trainer rank 0 (dp 0 tp 0 pp 0) on n"
    assert str(places[1]) == "rollout rank 1 (replica 0 tp 0) on n"
