"""The real engine on tiny random models, against Hugging Face: one start serves the cases of a module.

Weights arrive as they do in a run (`Engine.update`), so every case exercises binding and weights too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny_models import TinyModel, receiver

from areal_hpc.config import ConfigError, Dtype, RolloutConfig
from areal_hpc.layout.boxes import whole
from areal_hpc.layout.families import logical_tensors
from areal_hpc.layout.spec import read_spec
from areal_hpc.records import Status
from areal_hpc.rollout.engine import Engine, Finished
from areal_hpc.rollout.evaluate import Evaluation

MAX_LEN = 128
PROBE = np.random.default_rng(7).integers(2, 100, 40).tolist()
CLOSE = 1e-4  # fp32; the work order asks for 1e-3


def start(model: TinyModel, **config: object) -> Engine:
    settings = RolloutConfig(kv_cache_gib=0.05, max_num_seqs=16, **config)
    return Engine(read_spec(model.path), model.path, settings, max_model_len=MAX_LEN, seed=1)


def load(engine: Engine, model: TinyModel, seed: int, version: int | None = None) -> None:
    engine.pause()
    engine.update(seed if version is None else version, receiver(engine.boxes, model.tensors(seed)))
    engine.resume()


def drain(engine: Engine) -> dict[str, Finished]:
    finished = {}
    while engine.busy:
        finished |= {sample.request_id: sample for sample in engine.step()}
    return finished


def probe(engine: Engine) -> np.ndarray:
    engine.probe_start(PROBE)
    while (logp := engine.probe_result()) is None:
        engine.step()
    return logp


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("qwen2"), "qwen2", tied=True)


@pytest.fixture(scope="module")
def engines(model: TinyModel) -> Iterator[Engine]:
    engine = start(model)
    yield engine
    engine.close()


@pytest.fixture
def engine(engines: Engine, model: TinyModel) -> Iterator[Engine]:
    """The engine, empty, with version 0."""
    load(engines, model, 0)
    yield engines
    engines.abort(list(engines._samples))
    assert not engines.busy


def test_update_in_flight(engine: Engine, model: TinyModel) -> None:
    """Requests outlive two updates; each token's version and log-probability are those of the weights that made it."""
    temperature, changes = 0.7, [20, 45, 64]
    for i in range(8):
        engine.add(str(i), [5, 6, 7 + i], seed=i, max_new_tokens=64, temperature=temperature, ignore_eos=True)
    for version, until in enumerate(changes):
        if version:
            load(engine, model, version)
        while engine.running and len(engine._samples["3"].tokens) < until:
            finished = engine.step()
    assert sorted(sample.request_id for sample in finished) == [str(i) for i in range(8)]
    for sample in finished:
        assert sample.version_T.tolist() == [0] * 20 + [1] * 25 + [2] * 19
        tokens = [5, 6, 7 + int(sample.request_id), *sample.tokens_T.tolist()]
        expected = np.stack([model.logp(version, tokens, temperature)[2:] for version in range(3)])
        np.testing.assert_allclose(sample.logp_T, expected[sample.version_T, np.arange(64)], atol=CLOSE)
        assert np.abs(sample.logp_T - expected[0])[20:].max() > 0.1  # and the versions do differ
        assert (sample.tokens_T < model.config.vocab_size).all() and sample.finish == "length"


def test_probe_among_running_samples(engine: Engine, model: TinyModel) -> None:
    """It comes with the first step after resume, on a full engine, and takes no part in what others draw."""

    def fill() -> None:
        for i in range(engine.capacity):
            engine.add(str(i), [9, 8, 7 + i], seed=i, max_new_tokens=12, ignore_eos=True)

    fill()
    alone = drain(engine)
    fill()
    engine.pause()
    engine.update(1, receiver(engine.boxes, model.tensors(0)))
    engine.resume()
    engine.probe_start(PROBE)
    assert engine.room == 0
    engine.step()
    logp = engine.probe_result()
    assert logp.shape == (len(PROBE) - 1,) and logp.dtype == np.float32
    np.testing.assert_allclose(logp, model.logp(0, PROBE), atol=CLOSE)
    assert engine.probe_result() is None
    for request_id, sample in drain(engine).items():
        np.testing.assert_array_equal(sample.tokens_T, alone[request_id].tokens_T)


