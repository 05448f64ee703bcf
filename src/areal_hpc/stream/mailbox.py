"""The mailbox: what ranks tell each other while they work. It only carries; it decides nothing.

Mail (leader to trainer home: `Group`, `Tombstone`, `Saved`) is a stream of bytes for each pair, cut
into slots of `slot_bytes` that land in receives posted beforehand. A sender has at most `slots` slots
without credit at a home, so no message ever arrives where no receive waits, and a home that does not
look for a while costs the sender a queue, never a wait: at most (eta+1)*B groups exist. Items share a
slot when they are small and span slots when they are large.

Control (any rank to any rank) is everything else: pickled, under 64 KiB, by matched probe, on a
communicator of its own. Credits travel there as 4 bytes.

Both are first-in-first-out for a pair of ranks. Nothing here blocks but `flush` and `close`, which
sleep 1 ms between tests and have a deadline. A message moves only while both of its ranks call
`pump` now and then: over TCP a slot of 1 MiB needs several calls on either side. Only the main
thread may call any of it (MPI level FUNNELED).
"""

from __future__ import annotations

import pickle
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from areal_hpc.records import Group
from areal_hpc.stream.messages import Saved, Tombstone
from areal_hpc.stream.slots import PACKED_GROUP, PICKLED, SLOT_HEAD, SLOT_TAG, Incoming, MailboxError, Outgoing

NOTE_TAG, CREDIT_TAG = 1, 2
NOTE_LIMIT_BYTES = 64 * 1024
NOTES_PER_PUMP = 64  # bounds the work of one call; what is left is there for the next
CREDIT = struct.Struct("<I")  # slots consumed
SLEEP_S = 0.001


class MailWorld(Protocol):
    """What the mailbox needs to know of the world; ranks are those of both communicators."""

    rank: int
    homes: list[int]  # ranks that receive mail
    leaders: list[int]  # ranks that send it
    control: Any  # mpi4py communicators, used by the mailbox alone
    mail: Any


