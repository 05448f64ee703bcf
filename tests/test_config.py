"""The configuration: what is refused and in which words, the round trip, and the frozen list of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.config import Config, ConfigError, Dtype, Order, Parallel, parse_backend
from areal_hpc.configfile import dump, keys, load

MINIMAL = "experiment_name: one\nactor: {path: models/tiny}\n"

# Every key, so that a new one is a line which the reader of a change sees and weighs.
KEYS = """
experiment_name
trial_name
seed
total_train_steps
tokenizer_path
recover
cluster.fileroot
cluster.interface
cluster.tp_across_nodes
actor.backend
actor.path
actor.dtype
actor.distributed_optimizer
actor.mb_spec.max_tokens_per_mb
actor.optimizer.lr
actor.optimizer.weight_decay
actor.optimizer.beta1
actor.optimizer.beta2
actor.optimizer.eps
actor.optimizer.gradient_clipping
actor.optimizer.warmup_steps
actor.optimizer.lr_scheduler_type
actor.optimizer.min_lr_ratio
actor.ppo_n_minibatches
actor.eps_clip
actor.use_decoupled_loss
actor.behave_imp_weight_cap
actor.reward_bias
actor.reward_scaling
actor.adv_norm.mean_level
actor.adv_norm.std_level
actor.activation_recompute
rollout.backend
rollout.dtype
rollout.max_head_offpolicyness
rollout.max_concurrent_rollouts
rollout.order
rollout.stale
rollout.max_drops_per_step
rollout.short_batch
rollout.dynamic_sampling
rollout.max_model_len
rollout.max_num_seqs
rollout.kv_cache_gib
rollout.gpu_memory_utilization
rollout.enable_prefix_caching
rollout.enforce_eager
rollout.verify
rollout.verify_tolerance.fp32_max
rollout.verify_tolerance.bf16_mean
rollout.verify_tolerance.bf16_max
rollout.reward_workers
rollout.reward_timeout_s
gconfig.n_samples
gconfig.max_new_tokens
gconfig.temperature
gconfig.top_p
gconfig.top_k
gconfig.min_new_tokens
gconfig.ignore_eos
train_dataset.type
train_dataset.path
train_dataset.batch_size
train_dataset.size
train_dataset.options
train_dataset.system_prompt
valid_dataset.type
valid_dataset.path
valid_dataset.batch_size
valid_dataset.size
valid_dataset.options
valid_dataset.system_prompt
saver.freq_steps
saver.freq_secs
saver.keep_last
saver.writers_per_node
evaluator.freq_steps
evaluator.at_start
evaluator.at_end
stats_logger.tensorboard
stats_logger.trace
deadlines.start_s
deadlines.step_s
deadlines.engine_step_s
deadlines.exchange_s
deadlines.batch_s
deadlines.save_s
sft.steps
sft.until_loss
sft.batch_size
sft.lr
sft.warmup_steps
sft.output
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(write(folder, text), list(overrides))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_keys_are_these() -> None:
    assert [name for name, _ in keys()] == KEYS.strip().splitlines()
    assert all(text.strip() for _, text in keys()), "each key says what it is for"


def test_defaults_overrides_and_interpolation(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "trial_name: s${seed}\ngconfig: {n_samples: 4}\n")
    config = load(path, ["seed=5", "actor.optimizer.lr=3e-4", "rollout.order=ready", "actor.backend=megatron:d2t4p8"])
    assert config.trial_name == "s5"
    assert config.tokenizer_path == "models/tiny"
    assert config.actor.optimizer.lr == 3e-4
    assert config.rollout.order is Order.ready
    assert config.actor.parallel == Parallel(dp=2, tp=4, pp=8)
    assert config.actor.parallel.size == 64
    assert config.run_dir == Path("runs/one/s5")
    assert isinstance(config, Config)


