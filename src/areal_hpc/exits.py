"""How a job ended: exit codes, and the file that says more than a code can.

A code does not survive `srun` when one rank ends alone (137 or 143 arrive instead), so the
outcome is also `log/exit.<job>.<restart>.json`, written once: the first failing rank wins,
and an orderly end writes it if nobody failed. Scripts decide from the file. Standard library
only: the spawner writes it for ranks that can no longer speak.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
    """Exit codes of a job. Any other code is a crash too (a signal's, the launcher's)."""

    DONE = 0
    CRASH = 1
    REQUEUE = 75  # stopped in good order, a new checkpoint is there: start it again (EX_TEMPFAIL)
    BAD_CONFIG = 78  # ended within seconds, naming the key (EX_CONFIG)


SEVERITY = (Exit.DONE, Exit.REQUEUE, Exit.BAD_CONFIG, Exit.CRASH)


def worst(codes: Sequence[int]) -> int:
    """The code a job ends with when its ranks ask for these; an unknown code is a crash."""
    return max(codes, key=lambda code: SEVERITY.index(Exit(code)) if code in list(Exit) else len(SEVERITY))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the exit file holds; `version` is -1 and `ordinals` empty where they mean nothing."""

    code: int
    message: str
    rank: int = -1
    role: str = ""
    version: int = -1
    ordinals: list[int] = field(default_factory=list)
    time: float = 0.0  # seconds since the epoch, set when it is written


def exit_path(run_dir: str | Path, job: str, restart: int) -> Path:
    return Path(run_dir) / "log" / f"exit.{job}.{restart}.json"


def write_exit(path: str | Path, outcome: Outcome) -> bool:
    """Write the exit file unless one is there. True for the one rank that wrote it.

    Raises OSError when the disk refuses; a caller that is already failing reports its own
    error first.
    """
    record = {**asdict(outcome), "time": time.time()}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def read_exit(path: str | Path) -> Outcome | None:
    """The outcome, or None while there is none (also while it is being written)."""
    try:
        return Outcome(**json.loads(Path(path).read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
