"""The picture that a trace gives, over shared memory and over TCP."""

from __future__ import annotations

import pytest
from conftest import Done
from picture import assert_overlap

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", ["one_and_one", "eight_over_tcp"])
def test_generation_and_deliveries_inside_a_training_step(name: str, request: pytest.FixtureRequest) -> None:
    done: Done = request.getfixturevalue(name)
    assert_overlap(done.run.dir, done.run.ranks, done.run.steps)
