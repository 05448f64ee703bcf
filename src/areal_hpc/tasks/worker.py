"""A reward worker: the process that scores answers, started by the spawner.

It reads JSON lines from the socket whose descriptor is its last argument and answers in the
order of the questions: first the task (DatasetConfig, seed, split), answered by `ready`; then
samples (`item`, `completion`), each answered by `reward` or `error`. An
exception of the task's own code is an answer; what ends or hangs the process is seen from
outside (rollout/rewards.py). It ends with its socket.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from typing import IO, Any

from areal_hpc import tasks
from areal_hpc.config import DatasetConfig


def serve(lines: IO[str], answers: IO[str], load: Callable[..., Any]) -> None:
    """Answer every line of `lines` until it ends. `load(config, seed, split)` gives the task."""
    first = json.loads(lines.readline())
    task = load(DatasetConfig(**first["task"]), first["seed"], first["split"])
    _write(answers, {"ready": True})
    for line in lines:
        sample = json.loads(line)
        try:
            answer = {"reward": float(task.score(task.item(sample["item"]), sample["completion"]))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _write(answers, answer)


def _write(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def main(load: Callable[..., Any] = tasks.load) -> None:
    """Serve the socket named by the last argument."""
    channel = socket.socket(fileno=int(sys.argv[-1]))
    channel.set_inheritable(False)  # what the task starts must not keep the rank from seeing our end
    with channel, channel.makefile("r") as lines, channel.makefile("w") as answers:
        serve(lines, answers, load)


if __name__ == "__main__":
    main()
