"""The configuration: one dataclass per room. configfile.py makes it from YAML and overrides.

Keys follow AReaL's names where it has one. What a user reads about a key is its field's
`help`; a value is checked where it is declared (`check` of its dataclass), before any model
is loaded, and every error names the key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot run. Ends the job with exit code 78."""


def key(default: Any, help: str) -> Any:
    """A field with its unit and its reason beside it."""
    if callable(default):
        return field(default_factory=default, metadata={"help": help})
    return field(default=default, metadata={"help": help})


def require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value}: expected {expected}")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of a parallel layout: data, tensor and pipeline (AReaL's notation, `d2t1p4`)."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"d{self.dp}t{self.tp}p{self.pp}"


def parse_backend(name: str, text: str, engine: str, letters: str) -> Parallel:
    """`megatron:d2t1p4` as sizes. Letters may come in any order; one left out is 1."""
    found = re.fullmatch(rf"{engine}:((?:[a-z]\d+)+)", text)
    example = f"{engine}:" + "".join(f"{letter}1" for letter in letters)
    require(found is not None, name, text, f"{engine}: and sizes for {', '.join(letters)}, like {example}")
    sizes = re.findall(r"([a-z])(\d+)", found[1])
    for letter, _ in sizes:
        require(letter in letters, name, text, f"letters {', '.join(letters)} only; `{letter}` is not one of them")
    require(len({letter for letter, _ in sizes}) == len(sizes), name, text, "each letter once")
    require(all(int(n) > 0 for _, n in sizes), name, text, "sizes of at least 1")
    by_letter = {letter: int(n) for letter, n in sizes}
    return Parallel(by_letter.get("d", 1), by_letter.get("t", 1), by_letter.get("p", 1))


class Dtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Order(Enum):
    fifo = "fifo"
    ready = "ready"


class Stale(Enum):
    keep = "keep"
    drop = "drop"


class ShortBatch(Enum):
    train = "train"
    stop = "stop"


class Verify(Enum):
    always = "always"
    first = "first"
    never = "never"


class Level(Enum):
    batch = "batch"
    group = "group"
    none = "none"


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class ClusterConfig:
    fileroot: str = key("runs", "folder that holds <experiment_name>/<trial_name>/")
    interface: str = key("", "network interface of the torch stores' address, e.g. ib0; empty: the host name's address")
    tp_across_nodes: bool = key(False, "allow a tensor-parallel group to cross nodes")


@dataclass
class OptimizerConfig:
    lr: float = key(2e-5, "peak learning rate")
    weight_decay: float = key(0.05, "AdamW's decoupled weight decay")
    beta1: float = key(0.9, "Adam's first decay")
    beta2: float = key(0.95, "Adam's second decay")
    eps: float = key(1e-5, "Adam's denominator term")
    gradient_clipping: float = key(1.0, "clip of the global gradient norm; 0 switches it off")
    warmup_steps: int = key(0, "training steps over which the learning rate rises linearly")
    lr_scheduler_type: Schedule = key(Schedule.constant, "what follows the warm-up, until total_train_steps")
    min_lr_ratio: float = key(0.0, "the learning rate at the end over its peak")

    def check(self, at: str) -> None:
        require(self.lr >= 0, f"{at}.lr", self.lr, "a rate of at least 0")
        require(0 <= self.beta1 < 1, f"{at}.beta1", self.beta1, "0 <= beta1 < 1")
        require(0 <= self.beta2 < 1, f"{at}.beta2", self.beta2, "0 <= beta2 < 1")
        require(self.eps > 0, f"{at}.eps", self.eps, "more than 0")
        require(self.warmup_steps >= 0, f"{at}.warmup_steps", self.warmup_steps, "at least 0")
        require(0 <= self.min_lr_ratio <= 1, f"{at}.min_lr_ratio", self.min_lr_ratio, "a ratio from 0 to 1")


@dataclass
class MicroBatchConfig:
    max_tokens_per_mb: int = key(4096, "tokens of one microbatch on one DP rank; a longer sequence is one by itself")

    def check(self, at: str) -> None:
        require(self.max_tokens_per_mb > 0, f"{at}.max_tokens_per_mb", self.max_tokens_per_mb, "at least 1")


