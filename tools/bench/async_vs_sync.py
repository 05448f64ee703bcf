#!/usr/bin/env python3
"""What asynchrony gains: trained tokens per second at eta = 4 over the better of two synchronous baselines.

Two workloads, one trainer and one rollout rank each: the quickstart task from its warm-up
checkpoint, and counting ("7=" asks for "1+2+3+4+5+6+7"), whose answers have a Pareto tail of
lengths (median about 17 tokens, 3 in 100 about 290), from a warm-up of its own.

    async      eta = 4, both ranks at work at once, free to use both cores (a thread each: two each are slower)
    sync       eta = 0, the same program; two threads for whichever side works
    colocated  a bound, not a program: the seconds that `sync` spent inside engine steps and inside updates
               (two threads each), added, and its saves; no time for messages, weight updates or switching

Runs alternate, and so does which comes first. The first 3 steps do not count; weight updates and
saves (one every 10 steps) do. Every run goes on for eta steps more than are counted, so that the
counted steps end, as they begin, with rollout ahead of training. Every group is trained, also one whose
answers are all right or all wrong (`rollout.dynamic_sampling=false`): the ratio says what asynchrony
gains, not what a filter costs. The last line is JSON.

Example: python tools/bench/async_vs_sync.py --repeats 5 --model models/quickstart/seed1/warm
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

from areal_hpc.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart_arithmetic.yaml"
BENCH = Path("runs") / "bench"
WARM, ETA, LIMIT_S = 3, 4, 900
CLI = [sys.executable, "-m", "areal_hpc.cli"]


@dataclass(frozen=True)
class Workload:
    """A configuration file and what it is changed by."""

    config: Path
    overrides: list[str]


def launch(command: str, ranks: int, threads: int, trial: str, workload: Workload) -> Path:
    """Runs one job to its end and returns its folder. A job that fails ends the benchmark with its last lines."""
    run = BENCH / trial
    log = BENCH / f"{trial}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # no binding: Open MPI would pin each of two ranks to one core
    mpirun = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    mpirun += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    where = ["cluster.fileroot=runs", "experiment_name=bench", f"trial_name={trial}", "recover=fresh"]
    # threads wait as their runtime does by itself: told to wait passively, `sync` is 8 to 20 % slower
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("OMP_WAIT_POLICY", None)
    with open(log, "wb") as out:
        job = subprocess.Popen(
            [*mpirun, *CLI, command, "--config", str(workload.config), *where, *workload.overrides],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            code = job.wait(LIMIT_S)
        except BaseException:  # also a Ctrl-C or a TERM: no rank is left behind (mpirun kills them 1 s after a TERM)
            job.terminate()
            try:
                job.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
            raise
    if code != 0:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        raise SystemExit("\n".join([*tail, f"{trial}: exit code {code}; see {log} and {run}/log"]))
    return run


def counting_file(rows: int = 4000, largest: int = 99) -> Path:
    """Prompts and answers of the long-tail workload, the same on every machine."""
    draw = random.Random(1)
    path = BENCH / "counting.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for _ in range(rows):
            n = min(largest, int(5 / (1 - draw.random()) ** (1 / 1.2)))
            answer = "+".join(map(str, range(1, n + 1)))
            file.write(json.dumps({"prompt": f"{n}=", "answer": answer}) + "\n")
    return path


def quickstart_workload(model: Path) -> Workload:
    return Workload(CONFIG, [f"actor.path={model}"])


def long_tail_workload(model: Path) -> Workload:
    """Warms a copy of the model up on counting, and returns what makes it the workload."""
    keys = yaml.safe_load(CONFIG.read_text())
    data = {"type": "file", "path": str(counting_file().absolute())}
    keys["train_dataset"] = data | {"batch_size": 32}
    keys["valid_dataset"] = data  # not evaluated
    config = BENCH / "counting.yaml"
    config.write_text(yaml.safe_dump(keys))
    warm = (BENCH / "counting-model").absolute()
    shutil.rmtree(warm, ignore_errors=True)
    learn = ["sft.steps=300", "sft.batch_size=32", f"sft.output={warm}", "gconfig.max_new_tokens=320"]
    launch("sft", 1, 2, "counting-warmup", Workload(config, [f"actor.path={model}", *learn]))
    return Workload(config, [f"actor.path={warm}", "gconfig.max_new_tokens=320"])


def measure(run: Path, steps: int) -> dict[str, float]:
    """Trained tokens per second over the counted steps of one run, and what they were made of."""
    records = [r for r in read_metrics(run) if WARM - 1 <= r["step"] < WARM + steps]
    before, counted = records[0], records[1:]
    if len(counted) != steps:
        raise SystemExit(f"{run}: {len(counted)} records of steps {WARM} to {WARM + steps - 1}, expected {steps}")
    total = {
        key: sum(r[key] for r in counted)
        for key in ("trained_tokens", "stale_tokens", "generate_s", "update_s", "publish_s", "save_s", "wait_s")
    }
    seconds = counted[-1]["time_s"] - before["time_s"]
    apart = total["generate_s"] + total["update_s"] + total["save_s"]
    return {
        "rate": total["trained_tokens"] / seconds,
        "apart_rate": total["trained_tokens"] / apart,
        "stale_share": total["stale_tokens"] / total["trained_tokens"],
        **{f"{key[:-2]}_share": total[key] / seconds for key in total if key.endswith("_s")},
    }


def compare(name: str, workload: Workload, args: argparse.Namespace) -> dict[str, object]:
    """Alternated repeats of one workload; prints a line per repeat."""
    modes = {"async": (ETA, args.async_threads), "sync": (0, 2)}
    fixed = [
        f"total_train_steps={WARM + args.steps + ETA}",
        "saver.freq_steps=10",
        "rollout.dynamic_sampling=false",
        *(f"evaluator.{key}" for key in ("freq_steps=0", "at_start=false", "at_end=false")),
    ]
    rates: dict[str, list[float]] = {"async": [], "sync": [], "colocated": []}
    for repeat in range(args.repeats):
        found = {}
        for mode in ("async", "sync") if repeat % 2 == 0 else ("sync", "async"):
            eta, threads = modes[mode]
            these = [*workload.overrides, *fixed, f"rollout.max_head_offpolicyness={eta}", f"seed={repeat + 1}"]
            run = launch("train", 2, threads, f"{name}-{mode}", Workload(workload.config, these))
            found[mode] = measure(run, args.steps)
        rates["async"].append(found["async"]["rate"])
        rates["sync"].append(found["sync"]["rate"])
        rates["colocated"].append(found["sync"]["apart_rate"])
        shares = ", ".join(f"{k[:-6]} {v:.2f}" for k, v in found["async"].items() if k.endswith("_share"))
        print(
            f"{name} {repeat + 1}/{args.repeats}: "
            + "  ".join(f"{mode} {values[-1]:,.0f}" for mode, values in rates.items())
            + f"  trained tokens/s; shares of async: {shares}",
            flush=True,
        )
    ratios = [a / max(s, c) for a, s, c in zip(*rates.values())]
    return {
        "async_over_sync": round(median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "trained_tokens_per_s": {mode: round(median(values)) for mode, values in rates.items()},
    }


def machine() -> dict[str, object]:
    """Where and when: a number without them cannot be compared."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/quickstart/seed1/warm"), help="warm-up checkpoint")
    parser.add_argument("--repeats", type=int, default=5, help="alternated pairs of runs for each workload")
    parser.add_argument("--steps", type=int, default=30, help="training steps that count in each run")
    parser.add_argument("--async-threads", type=int, default=1, help="threads of each rank in the async runs")
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))  # by way of launch(), which ends its job
    model = args.model.absolute()
    if not (model / "config.json").is_file():
        raise SystemExit(f"--model {model}: no config.json there; tools/quickstart.sh makes it")
    workloads = {"quickstart": quickstart_workload, "long_tail": long_tail_workload}
    found = {name: compare(name, make(model), args) for name, make in workloads.items()}
    result = {key: {name: found[name][key] for name in found} for key in found["quickstart"]}
    settings = {"eta": ETA, "repeats": args.repeats, "steps": args.steps, "async_threads": args.async_threads}
    print(json.dumps(result | settings | machine()))


if __name__ == "__main__":
    main()
