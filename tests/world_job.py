"""A small job on a real world, for test_world.py and test_failure.py: `world_job.py SCENARIO FILEROOT [KEY=VALUE ...]`.

It begins like every job (boot, configuration, start) and then does what the scenario's function says.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from areal_hpc import phases
from areal_hpc import world as worlds
from areal_hpc.boot import boot

if __name__ == "__main__":
    boot("areal-hpc")

from areal_hpc.config import Config, ConfigError
from areal_hpc.world import World

LIMIT_S = 2.0
ORDINAL = 17


def configuration(fileroot: str, changes: list[str]) -> Config:
    config = Config(experiment_name="exp", trial_name="trial")
    config.cluster.fileroot, config.actor.path = fileroot, "model"
    for change in changes:
        name, _, value = change.partition("=")
        *way, last = name.split(".")
        node = config
        for part in way:
            node = getattr(node, part)
        setattr(node, last, value)
    config.check()
    return config


def report(world: World) -> None:
    """What this rank is, as a file of its own; a sum over every communicator proves that it works."""
    from mpi4py import MPI

    comms = ("comm", "mail", "control", "exchange", "role_comm", "replica_comm")
    members = {name: c.allgather(world.rank) for name in comms if (c := getattr(world, name)) is not None}
    said = {
        "level": MPI.Query_thread() == MPI.THREAD_FUNNELED,
        "distinct": len({MPI._addressof(getattr(world, n)) for n in comms if getattr(world, n) is not None}),
        "members": members,
        "role": world.place.role,
        "index": world.place.index,
        "role_rank": world.role_comm.rank,
        "local_rank": world.place.local_rank,
        "homes": world.homes,
        "leaders": world.leaders,
        "flags": [world.is_trainer, world.is_rollout, world.is_home, world.is_leader],
        "job": world.job,
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
        "spawner": os.path.exists(f"/proc/{world.spawner.pid}"),
    }
    (world.run_dir / f"rank{world.rank}.json").write_text(json.dumps(said))


def places(world: World) -> int:
    report(world)
    return 0


def whole(world: World) -> int:
    """Logs, a process that a leader starts after MPI is there, and a code that one rank asks for."""
    report(world)
    world.redirect_logs()
    os.write(1, f"from descriptor 1 of rank {world.rank}\n".encode())
    logging.getLogger("areal_hpc").info("a record")
    print("terminal of rank", world.rank, file=world.terminal)
    if world.is_leader:
        code = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).sendall(b'hello'); input()"
        _, channel = world.spawner.worker([sys.executable, "-c", code], {})
        channel.settimeout(20)
        assert channel.recv(5) == b"hello"
    return 75 if world.rank == 2 else 0


def stop_one(world: World) -> int:
    """One rank is stopped in a phase; its peers wait for it in the next one."""
    world.redirect_logs()
    victim = 1
    for _ in range(3):
        world.phase("forward-backward", LIMIT_S, version=4, ordinal=ORDINAL)
        time.sleep(0.1)
        if world.rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        with world.phase("exchange", LIMIT_S, peer=victim, version=5):
            world.comm.Barrier()
    return 0


def spin(world: World) -> int:
    """One rank runs for ever; a peer waits for it with a shorter limit and is past it first."""
    world.redirect_logs()
    if world.rank == 2:
        world.phase("engine", 100.0, version=6)
        while True:
            pass
    world.phase("exchange", LIMIT_S, peer=2)
    world.comm.Barrier()
    return 0


def beats(world: World) -> int:
    """Longer than the limit, with signs of life."""
    world.phase("forward-backward", LIMIT_S)
    deadline = time.monotonic() + 2.5 * LIMIT_S
    while time.monotonic() < deadline:
        world.beat()
        time.sleep(0.05)
    return 0


def no_watcher(world: World) -> int:
    """The watchers are gone; the second line must do."""
    if world.place.local_rank == 0:
        os.kill(world.spawner.pid, signal.SIGKILL)
    phases.SECOND_LINE_S, phases.SLACK_S = 1.0, 0.5  # sooner than 10 s, to keep the test short
    world.phase("save", 0.0)
    world.comm.Barrier()
    time.sleep(100)
    return 0


def raising(world: World) -> int:
    world.redirect_logs()
    world.phase("optimizer", 100.0, version=7, ordinal=ORDINAL)
    if world.rank == 1:
        raise ValueError("the gradient went away")
    world.comm.Barrier()
    return 0


def misconfigured(world: World) -> int:
    """Every rank finds the same fault after the start."""
    raise ConfigError("actor.path=model: no config.json there")


def killed(world: World) -> int:
    world.phase("engine", 100.0)
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    world.comm.Barrier()
    return 0


def deserted(world: World) -> int:
    """A loop that forgets the orderly end on one rank."""
    if world.rank == 0:
        sys.exit(0)
    world.comm.Barrier()
    return 0


def until_stopped(world: World) -> int:
    """Steps of 50 ms until some rank was asked to stop; all agree on it."""
    from mpi4py import MPI

    print(f"step of rank {world.rank}", flush=True)
    for step in range(600):
        world.phase("forward-backward", 60.0, version=step)
        time.sleep(0.05)
        if world.comm.allreduce(int(world.stop_requested()), MPI.SUM):
            (world.run_dir / f"rank{world.rank}.json").write_text(json.dumps(step))
            return 75
    return 1


def trainers_only(world: World) -> int:
    """A world without rollout ranks."""
    found = {"trainer": world.is_trainer, "trainers": world.role_comm.size, "leaders": world.leaders}
    (world.run_dir / f"rank{world.rank}.json").write_text(json.dumps(found))
    return 0


def main() -> None:
    scenario, fileroot, *changes = sys.argv[1:]
    if scenario == "importing":  # a heavy import before the start, signalled from outside
        print("importing", flush=True)
        time.sleep(1.5)
        scenario = "until_stopped"
    if scenario == "differ":  # a node that sees another file
        changes += [f"seed={os.getpid()}"]
    try:
        if scenario == "unreadable" and Path("/proc/self/environ").read_bytes().count(b"OMPI_COMM_WORLD_RANK=2\0"):
            raise ConfigError("--config here.yaml: no such file")
        config = configuration(fileroot, changes)
    except ConfigError as error:
        worlds.refuse(error)
    with worlds.start(config, rollout=scenario != "trainers_only") as world:
        function = globals()["places" if scenario in ("differ", "unreadable") else scenario]
        world.end(function(world))


if __name__ == "__main__":
    main()
