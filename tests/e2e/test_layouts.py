"""Whole runs on three layouts: what they leave behind, and that every trained token is what it is said to be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from archive import Oracle, Sample, checkpoints, item_of, prompts, samples, segments
from conftest import Done

LAYOUTS = ("one_and_one", "distributed_optimizer", "eight_over_tcp")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=LAYOUTS)
def done(request: pytest.FixtureRequest) -> Done:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def trained(done: Done) -> list[Sample]:
    return samples(done.run.dir)


def test_it_ends_well(done: Done) -> None:
    (outcome,) = done.run.exits()
    assert (outcome["code"], outcome["rank"]) == (0, 0)
    assert f"step {done.run.steps}/{done.run.steps}" in done.text
    assert "vllm" not in done.text.lower() and "Warning" not in done.text, "libraries print to the log, not here"


def test_the_outputs_are_those_that_are_promised(done: Done) -> None:
    run = done.run.dir
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.jsonl", "attempts.jsonl", "tensorboard", "checkpoints", "trajectories", "log",
    }  # fmt: skip
    versions = range(1, done.run.steps + 1)
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == [f"step-{v:08d}.h5" for v in versions]
    steps = [f"steps-{v - 1:08d}-{v:08d}.attempt-0.h5" for v in versions]
    assert [path.name for path in sorted((run / "trajectories").iterdir())] == steps
    assert segments(run) == [run / "trajectories" / name for name in steps]
    nodes, attempts = 1, 1
    files = sum(path.is_file() for path in run.rglob("*"))
    assert files <= 50 + 3 * nodes + 3 * attempts + len(versions) + len(steps)
    per_node = [path for path in (run / "log").iterdir() if path.name.startswith("ranks.") or path.suffix == ".log"]
    assert len(per_node) == 2, "files per node, not per rank"
    assert "megatron" in done.run.log() and "vllm" in done.run.log()
    assert str(done.run.model) in (run / "config.yaml").read_text()


def test_every_ordinal_is_trained_once_with_its_own_prompt(done: Done, trained: list[Sample]) -> None:
    run = done.run
    asked = prompts(run.questions, run.model)
    count = Counter(sample.ordinal for sample in trained)
    assert count == dict.fromkeys(range(run.B * run.steps), run.n_samples)
    for sample in trained:
        assert sample.item == item_of(run.seed, sample.ordinal, run.rows)
        assert sample.prompt == asked[sample.item], f"ordinal {sample.ordinal}"
        assert sample.step == sample.ordinal // run.B, "fifo without drops"
        assert len(sample.tokens) == len(sample.logp) == len(sample.version) == run.new_tokens
        assert sample.status == "ok" and sample.reward in (0.0, 1.0)
    assert {sample.replica for sample in trained} == ({0, 1} if run.ranks == 8 else {0})


def test_no_token_is_staler_than_eta_and_switches_fall_into_samples(done: Done, trained: list[Sample]) -> None:
    age = np.concatenate([sample.step - sample.version for sample in trained])
    assert age.min() >= 0 and age.max() <= done.run.eta
    assert all((np.diff(sample.version) >= 0).all() for sample in trained)
    across = [sample for sample in trained if sample.version[0] < sample.version[-1]]
    print(f"{len(across)} of {len(trained)} samples were begun before a switch and ended after it; "
          f"ages {dict(sorted(Counter(age.tolist()).items()))}")  # fmt: skip
    assert across, "no request went on over a switch"


def test_every_log_probability_is_that_of_the_version_that_made_the_token(done: Done, trained: list[Sample]) -> None:
    oracle = Oracle(done.run.model, done.run.dir)
    worst, other, seen = 0.0, [], 0
    for version in range(done.run.steps):
        here = [sample for sample in trained if (sample.version == version).any()]
        if not here:
            continue
        for sample, expected in zip(here, oracle.logp(version, here, done.temperature)):
            made = sample.version == version
            seen += int(made.sum())
            worst = max(worst, float(np.abs(sample.logp - expected)[made].max()))
            other += np.abs(sample.logp - expected)[~made].tolist()
    assert seen == sum(len(sample.tokens) for sample in trained)
    print(f"{seen} tokens: largest difference {worst:.2g}; under a neighbour's weights up to {max(other):.2g}")
    assert worst < 1e-3
    assert np.median(other) > 3e-3, "the versions are too alike for this test to tell them apart"


def test_metrics_are_those_of_the_archive(done: Done, trained: list[Sample]) -> None:
    run = done.run
    records = run.metrics()
    assert [(r["step"], r["version"], r["attempt"]) for r in records] == [(s, s + 1, 0) for s in range(run.steps)]
    for record in records:
        batch = [sample for sample in trained if sample.step == record["step"]]
        age = np.concatenate([sample.step - sample.version for sample in batch])
        reward = np.array([sample.reward for sample in batch])
        counts = (record["trained_groups"], record["trained_samples"], record["trained_tokens"], record["dropped"])
        assert counts == (run.B, len(batch), len(age), 0)
        assert (record["staleness_max"], record["stale_tokens"]) == (age.max(), (age > 0).sum())
        measured = (record["staleness_mean"], record["reward_mean"], record["reward_std"])
        assert measured == pytest.approx((age.mean(), reward.mean(), reward.std()))
        assert record["importance_weight/mean"] == pytest.approx(1.0, abs=0.2) and record["grad_norm"] >= 0
    assert sum(record["reward_mean"] for record in records) > 0, "no answer scored: nothing was learnt"
    (attempt,) = run.attempts()
    assert (attempt["attempt"], attempt["from_step"], attempt["checkpoint"]) == (0, 0, "")
    evaluated = [(r["version"], r["prompts"]) for r in run.metrics("eval")]
    assert evaluated == ([(0, run.rows), (run.steps, run.rows)] if run.name == "distributed_optimizer" else [])


def test_an_update_moves_what_the_destinations_need(done: Done) -> None:
    """Each replica gets each parameter once, in fp32; its two TP ranks both hold the norms."""
    from safetensors.torch import load_file

    weights = load_file(done.run.model / "model.safetensors")
    replicas, tp = (2, 2) if done.run.ranks == 8 else (1, 1)
    need = sum(4 * t.numel() * replicas * (tp if "norm" in name else 1) for name, t in weights.items())
    assert {record["moved_bytes"] for record in done.run.metrics()} == {need}


def test_tensorboard_has_the_steps(done: Done) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (done.run.dir / "tensorboard").iterdir()
    points = [
        event.step
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "train/reward_mean"
    ]
    assert points == list(range(1, done.run.steps + 1))


def test_checkpoints_hold_moments_and_what_was_not_trained(done: Done) -> None:
    import h5py

    for version, path in checkpoints(Path(done.run.dir)).items():
        with h5py.File(path, "r") as file:
            assert {"master", "exp_avg", "exp_avg_sq", "blobs", "checksums"} <= set(file)
            assert file.attrs["step"] == version
            assert "ledger" in file["blobs"] and "config.yaml" in file["blobs"]
