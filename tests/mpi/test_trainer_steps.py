"""What a trainer promises beyond equal layouts: cuts, restarts, non-finite steps, bf16, recomputing, SFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_cases import (
    VOCAB,
    actor_config,
    fixed_samples,
    make_model,
    on_subworlds,
    reference_logp,
    sequences,
    share_of,
    torch_store,
    train,
    whole_weights,
)

from areal_hpc.config import Dtype, MicroBatchConfig, Parallel, SftConfig
from areal_hpc.layout.spec import read_spec

D1, D2, T2, P2 = Parallel(1, 1, 1), Parallel(2, 1, 1), Parallel(1, 2, 1), Parallel(1, 1, 2)
NAME = "qwen2-tied"  # biases, grouped queries, an embedding that two stages share


@pytest.fixture(scope="module")
def store() -> Any:
    from mpi4py import MPI

    return torch_store(MPI.COMM_WORLD)


@pytest.fixture
def model_dir(world: Any, shared_dir: Path) -> Path:
    path = shared_dir / NAME
    if world.rank == 0:
        make_model(NAME, path)
    world.Barrier()
    return path


def built(comm: Any, store: Any, path: Path, parallel: Parallel, actor: Any) -> tuple[Any, Any, Any]:
    """Groups, binding with the directory's weights, and actor."""
    from areal_hpc.trainer.actor import Actor
    from areal_hpc.trainer.binding import TrainerBinding
    from areal_hpc.trainer.model import Model, build_groups

    groups = build_groups(comm, parallel, store, deadline_s=60)
    model = Model(read_spec(path), actor, groups, seed=1)
    binding = TrainerBinding(model)
    binding.load_hf(path)
    return groups, binding, Actor(model, actor, temperature=0.7, total_steps=4)


def fits(world: Any, layouts: list[Parallel]) -> list[Parallel]:
    """As many of the layouts as fit beside each other, in order; a launch of one rank has the first."""
    out: list[Parallel] = []
    for layout in layouts:
        if sum(held.size for held in out) + layout.size <= world.size:
            out.append(layout)
    return out


def close(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray], bound: float) -> None:
    for key, expected in theirs.items():
        if key.startswith("exp_avg/"):  # gradients, summed in another order; weights: see test_trainer_parity
            np.testing.assert_allclose(mine[key], expected, rtol=0, atol=bound, err_msg=key)


def test_gradient_does_not_depend_on_the_cut(world: Any, store: Any, model_dir: Path) -> None:
    """Two minibatches with their proximal pass, as one microbatch each, as one for each sample, and over DP or PP."""
    layouts = fits(world, [D1, D2, P2][: 1 if world.size == 1 else 3])
    runs = []
    for limit in (4096, 1):
        actor = replace(actor_config(True), mb_spec=MicroBatchConfig(limit))

        def body(comm: Any, store: Any, index: int, actor: Any = actor) -> Any:
            return train(comm, store, model_dir, layouts[index], actor, minibatches=2)

        runs += on_subworlds(world, store, f"cut/{limit}", layouts, body).values()
    if world.rank == 0:
        for run in runs[1:]:
            close(run.weights, runs[0].weights, 1e-6)
            for mine, theirs in zip(run.metrics, runs[0].metrics, strict=True):
                assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
                assert mine["approx_kl/proximal"] == pytest.approx(theirs["approx_kl/proximal"], rel=1e-2, abs=1e-8)
        # theta has moved away from pi_p by the second minibatch
        assert runs[0].metrics[0]["approx_kl/proximal"] > 0


def test_a_rank_without_samples_takes_part(world: Any, store: Any, model_dir: Path) -> None:
    """One sample over two DP ranks gives the gradient that it gives alone."""
    layouts = fits(world, [D1, D2])

    def body(comm: Any, store: Any, index: int) -> Any:
        groups, binding, actor = built(comm, store, model_dir, layouts[index], actor_config(True))
        try:
            calls: list[int] = []
            samples = fixed_samples(actor)[:1]
            [mine] = share_of(samples, 1, groups)
            outcome = actor.update(0, [mine], on_microbatch=lambda: calls.append(1))
            assert outcome.applied == 1 and outcome.metrics["tokens"] == len(samples[0].logp_A) and len(calls) == 1
            return whole_weights(comm, binding.model.spec, binding)
        finally:
            groups.close()

    results = on_subworlds(world, store, "empty", layouts, body)
    if world.rank == 0:
        for weights in results.values():
            close(weights, results[0], 1e-7)


