"""A rollout rank from its place in the world to its exit code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from areal_hpc import tasks
from areal_hpc.config import Config, ConfigError, DatasetConfig, Verify
from areal_hpc.layout.spec import ModelSpec, read_spec
from areal_hpc.observe import trace
from areal_hpc.observe.trace import Trace
from areal_hpc.reshard.exchange import Exchange
from areal_hpc.reshard.update import PROBE_TOKENS, update_plan
from areal_hpc.rollout.engine import Engine
from areal_hpc.rollout.evaluate import Evaluation
from areal_hpc.rollout.groups import Groups
from areal_hpc.rollout.leader import Leader, Owner
from areal_hpc.rollout.rewards import RewardPool
from areal_hpc.rollout.worker import Worker
from areal_hpc.stream import begin
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.tasks.prompts import encode, load_tokenizer
from areal_hpc.world import World


def roll(config: Config, world: World) -> int:
    """Generate until the trainer says stop. Collective over the world's rollout ranks."""
    world.phase("start", config.deadlines.start_s)
    spec, place = read_spec(config.actor.path), world.place
    # First of all: it refuses a layout that the model does not divide over.
    plan = update_plan(spec, config.actor.parallel, config.rollout.parallel, world.places)
    prompts = Prompts(config, spec)
    engine = Engine(
        spec,
        config.actor.path,
        config.rollout,
        max_model_len=prompts.max_model_len,
        seed=config.seed + place.dp,
        tp_rank=place.tp,
        store=world.torch_store(world.replica_comm) if world.replica_comm.size > 1 else None,
        device=place.local_rank % max(1, torch.cuda.device_count()),
    )
    mailbox = Mailbox(world)
    # The trainer may still read a checkpoint.
    world.phase("begin", config.deadlines.start_s + config.deadlines.save_s, peer=world.homes[0])
    start = begin.share(world.comm, None, world.homes[0])
    recorder = Trace(world.rank, f"rollout replica {place.dp} tp {place.tp}", enabled=config.stats_logger.trace)
    leader = _leader(config, world, mailbox, prompts, start) if world.is_leader else None
    exchange = Exchange(
        world.exchange,
        plan,
        getattr(torch, config.rollout.dtype.value),
        # A replica that is READY waits for the slowest: one that still builds its engine, or ends an engine step.
        deadline_s=config.deadlines.exchange_s + max(config.deadlines.start_s, 2 * config.deadlines.engine_step_s),
        on_wait=leader.serve if leader else lambda: None,
        verify=config.rollout.verify is not Verify.never,
    )
    code = Worker(config, world, mailbox, engine, exchange, recorder, leader).run()
    limit_s = max(config.deadlines.exchange_s, config.deadlines.engine_step_s)  # other replicas end their engine step
    world.phase("stop", 2 * limit_s)
    if leader:
        leader.close()
    mailbox.close(limit_s)
    trace.collect(recorder, world.comm, world.run_dir / "log" / f"trace.{start.attempt}.json")
    return code


class Prompts:
    """The prompts of both datasets as token ids, and the length that the engine must take.

    Raises ConfigError when the longest prompt and its answer exceed what is configured or what
    the model has positions for, and for an empty prompt.
    """

    def __init__(self, config: Config, spec: ModelSpec) -> None:
        self.tokenizer = load_tokenizer(config.tokenizer_path)
        evaluates = config.evaluator.freq_steps or config.evaluator.at_start or config.evaluator.at_end
        self.train = self._encode(config.train_dataset, config.seed, "train")
        self.valid = self._encode(config.valid_dataset, config.seed, "valid") if evaluates else []
        longest = max(len(p) for p in [*self.train, *self.valid])
        new, limit = config.gconfig.max_new_tokens, config.rollout.max_model_len or spec.max_position
        if longest + new > min(limit, spec.max_position):
            raise ConfigError(
                f"gconfig.max_new_tokens={new}: the longest prompt has {longest} tokens, together {longest + new}; "
                f"rollout.max_model_len={config.rollout.max_model_len} (0: no limit of its own), the model has "
                f"positions for {spec.max_position}"
            )
        # The probe needs its own length, and one token behind it.
        needed = max(longest + new, min(PROBE_TOKENS + 1, spec.max_position))
        self.max_model_len = max(config.rollout.max_model_len, needed)

    def _encode(self, dataset: DatasetConfig, seed: int, split: str) -> list[list[int]]:
        task = tasks.load(dataset, seed, split)
        prompts = [encode(self.tokenizer, task.item(i), dataset.system_prompt) for i in range(len(task))]
        if not all(prompts):
            raise ConfigError(f"{split}_dataset: the prompt of item {prompts.index([])} (from 0) is empty")
        return prompts

    def decode(self, tokens_T: Sequence[int] | np.ndarray) -> str:
        """The text that is scored: without special tokens (the end of the answer)."""
        return self.tokenizer.decode(tokens_T, skip_special_tokens=True)


def _leader(config: Config, world: World, mailbox: Mailbox, prompts: Prompts, start: begin.Begin) -> Leader:
    rollout, replica = config.rollout, world.place.dp

    def pool(dataset: DatasetConfig, split: str) -> RewardPool:
        return RewardPool(world.spawner, dataset, config.seed, split, rollout.reward_workers, rollout.reward_timeout_s)

    rewards = pool(config.train_dataset, "train")
    heldout = pool(config.valid_dataset, "valid") if prompts.valid else None
    groups = Groups(
        prompts.train,
        prompts.decode,
        rewards,
        seed=config.seed,
        n_samples=config.gconfig.n_samples,
        attempt=start.attempt,
        replica=replica,
        drop_uniform=rollout.dynamic_sampling,
    )
    evaluation = Evaluation(
        prompts.valid,
        lambda sample_id, row, tokens_T: heldout.start(sample_id, row, prompts.decode(tokens_T)),
        seed=config.seed,
        replica=replica,
        replicas=rollout.parallel.dp,
    )
    owner = Owner(begin.ledger(config, start.ledger, start.delivered), world, mailbox) if replica == 0 else None
    return Leader(config, world, mailbox, groups, rewards, evaluation, heldout, owner)
