"""Two small steps of configs/smollm2_chain_sum.yaml: a real chat model with its own template, bf16 rollout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from archive import samples
from launch import Job, command
from runs import REPO, Run, finish

MODEL = REPO / "build" / "smollm2"  # made once, half a gigabyte
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    if not MODEL.exists():
        draft = MODEL.with_name("smollm2.part")
        tool = [sys.executable, str(REPO / "tools/make_smollm2.py"), str(draft)]
        done = subprocess.run(tool, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        draft.rename(MODEL)
    return MODEL


def test_two_steps(smollm2: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, "smollm2", smollm2, steps=2, B=2)
    changes = [
        "experiment_name=e2e",
        "trial_name=smollm2",
        "seed=5",
        "total_train_steps=2",
        f"cluster.fileroot={tmp_path}/runs",
        f"actor.path={smollm2}",
        "train_dataset.batch_size=2",
        "valid_dataset.size=8",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=8",
        "rollout.kv_cache_gib=0.25",
        "rollout.max_concurrent_rollouts=16",
    ]
    argv = [sys.executable, "-m", "areal_hpc.cli", "train", "--config", f"{REPO}/configs/smollm2_chain_sum.yaml"]
    job = Job(command(2, [*argv, *changes]), {"HF_HUB_OFFLINE": "1"})
    code, text = finish(job, run, 600)
    assert code == 0, f"{text}\n{run.log()}"
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    trained = samples(run.dir)
    for path in (run.dir / "checkpoints").iterdir():
        path.unlink()  # 1.6 GB
    assert sorted({sample.ordinal for sample in trained}) == [0, 1, 2, 3]
    for sample in trained:
        prompt, answer = tokenizer.decode(sample.prompt), tokenizer.decode(sample.tokens)
        print(f"step {sample.step} reward {sample.reward:g}: {answer!r}")
        assert prompt.startswith("<|im_start|>system\nAnswer with the number only.<|im_end|>")
        assert prompt.endswith("<|im_start|>assistant\n"), prompt
        assert sample.status == "ok" and 1 <= len(sample.tokens) <= 8 and np.isfinite(sample.logp).all()
    first, second = run.metrics()
    assert (first["step"], second["step"]) == (0, 1)
    assert abs(first["importance_weight/mean"] - 1) < 0.1, "bf16 rollout against fp32 trainer: the ratio is near 1"
