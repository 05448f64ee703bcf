"""The job on one rank: which loop its role runs, between the world's start and its end."""

from __future__ import annotations

from areal_hpc.config import Config
from areal_hpc.world import World


def run_train(config: Config, world: World) -> int:
    """Asynchronous RL: this rank's loop until it is told the exit code. Collective over the world."""
    world.redirect_logs()  # before the role's imports: torch, Megatron and vLLM print when they are loaded
    if world.is_trainer:
        from areal_hpc.trainer.main import train as loop
    else:
        from areal_hpc.rollout.main import roll as loop
    return loop(config, world)


def run_sft(config: Config, world: World) -> int:
    """The supervised warm-up. Collective over the world, whose ranks are all trainers."""
    world.redirect_logs()
    from areal_hpc.trainer.warmup import warm_up

    return warm_up(config, world)
