"""Metrics: one line of JSON per training step in `metrics.jsonl`, the same as TensorBoard scalars.

Trainer rank 0 alone writes them. Records of a superseded attempt stay in the file;
`read_metrics` leaves them out (see attempts.py), and TensorBoard is told its purge step.

A record of kind "step" (what the loop knows, in these names; unknown values are left out):

    kind, attempt           "step"; the attempt that wrote it
    step, version           step i from 0; the version it published, i + 1
    time, time_s, step_s    UTC seconds since 1970; since this Metrics was opened; since the record before
    trained_tokens          answer tokens of the trained groups, those of skipped minibatches too, all DP ranks
    trained_groups, trained_samples
    reward_mean, reward_std rewards of the trained samples, before bias and scaling
    answer_tokens_mean, answer_tokens_max, truncated_share
                            lengths of the trained answers; share that ended by length
    staleness_mean, staleness_max
                            step minus the version that made the token, over trained tokens
    stale_tokens            trained tokens made by a version older than `step`
    wait_s, wait_ordinal    the longest wait for one ordinal at the head of the line, and which; 0 and -1 for none
    update_s                proximal log-probabilities, advantages, minibatches
    publish_s               the probe's log-probabilities, READY of all replicas, the exchange as far as this rank
    save_s, eval_s          0 when there was none
    generated_tokens        tokens sampled by all replicas since the record before
    generate_s              seconds inside engine steps since the record before, mean over replicas
    dropped                 ordinals dropped since the record before
    skipped_minibatches     left out behind one with a loss or gradient that is not finite
    moved_bytes             sent in the weight update, counted at the MPI calls
    probe_max               largest log-probability difference of the newest version that was proved, all replicas
    loss, entropy, grad_norm, lr, clip_ratio, approx_kl/behave, importance_weight/mean, ...
                            what the actor's update returned, under its names (Outcome.metrics)

A record of kind "eval" (`version` is the one evaluated; 0 is before training):

    kind, attempt, version, time, time_s, prompts, reward_mean, failed (samples that could not be scored)

A value that is not finite is `null` in the file (JSON has no NaN) and NaN in TensorBoard.
TensorBoard's step axis counts versions: the point of step i lies at i + 1, beside an
evaluation of the weights that it made.
"""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from typing import Any

from areal_hpc.observe import jsonl
from areal_hpc.observe.attempts import Attempt, read_attempts, superseded

FILE = "metrics.jsonl"
STAMPS = ("kind", "attempt", "step", "version", "time", "time_s", "step_s")


class Metrics:
    """The writer of one attempt. A record is with the operating system when a call returns; `sync`
    before a checkpoint gets its name, so that none is ahead of its metrics."""

    def __init__(self, run_dir: str | Path, attempt: Attempt, *, tensorboard: bool = True) -> None:
        self.attempt = attempt
        self._file = jsonl.Appender(Path(run_dir) / FILE)
        self._events = Events(Path(run_dir) / "tensorboard", attempt) if tensorboard else None
        self._opened = self._last_step = time.monotonic()

    def step(self, step: int, **values: Any) -> dict[str, Any]:
        """Writes the record of a training step and returns it, for the progress display."""
        now = time.monotonic()
        step_s, self._last_step = now - self._last_step, now
        return self._write("train", {"kind": "step", "step": step, "version": step + 1, "step_s": step_s}, values)

    def evaluation(self, version: int, **values: Any) -> dict[str, Any]:
        """Writes the record of an evaluation of `version` and returns it."""
        return self._write("eval", {"kind": "eval", "version": version}, values)

    def _write(self, prefix: str, stamps: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
        taken = [name for name in STAMPS if name in values]
        if taken:
            raise ValueError(f"metrics: {', '.join(taken)} cannot be given: Metrics sets {', '.join(STAMPS)}")
        stamps |= {"attempt": self.attempt.attempt, "time": time.time(), "time_s": time.monotonic() - self._opened}
        record = stamps | {name: _plain(value) for name, value in values.items()}
        self._file.append({name: _finite(value) for name, value in record.items()})
        if self._events:
            self._events.scalars(record["version"], {f"{prefix}/{k}": v for k, v in record.items() if k not in STAMPS})
        return record

    def sync(self) -> None:
        """Everything recorded so far is on the disk when this returns."""
        self._file.sync()

    def close(self) -> None:
        self.sync()
        self._file.close()
        if self._events:
            self._events.close()


class Events:
    """One TensorBoard event file per attempt.

    Written record by record: tensorboard's own writer would start a thread, torch's would import
    torch. Restart markers: tensorboard drops what earlier files of the folder hold from the purge
    step on (its event file version 2, SessionLog.START).
    """

    def __init__(self, folder: Path, attempt: Attempt) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # tensorboard reads the files of a folder in the order of their names
        name = f"events.out.tfevents.{attempt.attempt:06d}.{int(time.time())}.{socket.gethostname()}"
        self._records = RecordWriter(open(folder / name, "wb"))  # noqa: SIM115 (closed by close)
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if attempt.attempt > 0:
            start = SessionLog(status=SessionLog.START)
            self._put(Event(wall_time=time.time(), step=attempt.from_step + 1, session_log=start))

    def scalars(self, step: int, values: dict[str, Any]) -> None:
        """Writes the numbers among `values`, each under its tag."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {tag: value for tag, value in values.items() if isinstance(value, int | float)}
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()])
        self._put(Event(wall_time=time.time(), step=step, summary=summary))

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as Python's own number."""
    return value.item() if hasattr(value, "item") else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(run_dir: str | Path, kind: str = "step") -> list[dict[str, Any]]:
    """The records of one kind that count, in the order written: those of surviving weights only."""
    attempts = read_attempts(run_dir)
    records = (record for record in jsonl.read(Path(run_dir) / FILE) if record["kind"] == kind)
    return [record for record in records if not superseded(record, attempts)]