def test_round_trip(tmp_path: Path) -> None:
    first = load(write(tmp_path, MINIMAL), ["seed=9", "rollout.dtype=bfloat16", "train_dataset.options={digits: 3}"])
    again = load(write(tmp_path, dump(first)))
    assert again == first
    assert again.rollout.dtype is Dtype.bfloat16
    assert again.train_dataset.options == {"digits": 3}


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor.optimiser.lr=1", "actor.optimiser: unknown key; the nearest known one is actor.optimizer"),
        ("rollout.max_head_ofpolicyness=1", "rollout.max_head_ofpolicyness: unknown key; the nearest known one is"),
        ("gconfig.n_sample=4", "the nearest known one is gconfig.n_samples"),
        ("zzz=1", "zzz: unknown key"),
    ],
)
def test_unknown_key(tmp_path: Path, override: str, says: str) -> None:
    assert says in refusal(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(
    "override", ["seed=one", "actor.optimizer.lr=fast", "gconfig.n_samples=2.5", "rollout.order=lifo"]
)
def test_wrong_type(tmp_path: Path, override: str) -> None:
    name, value = override.split("=")
    said = refusal(tmp_path, MINIMAL, override)
    assert said.startswith(name + ":") and value in said


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("gconfig.top_p=0.9", "gconfig.top_p=0.9: expected 1 in training"),
        ("gconfig.top_k=5", "gconfig.top_k=5: expected 0 in training"),
        ("gconfig.temperature=0", "gconfig.temperature=0.0: expected more than 0"),
        ("gconfig.n_samples=1", "gconfig.n_samples=1: expected at least 2"),
        ("actor.backend=fsdp:d1", "actor.backend=fsdp:d1: expected megatron: and sizes"),
        ("actor.backend=megatron:d1e2", "`e` is not one of them"),
        ("actor.backend=megatron:d0", "actor.backend=megatron:d0: expected sizes of at least 1"),
        ("rollout.backend=vllm:d1p2", "`p` is not one of them"),
        ("rollout.max_concurrent_rollouts=4", "gconfig.n_samples * replicas = 8 * 1 = 8"),
        ("rollout.max_head_offpolicyness=-1", "rollout.max_head_offpolicyness=-1: expected at least 0"),
        ("actor.optimizer.beta1=1", "actor.optimizer.beta1=1.0: expected 0 <= beta1 < 1"),
        ("actor.behave_imp_weight_cap=0.5", "actor.behave_imp_weight_cap=0.5: expected 0 (off) or"),
        ("train_dataset.batch_size=0", "train_dataset.batch_size=0: expected at least 1"),
        ("deadlines.step_s=0", "deadlines.step_s=0.0: expected more than 0 seconds"),
        ("recover=maybe", "recover=maybe: expected auto or fresh"),
        ("seed", "seed: an override has the form key=value"),
    ],
)
def test_impossible_value(tmp_path: Path, override: str, says: str) -> None:
    assert says in refusal(tmp_path, MINIMAL, override)


@pytest.mark.parametrize(
    ("text", "override", "says"),
    [
        (MINIMAL, "actor=3", "actor: 3 is not a section; expected keys below it like backend"),
        (MINIMAL, "actor.optimizer=adam", "actor.optimizer: adam is not a section"),
        ("experiment_name: one\nactor:\n", "seed=1", "actor: None is not a section"),
        ("- experiment_name\n", "seed=1", "config.yaml: ['experiment_name'] is not a section"),
        ("3\n", "seed=1", "config.yaml: cannot be read as a configuration"),
        (MINIMAL, "seed=[1]", "seed: "),
    ],
)
def test_not_a_section(tmp_path: Path, text: str, override: str, says: str) -> None:
    assert says in refusal(tmp_path, text, override)


def test_a_section_may_be_another_ones(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL + "valid_dataset: ${train_dataset}\n"), ["train_dataset.size=7"])
    assert config.valid_dataset.size == 7


def test_missing_keys_and_files(tmp_path: Path) -> None:
    said = refusal(tmp_path, "seed: 1\n")
    assert "actor.path" in said and "experiment_name" in said and "required" in said
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load(tmp_path / "nowhere.yaml")
    assert "not YAML" in refusal(tmp_path, "seed: [1\n")
    assert "trial_name" in refusal(tmp_path, MINIMAL + "trial_name: ${no_such_key}\n")


@pytest.mark.parametrize(("text", "sizes"), [("m:d2t4", (2, 4, 1)), ("m:p3d2", (2, 1, 3)), ("m:t16", (1, 16, 1))])
def test_backend_notation(text: str, sizes: tuple[int, int, int]) -> None:
    assert parse_backend("key", text, "m", "dtp") == Parallel(*sizes)
    assert parse_backend("key", f"m:{Parallel(*sizes)}", "m", "dtp") == Parallel(*sizes)


@pytest.mark.parametrize("text", ["", "m:", "d1", "m:d", "m:d1d2", "x:d1", "m:d-1", "m:1d"])
def test_backend_notation_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^key="):
        parse_backend("key", text, "m", "dtp")