def test_state_moves_to_another_layout(world: Any, store: Any, model_dir: Path) -> None:
    """Two steps, state out through the boxes and into other layouts, one more step: as if never interrupted."""
    everyone = fits(world, [D1, P2]) if world.size < 4 else [Parallel(2, 2, 1)]
    after = [fits(world, [T2, P2]) if world.size >= 4 else fits(world, [D1, T2]), fits(world, [D1, D2])]

    def first(comm: Any, store: Any, index: int) -> Any:
        groups, binding, actor = built(comm, store, model_dir, everyone[index], actor_config(True))
        try:
            samples = fixed_samples(actor)
            [mine] = share_of(samples, 1, groups)
            for step in range(2):
                actor.update(step, [mine])
            middle = whole_weights(comm, binding.model.spec, binding)
            actor.update(2, [mine])
            return samples, middle, whole_weights(comm, binding.model.spec, binding)
        finally:
            groups.close()

    samples, middle, expected = on_subworlds(world, store, "before", everyone, first)[0]

    for number, layouts in enumerate(after):

        def second(comm: Any, store: Any, index: int, layouts: list[Parallel] = layouts) -> Any:
            groups, binding, actor = built(comm, store, model_dir, layouts[index], actor_config(True))
            try:
                [mine] = share_of(samples, 1, groups)
                actor.update(0, [mine])  # other moments and another count, to be overwritten
                for kind, views in binding.state_views(copies=True).items():
                    for box, view in views:
                        values = middle[f"{kind}/{box.name}"][tuple(slice(a, b) for a, b in zip(box.start, box.stop))]
                        view.copy_(torch.from_numpy(values))
                binding.step_count = 2
                binding.after_load()
                loaded = whole_weights(comm, binding.model.spec, binding)
                actor.update(2, [mine])
                return loaded, whole_weights(comm, binding.model.spec, binding)
            finally:
                groups.close()

        for loaded, last in on_subworlds(world, store, f"after/{number}", layouts, second).values():
            for key, values in middle.items():
                np.testing.assert_array_equal(loaded[key], values, err_msg=key)
            for key, values in expected.items():
                # the third step's rate is 1e-4: a wrong moment or count would show
                np.testing.assert_allclose(last[key], values, rtol=0, atol=1e-5, err_msg=key)


