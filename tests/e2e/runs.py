"""A run as a user starts one: model, questions and configuration in a folder, `mpirun ... areal-hpc train`.

Prompts are sums from a file that the tests write themselves, so that what was trained can be recounted without the
program. The model is random and a right answer is any that ends with one given digit: some answers of each batch do, so
weights move.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from launch import Job, command

REPO = Path(__file__).resolve().parents[2]
START_S = 240.0  # for a start on a machine that does much else; 20 s on one that does not
END_S = 60.0


def make_model(path: Path, *options: str) -> Path:
    """A tiny random model by tools/make_tiny_model.py, unless it is there."""
    if not path.exists():
        tool = [sys.executable, str(REPO / "tools/make_tiny_model.py"), str(path)]
        done = subprocess.run([*tool, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    return path


@dataclass
class Run:
    """One run folder. `changes` are dotted keys over the common configuration; `ranks` fit its layouts."""

    root: Path
    name: str
    model: Path
    ranks: int = 2
    tcp: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    rows: int = 20  # fewer than ordinals: several epochs
    seed: int = 5
    steps: int = 6
    B: int = 8
    eta: int = 2
    n_samples: int = 4
    new_tokens: int = 48

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        draw = random.Random(self.seed)
        asked = [f"{draw.randint(0, 999)}+{draw.randint(0, 99)}=" for _ in range(self.rows)]
        rows = [json.dumps({"prompt": question, "answer": str(draw.randint(0, 9))}) for question in asked]
        self.questions.write_text("\n".join(rows) + "\n")
        self.config.write_text(yaml.safe_dump(self._config()))

    @property
    def dir(self) -> Path:
        return self.root / "runs" / "e2e" / self.name

    @property
    def config(self) -> Path:
        return self.root / f"{self.name}.yaml"

    @property
    def questions(self) -> Path:
        return self.root / f"{self.name}.jsonl"

    def _config(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "experiment_name": "e2e",
            "trial_name": self.name,
            "seed": self.seed,
            "total_train_steps": self.steps,
            "cluster.fileroot": str(self.root / "runs"),
            "actor.path": str(self.model),
            "actor.mb_spec.max_tokens_per_mb": 256,
            "actor.ppo_n_minibatches": 2,
            "actor.optimizer": {"lr": 1e-3, "weight_decay": 0.0},
            "rollout.max_head_offpolicyness": self.eta,
            # Fewer at a time than a batch has: generation is what takes longest, and switches fall into it.
            "rollout.max_concurrent_rollouts": 24,
            "rollout.max_num_seqs": 12,
            "rollout.kv_cache_gib": 0.1,
            "gconfig": {"n_samples": self.n_samples, "max_new_tokens": self.new_tokens, "ignore_eos": True},
            "train_dataset": {
                "type": "file", "path": str(self.questions), "batch_size": self.B, "options": {"score": "number"},
            },
            "saver": {"freq_steps": 1, "keep_last": 100},
        }  # fmt: skip
        return _nested(keys | self.changes)

    def start(self, *overrides: str, ranks: int = 0) -> Job:
        """The run on its ranks, or on `ranks` when the overrides change the layout."""
        argv = [sys.executable, "-m", "areal_hpc.cli", "train", "--config", str(self.config), *overrides]
        return Job(command(ranks or self.ranks, argv, self.tcp), {"HF_HUB_OFFLINE": "1"})

    def metrics(self, kind: str = "step") -> list[dict[str, Any]]:
        """All records of a kind, superseded ones too."""
        path = self.dir / "metrics.jsonl"
        return [record for record in _records(path) if record["kind"] == kind]

    def attempts(self) -> list[dict[str, Any]]:
        path = self.dir / "attempts.jsonl"
        return _records(path)

    def exits(self) -> list[dict[str, Any]]:
        """What the exit files say, oldest first."""
        found = [json.loads(path.read_text()) for path in (self.dir / "log").glob("exit.*.json")]
        return sorted(found, key=lambda record: record["time"])

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted((self.dir / "log").glob("*.log")))


def _records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file that may be growing: a last line without its end does not count."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _nested(keys: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in keys.items():
        *way, last = name.split(".")
        node = out
        for part in way:
            node = node.setdefault(part, {})
        if isinstance(value, dict):
            node.setdefault(last, {}).update(value)
        else:
            node[last] = value
    return out


def areal_hpc(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command that is one process."""
    argv = [sys.executable, "-m", "areal_hpc.cli", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def wait_for(condition: Callable[[], Any], job: Job, limit_s: float = START_S) -> Any:
    """What `condition` says, once that is something. Fails with the job's output when it ends or time is up."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert job.process.poll() is None, f"it ended with {job.process.returncode}\n{job.finish(1).stdout}"
        assert time.monotonic() < deadline, f"not within {limit_s:g} s\n{job.finish(0).stdout}"
        time.sleep(0.002)
    return found


def finish(job: Job, run: Run, limit_s: float = START_S) -> tuple[int, str]:
    """Exit code and output. Nothing of the job (ranks, spawners, reward workers) may outlive its launcher."""
    try:
        code = job.process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still there after {limit_s:g} s\n{job.finish(0).stdout}\n{run.log()}") from None
    deadline = time.monotonic() + 10
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [line_of(pid) for pid in job.pids()]
    text = job.finish(1).stdout
    assert not left, f"outlived the job: {left}\n{text}"
    return code, text


def line_of(pid: int) -> str:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def ranks_of(job: Job) -> list[int]:
    """Process ids of the ranks: Open MPI marks them, and our spawners take the mark off."""
    found = []
    for pid in job.pids():
        try:
            if b"OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def handles_usr1(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1 (before that the signal ends it, as the system pleases)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def signal_ranks(job: Job, number: int) -> None:
    for pid in ranks_of(job):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)
