"""The two ends of a mail stream: items put into slots here, slots taken apart there.

A slot is a number and up to `slot_bytes` of the stream in all; an item is a kind, a length and its
bytes, and may share a slot or span several. Whoever holds these ends keeps the credit.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import numpy as np

SLOT_TAG = 3
SLOT_HEAD = struct.Struct("<Q")  # number of this slot between the pair, from 0
ITEM_HEAD = struct.Struct("<BQ")  # kind, bytes that follow
PACKED_GROUP, PICKLED = 0, 1


class MailboxError(RuntimeError):
    """A peer did not take or send its mail in time, or what came is not what was sent."""


class Outgoing:
    """The stream from here to one home."""

    def __init__(self) -> None:
        self.parts: deque[memoryview] = deque()
        self.queued_bytes = 0
        self.sent_slots = 0
        self.credited_slots = 0

    def put(self, kind: int, payload: bytes) -> None:
        for part in (ITEM_HEAD.pack(kind, len(payload)), payload):
            self.parts.append(memoryview(part))
            self.queued_bytes += len(part)

    def cut(self, slot_bytes: int) -> bytearray:
        """The next slot, as full as the queue allows."""
        slot = bytearray(SLOT_HEAD.pack(self.sent_slots))
        while self.parts and len(slot) < slot_bytes:
            part = self.parts.popleft()
            room = slot_bytes - len(slot)
            slot += part[:room]
            if len(part) > room:
                self.parts.appendleft(part[room:])
        self.queued_bytes -= len(slot) - SLOT_HEAD.size
        self.sent_slots += 1
        return slot


class Incoming:
    """The stream from one leader: a ring of posted receives, and the bytes of an item not yet whole."""

    def __init__(self, mail: Any, byte: Any, source: int, slots: int, slot_bytes: int) -> None:
        self.source = source
        self.buffers = [np.empty(slot_bytes, np.uint8) for _ in range(slots)]
        self.requests = [mail.Recv_init([buffer, byte], source, SLOT_TAG) for buffer in self.buffers]
        for request in self.requests:
            request.Start()
        self.received_slots = 0
        self.stream = bytearray()

    def take(self, status: Any, byte: Any) -> int:
        """Bytes of the next slot if it is here, else 0; its receive is posted again.

        Receives of one pair match in the order of posting, so the ring is looked at in that order.
        """
        at = self.received_slots % len(self.requests)
        if not self.requests[at].Test(status):
            return 0
        count = status.Get_count(byte)
        data = memoryview(self.buffers[at])[:count]
        (number,) = SLOT_HEAD.unpack_from(data)
        if number != self.received_slots:
            raise MailboxError(f"mail from rank {self.source}: slot {number} came, {self.received_slots} was due")
        self.stream += data[SLOT_HEAD.size :]
        self.received_slots += 1
        self.requests[at].Start()
        return count

    def items(self) -> list[tuple[int, bytes]]:
        """(kind, payload) of every item that is whole by now."""
        out: list[tuple[int, bytes]] = []
        start = 0
        while len(self.stream) - start >= ITEM_HEAD.size:
            kind, length = ITEM_HEAD.unpack_from(self.stream, start)
            stop = start + ITEM_HEAD.size + length
            if stop > len(self.stream):
                break
            out.append((kind, bytes(self.stream[start + ITEM_HEAD.size : stop])))
            start = stop
        del self.stream[:start]
        return out

    def close(self) -> None:
        for request in self.requests:
            request.Cancel()
            request.Wait()
            request.Free()
