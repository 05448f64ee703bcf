"""The command line in processes of its own, and `status` on run folders made by the real writers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import mpirun
from typer.testing import CliRunner

from areal_hpc import cli, exits, processes, runlock, stopfile
from areal_hpc.observe.attempts import begin_attempt, save_config
from areal_hpc.observe.metrics import Metrics
from areal_hpc.report.status import read_status

COMMANDS = ["train", "sft", "export", "status", "stop", "layout"]


def areal_hpc(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_hpc.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def write_config(path: Path, **more: object) -> Path:
    keys = {"experiment_name": "toy", "actor.path": "/nowhere", "cluster.fileroot": str(path.parent)} | more
    path.write_text("".join(f"{key}: {value}\n" for key, value in nested(keys).items()))
    return path


def nested(keys: dict[str, object]) -> dict[str, object]:
    """{"a.b": 1} as {"a": {"b": 1}}, which YAML takes in flow style."""
    out: dict[str, object] = {}
    for key, value in keys.items():
        *groups, last = key.split(".")
        node = out
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = value
    return out


# ---- help, refusals ----


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_that_calls_the_command(command):
    text = CliRunner().invoke(cli.app, [command, "--help"]).output
    example = text.split("Example:")[1]
    assert f"areal-hpc {command} " in example


def test_help_lists_every_command():
    out = areal_hpc("--help").stdout
    for command in COMMANDS:
        assert f"\n  {command} " in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from areal_hpc import cli; "
        "CliRunner().invoke(cli.app, ['train', '--help']); "
        "print([m for m in ('torch', 'mpi4py', 'numpy', 'h5py', 'vllm', 'omegaconf', 'rich') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_wrong_key_ends_with_78_and_one_line(tmp_path, command):
    config = write_config(tmp_path / "c.yaml")
    out = areal_hpc(command, "--config", config, "actor.optimiser.lr=1")
    assert (out.returncode, out.stdout) == (78, "")
    assert len(out.stderr.splitlines()) == 1
    assert out.stderr.startswith("areal-hpc: actor.optimiser") and "actor.optimizer" in out.stderr


def test_all_ranks_end_with_78_and_one_of_them_says_why(tmp_path):
    config = write_config(tmp_path / "c.yaml")
    program = [sys.executable, "-m", "areal_hpc.cli", "train", "--config", str(config), "gconfig.top_p=0.9"]
    out = mpirun(3, program, timeout=60)
    assert out.returncode == 78, out.stdout
    assert out.stdout.count("areal-hpc: gconfig.top_p=0.9") == 1, out.stdout


def test_a_world_of_the_wrong_size_ends_with_78_and_leaves_it_to_status(tmp_path):
    config = write_config(tmp_path / "c.yaml")
    out = areal_hpc("train", "--config", config, "trial_name=t")
    assert out.returncode == 78
    assert len(out.stderr.splitlines()) == 1 and "1 + 1 = 2" in out.stderr
    found = read_status(tmp_path / "toy" / "t")
    assert (found.state, found.code) == ("failed", 78) and "1 + 1 = 2" in found.error


def test_a_missing_config_file_is_named(tmp_path):
    out = areal_hpc("layout", "--config", tmp_path / "no.yaml", "--nodes", "1", "--gpus-per-node", "2")
    assert out.returncode == 78 and "no.yaml: no such file" in out.stderr


# ---- layout ----


def layout(tmp_path: Path, nodes: int, gpus: int, *overrides: str):
    config = write_config(tmp_path / "c.yaml")
    size = ["--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    return CliRunner().invoke(cli.app, ["layout", "--config", str(config), *size, *overrides])


def test_layout_gives_each_rank_its_role_under_its_node(tmp_path):
    out = layout(tmp_path, 2, 4, "actor.backend=megatron:d1t2p2", "rollout.backend=vllm:d2t2")
    assert out.exit_code == 0
    lines = [" ".join(line.split()) for line in out.output.splitlines()]
    assert lines[0] == "8 ranks"
    assert "dp 1 * tp 2 * pp 2 = 4" in lines[1] and "replicas 2 * tp 2 = 4" in lines[2]
    assert lines[3:8] == [
        "node0",
        "rank 0 local 0 trainer dp 0 tp 0 pp 0",
        "rank 1 local 1 trainer dp 0 tp 1 pp 0",
        "rank 2 local 2 trainer dp 0 tp 0 pp 1",
        "rank 3 local 3 trainer dp 0 tp 1 pp 1",
    ]
    assert lines[8] == "node1" and lines[12] == "rank 7 local 3 rollout replica 1 tp 1"


def test_layout_refuses_a_wrong_size_with_the_arithmetic(tmp_path):
    out = layout(tmp_path, 1, 4, "actor.backend=megatron:d2t1p1")
    assert out.exit_code == 78
    assert "dp 2 * tp 1 * pp 1 = 2" in out.output and "the world has 4 ranks" in out.output


# ---- status ----


def make_run(run: Path, steps: int = 0, attempt_from: int = 0, job: str = "17", restart: int = 0, reward: float = 0.5):
    """A start of a run as the job's own writers leave it, up to where it holds the lock."""
    (run / "log").mkdir(parents=True, exist_ok=True)
    changes = save_config(run, f"total_train_steps: 10\nseed: {restart}\n")
    checkpoint = f"step-{attempt_from:08d}.h5" if attempt_from else ""
    attempt = begin_attempt(
        run, from_step=attempt_from, checkpoint=checkpoint, job_id=job, restart=restart, config_changes=changes
    )
    metrics = Metrics(run, attempt)
    for step in range(attempt_from, attempt_from + steps):
        metrics.step(step, reward_mean=reward, trained_tokens=100, staleness_mean=1.0)
    metrics.close()