class Mailbox:
    """One per rank. `slots` and `slot_bytes` must be the same everywhere.

    `sent_bytes` and `recv_bytes` are counted at the MPI calls, mail and control together;
    `groups_sent` and `groups_received` count groups queued here and unpacked here.
    """

    def __init__(self, world: MailWorld, slots: int = 4, slot_bytes: int = 1 << 20) -> None:
        from mpi4py import MPI

        if slots < 1 or slot_bytes <= SLOT_HEAD.size:
            raise ValueError(f"mailbox: slots={slots} (at least 1), slot_bytes={slot_bytes} (over {SLOT_HEAD.size})")
        self._mpi, self._control, self._mail = MPI, world.control, world.mail
        self._rank, self._slots, self._slot_bytes = world.rank, slots, slot_bytes
        self._status = MPI.Status()
        self._outgoing = {home: Outgoing() for home in world.homes} if world.rank in world.leaders else {}
        self._incoming = (
            [Incoming(world.mail, MPI.BYTE, leader, slots, slot_bytes) for leader in world.leaders]
            if world.rank in world.homes
            else []
        )
        self._sends: list[tuple[Any, Any, int]] = []  # request, its buffer, destination
        self._notes: dict[int, deque[tuple[Any, bytearray, int]]] = {}  # by source: request, buffer, tag
        self._inbox: list[tuple[int, Any]] = []
        size = world.control.size
        self._sent = np.zeros((size, 2), np.int64)  # control messages, slots; by destination
        self._received = np.zeros((size, 2), np.int64)  # the same by source
        self._crediting = True
        self._closed = False
        self.sent_bytes = self.recv_bytes = 0
        self.groups_sent = self.groups_received = 0

    # -- the verbs of the loops ---------------------------------------------------------------

    def send(self, item: Group | Tombstone | Saved, dest: int) -> None:
        """Queue mail for the home at world rank `dest`. Leaders only. `pump` moves it."""
        if dest not in self._outgoing:
            raise MailboxError(f"mail from rank {self._rank} to rank {dest}: mail goes from leaders to homes")
        self._refuse_if_closed(dest)
        if isinstance(item, Group):
            self._outgoing[dest].put(PACKED_GROUP, item.pack())
            self.groups_sent += 1
        else:
            self._outgoing[dest].put(PICKLED, pickle.dumps(item, protocol=5))

    def notify(self, message: Any, dest: int) -> None:
        """Send a control message at once; to itself it comes with the next `pump`.

        Raises MailboxError for one of 64 KiB or more.
        """
        self._refuse_if_closed(dest)
        if dest == self._rank:
            self._inbox.append((dest, message))
            return
        data = pickle.dumps(message, protocol=5)
        if len(data) >= NOTE_LIMIT_BYTES:
            raise MailboxError(
                f"{type(message).__name__} from rank {self._rank} to rank {dest} has {len(data)} bytes; "
                f"a control message has fewer than {NOTE_LIMIT_BYTES}"
            )
        self._post(self._control, data, dest, NOTE_TAG)

    def pump(self) -> list[tuple[int, Any]]:
        """Move what can move, and return what is here: (source rank, message or Group), in order of each pair.

        Never blocks, and does a bounded amount of work. A caller with nothing else to do sleeps 1 ms.
        """
        self._progress()
        arrived, self._inbox = self._inbox, []
        return arrived

    def queued(self, dest: int) -> int:
        """Bytes for the home at `dest` that MPI has not been given yet, for want of credit."""
        return self._outgoing[dest].queued_bytes

    def unacknowledged(self, dest: int) -> int:
        """Slots sent to the home at `dest` that it has not credited: at most `slots`."""
        return self._outgoing[dest].sent_slots - self._outgoing[dest].credited_slots

    @property
    def idle(self) -> bool:
        """Nothing is queued and MPI is done with every buffer that was sent."""
        return not self._sends and not any(out.queued_bytes for out in self._outgoing.values())

    def flush(self, deadline_s: float, on_wait: Callable[[], None] = lambda: None) -> None:
        """Pump until `idle`; what arrives meanwhile comes with the next `pump`.

        Raises MailboxError after `deadline_s` without it, naming the peers that do not take their mail.
        """
        self._until(lambda: self.idle, deadline_s, on_wait, lambda: f"flush: {self._unsent()}")

    def close(self, deadline_s: float) -> list[tuple[int, Any]]:
        """Collective over the control communicator: deliver everything, then cancel the posted receives.

        Returns what arrived and was not pumped. Raises MailboxError after `deadline_s` in any of its
        phases, naming the peers. Everything is counted, so that MPI finalises with nothing under way:

        1. flush, and a barrier: afterwards no rank has mail to send, so credits are of no more use;
        2. tell each rank how many messages it was sent, and pump until that many have come.
        """
        nothing = lambda: None
        self.flush(deadline_s)
        barrier = self._control.Ibarrier()
        self._until(barrier.Test, deadline_s, nothing, lambda: "close: a rank has not come to the barrier")
        self._crediting = False
        self._closed = True
        due = np.zeros_like(self._sent)
        counts = self._control.Ialltoall(self._sent, due)
        self._until(counts.Test, deadline_s, nothing, lambda: "close: a rank has not told its counts")
        self._until(
            lambda: self.idle and bool((self._received == due).all()),
            deadline_s,
            nothing,
            lambda: (
                f"close: {self._unsent()}; due from ranks {np.flatnonzero((due != self._received).any(1)).tolist()}"
            ),
        )
        for stream in self._incoming:
            stream.close()
        arrived, self._inbox = self._inbox, []
        return arrived

    # -- how it moves -------------------------------------------------------------------------

    def _progress(self) -> None:
        self._probe_notes()
        self._finish_notes()
        for stream in self._incoming:
            self._receive_mail(stream)
        self._send_mail()
        self._sends = [entry for entry in self._sends if not entry[0].Test()]

    def _probe_notes(self) -> None:
        for _ in range(NOTES_PER_PUMP):
            message = self._control.Improbe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, self._status)
            if message is None:
                return
            source, tag = self._status.Get_source(), self._status.Get_tag()
            data = bytearray(self._status.Get_count(self._mpi.BYTE))
            # Irecv: over the eager limit a Recv would wait here until the sender is in MPI again.
            request = message.Irecv([data, self._mpi.BYTE])
            self._notes.setdefault(source, deque()).append((request, data, tag))

    def _finish_notes(self) -> None:
        for source, notes in self._notes.items():
            while notes and notes[0][0].Test():
                _, data, tag = notes.popleft()
                self.recv_bytes += len(data)
                self._received[source, 0] += 1
                if tag == CREDIT_TAG:
                    self._outgoing[source].credited_slots += CREDIT.unpack(data)[0]
                else:
                    self._inbox.append((source, pickle.loads(data)))

    def _receive_mail(self, stream: Incoming) -> None:
        consumed = 0
        while consumed < self._slots and (count := stream.take(self._status, self._mpi.BYTE)):
            consumed += 1
            self.recv_bytes += count
            self._received[stream.source, 1] += 1
        if not consumed:
            return
        for kind, payload in stream.items():
            if kind == PACKED_GROUP:
                try:
                    self._inbox.append((stream.source, Group.unpack(payload)))
                except ValueError as error:
                    raise MailboxError(f"mail from rank {stream.source} to rank {self._rank}: {error}") from error
                self.groups_received += 1
            else:
                self._inbox.append((stream.source, pickle.loads(payload)))
        if self._crediting:
            self._post(self._control, CREDIT.pack(consumed), stream.source, CREDIT_TAG)

    def _send_mail(self) -> None:
        for dest, out in self._outgoing.items():
            while out.queued_bytes and out.sent_slots - out.credited_slots < self._slots:
                self._post(self._mail, out.cut(self._slot_bytes), dest, SLOT_TAG)

    def _post(self, comm: Any, data: bytes | bytearray, dest: int, tag: int) -> None:
        request = comm.Isend([data, self._mpi.BYTE], dest, tag)
        self._sends.append((request, data, dest))
        self._sent[dest, int(tag == SLOT_TAG)] += 1
        self.sent_bytes += len(data)

    # -- waiting ------------------------------------------------------------------------------

    def _until(
        self, done: Callable[[], bool], deadline_s: float, on_wait: Callable[[], None], what: Callable[[], str]
    ) -> None:
        limit = time.monotonic() + deadline_s
        while True:
            self._progress()
            if done():
                return
            if time.monotonic() > limit:
                raise MailboxError(f"mailbox of rank {self._rank}: after {deadline_s:g} s of {what()}")
            on_wait()
            time.sleep(SLEEP_S)

    def _unsent(self) -> str:
        """Who has not taken what, in words."""
        under_way: dict[int, int] = {}
        for _, data, dest in self._sends:
            under_way[dest] = under_way.get(dest, 0) + len(data)
        peers = sorted(set(under_way) | {dest for dest, out in self._outgoing.items() if out.queued_bytes})
        told = [
            f"rank {dest} ({under_way.get(dest, 0)} bytes under way"
            + (
                f", {self.queued(dest)} queued, {self.unacknowledged(dest)} slots without credit)"
                if dest in self._outgoing
                else ")"
            )
            for dest in peers
        ]
        return f"not taken by {', '.join(told)}" if told else "all that was sent is taken"

    def _refuse_if_closed(self, dest: int) -> None:
        if self._closed:
            raise MailboxError(f"rank {self._rank} sends to rank {dest} after the mailbox was closed")
