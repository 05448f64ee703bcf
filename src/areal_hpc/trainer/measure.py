"""What a step trained, in numbers: summed over the homes, for metrics.jsonl (observe/metrics.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from areal_hpc.records import Group
from areal_hpc.trainer.commands import wait

SUMS = (
    "samples", "reward", "reward_squared", "tokens", "stale", "staleness", "truncated", "moved_bytes",
)  # fmt: skip
PEAKS = ("staleness", "answer")


def measure(
    comm: MPI.Comm, step: int, groups: Sequence[Group], moved_bytes: int, pump: Callable[[], None]
) -> dict[str, float]:
    """The metrics of one step from each home's groups. Collective over the trainer communicator.

    Staleness of a token: `step` less the version that made it. `moved_bytes` is this rank's share
    of the weight update.
    """
    scored = [t for group in groups for t in group.scored]
    age_T = step - np.concatenate([t.version_T for t in scored]) if scored else np.empty(0, np.int64)
    reward = np.array([t.reward for t in scored], np.float64)
    sums = np.array(
        [
            len(scored),
            reward.sum(),
            (reward**2).sum(),
            len(age_T),
            (age_T > 0).sum(),
            age_T.sum(),
            sum(t.finish == "length" for t in scored),
            moved_bytes,
        ],
        np.float64,
    )
    peaks = np.array([age_T.max(initial=0), max((len(t.tokens_T) for t in scored), default=0)], np.float64)
    requests = [comm.Iallreduce(MPI.IN_PLACE, sums, MPI.SUM), comm.Iallreduce(MPI.IN_PLACE, peaks, MPI.MAX)]
    wait(requests, pump)
    total, peak = dict(zip(SUMS, sums.tolist(), strict=True)), dict(zip(PEAKS, peaks.tolist(), strict=True))
    samples, tokens = max(total["samples"], 1.0), max(total["tokens"], 1.0)
    mean = total["reward"] / samples
    return {
        "trained_tokens": int(total["tokens"]),
        "trained_samples": int(total["samples"]),
        "reward_mean": mean,
        "reward_std": float(np.sqrt(max(total["reward_squared"] / samples - mean**2, 0.0))),
        "answer_tokens_mean": total["tokens"] / samples,
        "answer_tokens_max": int(peak["answer"]),
        "truncated_share": total["truncated"] / samples,
        "staleness_mean": total["staleness"] / tokens,
        "staleness_max": int(peak["staleness"]),
        "stale_tokens": int(total["stale"]),
        "moved_bytes": int(total["moved_bytes"]),
    }