@dataclass
class NormConfig:
    mean_level: Level = key(Level.batch, "what the mean of the advantages is taken over")
    std_level: Level = key(Level.batch, "what their standard deviation is taken over")


@dataclass
class ActorConfig:
    backend: str = key("megatron:d1t1p1", "trainer layout: data, tensor and pipeline sizes")
    path: str = key("???", "Hugging Face directory of the model: config.json, safetensors, tokenizer")
    dtype: Dtype = key(Dtype.float32, "dtype of the trainer's parameters; the optimizer's master copy is fp32")
    distributed_optimizer: bool = key(True, "spread optimizer state over DP ranks (has no effect at d1)")
    mb_spec: MicroBatchConfig = key(MicroBatchConfig, "how a minibatch is cut")
    optimizer: OptimizerConfig = key(OptimizerConfig, "AdamW")
    ppo_n_minibatches: int = key(1, "optimizer steps per training step")
    eps_clip: float = key(0.2, "PPO's clip of pi_theta / pi_proximal")
    use_decoupled_loss: bool = key(True, "decoupled PPO (equation 5); false: the behaviour policy is the proximal one")
    behave_imp_weight_cap: float = key(0.0, "cap of pi_proximal / pi_behave; 0 leaves it as it is")
    reward_bias: float = key(0.0, "added to each reward before scaling")
    reward_scaling: float = key(1.0, "factor of each reward; bias -0.5 and scaling 10 give the paper's +5 / -5")
    adv_norm: NormConfig = key(NormConfig, "normalisation of the advantages")
    activation_recompute: bool = key(False, "recompute each layer's activations in the backward pass")

    @property
    def parallel(self) -> Parallel:
        return parse_backend("actor.backend", self.backend, "megatron", "dtp")

    def check(self, at: str) -> None:
        parse_backend(f"{at}.backend", self.backend, "megatron", "dtp")
        require(self.ppo_n_minibatches > 0, f"{at}.ppo_n_minibatches", self.ppo_n_minibatches, "at least 1")
        require(0 < self.eps_clip < 1, f"{at}.eps_clip", self.eps_clip, "0 < eps_clip < 1")
        cap = self.behave_imp_weight_cap
        require(cap == 0 or cap >= 1, f"{at}.behave_imp_weight_cap", cap, "0 (off) or a cap of at least 1")


@dataclass
class GenerationConfig:
    n_samples: int = key(8, "samples of one prompt: the group")
    max_new_tokens: int = key(64, "tokens after which a sample is cut")
    temperature: float = key(1.0, "sampling temperature; trainer log-probabilities are of logits / temperature")
    top_p: float = key(1.0, "must be 1 in training")
    top_k: int = key(0, "must be 0 (all tokens) in training")
    min_new_tokens: int = key(0, "must be 0 in training")
    ignore_eos: bool = key(False, "go on to max_new_tokens (benchmarks)")

    def check(self, at: str) -> None:
        require(self.n_samples >= 2, f"{at}.n_samples", self.n_samples, "at least 2: a group with one has no advantage")
        require(self.max_new_tokens > 0, f"{at}.max_new_tokens", self.max_new_tokens, "at least 1")
        require(self.temperature > 0, f"{at}.temperature", self.temperature, "more than 0 in training")
        why = "in training: the trainer could not recompute the sampling distribution"
        require(self.top_p == 1, f"{at}.top_p", self.top_p, f"1 {why}")
        require(self.top_k == 0, f"{at}.top_k", self.top_k, f"0 {why}")
        require(self.min_new_tokens == 0, f"{at}.min_new_tokens", self.min_new_tokens, f"0 {why}")


@dataclass
class ToleranceConfig:
    """Bounds of the log-probability probe after an update (design, section 6)."""

    fp32_max: float = key(1e-3, "largest difference, fp32 rollout")
    bf16_mean: float = key(0.02, "mean difference, bf16 rollout")
    bf16_max: float = key(0.2, "largest difference, bf16 rollout")


