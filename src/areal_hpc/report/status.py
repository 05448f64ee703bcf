"""What a run has done, from the files in its folder alone: no job, no MPI, no network is asked.

    running   run.lock has a fresh heartbeat (and, on its own host, a living process)
    stopped   the newest exit file says 75: ended in good order, to be started again
    finished  it says 0
    failed    it says anything else; `error` is its message
    dead      run.lock is stale and its job left no exit file: killed, or its node is gone
    queued    none of these: nothing has started here yet

Reading a run that is being written is safe: lines that are not complete are passed over, and
all else is renamed into place. Files of superseded attempts count for nothing.
"""

from __future__ import annotations

import re
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_hpc import runlock
from areal_hpc.exits import Exit, Outcome, exit_path, read_exit
from areal_hpc.observe.attempts import read_attempts
from areal_hpc.observe.metrics import read_metrics
from areal_hpc.observe.progress import duration
from areal_hpc.storage.checkpoint import find

QUEUED, RUNNING, STOPPED, FINISHED, FAILED, DEAD = "queued", "running", "stopped", "finished", "failed", "dead"
TREND = 20  # steps at each end that the reward is averaged over


@dataclass(frozen=True, slots=True)
class Status:
    """The answer of `areal-hpc status --json`, key by key. None where it is not known (yet)."""

    run: str
    state: str
    code: int | None  # exit code of the newest start that ended
    job: str  # job id and restart of the newest start
    restart: int
    host: str  # of the lock's holder
    heartbeat_age_s: float | None
    step: int  # training steps done, in surviving weights
    total_steps: int | None
    reward_first: float | None  # mean over the first steps
    reward_last: float | None  # mean over the newest
    evaluations: list[dict[str, Any]]  # version and reward_mean of each
    step_s: float | None  # mean over the newest
    left_s: float | None
    last_step_age_s: float | None
    trained_tokens: int
    staleness_mean: float | None
    checkpoints: list[str]  # names, newest first
    segments: int  # trajectory files
    attempts: list[dict[str, Any]]  # attempt, from_step, checkpoint, job_id, restart, started, config_changes
    error: str
    hang_reports: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_status(run_dir: str | Path) -> Status:
    """Reads a run's folder. Raises ValueError where a file in it is damaged, naming it."""
    run, now = Path(run_dir), time.time()
    holder, steps, attempts = runlock.read(runlock.lock_path(run)), read_metrics(run), read_attempts(run)
    ended = _newest_exit(run)
    if holder is not None and (own := read_exit(exit_path(run, holder.job, holder.restart))) is not None:
        ended = (own, holder.job, holder.restart)
    state, error = _state(holder, ended, bool(attempts), now)
    job, restart = ("", 0) if ended is None else ended[1:]
    if holder is not None:
        job, restart = holder.job, holder.restart
    total, done = _total_steps(run), steps[-1]["version"] if steps else (attempts[-1].from_step if attempts else 0)
    recent = steps[-TREND:]
    step_s = _mean(recent, "step_s")
    return Status(
        run=str(run),
        state=state,
        code=None if ended is None or state in (RUNNING, DEAD) else ended[0].code,
        job=job,
        restart=restart,
        host=holder.host if holder else "",
        heartbeat_age_s=now - holder.heartbeat if holder else None,
        step=done,
        total_steps=total,
        reward_first=_mean(steps[:TREND], "reward_mean"),
        reward_last=_mean(recent, "reward_mean"),
        evaluations=[{k: r.get(k) for k in ("version", "reward_mean")} for r in read_metrics(run, "eval")],
        step_s=step_s,
        left_s=(total - done) * step_s if state == RUNNING and total is not None and step_s is not None else None,
        last_step_age_s=now - steps[-1]["time"] if steps else None,
        trained_tokens=sum(r.get("trained_tokens", 0) for r in steps),
        staleness_mean=_mean(recent, "staleness_mean"),
        checkpoints=[path.name for path in find(run / "checkpoints")],
        segments=len(list((run / "trajectories").glob("*.h5"))),
        attempts=[asdict(attempt) for attempt in attempts],
        error=error,
        hang_reports=sorted(str(path) for path in (run / "log").glob("hang.*.txt")),
    )


