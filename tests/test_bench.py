"""The arithmetic of tools/bench on made-up records: rates that a wrong window would change."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import median

import pytest

from areal_hpc.observe import jsonl

ROOT = Path(__file__).resolve().parents[1]


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "bench" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_async_vs_sync_counts_its_window_only(tmp_path):
    bench = load("async_vs_sync")
    file = jsonl.Appender(tmp_path / "metrics.jsonl")
    clock = 0.0
    for step in range(3 + 5 + 4):
        counted = 3 <= step < 8
        step_s = 2.0 if counted else 50.0
        clock += step_s
        values = {"trained_tokens": 100, "stale_tokens": 40, "generate_s": 0.5, "update_s": 0.6, "publish_s": 0.3}
        values |= {"save_s": 1.0 if step == 5 else 0.0, "wait_s": 0.1}
        if not counted:
            values = {name: 1e6 for name in values}
        stamps = {"kind": "step", "attempt": 0, "step": step, "version": step + 1, "time_s": clock, "step_s": step_s}
        file.append(stamps | values)
    file.close()
    found = bench.measure(tmp_path, 5)
    assert found["rate"] == pytest.approx(500 / 10)
    assert found["apart_rate"] == pytest.approx(500 / (2.5 + 3.0 + 1.0))
    assert found["stale_share"] == pytest.approx(0.4)
    assert found["generate_share"] == pytest.approx(0.25)
    with pytest.raises(SystemExit, match="expected 20"):
        bench.measure(tmp_path, 20)


def test_the_long_tail_is_one(tmp_path, monkeypatch):
    bench = load("async_vs_sync")
    monkeypatch.setattr(bench, "BENCH", tmp_path)
    rows = jsonl.read(bench.counting_file())
    assert all(row["answer"].split("+") == [str(i) for i in range(1, int(row["prompt"][:-1]) + 1)] for row in rows)
    lengths = sorted(len(row["answer"]) for row in rows)
    assert 12 <= median(lengths) <= 24
    assert lengths[-1] == 287 and sum(n == 287 for n in lengths) / len(lengths) == pytest.approx(0.028, abs=0.01)