@dataclass
class RolloutConfig:
    backend: str = key("vllm:d1t1", "rollout layout: replicas (d) and their tensor-parallel size (t)")
    dtype: Dtype = key(Dtype.float32, "dtype of the rollout weights; the sender casts")
    max_head_offpolicyness: int = key(4, "eta: how many versions a trained token may be behind; 0 is synchronous")
    max_concurrent_rollouts: int = key(64, "samples in flight over all replicas")
    order: Order = key(Order.fifo, "fifo: each step trains the next ordinals; ready: the oldest finished groups")
    stale: Stale = key(Stale.keep, "order `ready`: what happens to groups older than eta")
    max_drops_per_step: int = key(64, "ordinals a step may lose before it trains what is left")
    short_batch: ShortBatch = key(
        ShortBatch.train, "what a step does that lost more: train what is left, or stop the run with an error"
    )
    dynamic_sampling: bool = key(False, "drop groups whose rewards are all equal")
    max_model_len: int = key(0, "longest prompt + answer; 0: as the longest prompt of the data allows")
    max_num_seqs: int = key(64, "sequences of one engine step on one replica")
    kv_cache_gib: float = key(1.0, "host memory for KV blocks of one rank (CPU backend)")
    gpu_memory_utilization: float = key(0.85, "share of a GPU's memory for vLLM")
    enable_prefix_caching: bool = key(True, "share KV of equal prefixes within one version")
    enforce_eager: bool = key(False, "GPU: no CUDA graphs")
    verify: Verify = key(
        Verify.always, "always: checksums and probe of each version; first: the probe once per start; never: neither"
    )
    verify_tolerance: ToleranceConfig = key(ToleranceConfig, "bounds of the probe")
    reward_workers: int = key(1, "reward processes of each replica")
    reward_timeout_s: float = key(15.0, "seconds after which a reward worker is killed")

    @property
    def parallel(self) -> Parallel:
        return parse_backend("rollout.backend", self.backend, "vllm", "dt")

    def check(self, at: str) -> None:
        parse_backend(f"{at}.backend", self.backend, "vllm", "dt")
        for name in ("max_head_offpolicyness", "max_drops_per_step", "max_model_len"):
            require(getattr(self, name) >= 0, f"{at}.{name}", getattr(self, name), "at least 0")
        for name in ("max_concurrent_rollouts", "max_num_seqs", "kv_cache_gib", "reward_workers", "reward_timeout_s"):
            require(getattr(self, name) > 0, f"{at}.{name}", getattr(self, name), "more than 0")


@dataclass
class DatasetConfig:
    type: str = key("arithmetic", "the task: arithmetic, reasoning_gym or file")
    path: str = key("", "reasoning_gym: name of its task; file: a JSONL file")
    batch_size: int = key(16, "B: prompts of one training step (an evaluation takes all items)")
    size: int = key(10000, "prompts of a generated dataset")
    options: dict[str, Any] = key(dict, "what the task itself takes, e.g. {digits: 2}")
    system_prompt: str = key("", "put before the question where the tokenizer has a chat template")

    def check(self, at: str) -> None:
        require(self.batch_size > 0, f"{at}.batch_size", self.batch_size, "at least 1")
        require(self.size > 0, f"{at}.size", self.size, "at least 1")


@dataclass
class SaverConfig:
    freq_steps: int = key(0, "training steps between checkpoints; 0: at the end only")
    freq_secs: float = key(0.0, "seconds between checkpoints; 0: by steps only")
    keep_last: int = key(2, "newest checkpoints that stay")
    writers_per_node: int = key(1, "trainer ranks of a node that write")

    def check(self, at: str) -> None:
        require(self.keep_last >= 1, f"{at}.keep_last", self.keep_last, "at least 1")
        require(self.writers_per_node >= 1, f"{at}.writers_per_node", self.writers_per_node, "at least 1")


@dataclass
class EvaluatorConfig:
    freq_steps: int = key(0, "training steps between evaluations on valid_dataset; 0: never")
    at_start: bool = key(False, "evaluate version 0 before training")
    at_end: bool = key(False, "evaluate the last version")