def test_samples_that_end_before_the_probe_are_the_callers_to_withhold(engine: Engine, model: TinyModel) -> None:
    engine.add("short", [4, 5], seed=0, max_new_tokens=3, ignore_eos=True)
    engine.step(), engine.step()
    load(engine, model, 1)
    engine.probe_start(PROBE)
    withheld = engine.step()  # its last token is made in the step that serves the probe
    assert [sample.request_id for sample in withheld] == ["short"]
    assert withheld[0].version_T.tolist() == [0, 0, 1]
    assert engine.probe_result() is not None and not engine.busy


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ],
)
def test_probe_sees_a_corrupted_tensor(engine: Engine, model: TinyModel, name: str) -> None:
    good = model.tensors(1)
    load(engine, model, 1)
    assert np.abs(probe(engine) - model.logp(1, PROBE)).max() < CLOSE
    wrong = good | {name: good[name].roll(1, 0)}
    engine.pause()
    engine.update(2, receiver(engine.boxes, wrong))
    engine.resume()
    assert np.abs(probe(engine) - model.logp(1, PROBE)).max() > 1e-3


def test_a_sample_depends_on_its_seed_and_not_on_its_batch(engine: Engine) -> None:
    prompt = list(range(2, 42))  # longer than a KV block: the second run reads the prefix cache

    def draw(ids: dict[str, int]) -> dict[str, list[int]]:
        for name, seed in ids.items():
            engine.add(name, prompt, seed=seed, max_new_tokens=10, ignore_eos=True)
        return {name: sample.tokens_T.tolist() for name, sample in drain(engine).items()}

    together = draw({"a": 11, "b": 12, "c": 11, "d": 13})
    assert together["a"] == together["c"] and together["a"] != together["b"] != together["d"]
    assert draw({"d": 13}) == {"d": together["d"]}


def test_kv_of_another_version_is_not_read(engine: Engine, model: TinyModel) -> None:
    prompt = PROBE[:36]
    for version in (0, 1):
        load(engine, model, version)
        for again in range(2):
            engine.add(f"{version}.{again}", prompt, seed=3, max_new_tokens=8, ignore_eos=True)
            (sample,) = drain(engine).values()
            expected = model.logp(version, prompt + sample.tokens_T.tolist())[len(prompt) - 1 :]
            np.testing.assert_allclose(sample.logp_T, expected, atol=CLOSE)


def test_stop_token_ends_a_sample_and_is_part_of_it(engine: Engine, model: TinyModel) -> None:
    """The stop token is made likely: its row of the (tied) embedding is enlarged."""
    tensors = dict(model.tensors(0))
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].detach().clone()
    tensors["model.embed_tokens.weight"][1] *= 40
    engine.pause()
    engine.update(0, receiver(engine.boxes, tensors))
    engine.resume()
    for seed in range(12):
        engine.add(f"{seed}", [3, 4, 5 + seed], seed=seed, max_new_tokens=40)
    before = engine.tokens
    samples = drain(engine).values()
    assert engine.tokens - before == sum(len(sample.tokens_T) for sample in samples)
    stopped = [sample for sample in samples if sample.finish == "stop"]
    assert stopped
    for sample in stopped:
        assert sample.tokens_T.tolist().index(1) == len(sample.tokens_T) - 1


def test_refusals(engine: Engine, model: TinyModel) -> None:
    def add(name: str = "x", prompt: int = 4, new: int = 4) -> None:
        engine.add(name, [2] * prompt, seed=0, max_new_tokens=new, ignore_eos=True)

    add("a")
    with pytest.raises(ValueError, match="request a: the engine has a request of this id"):
        add("a")
    with pytest.raises(ValueError, match=rf"request x: .*at most max_model_len={MAX_LEN}"):
        add(prompt=100, new=29)
    for i in range(engine.room):
        add(f"more{i}")
    with pytest.raises(ValueError, match="request x: the replica is full with 16 samples"):
        add()
    with pytest.raises(RuntimeError, match="update to version 9 of a running engine"):
        engine.update(9, lambda views: None)
    engine.pause()
    with pytest.raises(RuntimeError, match="step of a paused engine"):
        engine.step()
    engine.resume()
    engine.probe_start(PROBE)
    with pytest.raises(ValueError, match="the one before has not ended"):
        engine.probe_start(PROBE)
    engine.abort(["a", "unknown"])
    assert engine.room == 1 and "a" not in drain(engine)
    engine.probe_result()
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len=257: the model has positions for 256"):
        Engine(read_spec(model.path), model.path, RolloutConfig(), max_model_len=257, seed=1)
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gib=1e-05: expected at least 0\.000\d+: .* 128 tokens"):
        Engine(read_spec(model.path), model.path, RolloutConfig(kv_cache_gib=1e-5), max_model_len=128, seed=1)