def test_non_finite_minibatch_changes_nothing(world: Any, store: Any, model_dir: Path) -> None:
    """An infinite importance weight on one DP rank: in the first minibatch no step, in the second only the first."""
    layouts = fits(world, [D2, D2][: max(1, world.size // 2)] if world.size > 1 else [D1])

    def body(comm: Any, store: Any, index: int) -> None:
        groups, binding, actor = built(comm, store, model_dir, layouts[index], actor_config(index == 0))
        try:
            good = fixed_samples(actor)
            bad = list(good)
            bad[-1] = replace(bad[-1], logp_A=np.full_like(bad[-1].logp_A, -np.inf))
            before = whole_weights(comm, binding.model.spec, binding)
            outcome = actor.update(0, share_of(bad, 1, groups))
            assert (outcome.applied, outcome.finite) == (0, False) and binding.step_count == 0
            after = whole_weights(comm, binding.model.spec, binding)
            for key in before or ():
                np.testing.assert_array_equal(after[key], before[key], err_msg=key)
            outcome = actor.update(0, share_of(bad, 2, groups))  # its last sample is in the second minibatch
            assert (outcome.applied, outcome.finite) == (1, False) and binding.step_count == 1
            outcome = actor.update(1, share_of(good, 1, groups))
            assert (outcome.applied, outcome.finite) == (1, True)
            assert all(np.isfinite(value) for value in outcome.metrics.values())
        finally:
            groups.close()

    on_subworlds(world, store, "nonfinite", layouts, body)


def test_ranks_that_disagree_are_told(world: Any, store: Any, model_dir: Path) -> None:
    layouts = fits(world, [D2] if world.size > 1 else [D1])

    def body(comm: Any, store: Any, index: int) -> None:
        groups, _, actor = built(comm, store, model_dir, layouts[index], actor_config(True))
        try:
            samples = fixed_samples(actor)
            if comm.size > 1:
                with pytest.raises(ValueError, match="from 1 to 2 minibatches"):
                    actor.update(0, [samples] * (1 + comm.rank))
            with pytest.raises(ValueError, match="each needs at least one"):
                actor.update(0, [samples, []])
        finally:
            groups.close()

    on_subworlds(world, store, "disagree", layouts, body)


def test_bf16_keeps_an_fp32_master(world: Any, store: Any, model_dir: Path) -> None:
    """Weights are the masters' casts, masters those of the file; log-probabilities near fp32's; steps move masters."""
    layouts = fits(world, [D1, D2])
    expected = reference_logp(model_dir) if world.rank == 0 else None

    def body(comm: Any, store: Any, index: int) -> Any:
        actor_settings = actor_config(True, dtype=Dtype.bfloat16)
        groups, binding, actor = built(comm, store, model_dir, layouts[index], actor_settings)
        try:
            start = whole_weights(comm, binding.model.spec, binding)
            logp = actor.logp(sequences())
            outcome = actor.update(0, share_of(fixed_samples(actor), 1, groups))
            assert outcome.finite
            return start, logp, whole_weights(comm, binding.model.spec, binding)
        finally:
            groups.close()

    results = on_subworlds(world, store, "bf16", layouts, body)
    if world.rank == 0:
        from safetensors.numpy import load_file

        stored = load_file(model_dir / "model.safetensors")
        for start, logp, end in results.values():
            for name, values in stored.items():
                np.testing.assert_array_equal(start[f"master/{name}"], values, err_msg=name)
                for held in (start, end):
                    cast = torch.from_numpy(held[f"master/{name}"]).bfloat16().float().numpy()
                    np.testing.assert_array_equal(held[f"weight/{name}"], cast, err_msg=name)
            assert np.abs(np.concatenate(logp) - np.concatenate(expected)).mean() < 0.05
            moved = np.abs(end["master/model.norm.weight"] - start["master/model.norm.weight"])
            assert 0 < moved.max() < 2e-4


def test_recomputing_activations_changes_no_number(world: Any, store: Any, model_dir: Path) -> None:
    layouts = fits(world, [D1, P2])

    def body(comm: Any, store: Any, index: int) -> Any:
        runs = []
        for recompute in (False, True):
            actor = actor_config(True, activation_recompute=recompute)
            from torch.distributed import PrefixStore

            runs.append(train(comm, PrefixStore(f"{recompute}", store), model_dir, layouts[index], actor))
        return runs

    for plain, again in on_subworlds(world, store, "recompute", layouts, body).values():
        for key, values in plain.weights.items():
            np.testing.assert_array_equal(again.weights[key], values, err_msg=key)


def test_sft_loss_is_the_answers_and_falls(world: Any, store: Any, model_dir: Path) -> None:
    """The first loss is Hugging Face's, over layouts alike; eight steps on one batch lower it."""
    from areal_hpc.trainer.sft import train_sft

    layouts = fits(world, [D1, D2] if world.size < 4 else [Parallel(1, 2, 2)])
    layouts_too = fits(world, [D1, D2])
    pairs = [(tokens[:3].tolist(), tokens[3:].tolist()) for tokens in sequences()]
    nll = [-values[2:].sum() for values in reference_logp(model_dir)] if world.rank == 0 else []

    for number, chosen in enumerate((layouts, layouts_too)):

        def body(comm: Any, store: Any, index: int, chosen: list[Parallel] = chosen) -> list[dict[str, float]]:
            groups, binding, _ = built(comm, store, model_dir, chosen[index], actor_config(True))
            try:
                share = pairs[groups.dp :: groups.parallel.dp]
                seen: list[dict[str, float]] = []
                config = SftConfig(steps=8, lr=3e-3, warmup_steps=2)
                train_sft(binding.model, [share] * 8, config, lambda step, metrics: seen.append(metrics))
                assert binding.step_count == 8
                return seen
            finally:
                groups.close()

        for steps in on_subworlds(world, store, f"sft/{number}", chosen, body).values():
            if world.rank == 0:
                tokens = sum(len(answer) for _, answer in pairs)
                assert steps[0]["loss"] == pytest.approx(sum(nll) / tokens, abs=1e-4)
                assert steps[0]["lr"] == pytest.approx(1.5e-3) and steps[1]["lr"] == pytest.approx(3e-3)
                assert steps[0]["tokens"] == tokens and steps[-1]["loss"] < steps[0]["loss"] - 0.3


def test_logp_of_one_token_and_none(world: Any, store: Any, model_dir: Path) -> None:
    """The first token of a sequence has no log-probability; results keep the order they were asked in."""
    layouts = fits(world, [P2] if world.size > 1 else [D1])

    def body(comm: Any, store: Any, index: int) -> None:
        groups, _, actor = built(comm, store, model_dir, layouts[index], actor_config(True))
        try:
            asked = [np.arange(n, dtype=np.int32) % VOCAB for n in (5, 1, 3, 5)]
            got = actor.logp(asked)
            assert [len(values) for values in got] == [4, 0, 2, 4]
            np.testing.assert_allclose(got[0][:2], got[2], atol=1e-5)
            assert actor.logp([]) == []
            state = actor.rng_state()
            drawn = torch.rand(3)
            actor.load_rng_state(state)
            assert torch.equal(torch.rand(3), drawn)
        finally:
            groups.close()

    on_subworlds(world, store, "logp", layouts, body)
