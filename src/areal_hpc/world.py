"""The world: one MPI launch becomes placed ranks, communicators, phases and one orderly end.

    boot(); config = load(...) or refuse(error); with start(config) as world: world.end(loop(world))

`boot` comes before every heavy import: it starts the spawner (nothing forks after MPI_Init)
and installs the signal flags. This module alone has MPI initialised (level FUNNELED), aborts
and finalises; everyone else is handed a communicator. What a rank knows of the others comes
over MPI, never from the launcher's environment; that only gives the job's number, for names.

Limits: a signal cannot stop a rank inside a collective (the watcher's limits do that), and a
job that is suspended for longer than a limit ends when it is resumed.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from areal_hpc import communicators, logs, ranktable, rendezvous, runlock, signals, stopfile
from areal_hpc.boot import MEET_LIMIT_S, Booted, Job, agree, boot, booted, leave, refuse, say
from areal_hpc.config import Config, ConfigError
from areal_hpc.exits import Exit, Outcome, exit_path, worst, write_exit
from areal_hpc.phases import STDERR, Phase, Phases, SecondLine
from areal_hpc.placement import Place, Role, place
from areal_hpc.spawner import Spawner
from areal_hpc.watch import WatchFiles

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import TCPStore

__all__ = ["World", "boot", "refuse", "start", "time_left"]

ABORT_LIMIT_S = 10.0
END_TIME = "AREAL_HPC_END_TIME"  # seconds since the epoch, from the batch script


def time_left() -> float:
    """Seconds until the walltime ends, as the batch script says; inf when it says nothing.

    Raises ConfigError when AREAL_HPC_END_TIME is no number.
    """
    text = os.environ.get(END_TIME, "")
    try:
        return float(text) - time.time() if text else math.inf
    except ValueError:
        raise ConfigError(f"{END_TIME}={text}: expected seconds since the epoch, as `date +%s` gives") from None


def start(config: Config, *, rollout: bool = True) -> World:
    """Place the ranks and split the world. Collective over the world, once per process.

    rollout False: every rank trains. What cannot run (sizes, placement, a run folder that
    another job owns, configurations that differ between ranks) ends every rank with 78 and
    one message. Any other error aborts the job.
    """
    ready = booted()
    base = communicators.initialise().COMM_WORLD
    signals.install()  # MPI libraries have handlers of their own
    try:
        return _start(base, ready, config, rollout)
    except Exception as error:
        traceback.print_exception(error)
        say(f"rank {base.rank}: start: {type(error).__name__}: {error}")
        base.Abort(Exit.CRASH)
        raise


def _start(base: Intracomm, ready: Booted, config: Config, rollout: bool) -> World:
    error: ConfigError | None = None
    try:
        time_left()
    except ConfigError as caught:
        error = caught
    agree(base, error, config)
    nodes, local = communicators.map_nodes(base)
    job = base.bcast(_job() if base.rank == 0 else None, 0)
    places: list[Place] = []
    try:
        across = config.cluster.tp_across_nodes
        places = place(nodes, config.actor.parallel, config.rollout.parallel if rollout else None, across)
        rendezvous.set_gloo_interface(len(set(nodes)) == 1, config.cluster.interface)
    except ConfigError as caught:
        error = caught
    agree(base, error, config, job)
    error = None
    if base.rank == 0:
        try:
            _open_run(ready.spawner, config, job)
        except ConfigError as caught:
            error = caught
    agree(base, error, config, job)
    return World(config, ready, job, places, communicators.split(base, places), local)


class World:
    """One rank's view of the job. Made by `start`; as a context manager it aborts the job on an error.

    `homes[dp]` is the trainer rank that receives groups (tp 0, pp 0), `leaders[replica]` the
    rollout rank that talks for its replica (tp 0); both are ranks of the world.
    """

    def __init__(
        self,
        config: Config,
        ready: Booted,
        job: Job,
        places: list[Place],
        comms: communicators.Communicators,
        local: Intracomm,
    ) -> None:
        self.rank, self.size = comms.comm.rank, comms.comm.size
        self.places, self.place = places, places[comms.comm.rank]
        self.run_dir = Path(config.run_dir)
        self.job, self.restart = job.name, job.restart
        self.comm, self.role_comm, self.replica_comm = comms.comm, comms.role, comms.replica
        self.mail, self.control, self.exchange = comms.mail, comms.control, comms.exchange
        self.homes = [p.rank for p in by_dp(places, Role.TRAINER)]
        self.leaders = [p.rank for p in by_dp(places, Role.ROLLOUT)]
        self.spawner = ready.spawner
        self.terminal: TextIO = sys.stdout if self.rank == 0 else open(os.devnull, "w")  # noqa: SIM115
        self._stderr = STDERR
        self._interface = config.cluster.interface
        self._exit_path = exit_path(self.run_dir, job.name, job.restart)
        self._phases = self._watched(local, ready.second_line, config.deadlines.start_s)
        if not (self.is_leader or self.place.local_rank == 0):
            self.spawner.close()  # nothing to start, nothing to watch

    def _watched(self, local: Intracomm, second_line: SecondLine, limit_s: float) -> Phases:
        """This rank's slot in the node's table, and the watcher on it. Collective over the node."""
        path = ranktable.table_path(self.run_dir, self.place.node)
        if local.rank == 0:
            ranktable.create_table(path, local.size)
        local.Barrier()
        phases = Phases(ranktable.Slot(path, local.rank, self.rank, self.place.role), second_line)
        phases.phase("start", limit_s)
        if local.rank == 0:
            hang = self.run_dir / "log" / f"hang.{self.place.node}.txt"
            log = logs.log_path(self.run_dir, self.place.node)
            self.spawner.watch(WatchFiles(self.place.node, str(path), str(log), str(hang), str(self._exit_path)))
        return phases

    @property
    def is_trainer(self) -> bool:
        return self.place.role is Role.TRAINER

    @property
    def is_rollout(self) -> bool:
        return self.place.role is Role.ROLLOUT

    @property
    def is_home(self) -> bool:
        return self.rank in self.homes

    @property
    def is_leader(self) -> bool:
        return self.rank in self.leaders

    def redirect_logs(self) -> None:
        """From now on this rank prints to log/<node>.log; rank 0 keeps `terminal`."""
        path = logs.log_path(self.run_dir, self.place.node)
        name = f"rank {self.rank} {self.place.role}"
        self.terminal, self._stderr = logs.redirect(path, name, keep=self.rank == 0)
        if self.place.local_rank == 0:
            print(f"--- job {self.job} restart {self.restart}, {datetime.now(UTC).isoformat(timespec='seconds')}")
        if self.is_leader or self.place.local_rank == 0:
            self.spawner.log(path)

    def phase(self, name: str, limit_s: float, *, peer: int = -1, version: int = -1, ordinal: int = -1) -> Phase:
        """Say what this rank does and for how long it may be silent in it (phases.py). About 2 us."""
        return self._phases.phase(name, limit_s, peer, version, ordinal)

    def beat(self) -> None:
        """A sign of life inside the phase; never in a wait for a peer that gives none."""
        self._phases.beat()

    def stop_requested(self) -> bool:
        """Whether this rank got SIGUSR1 or SIGTERM; the loops agree on what follows."""
        return signals.stop_requested()

    def time_left(self) -> float:
        """Seconds until the walltime ends (inf: unknown)."""
        return time_left()

    def torch_store(self, comm: Intracomm) -> TCPStore:
        """A torch store of the ranks of `comm`; collective over it (rendezvous.py)."""
        nodes = comm.allgather(self.place.node)
        return rendezvous.torch_store(comm, len(set(nodes)) == 1, self._interface)

    def end(self, code: int) -> NoReturn:
        """Leave in good order, all together. Collective over the world; files must be closed.

        The job ends with the worst of the ranks' codes, in its exit file too. MPI is finalised
        and the process leaves at once (os._exit): nothing a library left behind can hold it.
        Ranks that do not meet within MEET_LIMIT_S abort.
        """
        try:
            self.phase("stop", MEET_LIMIT_S)
            communicators.wait(self.comm.Ibarrier(), "end", MEET_LIMIT_S)
            code = worst(self.comm.allgather(int(code)))
            if self.rank == 0:
                write_exit(self._exit_path, Outcome(code, _MEANING.get(code, "ended"), 0, self.place.role))
            self._phases.mark(ranktable.State.ENDED)
            self.spawner.close()
            # Launchers may kill all ranks when the first leaves with a code: nobody leaves before all are done.
            communicators.wait(self.comm.Ibarrier(), "end", MEET_LIMIT_S)
        except Exception as error:
            self.abort(error)
        leave(code, self.terminal)

    def abort(self, error: BaseException, *, version: int = -1, ordinals: Sequence[int] = ()) -> NoReturn:
        """End the job because of this rank. The first rank that fails writes the exit file and says why.

        78 for a ConfigError, else 1. Version and ordinal are the phase's where not given.
        """
        faulthandler.dump_traceback_later(ABORT_LIMIT_S, exit=True, file=STDERR)
        code = Exit.BAD_CONFIG if isinstance(error, ConfigError) else Exit.CRASH
        phase, _, _, phase_version, ordinal = self._phases.doing
        version = version if version >= 0 else phase_version
        ordinals = list(ordinals) or [ordinal] * (ordinal >= 0)
        where = f"{self.place}, phase {phase}"
        where += f", version {version}" * (version >= 0) + f", ordinals {ordinals}" * bool(ordinals)
        message = f"{where}: {type(error).__name__}: {error}"
        message = str(error) if code == Exit.BAD_CONFIG else message
        self._phases.mark(ranktable.State.FAILED)
        if code == Exit.CRASH:
            traceback.print_exception(error)
        try:
            first = write_exit(self._exit_path, Outcome(code, message, self.rank, self.place.role, version, ordinals))
        except OSError as refused:
            first, message = True, f"{message} (and no exit file: {refused})"
        if first:
            say(message, self._stderr)
        self.comm.Abort(code)
        os._exit(code)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort(error or RuntimeError("the loop was left without world.end(code)"))


_MEANING = {
    Exit.DONE: "done",
    Exit.REQUEUE: "stopped in good order; to be started again",
    Exit.BAD_CONFIG: "bad configuration",
    Exit.CRASH: "stopped in good order, but with no new checkpoint",  # a crash does not come to `end`
}


def by_dp(places: Sequence[Place], role: Role) -> list[Place]:
    """The places of a role with tp 0 and pp 0, by dp: who talks for a data-parallel rank or replica."""
    return sorted((p for p in places if p.role is role and p.tp == p.pp == 0), key=lambda p: p.dp)


def _job() -> Job:
    """This start's job: Slurm's number and restart, else one made from time and process.

    Two starts may come within a second (the one that finds the folder in use, say), and what one leaves in
    the run's folder under its name must not be taken for the other's.
    """
    number = os.environ.get("SLURM_JOB_ID", "")
    if number:
        return Job(number, int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    return Job(f"local-{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}", 0)


def _open_run(spawner: Spawner, config: Config, job: Job) -> None:
    """Rank 0: make the run folder and take its lock. Raises ConfigError.

    Starts of one Slurm allocation share a name (an `salloc` shell, two `srun` in a script). Once the lock is
    ours the one before has ended, and neither its outcome nor a stop that it was asked for is this one's.
    """
    run_dir = Path(config.run_dir)
    try:
        (run_dir / "log").mkdir(parents=True, exist_ok=True)
        spawner.hold(runlock.RunLock.acquire(runlock.lock_path(run_dir), job.name, job.restart, os.getpid()))
        exit_path(run_dir, job.name, job.restart).unlink(missing_ok=True)
        stopfile.clear(run_dir)
    except runlock.LockHeld as error:
        raise ConfigError(f"trial_name={config.trial_name}: {error}. Or choose another trial_name") from None
    except OSError as error:
        raise ConfigError(f"cluster.fileroot={config.cluster.fileroot}: {error}") from None
