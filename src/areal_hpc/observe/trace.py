"""Trace: what each rank did and when, as a Chrome trace (chrome://tracing, ui.perfetto.dev).

Spans and instants stay in memory, the newest `limit` of them, and are written once: at the
end rank 0 merges all ranks into `log/trace.<attempt>.json`. A span costs 2 to 3 us, with
`enabled=False` that of a shared null context. Times are the wall clock at the start of the trace
plus the monotonic clock since, so ranks of one node agree and nodes agree as far as their
clocks do. A run that is killed leaves no trace.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

TAG = 7  # of the packs on their way to rank 0; the communicator is the caller's

_NOTHING: AbstractContextManager[dict[str, Any]] = nullcontext({})


class _Span:
    """A phase in progress; what the block puts into the dict it gets becomes an argument."""

    __slots__ = ("args", "name", "start_ns", "trace")

    def __init__(self, trace: Trace, name: str, args: dict[str, Any]) -> None:
        self.trace, self.name, self.args = trace, name, args

    def __enter__(self) -> dict[str, Any]:
        self.start_ns = time.monotonic_ns()
        return self.args

    def __exit__(self, *exc: object) -> None:
        self.trace.add(self.name, self.start_ns, time.monotonic_ns() - self.start_ns, self.args)


class Trace:
    """The events of one rank. `title` is what the rank is called in the picture."""

    def __init__(self, rank: int, title: str, *, enabled: bool = True, limit: int = 50_000) -> None:
        self.rank, self.title, self.enabled = rank, title, enabled
        self.seen = 0
        self._events: deque[tuple[str, int, int, dict[str, Any]]] = deque(maxlen=limit)
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def span(self, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        """A phase: `with trace.span("update", step=3) as args: ...; args["tokens"] = n`."""
        return _Span(self, name, args) if self.enabled else _NOTHING

    def instant(self, name: str, **args: Any) -> None:
        """A moment: a delivery, a commit, a signal."""
        if self.enabled:
            self.add(name, time.monotonic_ns(), -1, args)

    def add(self, name: str, start_ns: int, duration_ns: int, args: dict[str, Any]) -> None:
        """An event measured elsewhere, in monotonic nanoseconds; a duration of -1 is an instant."""
        self.seen += 1
        self._events.append((name, start_ns, duration_ns, args))

    def pack(self) -> bytes:
        """Everything kept, as compressed text that `write` can put between two others."""
        title = f"rank {self.rank} {self.title}"
        if self.seen > len(self._events):
            title += f" (newest {len(self._events)} of {self.seen} events)"
        head = {"ph": "M", "name": "process_name", "pid": self.rank, "args": {"name": title}}
        order = {"ph": "M", "name": "process_sort_index", "pid": self.rank, "args": {"sort_index": self.rank}}
        lines = [json.dumps(event) for event in (head, order, *map(self._chrome, self._events))]
        return zlib.compress(",\n".join(lines).encode(), 1)

    def _chrome(self, event: tuple[str, int, int, dict[str, Any]]) -> dict[str, Any]:
        name, start_ns, duration_ns, args = event
        shown = {"name": name, "pid": self.rank, "tid": 0, "ts": (start_ns + self._epoch_ns) / 1000, "args": args}
        return shown | ({"ph": "i", "s": "p"} if duration_ns < 0 else {"ph": "X", "dur": duration_ns / 1000})


def write(path: str | Path, packs: Iterable[bytes]) -> None:
    """Writes one trace file from the packs of all ranks, one in memory at a time."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, pack in enumerate(packs):
            file.write((b",\n" if number else b"") + zlib.decompress(pack))
        file.write(b"\n]}\n")


def collect(trace: Trace, comm: Any, path: str | Path) -> None:
    """Collective over `comm` (an mpi4py communicator, otherwise silent): its rank 0 writes `path`.

    A rank that does not come leaves rank 0 waiting: call it inside `world.phase`, whose
    limit ends the job.
    """
    if not trace.enabled:
        return
    if comm.rank == 0:
        write(path, (_pack_of(trace, comm, source) for source in range(comm.size)))
    else:
        comm.send(trace.pack(), dest=0, tag=TAG)


def _pack_of(trace: Trace, comm: Any, source: int) -> bytes:
    if source == comm.rank:
        return trace.pack()
    while (message := comm.improbe(source, TAG)) is None:
        time.sleep(0.001)
    return message.recv()