def hold(run: Path, job: str = "17", restart: int = 0, **changes: object) -> runlock.RunLock:
    """The lock as a living holder (this process) has it, then with `changes` in its file."""
    lock = runlock.RunLock.acquire(runlock.lock_path(run), job, restart, os.getpid())
    if changes:
        path = runlock.lock_path(run)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return lock


def end(run: Path, code: int, message: str, job: str = "17", restart: int = 0) -> None:
    assert exits.write_exit(exits.exit_path(run, job, restart), exits.Outcome(code, message, rank=1, role="rollout"))


def test_queued_is_a_folder_in_which_nothing_began(tmp_path):
    found = read_status(tmp_path)
    assert (found.state, found.step, found.total_steps, found.code) == ("queued", 0, None, None)


def test_running(tmp_path):
    make_run(tmp_path, steps=4)
    hold(tmp_path)
    found = read_status(tmp_path)
    assert (found.state, found.step, found.total_steps, found.job) == ("running", 4, 10, "17")
    assert found.reward_last == 0.5 and found.trained_tokens == 400
    assert found.left_s is not None and found.heartbeat_age_s < 30
    assert found.host == socket.gethostname()


def test_starting_has_no_step_yet(tmp_path):
    make_run(tmp_path)
    hold(tmp_path)
    found = read_status(tmp_path)
    assert (found.state, found.step, found.reward_last, found.left_s) == ("running", 0, None, None)


@pytest.mark.parametrize(
    ("code", "state", "error"),
    [(0, "finished", ""), (75, "stopped", ""), (1, "failed", "boom"), (78, "failed", "boom")],
)
def test_an_exit_file_says_how_it_ended(tmp_path, code, state, error):
    make_run(tmp_path, steps=10)
    lock = hold(tmp_path)
    end(tmp_path, code, "boom")
    lock.release()
    found = read_status(tmp_path)
    assert (found.state, found.code, found.error) == (state, code, error)


def test_a_crash_that_left_its_lock_is_failed_not_running(tmp_path):
    make_run(tmp_path, steps=2)
    hold(tmp_path)
    end(tmp_path, 1, "rank 1: KeyError")
    found = read_status(tmp_path)
    assert (found.state, found.error, found.code) == ("failed", "rank 1: KeyError", 1)


def dead_pid() -> dict[str, int]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = processes.ticks(child.pid)
    child.kill()
    child.wait()
    return {"pid": child.pid, "ticks": ticks}


@pytest.mark.parametrize("case", ["process gone on this host", "silent on another host"])
def test_dead_is_a_stale_lock_without_an_exit_file(tmp_path, case):
    make_run(tmp_path, steps=2)
    end(tmp_path, 75, "", restart=0)  # the start before it ended well
    make_run(tmp_path, steps=1, attempt_from=2, restart=1)
    gone = dead_pid() if case.startswith("process") else {"host": "elsewhere", "heartbeat": time.time() - 61}
    hold(tmp_path, restart=1, **gone)
    found = read_status(tmp_path)
    assert (found.state, found.code, found.restart) == ("dead", None, 1)
    assert "job 17 restart 1" in found.error


