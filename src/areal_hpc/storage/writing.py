"""How data gets into a file of ours: resharded to writers, written natively, agreed on, renamed.

Collective: reserve, structure (HDF5), reserve, reshard to the writers' extents, write and sync,
checksum table, sizes compared, rename, sync of the directory. Each step ends in an agreement of all
ranks, so a full disk or a lost permission on one rank is the same error on all; the temporary file is
then removed and what was there before is untouched. A kill leaves, at any moment, a temporary name
or the whole file.

Memory: a writer stages its extents (the data / writers), and the exchange its bounded part.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_hpc import native
from areal_hpc.layout.extents import writer_extents
from areal_hpc.storage import hdf5
from areal_hpc.storage.hdf5 import CheckpointError, Entry, Structure, raise_errno
from areal_hpc.storage.meeting import Meeting
from areal_hpc.storage.moving import Extents, Held, block_checksums, boxes_in, by_unit, move, views_of

SLACK_BYTES = 1 << 20  # directory entries and the like, in the first reservation


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did, the same on every rank but for `sent_bytes` (this rank's, over MPI)."""

    path: Path
    size_bytes: int
    data_bytes: int
    sent_bytes: int
    seconds: float


def temporary(path: Path) -> Path:
    """The name a file has until it is complete: hidden, in the same directory."""
    return path.with_name(f".{path.name}.tmp")


def write_file(
    path: Path,
    meeting: Meeting,
    entries: Sequence[Entry],
    attrs: dict[str, Any],
    held: Held,
    writers: Sequence[int],
) -> SaveReport:
    """Collective over the meeting: `path` appears, complete and synced, or CheckpointError on every rank.

    `entries`, `attrs` and `writers` (ranks of the communicator) are equal on all ranks; entries that
    move as elements come before those that move as bytes. `held` is this rank's part of the data:
    boxes in units of their entry, views on any device, float32 (others are cast) or uint8.
    """
    if not writers or len(set(writers)) < len(writers) or not 0 <= min(writers) <= max(writers) < meeting.size:
        raise CheckpointError(f"{path}: writers {list(writers)} are not distinct ranks below {meeting.size}")
    begin = time.monotonic()
    temp = temporary(path)
    first = meeting.rank == 0
    try:
        with meeting.step(f"reserving disk space in {path.parent}"):
            if first:
                _try_reservation(temp, entries)
        with meeting.step("making the HDF5 structure"):
            structure = hdf5.create(temp, meeting.comm, entries, attrs)
        with meeting.step(f"reserving {structure.size_bytes} bytes"):
            if first:
                _check_reserved(native.reserve(temp, structure.size_bytes), structure.size_bytes)
        sent_bytes, table = _write_data(meeting, temp, structure, held, writers)
        with meeting.step("writing the checksum table"):
            if first:
                _write_table(temp, structure, table)
        with meeting.step("comparing sizes"):
            size = temp.stat().st_size
            if size != structure.size_bytes:
                raise CheckpointError(f"{temp} has {size} bytes here, expected {structure.size_bytes}")
        with meeting.step("renaming"):
            if first:
                temp.rename(path)
                raise_errno(native.sync_dir(path.parent), f"syncing {path.parent}")
    except CheckpointError:
        if first:
            with contextlib.suppress(OSError):  # the error that counts is the one on its way
                temp.unlink(missing_ok=True)
        raise
    data_bytes = sum(entry.size_bytes for entry in entries)
    return SaveReport(path, structure.size_bytes, data_bytes, sent_bytes, time.monotonic() - begin)


def _try_reservation(temp: Path, entries: Sequence[Entry]) -> None:
    """Rank 0: find out whether the whole file has room before HDF5, which may hang on a full disk, makes it.

    HDF5 cannot make a file inside a reservation (it truncates), so this one is given back at once.
    """
    temp.parent.mkdir(parents=True, exist_ok=True)
    temp.unlink(missing_ok=True)
    need = sum(entry.size_bytes for entry in entries) + hdf5.metadata_bytes(entries) + SLACK_BYTES
    try:
        _check_reserved(native.reserve(temp, need), need)
    finally:
        temp.unlink(missing_ok=True)


def _check_reserved(code: int, size_bytes: int) -> None:
    if code != errno.EOPNOTSUPP:  # a file system that cannot reserve: the errno of each write still decides
        raise_errno(code, f"no room for {size_bytes} bytes")


def _write_data(
    meeting: Meeting, temp: Path, structure: Structure, held: Held, writers: Sequence[int]
) -> tuple[int, list[int]]:
    """Reshard to the writers and write: (bytes sent by this rank, checksum of every block in order)."""
    tensors = list(structure.tensors.values())
    extents: list[Extents] = [[] for _ in range(meeting.size)]
    for writer, owned in zip(writers, writer_extents(tensors, len(writers)), strict=True):
        extents[writer] = owned
    mine = extents[meeting.rank]
    everyone = meeting.share([box for box, _ in held])
    with meeting.step("taking memory for the data to write"):
        staging = [np.empty(stop - start, np.uint8) for start, stop in mine]
    sent_bytes = 0
    for unit, group in by_unit(tensors).items():
        names = {tensor.name for tensor in group}
        sent_bytes += move(
            meeting,
            [[box for box in boxes if box.name in names] for boxes in everyone],
            [boxes_in(group, owned) for owned in extents],
            [view for box, view in held if box.name in names],
            views_of(group, mine, staging),
            unit,
        )
    with meeting.step("writing"):
        # also ranks without an extent sync: theirs may be part of what HDF5 wrote
        for start, data in [(start, data) for (start, _), data in zip(mine, staging)] or [(0, b"")]:
            raise_errno(native.write_extent(temp, start, data), f"writing {len(data)} bytes at {start} of {temp}")
    sums = [crc for data in staging for crc in block_checksums(data)]
    by_rank = meeting.share(sums)
    return sent_bytes, [crc for writer in writers for crc in by_rank[writer]]


def _write_table(temp: Path, structure: Structure, checksums: list[int]) -> None:
    values = np.array(checksums, "<u4")
    table = np.append(values, np.array([native.crc32c(values)], "<u4"))
    raise_errno(native.write_extent(temp, structure.table.offset, table), f"writing the checksum table of {temp}")


def remove_stale(directory: Path) -> list[Path]:
    """Rank 0, while no save is under way: remove temporary files that kills left behind."""
    stale = sorted(directory.glob(".*.h5.tmp"))
    for path in stale:
        path.unlink(missing_ok=True)
    return stale
