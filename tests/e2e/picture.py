"""What a trace shows: rollout ranks generate and deliver while a trainer step goes on."""

from __future__ import annotations

import json
from pathlib import Path


def assert_overlap(run_dir: Path, ranks: int, steps: int) -> None:
    """The only trace of a run: all ranks, all steps, whole engine steps and deliveries inside a training step."""
    (path,) = (run_dir / "log").glob("trace.*.json")
    found = json.loads(path.read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert len(titles) == ranks
    root = 0  # trainer rank 0 is rank 0 of a world on one node
    assert "trainer" in titles[root]
    spans = [e for e in found if e["ph"] == "X"]
    instants = [e for e in found if e["ph"] == "i"]
    trained = [e for e in spans if e["name"] == "train" and e["pid"] == root]
    assert [e["args"]["step"] for e in trained] == list(range(steps))
    engine = [e for e in spans if e["name"] == "engine"]
    deliveries = [e for e in instants if e["name"] == "delivery"]
    assert all("rollout" in titles[e["pid"]] for e in engine)
    both = []
    for step in trained:
        begin, end = step["ts"], step["ts"] + step["dur"]
        whole = sum(begin < e["ts"] and e["ts"] + e["dur"] < end for e in engine)
        delivered = [e for e in deliveries if begin < e["ts"] < end]
        assert all(e["pid"] == root for e in delivered)
        if len(trained) <= 20:
            print(f"step {step['args']['step']}: {step['dur'] / 1000:.0f} ms, in it {whole} whole engine steps and "
                  f"{len(delivered)} deliveries")  # fmt: skip
        both.append(bool(whole and delivered))
    print(f"{sum(both)} of {steps} training steps had whole engine steps and deliveries in them")
    assert any(both), "no step had engine steps and deliveries in it"
    assert {"update", "engine"} <= {e["name"] for e in spans if "rollout" in titles[e["pid"]]}
    assert {"take", "train", "publish", "save"} <= {e["name"] for e in spans if e["pid"] == root}
