"""Metrics, attempts, progress and trace, read back by readers of other people (json, TensorBoard, a pty)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.observe import jsonl, progress, trace
from areal_hpc.observe.attempts import begin_attempt, config_changes, read_attempts, save_config, superseded
from areal_hpc.observe.metrics import Metrics, read_metrics
from areal_hpc.processes import scrubbed


def begin(run: Path, from_step: int = 0, checkpoint: str = "", restart: int = 0):
    return begin_attempt(
        run, from_step=from_step, checkpoint=checkpoint, job_id="17", restart=restart, config_changes={}
    )


def write_steps(run: Path, first: int, last: int, reward: float, **kw) -> None:
    metrics = Metrics(run, begin(run, first), **kw)
    for step in range(first, last):
        metrics.step(step, reward_mean=reward, trained_tokens=100)
    metrics.close()


# ---- lines ----


def test_a_killed_writers_torn_line_is_passed_over_and_then_cut_off(tmp_path):
    path = tmp_path / "a.jsonl"
    first = jsonl.Appender(path)
    first.append({"n": 1})
    first.close()
    with open(path, "ab") as file:
        file.write(b'{"n": 2, "long": "' + b"x" * 200_000)  # longer than the block that is searched backwards
    assert jsonl.read(path) == [{"n": 1}]
    again = jsonl.Appender(path)
    again.append({"n": 3})
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"n": 1}, {"n": 3}]


def test_a_file_that_is_one_torn_line_starts_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": ')
    appender = jsonl.Appender(path)
    appender.append({"n": 1})
    appender.close()
    assert jsonl.read(path) == [{"n": 1}]


def test_damage_inside_a_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n": \n{"n": 3}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not JSON"):
        jsonl.read(path)


# ---- attempts and metrics ----


def test_what_a_restart_undid_is_superseded_and_left_out(tmp_path):
    write_steps(tmp_path, 0, 5, 0.1)  # versions 1..5
    write_steps(tmp_path, 3, 4, 0.2)  # from the checkpoint of version 3: undoes 4 and 5
    write_steps(tmp_path, 2, 6, 0.3)  # from an older one: undoes 3 of attempt 0 and all of attempt 1
    kept = [(r["step"], r["attempt"], r["version"]) for r in read_metrics(tmp_path)]
    assert kept == [(0, 0, 1), (1, 0, 2), (2, 2, 3), (3, 2, 4), (4, 2, 5), (5, 2, 6)]
    assert len(jsonl.read(tmp_path / "metrics.jsonl")) == 10  # nothing is rewritten
    assert [a.from_step for a in read_attempts(tmp_path)] == [0, 3, 2]


def test_an_evaluation_of_the_restored_version_survives(tmp_path):
    metrics = Metrics(tmp_path, begin(tmp_path), tensorboard=False)
    for version in (0, 3, 4):
        metrics.evaluation(version, reward_mean=0.5, prompts=10)
    begin(tmp_path, from_step=3, checkpoint="step3.h5", restart=1)
    assert [r["version"] for r in read_metrics(tmp_path, "eval")] == [0, 3]
    assert read_metrics(tmp_path, "step") == []
    assert not superseded({"attempt": 1, "version": 9}, read_attempts(tmp_path))


def test_a_step_record_has_its_stamps_and_plain_numbers(tmp_path):
    metrics = Metrics(tmp_path, begin(tmp_path))
    returned = metrics.step(0, reward_mean=np.float32(0.5), trained_tokens=np.int64(7), grad_norm=float("inf"))
    time.sleep(0.02)
    metrics.step(1)
    metrics.close()
    first, second = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["kind"], first["step"], first["version"], first["attempt"]) == ("step", 0, 1, 0)
    assert (first["reward_mean"], first["trained_tokens"], first["grad_norm"]) == (0.5, 7, None)
    assert returned["reward_mean"] == 0.5
    assert abs(first["time"] - time.time()) < 60
    assert second["step_s"] == pytest.approx(second["time_s"] - first["time_s"], abs=0.01)
    assert second["step_s"] >= 0.02


def test_a_stamp_cannot_be_given(tmp_path):
    metrics = Metrics(tmp_path, begin(tmp_path), tensorboard=False)
    with pytest.raises(ValueError, match="version cannot be given"):
        metrics.step(0, version=3)


def test_tensorboards_own_reader_sees_one_history(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_steps(tmp_path, 0, 5, 0.1)
    write_steps(tmp_path, 2, 4, 0.3)
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    points = [(e.step, round(e.value, 6)) for e in reader.Scalars("train/reward_mean")]
    assert points == [(1, 0.1), (2, 0.1), (3, 0.3), (4, 0.3)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_config_changes_name_the_keys(tmp_path):
    before = "seed: 1\nactor:\n  optimizer: {lr: 0.1}\n  old: 3\n"
    now = "seed: 1\nactor:\n  optimizer: {lr: 0.2}\n  new: [1, 2]\n"
    assert save_config(tmp_path, before) == {}
    changes = save_config(tmp_path, now)
    assert changes == {"actor.optimizer.lr": [0.1, 0.2], "actor.old": [3, None], "actor.new": [None, [1, 2]]}
    assert (tmp_path / "config.yaml").read_text() == now
    assert config_changes(now, now) == {}
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_importing_observe_imports_neither_torch_nor_mpi_nor_tensorboard():
    code = (
        "import sys; from areal_hpc.observe import attempts, jsonl, metrics, progress, trace; "
        "print([m for m in ('torch', 'mpi4py', 'tensorboard', 'rich', 'h5py') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


def test_writing_metrics_imports_no_torch(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_observe import write_steps
from pathlib import Path
write_steps(Path({str(tmp_path)!r}), 0, 2, 0.5)
print('torch' in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


# ---- progress ----

RECORD = {
    "version": 3,
    "step_s": 2.0,
    "reward_mean": 0.6125,
    "staleness_mean": 1.4,
    "staleness_max": 3,
    "trained_tokens": 5000,
    "generated_tokens": 9000,
    "wait_s": 0.5,
    "wait_ordinal": 812,
}


def test_without_a_terminal_one_line_a_step():
    out = io.StringIO()
    shown = progress.Progress(out, "toy/trial0", total=10)
    shown.phase("update")
    for version in (1, 2, 3):
        shown.step(RECORD | {"version": version})
    shown.say("checkpoint step3.h5")
    shown.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("step  3/10  reward 0.61")
    for part in ("staleness 1.40 (max 3)", "trainer 2,500 tok/s", "rollout 4,500 tok/s", "ordinal 812", "14s left"):
        assert part in lines[2]
    assert lines[3] == "checkpoint step3.h5"
    assert "\x1b" not in out.getvalue()


def test_a_record_that_lacks_values_shows_dashes():
    out = io.StringIO()
    progress.Progress(out, "toy", total=10).step({"version": 1, "step_s": 1.0})
    assert "reward -" in out.getvalue() and "rollout - tok/s" in out.getvalue()


def drawn_on_a_pty(columns: int) -> str:
    """What a display writes to a pseudo-terminal of that width (0: a launcher's, without a size)."""
    import fcntl
    import struct
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30 if columns else 0, columns, 0, 0))
    with os.fdopen(slave, "w") as stream:
        shown = progress.Progress(stream, "toy/trial0", total=10)
        for version in (1, 2, 3):
            shown.step(RECORD | {"version": version})
            shown.phase("wait for ordinal 813")
        shown.close()
    data = b""
    with contextlib.suppress(OSError):  # EIO once all is read and nobody can write any more
        while True:
            data += os.read(master, 1 << 16)
    os.close(master)
    return data.decode()


