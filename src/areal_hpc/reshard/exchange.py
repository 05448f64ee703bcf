"""Run a plan: boxes go rank to rank over MPI, cast at the sender, checked at the receiver.

`start`, `test`, `wait`; one object serves many versions. Boxes are cut into units of at most
`chunk_bytes`; the units for one receiver are packed, in the plan's order, into messages of at most
`chunk_bytes` (or one element) plus a trailing table with a crc32c of each unit's bytes in the wire
dtype. At most IN_FLIGHT messages each way are staged at a time, so staging per rank is at most
2 x IN_FLIGHT x chunk_bytes. Receivers take what arrives, from whomever, so no order of sends
can lock; they are idle in Test and a sleep of 1 ms, never inside MPI.

The wire is raw bytes (MPI has no bfloat16). Knows nothing of versions or models. Main thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI

from areal_hpc.layout.boxes import Box
from areal_hpc.native import crc32c
from areal_hpc.reshard.plan import Plan
from areal_hpc.reshard.units import Unit, interleave, messages_of

IN_FLIGHT = 4  # messages each way: one is packed while others travel
MAX_CHUNK_BYTES = 256 << 20  # with the table of units of one element each, still below 1 GiB a call
TAGS = 16384  # runs are told apart by tag, so that a fast peer's next run cannot mix with this one
BUSY_S = 0.005  # bytes move only inside MPI calls: sleep only when nothing was completed for this long
SLEEP_S = 0.001

_runs = MPI.Comm.Create_keyval()  # not copied to a duplicate, which counts from 0
_abandoned: list[object] = []  # requests of failed runs with their buffers: MPI may still write to them


class ExchangeError(RuntimeError):
    """A run that failed: a peer that does not answer or bytes that changed. The version must not be used."""


@dataclass(slots=True, eq=False)
class _Message:
    """A message under way and the buffer it uses."""

    peer: int
    units: list[Unit]
    buffer: np.ndarray
    request: MPI.Request | None = None


class Exchange:
    """The plan's part of this rank of `comm`; the ranks of `plan` are those of `comm`.

    `dtype` is the wire's and that of every wanted tensor. `deadline_s` bounds the time without a
    single message completed. `on_wait` is called at each turn of `wait`, and may not use `comm`.
    `verify=False` leaves the checksums out; all ranks must agree on it and on `chunk_bytes`.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        plan: Plan,
        dtype: torch.dtype,
        *,
        deadline_s: float,
        on_wait: Callable[[], None] = lambda: None,
        chunk_bytes: int = 64 << 20,
        verify: bool = True,
    ) -> None:
        if not dtype.itemsize <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes={chunk_bytes}: expected {dtype.itemsize} to {MAX_CHUNK_BYTES}")
        self.comm = comm
        self.plan = plan
        self.dtype = dtype
        self.deadline_s = deadline_s
        self.on_wait = on_wait
        self.verify = verify
        self.sent_bytes = 0  # of tensors, counted at the MPI calls, over all runs
        self.table_bytes = 0  # of checksums, counted alike
        self._tag = -1
        rank, limit = comm.rank, chunk_bytes // dtype.itemsize
        self._local = [transfer for transfer in plan.sends(rank) if transfer.dst == rank]
        self._sends = interleave(messages_of(plan.sends(rank), "dst", rank, limit), rank, comm.size)
        self._receives = messages_of(plan.receives(rank), "src", rank, limit)
        self._held_boxes = plan.sources[rank] if rank < len(plan.sources) else ()
        self._wanted_boxes = plan.destinations[rank] if rank < len(plan.destinations) else ()
        self._to_send: deque[tuple[int, list[Unit]]] = deque()
        self._expected: dict[int, deque[list[Unit]]] = {}
        self._sending: list[_Message] = []
        self._receiving: list[_Message] = []
        self._held: Sequence[torch.Tensor] = ()
        self._wanted: Sequence[torch.Tensor] = ()

    def start(self, held: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        """Begin a run: `held[i]` has the shape of source box i, `wanted[i]` that of destination box i.

        All ranks of `comm` start the same runs in the same order, those with nothing to move too, but
        need not meet. Views of live tensors, strided or not; both must stay as they are until the run
        is done. Boxes that stay on this rank are copied here. Raises ValueError naming the tensor for a
        wrong count, shape or dtype, RuntimeError when the last run is not done.
        """
        if self.running:
            raise RuntimeError("start of an exchange whose last run is not done")
        _check(held, self._held_boxes, "held", None)
        _check(wanted, self._wanted_boxes, "wanted", self.dtype)
        self._held, self._wanted = held, wanted
        self._tag = _next_tag(self.comm)
        self._to_send = deque(self._sends)
        self._expected = {peer: deque(messages) for peer, messages in self._receives.items()}
        self._last_progress = time.monotonic()
        for transfer in self._local:
            unit = Unit(transfer, transfer.box)
            self._destination(unit).copy_(self._source(unit).to(self.dtype))

    @property
    def running(self) -> bool:
        return bool(self._to_send or self._expected or self._sending or self._receiving)

    def test(self) -> bool:
        """Take what has arrived and send what there is room for; True when this rank's part is done.

        Never blocks. Raises ExchangeError naming tensor, box and ranks when a checksum differs, and
        naming peers and tensors when nothing was completed for `deadline_s`.
        """
        if not self.running:
            return True
        progress = self._pump_sends() | self._pump_receives()
        now = time.monotonic()
        if progress:
            self._last_progress = now
        elif now - self._last_progress > self.deadline_s:
            self._fail(self._late())
        if not self.running:
            self._held = self._wanted = ()
            return True
        return False

    def wait(self) -> None:
        """`test` until this rank's part is done, with short sleeps where nothing moves."""
        while not self.test():
            self.on_wait()
            if time.monotonic() - self._last_progress > BUSY_S:
                time.sleep(SLEEP_S)

    def _pump_sends(self) -> bool:
        """Forget what is sent, pack and send one more message; True when either happened."""
        under_way = [message for message in self._sending if not message.request.Test()]
        progress = len(under_way) < len(self._sending)
        self._sending = under_way
        if not self._to_send or len(self._sending) == IN_FLIGHT:
            return progress
        peer, units = self._to_send.popleft()
        message = _Message(peer, units, self._pack(units))
        message.request = self.comm.Isend([message.buffer, MPI.BYTE], peer, self._tag)
        self._sending.append(message)
        table = 4 * len(units) if self.verify else 0
        self.sent_bytes += message.buffer.nbytes - table
        self.table_bytes += table
        return True

    def _pump_receives(self) -> bool:
        """Take what peers have sent and unpack what is complete; True when a message was completed."""
        while len(self._receiving) < IN_FLIGHT and self._expected:
            status = MPI.Status()
            probed = self.comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
            if probed is None:
                break
            peer = status.Get_source()
            units = self._expect(peer, status.Get_count(MPI.BYTE))
            message = _Message(peer, units, np.empty(status.Get_count(MPI.BYTE), np.uint8))
            message.request = probed.Irecv([message.buffer, MPI.BYTE])
            self._receiving.append(message)
        done = [message for message in self._receiving if message.request.Test()]
        for message in done:
            self._receiving.remove(message)
            self._unpack(message)
        return bool(done)

    def _expect(self, peer: int, size_bytes: int) -> list[Unit]:
        """The units of the next message of `peer`, whose size must be theirs."""
        messages = self._expected.get(peer)
        if not messages:
            self._fail(f"rank {peer} sent {size_bytes} bytes to rank {self.comm.rank}, which expects none from it")
        units = messages.popleft()
        if not messages:
            del self._expected[peer]
        expected = self._bytes(units)
        if size_bytes != expected:
            self._fail(
                f"{units[0].transfer.box.name}: message of {size_bytes} bytes from rank {peer} to rank "
                f"{self.comm.rank}, expected {expected}: do the ranks agree on plan, dtype, chunk_bytes and verify?"
            )
        return units

    def _bytes(self, units: list[Unit]) -> int:
        return sum(unit.box.size for unit in units) * self.dtype.itemsize + (4 * len(units) if self.verify else 0)

    def _source(self, unit: Unit) -> torch.Tensor:
        index = unit.transfer.src_index
        return self._held[index][unit.box.within(self._held_boxes[index])]

    def _destination(self, unit: Unit) -> torch.Tensor:
        index = unit.transfer.dst_index
        return self._wanted[index][unit.box.within(self._wanted_boxes[index])]

    def _slots(self, units: list[Unit], buffer: np.ndarray) -> Iterator[tuple[Unit, np.ndarray, torch.Tensor]]:
        """(unit, its bytes in the buffer, the same as a tensor of the unit's shape and wire dtype)."""
        at = 0
        for unit in units:
            part = buffer[at : at + unit.box.size * self.dtype.itemsize]
            yield unit, part, torch.from_numpy(part).view(self.dtype).view(unit.box.shape)
            at += part.nbytes

    def _pack(self, units: list[Unit]) -> np.ndarray:
        buffer = np.empty(self._bytes(units), np.uint8)
        table = []
        for unit, part, tensor in self._slots(units, buffer):
            tensor.copy_(self._source(unit))
            if self.verify:
                table.append(crc32c(part))
        if self.verify:
            buffer[-4 * len(units) :] = np.array(table, "<u4").view(np.uint8)
        return buffer

    def _unpack(self, message: _Message) -> None:
        table = message.buffer[-4 * len(message.units) :].view("<u4") if self.verify else ()
        for number, (unit, part, tensor) in enumerate(self._slots(message.units, message.buffer)):
            if self.verify and crc32c(part) != table[number]:
                self._fail(
                    f"{unit.box.name}: checksum of {unit.box.start}..{unit.box.stop} from rank {message.peer} to rank "
                    f"{self.comm.rank} is {crc32c(part):08x}, sent as {table[number]:08x}: the bytes changed on the way"
                )
            self._destination(unit).copy_(tensor)

    def _late(self) -> str:
        """Who owes what, for the deadline's message."""
        owed = {message.peer: message.units for message in self._receiving}
        owed.update({peer: messages[0] for peer, messages in self._expected.items()})
        owes = [f"rank {peer} has not sent {units[0].box.name}" for peer, units in sorted(owed.items())]
        owes += [f"rank {m.peer} has not taken {m.units[0].box.name}" for m in self._sending]
        more = f"; and {len(owes) - 8} more" if len(owes) > 8 else ""
        return f"no progress on rank {self.comm.rank} for {self.deadline_s} s: {'; '.join(owes[:8])}{more}"

    def _fail(self, text: str) -> None:
        """Give up this run; buffers in use by MPI stay alive until the process ends."""
        _abandoned.extend(self._sending + self._receiving)
        self._to_send, self._expected, self._sending, self._receiving = deque(), {}, [], []
        raise ExchangeError(text)


def _next_tag(comm: MPI.Comm) -> int:
    """The tag of the next run on `comm`: counted on the communicator, which several exchanges may use in turn."""
    runs = comm.Get_attr(_runs) or 0
    comm.Set_attr(_runs, runs + 1)
    return runs % TAGS


def _check(tensors: Sequence[torch.Tensor], boxes: Sequence[Box], what: str, dtype: torch.dtype | None) -> None:
    if len(tensors) != len(boxes):
        raise ValueError(f"{len(tensors)} {what} tensors for {len(boxes)} boxes")
    for tensor, box in zip(tensors, boxes):
        if tuple(tensor.shape) != box.shape:
            raise ValueError(f"{box.name}: {what} tensor has shape {tuple(tensor.shape)}, its box {box.shape}")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{box.name}: {what} tensor is {tensor.dtype}, the exchange carries {dtype}")
