"""Attempts: where each start of a run began, and so which records of earlier ones still count.

A run that restarts from the checkpoint of version s opens a new attempt. What earlier
attempts recorded of versions above s belongs to weights that do not survive: it is
*superseded*. Nothing is rewritten; every record carries its `attempt` and `version`, and
readers apply one rule:

    superseded(record)  =  some attempt a > record.attempt has record.version > a.from_step

`attempts.jsonl` holds one line per attempt, appended by rank 0 before the first record of
that attempt, synced to the disk. Step i (from 0) makes version i + 1, so an attempt
`from_step` s trains step s first and its weights at the start are version s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from areal_hpc.observe import jsonl

FILE = "attempts.jsonl"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a run. `checkpoint`: name of the file it was restored from, empty for none.
    `config_changes`: {key: [value before, value now]} against the attempt before."""

    attempt: int
    from_step: int
    checkpoint: str
    job_id: str
    restart: int
    started: str
    config_changes: dict[str, list[Any]] = field(default_factory=dict)


def read_attempts(run_dir: str | Path) -> list[Attempt]:
    """All attempts of a run, in order; none when it never started."""
    return [Attempt(**record) for record in jsonl.read(Path(run_dir) / FILE)]


def begin_attempt(
    run_dir: str | Path,
    *,
    from_step: int,
    checkpoint: str,
    job_id: str,
    restart: int,
    config_changes: dict[str, list[Any]],
) -> Attempt:
    """Appends the next attempt and returns it. By world rank 0 or the trainer's, once per start."""
    earlier = read_attempts(run_dir)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    attempt = Attempt(len(earlier), from_step, checkpoint, job_id, restart, started, config_changes)
    file = jsonl.Appender(Path(run_dir) / FILE)
    file.append(asdict(attempt))
    file.sync()
    file.close()
    return attempt


def superseded(record: dict[str, Any], attempts: Iterable[Attempt]) -> bool:
    """Whether a record (with `attempt` and `version`) belongs to weights that a restart undid."""
    return any(a.attempt > record["attempt"] and record["version"] > a.from_step for a in attempts)


def save_config(run_dir: str | Path, text: str) -> dict[str, list[Any]]:
    """Writes `config.yaml` (complete or not at all) and returns the keys that differ from the one
    it replaces, as {key: [before, now]}; {} when there was none."""
    path = Path(run_dir) / "config.yaml"
    before = path.read_text() if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".yaml.part")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    return {} if before is None else config_changes(before, text)


def config_changes(before: str, now: str) -> dict[str, list[Any]]:
    """Dotted keys whose values differ between two YAML texts, as {key: [before, now]}; a key that
    only one of them has counts as None in the other."""
    import yaml

    old, new = (dict(_flat(yaml.safe_load(text) or {})) for text in (before, now))
    return {name: [old.get(name), new.get(name)] for name in {**old, **new} if old.get(name) != new.get(name)}


def _flat(node: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value
