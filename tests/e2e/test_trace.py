"""The picture that a trace gives: rollout ranks generate and deliver while a trainer step goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import Done

pytestmark = pytest.mark.timeout(600)


def events(done: Done) -> list[dict[str, Any]]:
    (path,) = (done.run.dir / "log").glob("trace.*.json")
    return json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["one_and_one", "eight_over_tcp"])
def test_generation_and_deliveries_inside_a_training_step(name: str, request: pytest.FixtureRequest) -> None:
    done = request.getfixturevalue(name)
    found = events(done)
    ranks = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert len(ranks) == done.run.ranks
    (root,) = (pid for pid, title in ranks.items() if pid == 0)
    spans = [e for e in found if e["ph"] == "X"]
    instants = [e for e in found if e["ph"] == "i"]
    steps = [e for e in spans if e["name"] == "train" and e["pid"] == root]
    assert [e["args"]["step"] for e in steps] == list(range(done.run.steps))
    both = []
    for step in steps:
        begin, end = step["ts"], step["ts"] + step["dur"]
        engine = [e for e in spans if e["name"] == "engine" and begin < e["ts"] and e["ts"] + e["dur"] < end]
        delivered = [e for e in instants if e["name"] == "delivery" and begin < e["ts"] < end]
        assert all("rollout" in ranks[e["pid"]] for e in engine) and all(e["pid"] == root for e in delivered)
        print(f"step {step['args']['step']}: {step['dur'] / 1000:.0f} ms, in it {len(engine)} whole engine steps and "
              f"{len(delivered)} deliveries")  # fmt: skip
        both.append(bool(engine and delivered))
    assert any(both), "no step had engine steps and deliveries in it"
    assert {"update", "engine"} <= {e["name"] for e in spans if "rollout" in ranks[e["pid"]]}
    assert {"take", "train", "publish", "save"} <= {e["name"] for e in spans if e["pid"] == root}
