"""Runs that several files of tests look at: each is made once a session, when it is first asked for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launch import Job
from runs import START_S, Run, areal_hpc, finish, handles_usr1, line_of, make_model, ranks_of, signal_ranks, wait_for

SAVE_EVERY = 5  # steps, of the run that is interrupted


@dataclass
class Done:
    """A run that went to its end in one start, and what it printed."""

    run: Run
    text: str
    temperature: float = 1.0


def through(run: Run, limit_s: float = START_S, temperature: float = 1.0) -> Done:
    code, text = finish(run.start(), run, limit_s)
    assert code == 0, f"exit code {code}\n{text}\n{run.log()}"
    return Done(run, text, temperature)


@pytest.fixture(scope="session", autouse=True)
def shared_memory() -> Iterator[None]:
    """No run leaves memory of its node taken by vLLM's CPU group, whether it came to its end or was killed."""

    def names() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if "cpushm" in name}

    before = names()
    yield
    assert not names() - before, "runs have ended and left these in /dev/shm"


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def tiny(root: Path) -> Path:
    """Qwen2, tied, with every tensor away from its initial value."""
    return make_model(root / "qwen2", "--noise", "0.02")


@pytest.fixture(scope="session")
def one_and_one(root: Path, tiny: Path) -> Done:
    """megatron:d1t1p1 + vllm:d1t1 over shared memory, traced."""
    run = Run(root, "one_and_one", tiny, changes={"stats_logger.trace": True})
    return through(run)


@pytest.fixture(scope="session")
def distributed_optimizer(root: Path) -> Done:
    """megatron:d2t1p1 with the distributed optimizer + vllm:d1t1; another temperature; evaluated at both ends."""
    model = make_model(root / "llama", "--family", "llama", "--untied", "--noise", "0.02")
    changes = {
        "actor.backend": "megatron:d2t1p1",
        "actor.distributed_optimizer": True,
        "gconfig.temperature": 0.8,
        "rollout.max_num_seqs": 8,
        "evaluator": {"at_start": True, "at_end": True},
    }
    run = Run(root, "distributed_optimizer", model, ranks=3, changes=changes)
    run.config.write_text(run.config.read_text() + "valid_dataset: ${train_dataset}\n")
    return through(run, temperature=0.8)


@pytest.fixture(scope="session")
def eight_over_tcp(root: Path) -> Done:
    """megatron:d1t2p2 + vllm:d2t2, no message through shared memory, traced."""
    model = make_model(root / "qwen3", "--family", "qwen3", "--noise", "0.02")
    changes = {
        "actor.backend": "megatron:d1t2p2",
        "rollout.backend": "vllm:d2t2",
        # three at a time: generation lasts longer than a training step, so that switches fall into samples
        "rollout.max_num_seqs": 3,
        "stats_logger.trace": True,
    }
    run = Run(root, "eight_over_tcp", model, ranks=8, tcp=True, steps=5, new_tokens=32, changes=changes)
    return through(run, 2 * START_S)


@dataclass
class Interrupted:
    """A run in five starts; `ends` are their exit codes and what they printed."""

    run: Run
    ends: dict[str, tuple[int, str]] = field(default_factory=dict)
    refused: tuple[int, str] = (0, "")  # a start in the folder while the third held it
    stop: subprocess.CompletedProcess[str] | None = None  # the command that ended the third
    processes: list[str] = field(default_factory=list)  # command lines of the third while it trained


@pytest.fixture(scope="session")
def interrupted(root: Path, tiny: Path) -> Interrupted:
    """Stopped by signals, by a signal during imports, by `areal-hpc stop` on other ranks, and killed; then to its end.

    Where it is stopped is drawn anew each time; the seed is printed.
    """
    draw = random.Random(seed := int.from_bytes(os.urandom(4), "big"))
    print(f"interrupted at steps drawn with seed {seed}")
    # Its end is set by the last start, so that no start comes to it before it is stopped, however fast its steps are;
    # and a small rate keeps answers different from each other, however many steps there are.
    changes = {"saver": {"freq_steps": SAVE_EVERY}, "actor.optimizer.lr": 1e-5}
    run = Run(root, "interrupted", tiny, steps=10**6, B=4, new_tokens=32, changes=changes)
    it = Interrupted(run)

    def steps_done() -> int:
        return len(run.metrics())

    def after(steps: int, job: Job) -> None:
        wanted = steps_done() + steps
        wait_for(lambda: steps_done() >= wanted, job)

    job = run.start()
    after(draw.randint(1, 4), job)
    signal_ranks(job, signal.SIGUSR1)
    time.sleep(draw.uniform(0, 0.9))
    signal_ranks(job, signal.SIGUSR1)
    it.ends["signals"] = finish(job, run)

    job = run.start()
    wait_for(lambda: len(ranks_of(job)) == 2 and all(map(handles_usr1, ranks_of(job))), job)
    time.sleep(draw.uniform(0, 1.5))
    assert len(run.attempts()) == 1, "the second start is past its imports"
    signal_ranks(job, signal.SIGUSR1)
    it.ends["imports"] = finish(job, run)

    job = run.start("actor.backend=megatron:d2t1p1", ranks=3)
    wait_for((run.dir / "run.lock").exists, job)
    other = run.start()
    it.refused = finish(other, run)
    after(draw.randint(1, 3), job)
    it.processes = [line_of(pid) for pid in job.pids()]
    it.stop = areal_hpc("stop", run.dir)
    it.ends["stop file"] = finish(job, run)

    job = run.start()
    after(draw.randint(1, 5), job)
    wait_for(lambda: run.metrics()[-1]["version"] % SAVE_EVERY, job)  # something is lost
    os.kill(draw.choice(ranks_of(job)), signal.SIGKILL)
    it.ends["kill"] = finish(job, run)

    # Further than the checkpoint's waiting groups reach: the last start trains groups of its own too.
    run.steps = max(record["version"] for record in run.metrics()) + draw.randint(run.eta + 2, 2 * SAVE_EVERY)
    it.ends["to its end"] = finish(run.start(f"total_train_steps={run.steps}"), run)
    return it