@dataclass
class StatsConfig:
    tensorboard: bool = key(True, "write TensorBoard events beside metrics.jsonl")
    trace: bool = key(False, "write a Chrome trace of each rank's phases")


@dataclass
class DeadlineConfig:
    """Seconds without a sign of life after which the job ends; each names what it waits for."""

    start_s: float = key(600.0, "building a model or an engine")
    step_s: float = key(1800.0, "a phase of a training step: forward, backward, optimizer")
    engine_step_s: float = key(300.0, "one engine step")
    exchange_s: float = key(300.0, "READY of a replica, and the exchange")
    batch_s: float = key(3600.0, "a batch to be complete, counted from the last delivery")
    save_s: float = key(1800.0, "a checkpoint")

    def check(self, at: str) -> None:
        for f in fields(self):
            require(getattr(self, f.name) > 0, f"{at}.{f.name}", getattr(self, f.name), "more than 0 seconds")


@dataclass
class SftConfig:
    steps: int = key(300, "optimizer steps, at most")
    until_loss: float = key(0.0, "end once the mean loss of 20 steps is below this; 0: after all steps")
    batch_size: int = key(256, "sequences a step over all DP ranks")
    lr: float = key(1e-3, "peak learning rate; warm-up and schedule are the optimizer's")
    warmup_steps: int = key(20, "steps over which the learning rate rises linearly")
    output: str = key("", "Hugging Face directory for the result; empty: <run>/hf")

    def check(self, at: str) -> None:
        for name in ("steps", "batch_size"):
            require(getattr(self, name) > 0, f"{at}.{name}", getattr(self, name), "at least 1")


@dataclass
class Config:
    experiment_name: str = key("???", "first part of the run's folder")
    trial_name: str = key("trial0", "second part of the run's folder")
    seed: int = key(1, "data order, sampling and initialisation")
    total_train_steps: int = key(100, "training steps in all, over all attempts")
    tokenizer_path: str = key("${actor.path}", "Hugging Face directory of the tokenizer")
    recover: str = key(
        "auto", "auto: go on from the newest checkpoint that verifies; fresh: start over (a requeued job goes on)"
    )
    cluster: ClusterConfig = key(ClusterConfig, "the machine")
    actor: ActorConfig = key(ActorConfig, "trainer")
    rollout: RolloutConfig = key(RolloutConfig, "generation")
    gconfig: GenerationConfig = key(GenerationConfig, "sampling")
    train_dataset: DatasetConfig = key(DatasetConfig, "prompts to train on")
    valid_dataset: DatasetConfig = key(DatasetConfig, "held-out prompts")
    saver: SaverConfig = key(SaverConfig, "checkpoints")
    evaluator: EvaluatorConfig = key(EvaluatorConfig, "evaluation")
    stats_logger: StatsConfig = key(StatsConfig, "metrics")
    deadlines: DeadlineConfig = key(DeadlineConfig, "how long a wait may last")
    sft: SftConfig = key(SftConfig, "areal-hpc sft")

    @property
    def run_dir(self) -> Path:
        return Path(self.cluster.fileroot) / self.experiment_name / self.trial_name

    def check(self) -> None:
        """Values that contradict each other. Raises ConfigError naming the keys."""
        _check_fields(self, "")
        require(self.total_train_steps >= 0, "total_train_steps", self.total_train_steps, "at least 0")
        require(self.recover in ("auto", "fresh"), "recover", self.recover, "auto or fresh")
        limit, n = self.rollout.max_concurrent_rollouts, self.gconfig.n_samples
        need = n * self.rollout.parallel.dp
        require(
            limit >= need,
            "rollout.max_concurrent_rollouts",
            limit,
            f"at least gconfig.n_samples * replicas = {n} * {self.rollout.parallel.dp} = {need}: "
            "a smaller limit never lets a replica start a group",
        )


def _check_fields(node: Any, at: str) -> None:
    for f in fields(node):
        value, name = getattr(node, f.name), f"{at}.{f.name}" if at else f.name
        if is_dataclass(value):
            if hasattr(value, "check"):
                value.check(name)
            _check_fields(value, name)