def _state(
    holder: runlock.Holder | None, ended: tuple[Outcome, str, int] | None, began: bool, now: float
) -> tuple[str, str]:
    """State and error. The lock is released at an orderly end, so a lock without its job's exit
    file means a job that lives or one that died without a word."""
    if holder is not None and (ended is None or ended[1:] != (holder.job, holder.restart)):
        if not runlock.free_for(holder, "", -1, socket.gethostname(), now):
            return RUNNING, ""
        return DEAD, f"no sign of life from {holder}, and no exit file of it"
    if ended is None:
        return (DEAD, "it began, and left neither lock nor exit file") if began else (QUEUED, "")
    code = ended[0].code
    if code == Exit.DONE:
        return FINISHED, ""
    return (STOPPED, "") if code == Exit.REQUEUE else (FAILED, ended[0].message)


def _newest_exit(run: Path) -> tuple[Outcome, str, int] | None:
    """The exit file written last, with the job and restart in its name."""
    found = []
    for path in (run / "log").glob("exit.*.json"):
        name, outcome = re.fullmatch(r"exit\.(.+)\.(\d+)\.json", path.name), read_exit(path)
        if name and outcome is not None:
            found.append((outcome, name[1], int(name[2])))
    return max(found, key=lambda item: item[0].time, default=None)


def _total_steps(run: Path) -> int | None:
    import yaml

    path = run / "config.yaml"
    return yaml.safe_load(path.read_text()).get("total_train_steps") if path.is_file() else None


def _mean(records: list[dict[str, Any]], key: str) -> float | None:
    values = [r[key] for r in records if r.get(key) is not None]
    return sum(values) / len(values) if values else None


def describe(status: Status) -> str:
    """The same for people, a line per matter."""
    s, lines = status, []

    def line(name: str, text: str) -> None:
        lines.append(f"{name:<12}{text}")

    line("run", s.run)
    line("state", s.state + (f" (exit code {s.code})" if s.code is not None else ""))
    if s.job:
        beat = f", heartbeat {s.heartbeat_age_s:.0f} s ago on {s.host}" if s.heartbeat_age_s is not None else ""
        line("job", f"{s.job}, restart {s.restart}{beat}")
    line("step", f"{s.step} of {s.total_steps if s.total_steps is not None else '?'}" + _pace(s))
    if s.reward_last is not None:
        line("reward", f"{s.reward_first:.3f} in the first steps, {s.reward_last:.3f} in the newest")
    for evaluation in s.evaluations:
        line("evaluation", f"version {evaluation['version']}: {evaluation['reward_mean']}")
    if s.trained_tokens:
        stale = f", mean staleness {s.staleness_mean:.2f}" if s.staleness_mean is not None else ""
        line("tokens", f"{s.trained_tokens:,} trained{stale}")
    newest = f", newest {s.checkpoints[0]}" if s.checkpoints else ""
    line("checkpoints", f"{len(s.checkpoints)}{newest}; {s.segments} trajectory segments")
    for attempt in s.attempts:
        changes = ", ".join(f"{k} {old} -> {new}" for k, (old, new) in attempt["config_changes"].items())
        start = f"{attempt['started']} from step {attempt['from_step']}, job {attempt['job_id']}"
        line(f"attempt {attempt['attempt']}", start + (f"; changed: {changes}" if changes else ""))
    if s.error:
        line("error", s.error)
    for report in s.hang_reports:
        line("hang report", report)
    return "\n".join(lines)


def _pace(s: Status) -> str:
    """How fast, how long still, how long ago."""
    parts = [f"{s.step_s:.2f} s a step"] if s.step_s is not None else []
    parts += [f"{duration(s.left_s)} left"] if s.left_s is not None else []
    parts += [f"the last one {duration(s.last_step_age_s)} ago"] if s.last_step_age_s is not None else []
    return f" ({', '.join(parts)})" if parts else ""