def test_what_receive_raises_comes_through_and_the_next_version_repairs(engine: Engine, model: TinyModel) -> None:
    def half(views: list[torch.Tensor]) -> None:
        views[0].fill_(float("nan"))
        raise OSError("the sender is gone")

    engine.add("a", [3, 4, 5], seed=0, max_new_tokens=6, ignore_eos=True)
    engine.step()
    engine.pause()
    with pytest.raises(OSError, match="the sender is gone"):
        engine.update(1, half)
    assert engine.version == 0
    engine.update(2, receiver(engine.boxes, model.tensors(2)))
    engine.resume()
    (sample,) = drain(engine).values()
    assert sample.version_T.tolist() == [0] + [2] * 5
    expected = model.logp(2, [3, 4, 5, *sample.tokens_T.tolist()])[2:]
    np.testing.assert_allclose(sample.logp_T[1:], expected[1:], atol=CLOSE)


def test_evaluation_shares_the_engine_with_training(engine: Engine, model: TinyModel) -> None:
    """Two replicas' shares cover the held-out rows once; a score is asked for each answer."""
    prompts = [[2 + row, 3, 4] for row in range(21)]
    answers: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
    for replica in (0, 1):
        inbox: list[str] = []

        def score(sample_id: str, row: int, tokens_T: np.ndarray, replica: int = replica, inbox: list = inbox) -> None:
            answers[replica][row] = tokens_T.tolist()
            inbox.append(sample_id)

        evaluation = Evaluation(prompts, score, seed=1, replica=replica, replicas=2)
        engine.add("7.0", [5, 6], seed=0, max_new_tokens=9, ignore_eos=True)  # a training sample
        evaluation.start(0)
        result = None
        while result is None:
            for request in evaluation.requests(min(engine.room, 4)):
                assert request.temperature == 1.0
                engine.add(request.id, request.prompt, seed=request.seed, max_new_tokens=3, ignore_eos=True)
            for sample in engine.step():
                if evaluation.owns(sample.request_id):
                    evaluation.finished(sample)
            for sample_id in inbox:
                row = int(sample_id.split(".")[1])
                evaluation.scored(sample_id, float(row), Status.TIMEOUT if row == 5 else Status.OK)
            inbox.clear()
            result = evaluation.test()
        rows = range(replica, 21, 2)
        assert (result.version, result.prompts) == (0, len(rows))
        assert result.reward_sum == sum(row for row in rows if row != 5) and result.failed == replica
        assert evaluation.test() is None and not evaluation.open
        drain(engine)
    assert sorted(answers[0] | answers[1]) == list(range(21)) and not set(answers[0]) & set(answers[1])
    evaluation.start(0)
    mixed = Finished("heldout.1", np.array([2, 3]), np.zeros(2), np.array([0, 1]), "length")
    with pytest.raises(RuntimeError, match=r"version 0: heldout.1 has tokens of versions \[0, 1\]"):
        evaluation.finished(mixed)


def test_bfloat16(model: TinyModel) -> None:
    """Views have the rollout dtype; the bounds are those of verify_tolerance."""
    engine = start(model, dtype=Dtype.bfloat16)
    try:
        for seed in (0, 1):
            load(engine, model, seed)
            difference = np.abs(probe(engine) - model.logp(seed, PROBE))
            assert 0 < difference.mean() < 0.02 and difference.max() < 0.2
    finally:
        engine.close()


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("qwen2", False)])
def test_families(tmp_path_factory: pytest.TempPathFactory, family: str, tied: bool) -> None:
    """Every tensor of a family lands where vLLM reads it, before and after its kernels have packed once."""
    model = TinyModel(tmp_path_factory.mktemp(family), family, tied)
    engine = start(model)
    try:
        for seed in (0, 1):
            load(engine, model, seed)
            np.testing.assert_allclose(probe(engine), model.logp(seed, PROBE), atol=CLOSE)
        spec = read_spec(model.path)
        # TP 1: the boxes are the model, each tensor whole and once
        held = sorted(engine.boxes, key=lambda box: box.name)
        assert held == sorted((whole(*item) for item in logical_tensors(spec).items()), key=lambda box: box.name)
        binding = type(engine.binding)
        for change, message in [
            ({"ffn": 224}, r"model\.layers\.0\.mlp\.gate_up_proj\.weight: the layout gives shape .* has \(384, 128\)"),
            ({"layers": 3}, r"model\.layers\.2\.\S+: its layout has it, vLLM's model does not"),
            ({"layers": 1}, r"model\.layers\.1\.\S+: vLLM's model has it, its layout does not"),
        ]:
            with pytest.raises(ValueError, match=message):
                binding(
                    engine.binding._model,
                    dataclasses.replace(spec, **change),
                    tp=1,
                    tp_rank=0,
                    dtype=torch.float32,
                    device=torch.device("cpu"),
                )
    finally:
        engine.close()
