#!/usr/bin/env python3
"""What a quickstart did, for people and, as the last line, as JSON.

Usage: quickstart_summary.py SECONDS CONFIG [key=value ...]
Read from the run's metrics; records that a restart superseded do not count.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from areal_hpc.configfile import load
from areal_hpc.observe.metrics import read_metrics


def main(run: Path, seconds: float) -> None:
    steps, evals = read_metrics(run, kind="step"), read_metrics(run, kind="eval")
    heldout = {record["version"]: record["reward_mean"] for record in evals}
    trained = sum(record["trained_tokens"] for record in steps)
    stale = sum(record["stale_tokens"] for record in steps)
    result = {
        "heldout_before": heldout[min(heldout)],
        "heldout_after": heldout[max(heldout)],
        "steps": len(steps),
        "trained_tokens": trained,
        "stale_token_share": round(stale / max(trained, 1), 4),
        "seconds": round(seconds, 1),
        "run": str(run),
    }
    prompts = evals[-1]["prompts"]
    print(
        f"\nOf {prompts} held-out problems, one sample each at temperature 1, the model solved\n"
        f"  {result['heldout_before']:.1%} before and {result['heldout_after']:.1%} after {len(steps)} steps of "
        f"asynchronous RL\n"
        f"  {trained:,} tokens were trained, {result['stale_token_share']:.0%} of them made by an older version than "
        f"the one being trained\n"
        f"  {seconds:.0f} s with the warm-up; everything is in {run}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main(load(sys.argv[2], sys.argv[3:]).run_dir, float(sys.argv[1]))
