"""A trainer rank from its place in the world to its exit code."""

from __future__ import annotations

import torch

from areal_hpc.config import Config, Verify
from areal_hpc.configfile import dump
from areal_hpc.layout.spec import read_spec
from areal_hpc.observe import trace
from areal_hpc.observe.attempts import Attempt, begin_attempt, save_config
from areal_hpc.observe.metrics import Metrics, read_metrics
from areal_hpc.observe.progress import Progress
from areal_hpc.observe.trace import Trace
from areal_hpc.reshard.exchange import Exchange
from areal_hpc.reshard.update import update_plan
from areal_hpc.stream import begin
from areal_hpc.stream.buffer import Inventory
from areal_hpc.stream.mailbox import Mailbox
from areal_hpc.trainer.actor import Actor
from areal_hpc.trainer.binding import TrainerBinding
from areal_hpc.trainer.model import Model, build_groups
from areal_hpc.trainer.root import Root
from areal_hpc.trainer.state import Restored, State
from areal_hpc.trainer.worker import Worker
from areal_hpc.world import World


def train(config: Config, world: World) -> int:
    """Train to the last step or until the run is to stop. Collective over the world's trainer ranks."""
    world.phase("start", config.deadlines.start_s)
    spec, place = read_spec(config.actor.path), world.place
    # First of all: it refuses a layout that the model does not divide over.
    plan = update_plan(spec, config.actor.parallel, config.rollout.parallel, world.places)
    is_root = world.rank == world.homes[0]
    # Twice the phase's limit: the watcher names the rank that is silent, gloo only the one that waited for it.
    groups = build_groups(
        world.role_comm,
        config.actor.parallel,
        world.torch_store(world.role_comm),
        2 * config.deadlines.step_s,
        place.local_rank,
    )
    model = Model(spec, config.actor, groups, config.seed)
    actor = Actor(model, config.actor, config.gconfig.temperature, config.total_train_steps)
    binding = TrainerBinding(model)
    state = State(config, world, model, binding, actor)
    world.phase("restore", config.deadlines.save_s)
    restored = state.restore()
    world.phase("begin", config.deadlines.save_s, peer=world.homes[0])
    attempt = _attempt(config, world, restored) if is_root else None
    start = begin.share(
        world.comm,
        begin.Begin(attempt.attempt, restored.ledger, restored.delivered) if attempt else None,
        world.homes[0],
    )
    mailbox = Mailbox(world)
    exchange = Exchange(
        world.exchange,
        plan,
        getattr(torch, config.rollout.dtype.value),
        deadline_s=config.deadlines.exchange_s,
        on_wait=lambda: worker.pump(),
        verify=config.rollout.verify is not Verify.never,
    )
    recorder = Trace(
        world.rank, f"trainer dp {place.dp} tp {place.tp} pp {place.pp}", enabled=config.stats_logger.trace
    )
    worker = Worker(config, world, mailbox, actor, binding, state, exchange, recorder, start.attempt)
    if attempt is not None:
        title = f"{config.experiment_name}/{config.trial_name}"
        progress = Progress(world.terminal, title, config.total_train_steps, restored.step)
        for line in restored.refused:
            progress.say(f"passed over: {line}")
        if config.rollout.verify is Verify.never:
            progress.say("rollout.verify=never: no version is proved, the run is unverified")
        if restored.checkpoint:
            progress.say(f"attempt {attempt.attempt} goes on from {restored.checkpoint}")
        inventory = Inventory(begin.ledger(config, restored.ledger), config.rollout.order, config.rollout.stale)
        worker.root = Root(
            config,
            world,
            mailbox,
            inventory,
            progress,
            worker.pump,
            attempt_start=restored.step,
            evaluated={record["version"] for record in read_metrics(world.run_dir, "eval")},
            save_s=state.first_save_s(),
        )
        worker.metrics = Metrics(world.run_dir, attempt, tensorboard=config.stats_logger.tensorboard)
    code = worker.run(restored)
    limit_s = max(config.deadlines.exchange_s, config.deadlines.engine_step_s)  # replicas end their engine step first
    world.phase("stop", 2 * limit_s)
    mailbox.close(limit_s)
    trace.collect(recorder, world.comm, world.run_dir / "log" / f"trace.{start.attempt}.json")
    if worker.root is not None:
        worker.metrics.close()
        worker.root.progress.close()
    worker.close()
    groups.close()
    return code


def _attempt(config: Config, world: World, restored: Restored) -> Attempt:
    return begin_attempt(
        world.run_dir,
        from_step=restored.step,
        checkpoint=restored.checkpoint,
        job_id=world.job,
        restart=world.restart,
        config_changes=save_config(world.run_dir, dump(config)),
    )
