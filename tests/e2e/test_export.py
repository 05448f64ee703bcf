"""What is done with a run when it is over: export to Hugging Face, and its status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from archive import checkpoints
from conftest import Done, Interrupted
from runs import areal_hpc

pytestmark = pytest.mark.timeout(600)

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True, seed=1)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
print("tokens", json.dumps([list(o.outputs[0].token_ids) for o in out]))
"""


@pytest.fixture(scope="module")
def exports(
    one_and_one: Done, distributed_optimizer: Done, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Path]]:
    """A checkpoint of a tied and of an untied model, and the fp32 directory that was made of it."""
    made = {}
    for name, done in (("tied", one_and_one), ("untied", distributed_optimizer)):
        checkpoint, out = checkpoints(done.run.dir)[3], tmp_path_factory.mktemp("export") / "hf"
        said = areal_hpc("export", checkpoint, out, "--dtype", "float32")
        assert (said.returncode, said.stdout.strip()) == (0, str(out)), said.stderr
        made[name] = (checkpoint, out)
    return made


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_transformers_loads_equal_weights(name: str, exports: dict[str, tuple[Path, Path]]) -> None:
    import h5py
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint, out = exports[name]
    model, said = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    found = dict(model.named_parameters())
    with h5py.File(checkpoint, "r") as file:
        assert set(file["master"]) == set(found)
        for name, tensor in file["master"].items():
            assert found[name].dtype == torch.float32
            np.testing.assert_array_equal(found[name].detach().numpy(), tensor[()], err_msg=name)
    assert AutoTokenizer.from_pretrained(out).encode("7", add_special_tokens=False) == [11]


def test_bfloat16_is_the_default_and_rounds_the_master_weights(one_and_one: Done, tmp_path: Path) -> None:
    import h5py
    import torch
    from safetensors.torch import load_file

    checkpoint = checkpoints(one_and_one.run.dir)[2]
    assert areal_hpc("export", checkpoint, tmp_path / "hf").returncode == 0
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    with h5py.File(checkpoint, "r") as file:
        for name, tensor in file["master"].items():
            assert torch.equal(weights[name], torch.from_numpy(tensor[()]).to(torch.bfloat16)), name
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_vllm_loads_it_and_generates_what_transformers_does(exports: dict[str, tuple[Path, Path]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    _, out = exports["tied"]
    prompts = [[5, 9, 14, 8, 18], [11, 12, 14, 4, 4, 18]]
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-c", GENERATE, str(out), json.dumps(prompts)]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=300, env=env)
    assert said.returncode == 0, said.stderr
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("tokens ")]
    model = AutoModelForCausalLM.from_pretrained(out)
    for prompt, tokens in zip(prompts, json.loads(line.removeprefix("tokens "))):
        text = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        assert text[len(prompt) :] == tokens


def test_status_of_a_finished_run(one_and_one: Done) -> None:
    run = one_and_one.run
    found = json.loads(areal_hpc("status", run.dir, "--json").stdout)
    assert (found["state"], found["code"], found["step"], found["total_steps"]) == ("finished", 0, run.steps, run.steps)
    assert found["trained_tokens"] == run.steps * run.B * run.n_samples * run.new_tokens
    assert found["checkpoints"] == [f"step-{v:08d}.h5" for v in range(run.steps, 0, -1)]
    assert found["segments"] == run.steps and len(found["attempts"]) == 1 and found["error"] == ""
    assert f"{run.steps} of {run.steps}" in areal_hpc("status", run.dir).stdout


def test_status_of_a_run_in_many_starts(interrupted: Interrupted) -> None:
    run = interrupted.run
    found = json.loads(areal_hpc("status", run.dir, "--json").stdout)
    assert (found["state"], found["code"], found["step"]) == ("finished", 0, run.steps)
    tokens = run.steps * run.B * run.n_samples * run.new_tokens
    assert found["trained_tokens"] == tokens, "superseded steps do not count"
    assert [a["from_step"] for a in found["attempts"]] == [a["from_step"] for a in run.attempts()]
    refused = areal_hpc("stop", run.dir)
    assert refused.returncode == 1 and "not running" in refused.stderr
