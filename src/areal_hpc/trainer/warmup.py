"""`areal-hpc sft` on one rank: from a Hugging Face directory to a warmed-up one.

The pairs are the training dataset's questions and reference answers, in the order of the same
permutation that numbers prompts in RL. The result is a checkpoint of the run and its export.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from areal_hpc import tasks
from areal_hpc.communicators import wait
from areal_hpc.config import Config, ConfigError
from areal_hpc.configfile import dump
from areal_hpc.exits import Exit
from areal_hpc.layout.families import logical_tensors
from areal_hpc.layout.spec import read_spec
from areal_hpc.observe.attempts import save_config
from areal_hpc.observe.progress import duration
from areal_hpc.storage import checkpoint, hf
from areal_hpc.stream.ledger import item_of
from areal_hpc.tasks.prompts import encode, load_tokenizer
from areal_hpc.trainer.binding import TrainerBinding
from areal_hpc.trainer.model import Model, build_groups
from areal_hpc.trainer.sft import Pair, train_sft
from areal_hpc.trainer.state import CHECKPOINTS, writers
from areal_hpc.world import World

TOLD = 20  # lines of progress in all


class _Stopped(Exception):
    """A rank was asked to stop; all have agreed on it."""


def warm_up(config: Config, world: World) -> int:
    """Train `sft.steps` steps and export to `sft.output`. Collective over the world; returns the exit code.

    A stop (SIGUSR1, SIGTERM) is heard after the present step; it keeps nothing, and the code is 1.
    """
    world.phase("start", config.deadlines.start_s)
    spec, sft = read_spec(config.actor.path), config.sft
    output = Path(sft.output or world.run_dir / "hf")
    if output.exists():
        raise ConfigError(f"sft.output={output}: exists; remove it or name another folder")
    groups = build_groups(
        world.role_comm,
        config.actor.parallel,
        world.torch_store(world.role_comm),
        2 * config.deadlines.step_s,  # as in training: the watcher comes first
        world.place.local_rank,
    )
    model = Model(spec, config.actor, groups, config.seed)
    binding = TrainerBinding(model)
    binding.load_hf(config.actor.path)
    if world.rank == 0:
        save_config(world.run_dir, dump(config))
    total = 0.0

    def tell(step: int, metrics: dict[str, float]) -> None:
        nonlocal total
        total += metrics["seconds"]
        world.phase("forward-backward", config.deadlines.step_s, version=step)
        if (step + 1) % max(1, sft.steps // TOLD) == 0:
            left = duration(total / (step + 1) * (sft.steps - step - 1))
            print(
                f"sft {step + 1}/{sft.steps}  loss {metrics['loss']:.3f}  {left} left", file=world.terminal, flush=True
            )

        if any(groups.all([float(world.stop_requested())])):
            raise _Stopped(f"sft: stopped by a signal after step {step + 1}; nothing was kept")

    try:
        steps = train_sft(model, _batches(config, groups.dp), sft, tell, world.beat)
    except _Stopped as stopped:
        print(stopped, file=world.terminal, flush=True)
        groups.close()
        return Exit.CRASH
    world.phase("save", config.deadlines.save_s)
    path = checkpoint.checkpoint_path(world.run_dir / CHECKPOINTS, steps)
    checkpoint.save(
        path,
        world.role_comm,
        {"master": binding.state_views()["master"]},
        logical_tensors(spec),
        {},
        {"step": steps},
        writers(world, config.saver.writers_per_node),
        deadline_s=config.deadlines.save_s,
    )
    if world.rank == 0:
        draft = output.with_name(f".{output.name}.part")
        shutil.rmtree(draft, ignore_errors=True)
        hf.export(path, Path(config.actor.path), draft, "float32")
        draft.rename(output)
        reached = f": loss below sft.until_loss={sft.until_loss:g}" if steps < sft.steps else ""
        print(f"sft: {output} after {steps} of {sft.steps} steps{reached}", file=world.terminal, flush=True)
    # The others wait here, where the limit is a save's, and not in the short one of an orderly end.
    world.phase("export", 2 * config.deadlines.save_s, peer=0)
    wait(world.role_comm.Ibarrier(), "sft: the export by rank 0", config.deadlines.save_s)
    groups.close()
    return 0


def _batches(config: Config, dp: int) -> Iterator[list[Pair]]:
    """This DP rank's share of each batch."""
    tokenizer = load_tokenizer(config.tokenizer_path)
    task = tasks.load(config.train_dataset, config.seed, "train")
    size, ranks = config.sft.batch_size, config.actor.parallel.dp
    for step in range(config.sft.steps):
        pairs = []
        for number in range(step * size + dp, (step + 1) * size, ranks):
            item = task.item(item_of(config.seed, number, len(task)))
            answer = [*tokenizer.encode(item.answer, add_special_tokens=False), tokenizer.eos_token_id]
            pairs.append((encode(tokenizer, item, config.train_dataset.system_prompt), answer))
        yield pairs
