"""Reward workers of one replica: scoring outside the rank, so that no reward can hang or kill it.

The spawner starts the workers; the pool talks to each over a socket without ever blocking.
Samples are sent ahead, `AHEAD` per worker, and answered in order. The sample at a worker's
head has `timeout_s` from the moment it got there; past it the worker is killed and replaced,
the sample gets `timeout`. A worker that dies gives its head `error`. Either way the samples
behind the head go to other workers: they are not at fault. A reward that could not be had is
NaN, never 0, and never without a status.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from areal_hpc.config import DatasetConfig
from areal_hpc.records import Status
from areal_hpc.spawner import Spawner

AHEAD = 16  # samples at one worker: enough that it does not wait for the rank's next engine step
READY_S = 120.0  # for a worker to import and load its task
STARTS = 3  # workers in a row that may end before they are ready
LOGGED = 20  # failed samples that are described in the log; the rest are only counted
RECEIVE_BYTES = 1 << 16
# A worker has one core and no accelerator, whatever libraries its task imports.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
COMMAND = (sys.executable, "-m", "areal_hpc.tasks.worker")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sample:
    id: Hashable
    item: int
    completion: str


@dataclass(slots=True)
class _Worker:
    """One process: what it was sent and has not answered (`waiting`), and since when it has its head."""

    number: int
    channel: socket.socket
    ready: bool = False
    since: float = field(default_factory=time.monotonic)
    waiting: deque[_Sample] = field(default_factory=deque)
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)


class RewardPool:
    """`start` a sample, `test` for results, `close`. No call waits.

    `workers` processes score with `load(task, seed, split)` of areal_hpc.tasks. Raises
    RuntimeError (from `test`) when `STARTS` workers in a row end before they are ready: the
    task cannot be loaded; what they printed is in the node's log.
    """

    def __init__(
        self,
        spawner: Spawner,
        task: DatasetConfig,
        seed: int,
        split: str,
        workers: int,
        timeout_s: float,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._spawner = spawner
        self._first = {"task": asdict(task), "seed": seed, "split": split}
        self._command = command
        self._timeout_s = timeout_s
        self._queue: deque[_Sample] = deque()
        self._failed_starts = 0
        self._described = 0
        self.counts: Counter[Status] = Counter()
        self._workers = [self._new_worker() for _ in range(workers)]

    def __len__(self) -> int:
        """Samples without a result."""
        return len(self._queue) + sum(len(worker.waiting) for worker in self._workers)

    def start(self, sample_id: Hashable, item_index: int, completion: str) -> None:
        """Have the completion scored as an answer to item `item_index`; the result comes from `test`."""
        self._queue.append(_Sample(sample_id, item_index, completion))
        self._hand_out()

    def test(self) -> list[tuple[Hashable, float, Status]]:
        """Results since the last call: (sample id, reward, status); the reward is NaN unless ok."""
        results: list[tuple[Hashable, float, Status]] = []
        for place, worker in enumerate(self._workers):
            lives = self._receive(worker, results)  # answers first: who was slow to ask is not who was slow
            limit_s = self._timeout_s if worker.ready else READY_S
            late = (bool(worker.waiting) or not worker.ready) and time.monotonic() - worker.since > limit_s
            if lives and not late:
                continue
            self._retire(worker, late, results)
            self._workers[place] = self._new_worker()
        self._hand_out()
        self.counts.update(status for _, _, status in results)
        return results

    def close(self) -> None:
        """End the workers; samples without a result are forgotten."""
        for worker in self._workers:
            self._spawner.kill(worker.number)
            worker.channel.close()
        self._workers.clear()
        self._queue.clear()

    def _new_worker(self) -> _Worker:
        worker = _Worker(*self._spawner.worker(self._command, ENVIRONMENT))
        self._send(worker, self._first)
        return worker

    def _hand_out(self) -> None:
        """Give queued samples to the ready workers with the fewest, and push what waits to be sent."""
        while self._queue:
            free = [worker for worker in self._workers if worker.ready and len(worker.waiting) < AHEAD]
            if not free:
                break
            worker, sample = min(free, key=lambda w: len(w.waiting)), self._queue.popleft()
            if not worker.waiting:
                worker.since = time.monotonic()
            worker.waiting.append(sample)
            self._send(worker, {"item": sample.item, "completion": sample.completion})
        for worker in self._workers:
            self._push(worker)

    def _send(self, worker: _Worker, message: dict[str, Any]) -> None:
        worker.outgoing += json.dumps(message).encode() + b"\n"
        self._push(worker)

    def _push(self, worker: _Worker) -> None:
        while worker.outgoing:
            try:
                sent = worker.channel.send(worker.outgoing)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                return  # it is dead: `_receive` sees the end of its socket
            del worker.outgoing[:sent]

    def _receive(self, worker: _Worker, results: list[tuple[Hashable, float, Status]]) -> bool:
        """Take the answers that are there. False when the worker has ended."""
        lives = True
        while True:
            try:
                data = worker.channel.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                lives = False
                break
            worker.incoming += data
        *lines, rest = bytes(worker.incoming).split(b"\n")
        worker.incoming = bytearray(rest)
        for line in lines:
            answer = json.loads(line)
            worker.since = time.monotonic()
            if "ready" in answer:
                worker.ready, self._failed_starts = True, 0
            else:
                results.append(self._result(worker.waiting.popleft(), answer))
        return lives

    def _result(self, sample: _Sample, answer: dict[str, Any]) -> tuple[Hashable, float, Status]:
        if "error" in answer:
            return self._fail(sample, Status.ERROR, answer["error"])
        reward = answer["reward"]
        if not 0.0 <= reward <= 1.0:  # NaN too
            return self._fail(sample, Status.ERROR, f"the task's score is {reward}, expected 0 to 1")
        return sample.id, reward, Status.OK

    def _fail(self, sample: _Sample, status: Status, why: str) -> tuple[Hashable, float, Status]:
        self._described += 1
        if self._described <= LOGGED:
            log.warning("reward of sample %s (item %d): %s: %s", sample.id, sample.item, status, why)
        return sample.id, math.nan, status

    def _retire(self, worker: _Worker, late: bool, results: list[tuple[Hashable, float, Status]]) -> None:
        """Kill the worker, blame its head, put the others back to the front of the queue."""
        self._spawner.kill(worker.number)
        worker.channel.close()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS:
                what = f"were not ready in {READY_S:g} s" if late else "ended before they were ready"
                raise RuntimeError(
                    f"{STARTS} reward workers in a row {what}: {' '.join(self._command)} cannot load "
                    f"{self._first}; its error is in the node's log"
                )
        if worker.waiting:
            status, why = (Status.TIMEOUT, f"no answer in {self._timeout_s:g} s") if late else (Status.ERROR, "the "
                "worker died")  # fmt: skip
            results.append(self._fail(worker.waiting.popleft(), status, why))
        self._queue.extendleft(reversed(worker.waiting))
