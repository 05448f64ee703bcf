"""Packing: every sample once, token limits kept, DP shares balanced, on random batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.records import Group, Trajectory
from areal_hpc.trainer.packing import Sample, assign, microbatches

lengths = st.lists(st.integers(1, 500), max_size=60)


@given(lengths=lengths, limit=st.integers(1, 800))
def test_microbatches_hold_every_sample_once_within_the_limit(lengths: list[int], limit: int) -> None:
    cuts = microbatches(lengths, limit)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert cut and (sum(lengths[i] for i in cut) <= limit or len(cut) == 1)
    packed = [lengths[i] for cut in cuts for i in cut]
    assert packed == sorted(packed)  # equally long samples lie together
    for left, right in pairwise(cuts):  # no cut without need
        assert sum(lengths[i] for i in left) + lengths[right[0]] > limit


@given(lengths=lengths, minibatches=st.integers(1, 5), dp=st.integers(1, 5))
def test_assign_gives_every_sample_to_one_rank_and_minibatch(lengths: list[int], minibatches: int, dp: int) -> None:
    shares = assign(lengths, minibatches, dp)
    assert len(shares) == dp and all(len(share) == minibatches for share in shares)
    assert sorted(i for share in shares for cut in share for i in cut) == list(range(len(lengths)))
    for index in range(minibatches):
        loads = [sum(lengths[i] for i in share[index]) for share in shares]
        longest = max((lengths[i] for share in shares for i in share[index]), default=0)
        assert max(loads) - min(loads) <= longest


@given(lengths=lengths, minibatches=st.integers(1, 5), dp=st.integers(1, 5))
def test_minibatches_do_not_depend_on_dp(lengths: list[int], minibatches: int, dp: int) -> None:
    """The cut that fixes the gradient: consecutive samples, sizes that differ by at most one."""
    alone = assign(lengths, minibatches, 1)[0]
    shares = assign(lengths, minibatches, dp)
    together = [sorted(i for share in shares for i in share[index]) for index in range(minibatches)]
    assert together == alone
    assert [i for cut in alone for i in cut] == list(range(len(lengths)))
    assert max(map(len, alone)) - min(map(len, alone)) <= 1


def test_sample_of_a_trajectory() -> None:
    group = Group(4, 2, np.array([5, 6, 7]))
    answer = Trajectory([8, 9], [-0.5, -0.25], [3, 4], 1.0)
    sample = Sample.of(group, answer, 0.75)
    assert sample.tokens_S.tolist() == [5, 6, 7, 8, 9] and sample.tokens_S.dtype == np.int32
    assert sample.prompt == 3 and sample.logp_A.tolist() == [-0.5, -0.25] and sample.advantage == 0.75


@pytest.mark.parametrize(("tokens", "prompt", "logp"), [(3, 3, 0), (3, 0, 3), (4, 2, 1)])
def test_sample_without_prompt_answer_or_logp_is_refused(tokens: int, prompt: int, logp: int) -> None:
    with pytest.raises(ValueError, match=f"{tokens} tokens, a prompt of {prompt} and {logp} log-probabilities"):
        Sample(np.zeros(tokens, np.int32), prompt, np.zeros(logp, np.float32), 0.0)
