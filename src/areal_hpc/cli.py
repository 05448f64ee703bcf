"""The command line. Every command imports what it needs when it runs, so that --help is instant.

`train` and `sft` run on every rank of a job; the order of their first lines matters: the
spawner is started and the signal handlers are installed (`world.boot`) before mpi4py, torch
or vLLM are imported, and a wrong configuration ends all ranks with 78 before torch or vLLM is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from areal_hpc.config import Config, ConfigError, Dtype
from areal_hpc.exits import Exit

if TYPE_CHECKING:
    from areal_hpc.placement import Place

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

ConfigPath = Annotated[Path, typer.Option("--config", metavar="FILE", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Keys to change, like actor.optimizer.lr=1e-5.", show_default=False),
]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run: runs/<experiment>/<trial>.")]


@app.callback()
def about() -> None:
    """Asynchronous reinforcement learning of language models as one MPI job."""


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train with asynchronous RL. Runs on every rank; goes on from the newest checkpoint of the run.

    Exit codes: 0 done, 75 stopped in good order with a new checkpoint (start it again), 78 bad
    configuration, anything else a crash; also in log/exit.<job>.<restart>.json of the run.

    \b
    Example:
      mpirun -n 2 areal-hpc train --config configs/quickstart_arithmetic.yaml seed=2
      srun areal-hpc train --config my.yaml actor.backend=megatron:d2t4p4 rollout.backend=vllm:d24t4
    """
    _run(config, overrides, rollout=True)


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None) -> None:
    """Supervised warm-up on the train_dataset. Every rank trains; writes a Hugging Face directory.

    \b
    Example:
      mpirun -n 1 areal-hpc sft --config configs/quickstart_arithmetic.yaml trial_name=warmup sft.steps=350
    """
    _run(config, overrides, rollout=False)


def _run(path: Path, overrides: list[str] | None, *, rollout: bool) -> None:
    from areal_hpc import world

    world.boot()
    from areal_hpc.configfile import load

    try:
        config = load(path, overrides)
    except ConfigError as error:
        world.refuse(error)
    with world.start(config, rollout=rollout) as ours:  # mpi4py comes before torch
        from areal_hpc import job

        ours.end(job.run_train(config, ours) if rollout else job.run_sft(config, ours))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint: <run>/checkpoints/*.h5.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the Hugging Face directory goes.")],
    dtype: Annotated[Dtype, typer.Option(help="dtype of the weights.")] = Dtype.bfloat16,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Model directory with config and tokenizer. [default: the run's actor.path]"),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face directory.

    transformers and vLLM load it; the weights are the optimizer's master copy, cast to --dtype.

    \b
    Example:
      areal-hpc export runs/quickstart/trial0/checkpoints/step-00000100.h5 my-model --dtype bfloat16
    """
    from areal_hpc.storage import hf
    from areal_hpc.storage.hdf5 import CheckpointError

    try:
        typer.echo(hf.export(checkpoint, model or _model_of(checkpoint), directory, dtype.value))
    except (CheckpointError, hf.HFError, OSError) as error:
        _fail(str(error))


@app.command()
def status(
    run: RunDir, as_json: Annotated[bool, typer.Option("--json", help="One JSON object for scripts.")] = False
) -> None:
    """Tell from files alone what a run has done.

    States: queued, running, stopped (75: to be started again), finished, failed, dead (no sign of life, no exit file).

    \b
    Example:
      areal-hpc status runs/quickstart/trial0
      areal-hpc status runs/quickstart/trial0 --json | jq .step
    """
    from areal_hpc.report.status import describe, read_status

    found = read_status(_folder(run))
    typer.echo(json.dumps(found.as_dict()) if as_json else describe(found))


@app.command()
def stop(run: RunDir) -> None:
    """Ask a running job to stop in good order.

    It stops after its present step, with a checkpoint, and exit code 75.

    \b
    Example:
      areal-hpc stop runs/quickstart/trial0
    """
    from areal_hpc import stopfile
    from areal_hpc.report.status import RUNNING, read_status

    found = read_status(_folder(run))
    if found.state != RUNNING:
        _fail(f"{run} is not running ({found.state}): nothing to stop")
    stopfile.ask(run, found.job, found.restart)
    typer.echo(
        f"asked job {found.job} to stop after its present step, with a checkpoint\n"
        f"watch it: areal-hpc status {run}    (state `stopped`, exit code 75, when it is done)"
    )


@app.command()
def layout(
    config: ConfigPath,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the allocation.")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs, so ranks, of a node.")],
    overrides: Overrides = None,
) -> None:
    """Print which rank does what, without an allocation.

    Refuses (78) sizes and placements that a job would refuse; also those that the model does not
    divide over, where actor.path is at hand.

    \b
    Example:
      areal-hpc layout --config configs/areal_32b.yaml --nodes 16 --gpus-per-node 8
    """
    from areal_hpc.configfile import load
    from areal_hpc.layout.spec import read_spec
    from areal_hpc.placement import place
    from areal_hpc.reshard.update import update_plan

    names = [f"node{n}" for n in range(nodes) for _ in range(gpus_per_node)]
    try:
        settings = load(config, overrides)
        across = settings.cluster.tp_across_nodes
        places = place(names, settings.actor.parallel, settings.rollout.parallel, across)
        if (Path(settings.actor.path) / "config.json").is_file():
            update_plan(read_spec(settings.actor.path), settings.actor.parallel, settings.rollout.parallel, places)
    except ConfigError as error:
        _fail(str(error), Exit.BAD_CONFIG)
    typer.echo(_picture(settings, places))


def _picture(config: Config, places: list[Place]) -> str:
    """A line per rank under its node, below the two layouts."""
    trainer, rollout = config.actor.parallel, config.rollout.parallel
    lines = [
        f"{len(places)} ranks",
        f"  trainer  {config.actor.backend}: dp {trainer.dp} * tp {trainer.tp} * pp {trainer.pp} = {trainer.size}",
        f"  rollout  {config.rollout.backend}: replicas {rollout.dp} * tp {rollout.tp} = {rollout.size}",
    ]
    node = ""
    for p in places:
        if p.node != node:
            node = p.node
            lines.append(node)
        what = f"dp {p.dp}  tp {p.tp}  pp {p.pp}" if p.role == "trainer" else f"replica {p.dp}  tp {p.tp}"
        lines.append(f"  rank {p.rank:>4}  local {p.local_rank:>2}  {p.role:<7}  {what}")
    return "\n".join(lines)


def _fail(message: str, code: Exit = Exit.CRASH) -> NoReturn:
    """One line on stderr and the exit code, for the commands that are one process."""
    typer.echo(f"areal-hpc: {message}", err=True)
    raise typer.Exit(code)


def _folder(run: Path) -> Path:
    if not run.is_dir():
        _fail(f"{run}: no such run folder (a job that is queued may have none yet)")
    return run


def _model_of(checkpoint: Path) -> Path:
    """`actor.path` of the run that a checkpoint lies in."""
    import yaml

    path = checkpoint.resolve().parent.parent / "config.yaml"
    if not path.is_file():
        _fail(f"--model: needed, because there is no {path} that names the model")
    return Path(yaml.safe_load(path.read_text())["actor"]["path"])


def main() -> None:
    app(prog_name="areal-hpc")


if __name__ == "__main__":
    main()