def test_on_a_terminal_a_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    data = drawn_on_a_pty(100)
    assert "\x1b[" in data
    last = data[data.rindex("toy/trial0") :]
    for part in ("step 3/10", "0.61", "wait for ordinal 813", "2,500 tok/s", "14s left", "1.40 mean, 3 max"):
        assert part in last
    assert data.count("toy/trial0") <= 3  # drawn at the start, at most FPS times a second, and at the end


def test_a_terminal_without_a_size_is_none(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    data = drawn_on_a_pty(0)
    assert "\x1b" not in data and data.count("\n") == 3


def test_waiting_loops_write_nothing_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = progress.Progress(stream := io.StringIO(), "toy", total=10)
    for _ in range(10_000):
        shown.tick()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(3.6, "4s"), (192, "3:12"), (7439, "2:03:59"), (3599.7, "1:00:00")])
def test_duration(seconds, text):
    assert progress.duration(seconds) == text


# ---- trace ----


def test_trace_holds_spans_and_instants_with_their_times(tmp_path):
    ours = trace.Trace(0, "trainer")
    with ours.span("step", step=3) as args:
        ours.instant("deliver", ordinal=17)
        time.sleep(0.01)
        args["tokens"] = 12
    before = time.time() * 1e6
    trace.write(tmp_path / "log" / "trace.0.json", [ours.pack(), trace.Trace(1, "rollout").pack()])
    data = json.loads((tmp_path / "log" / "trace.0.json").read_text())
    events = data["traceEvents"]
    span = next(e for e in events if e["ph"] == "X")
    instant = next(e for e in events if e["ph"] == "i")
    assert (span["name"], span["args"], span["pid"]) == ("step", {"step": 3, "tokens": 12}, 0)
    assert span["dur"] >= 10_000 and before - 5e6 < span["ts"] < before
    assert span["ts"] <= instant["ts"] <= span["ts"] + span["dur"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0 trainer", "rank 1 rollout"}


def test_a_full_trace_keeps_the_newest_and_says_so(tmp_path):
    ours = trace.Trace(0, "trainer", limit=10)
    for n in range(25):
        ours.instant("deliver", ordinal=n)
    trace.write(tmp_path / "t.json", [ours.pack()])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["args"]["ordinal"] for e in events if e["ph"] == "i"] == list(range(15, 25))
    assert "newest 10 of 25" in events[0]["args"]["name"]


def test_a_trace_that_is_off_costs_nothing_and_keeps_nothing():
    ours = trace.Trace(0, "trainer", enabled=False)
    with ours.span("step") as args:
        args["tokens"] = 1
    ours.instant("deliver")
    assert ours.seen == 0


def test_an_exception_ends_its_span():
    ours = trace.Trace(0, "trainer")
    with pytest.raises(KeyError), ours.span("step"):
        raise KeyError("x")
    assert ours.seen == 1


def test_rank_0_merges_the_ranks_under_mpi(tmp_path):
    code = f"""
from mpi4py import MPI
from areal_hpc.observe import trace
comm = MPI.COMM_WORLD
ours = trace.Trace(comm.rank, "of the test")
with ours.span("work", rank=comm.rank):
    pass
trace.collect(ours, comm, {str(tmp_path / "trace.0.json")!r})
"""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, "-c", code]
    # Another test of this process may have initialised MPI, which leaves its marks in the environment.
    subprocess.run(command, check=True, timeout=60, env=scrubbed(os.environ))
    events = json.loads((tmp_path / "trace.0.json").read_text())["traceEvents"]
    assert sorted(e["args"]["rank"] for e in events if e["ph"] == "X") == [0, 1, 2]
