"""What cannot run is refused by all ranks with 78, once, in words that say what to change."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from conftest import Interrupted
from runs import Run, finish

SOON_S = 200.0  # 2 to 5 s where nothing else runs; what would wait for others waits 15 minutes
pytestmark = pytest.mark.timeout(300)

CASES = {
    "a world of the wrong size": (3, [], ["the world has 3 ranks", "2"]),
    "an unknown key": (
        2,
        ["rollout.max_head_offpolicynes=2"],
        ["rollout.max_head_offpolicynes: unknown key", "rollout.max_head_offpolicyness"],
    ),
    "a wrong type": (2, ["gconfig.n_samples=many"], ["gconfig.n_samples"]),
    "an answer longer than the model takes": (
        2,
        ["gconfig.max_new_tokens=600"],
        ["gconfig.max_new_tokens=600", "positions for 512"],
    ),
    "no room for one sample's KV": (2, ["rollout.kv_cache_gib=1e-5"], ["rollout.kv_cache_gib=1e-05", "at least"]),
    "a layout that the model does not divide over": (4, ["rollout.backend=vllm:d1t3"], ["t3", "4"]),
    "fewer rollouts than samples": (
        2,
        ["rollout.max_concurrent_rollouts=3"],
        ["rollout.max_concurrent_rollouts=3", "gconfig.n_samples"],
    ),
    "sampling that cannot be trained on": (2, ["gconfig.top_p=0.9"], ["gconfig.top_p=0.9"]),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, tiny: Path, tmp_path: Path) -> None:
    ranks, overrides, said = CASES[case]
    run = Run(tmp_path, "refused", tiny)
    began = time.monotonic()
    code, text = finish(run.start(*overrides, ranks=ranks), run)
    took = time.monotonic() - began
    print(f"{took:.1f} s: {text.splitlines()[0]}")
    assert code == 78, text
    assert took < SOON_S
    (line,) = [line for line in text.splitlines() if line.startswith("areal-hpc: ")]
    assert all(part in line for part in said), line
    assert "Traceback" not in text
    assert not list(run.dir.glob("checkpoints/*"))


def test_the_size_that_is_needed_is_named(tiny: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, "size", tiny, changes={"actor.backend": "megatron:d2t2p2", "rollout.backend": "vllm:d3t1"})
    code, text = finish(run.start(ranks=2), run)
    assert code == 78, text
    (line,) = [line for line in text.splitlines() if line.startswith("areal-hpc: ")]
    assert "11" in line and "the world has 2 ranks" in line, line


def test_a_folder_that_a_live_run_owns(interrupted: Interrupted) -> None:
    code, text = interrupted.refused
    assert code == 78, text
    (line,) = [line for line in text.splitlines() if line.startswith("areal-hpc: ")]
    assert "trial_name=interrupted" in line and "run.lock: held by job" in line, line