def test_another_hosts_fresh_heartbeat_is_running(tmp_path):
    make_run(tmp_path, steps=2)
    hold(tmp_path, host="elsewhere", pid=1, heartbeat=time.time() - 30)
    assert read_status(tmp_path).state == "running"


def test_a_requeued_run_that_runs_again_is_running(tmp_path):
    make_run(tmp_path, steps=3)
    end(tmp_path, 75, "")
    hold(tmp_path, restart=1)
    assert read_status(tmp_path).state == "running"


def test_superseded_steps_do_not_count(tmp_path):
    make_run(tmp_path, steps=6, reward=0.1)
    make_run(tmp_path, steps=1, attempt_from=2, restart=1, reward=0.9)  # restored at 2: 3 to 6 are undone
    end(tmp_path, 75, "", restart=1)
    found = read_status(tmp_path)
    assert found.step == 3 and found.trained_tokens == 300
    assert found.reward_last == pytest.approx((0.1 + 0.1 + 0.9) / 3)
    assert [a["from_step"] for a in found.attempts] == [0, 2]
    assert found.attempts[1]["config_changes"] == {"seed": [0, 1]}


def test_checkpoints_newest_first_and_drafts_left_out(tmp_path):
    make_run(tmp_path, steps=1)
    (tmp_path / "checkpoints").mkdir()
    for name in ("step-00000009.h5", "step-00000100.h5", "step-00000020.h5", "step-00000200.h5.part"):
        (tmp_path / "checkpoints" / name).touch()
    assert read_status(tmp_path).checkpoints == ["step-00000100.h5", "step-00000020.h5", "step-00000009.h5"]


def test_status_for_people_and_for_scripts(tmp_path):
    make_run(tmp_path, steps=3)
    end(tmp_path, 1, "rank 1 (rollout): engine step: boom")
    text = areal_hpc("status", tmp_path)
    assert text.returncode == 0
    for part in ("failed (exit code 1)", "3 of 10", "0.500", "rank 1 (rollout): engine step: boom", "attempt 0"):
        assert part in text.stdout
    found = json.loads(areal_hpc("status", tmp_path, "--json").stdout)
    assert (found["state"], found["step"], found["total_steps"], found["code"]) == ("failed", 3, 10, 1)


def test_status_imports_neither_torch_nor_mpi(tmp_path):
    make_run(tmp_path, steps=3)
    code = (
        f"import sys; from areal_hpc.report.status import read_status; read_status({str(tmp_path)!r}); "
        "print([m for m in ('torch', 'mpi4py', 'h5py', 'tensorboard') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    out = areal_hpc("status", tmp_path / "nothing")
    assert out.returncode == 1 and "no such run folder" in out.stderr


# ---- stop ----


def test_stop_asks_the_holder_of_the_lock_and_no_later_start(tmp_path):
    make_run(tmp_path, steps=1)
    hold(tmp_path)
    assert not stopfile.asked(tmp_path, "17", 0)
    for _ in range(2):
        out = CliRunner().invoke(cli.app, ["stop", str(tmp_path)])
        assert out.exit_code == 0 and f"areal-hpc status {tmp_path}" in out.output
    assert stopfile.asked(tmp_path, "17", 0)
    assert not stopfile.asked(tmp_path, "17", 1)
    assert not stopfile.asked(tmp_path, "18", 0)


def test_stop_of_a_run_that_is_not_running_says_so(tmp_path):
    make_run(tmp_path, steps=10)
    end(tmp_path, 0, "")
    out = CliRunner().invoke(cli.app, ["stop", str(tmp_path)])
    assert out.exit_code == 1 and "not running (finished)" in out.output
    assert not (tmp_path / "stop").exists()


# ---- export ----


def test_export_names_what_it_misses(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001.h5"
    checkpoint.parent.mkdir(parents=True)
    for written, complaint in ((None, "--model: needed"), ("/no/model", "step-00000001.h5")):
        if written:
            (tmp_path / "run" / "config.yaml").write_text(f"actor: {{path: {written}}}\n")
        out = areal_hpc("export", checkpoint, tmp_path / "hf")
        assert out.returncode == 1 and complaint in out.stderr
        assert len(out.stderr.splitlines()) == 1 and out.stderr.startswith("areal-hpc: ")
