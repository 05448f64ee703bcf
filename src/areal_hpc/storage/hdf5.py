"""HDF5 calls that are safe among many ranks, and nothing else that knows HDF5.

`create` is collective over its communicator, and every rank must make it with equal
arguments: parallel HDF5 hangs where one rank leaves out a metadata call, and loses datasets
where ranks create different ones. No data passes through HDF5. With the mpio driver a
collective write hangs for good when one rank's disk is full (seen with HDF5 1.10.8, Open MPI
4.1.4, romio and ompio alike), so data is written natively at the datasets' byte offsets, after
the file is closed. A hang inside `create` itself (a rank killed in it) ends by the job's hang
report; HDF5 has no deadline. `read_structure` is serial.

What makes those offsets lasting: contiguous layout, early allocation, no fill, no filters, no
alignment, and a first metadata block that is larger than all metadata. `create` checks that the
datasets lie back to back, so no metadata is between them. libver v110 puts a checksum on each
piece of metadata. Not so: global and local heaps, and attributes above 4 KiB; hence no
variable-length types and `ATTR_BYTES`. Object times are off: equal content, equal bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc import native
from areal_hpc.layout.extents import FileTensor, data_range, grid

if TYPE_CHECKING:
    import h5py
    from mpi4py import MPI

TABLE = "checksums"
ATTR_BYTES = 4000  # larger attributes would be stored without a checksum (fractal heap, "huge" objects)
JSON_MARK = "json:"


class CheckpointError(RuntimeError):
    """A file of ours that cannot be written or must not be read; names the file and what is wrong."""


def raise_errno(code: int, doing: str) -> None:
    """CheckpointError for the errno of a native call, nothing for 0."""
    if code:
        raise CheckpointError(f"{doing}: {os.strerror(code)} (errno {code})")


@dataclass(frozen=True, slots=True)
class Entry:
    """A dataset to be: its path in the file, shape and dtype.

    Data moves as elements of the dtype, or, where `as_bytes`, as a flat run of bytes; the boxes
    of its `FileTensor` count in that unit.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    as_bytes: bool = False

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def at(self, offset: int) -> FileTensor:
        """This dataset at its place in the file."""
        if self.as_bytes:
            return FileTensor(self.name, (self.size_bytes,), 1, offset)
        return FileTensor(self.name, self.shape, np.dtype(self.dtype).itemsize, offset)


@dataclass(frozen=True, slots=True)
class Structure:
    """What a file of ours holds and where. Offsets are bytes from the file's start.

    `tensors` are the datasets with at least one byte, which fill [start, stop); `dtypes` and `shapes`
    are of all by name; `table` is the checksum table's dataset; `checksums` the crc32c of each block
    of the grid over [start, stop), filled when read.
    """

    path: Path
    size_bytes: int
    start: int
    stop: int
    tensors: dict[str, FileTensor]
    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    table: FileTensor
    attrs: dict[str, Any] = field(default_factory=dict)
    checksums: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The grid: (first byte, byte after the last) of each checksummed block."""
        return list(grid(self.start, self.stop))

    def names(self, group: str) -> list[str]:
        """Datasets below `group`, without that prefix, in file order of creation."""
        return [name.removeprefix(group + "/") for name in self.shapes if name.startswith(group + "/")]


def block_count(entries: Sequence[Entry]) -> int:
    """Blocks of the grid over these datasets."""
    return sum(1 for _ in grid(0, sum(entry.size_bytes for entry in entries)))


def metadata_bytes(entries: Sequence[Entry]) -> int:
    """More than all metadata of such a file (seen: about 350 bytes a dataset)."""
    return (1 << 18) + sum(2048 + 4 * len(entry.name) for entry in entries)


def create(path: Path, comm: MPI.Comm, entries: Sequence[Entry], attrs: dict[str, Any]) -> Structure:
    """Collective over `comm`, equal arguments everywhere: make the file's structure and close it.

    The checksum table is added behind the data. Data is not written: its bytes are whatever the
    file system gives, zeros in a new file. Raises CheckpointError when an attribute is too large
    or the datasets do not lie back to back; OSError from HDF5.
    """
    import h5py
    from mpi4py import MPI

    values = {key: _to_attr(path, key, value) for key, value in attrs.items()}  # before anything collective
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fapl_mpio(comm, MPI.INFO_NULL)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_V110)
    access.set_meta_block_size(metadata_bytes(entries))
    creation = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    table = Entry(TABLE, (block_count(entries) + 1,), "<u4", as_bytes=True)
    with h5py.File(h5py.h5f.create(bytes(path), h5py.h5f.ACC_TRUNC, creation, access)) as file:
        for key, value in values.items():
            file.attrs.create(key, value)
        tensors = [tensor for entry in entries if (tensor := _create_dataset(file, entry))]
        table_tensor = _create_dataset(file, table)
        file.flush()
    start, stop = data_range(tensors)
    if stop - start != sum(entry.size_bytes for entry in entries):
        raise CheckpointError(f"{path}: HDF5 put something between the datasets, in bytes [{start}, {stop})")
    return Structure(
        path,
        table_tensor.stop,
        start,
        stop,
        {tensor.name: tensor for tensor in tensors},
        {entry.name: entry.dtype for entry in entries},
        {entry.name: entry.shape for entry in entries},
        table_tensor,
        attrs,
    )


def _create_dataset(file: h5py.File, entry: Entry) -> FileTensor | None:
    """One early-allocated contiguous dataset; None where it has no byte, and so no place."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_layout(h5py.h5d.CONTIGUOUS)
    creation.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    group, _, name = entry.name.rpartition("/")
    parent = _require_group(file, group)
    space = h5py.h5s.create_simple(entry.shape)
    dataset = h5py.h5d.create(parent, name.encode(), h5py.h5t.py_create(np.dtype(entry.dtype)), space, creation)
    return entry.at(dataset.get_offset()) if entry.size_bytes else None


def _require_group(file: h5py.File, path: str) -> h5py.h5g.GroupID:
    """The group of that path, made without times where it is missing."""
    import h5py

    creation = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    group = h5py.h5g.open(file.id, b"/")
    for part in filter(None, path.split("/")):
        name = part.encode()
        group = h5py.h5g.open(group, name) if name in group else h5py.h5g.create(group, name, gcpl=creation)
    return group


def read_structure(path: str | Path, file_format: str, version: int) -> Structure:
    """Serial: what the file holds, its metadata and checksum table verified; no data is read.

    Raises CheckpointError naming the file when it is not HDF5, torn, damaged, of another format,
    or of another version than `version` (both are named).
    """
    import h5py

    path = Path(path)
    try:
        size = path.stat().st_size
        with h5py.File(path, "r", locking="best-effort") as file:
            attrs = {key: _from_attr(value) for key, value in file.attrs.items()}
            _check_format(path, attrs, file_format, version)
            table, *found = _datasets(file)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises OSError, KeyError, RuntimeError, ValueError for damage alike
        raise CheckpointError(f"{path}: not a readable HDF5 file: {' '.join(str(error).split())}") from None
    entries = [entry for entry, _ in found]
    tensors = {entry.name: entry.at(offset) for entry, offset in found if entry.size_bytes}
    try:
        start, stop = data_range(list(tensors.values()))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    structure = Structure(
        path,
        size,
        start,
        stop,
        tensors,
        {entry.name: entry.dtype for entry in entries},
        {entry.name: entry.shape for entry in entries},
        table[0].at(table[1]),
        attrs,
    )
    return _with_checksums(structure, entries)


def _check_format(path: Path, attrs: dict[str, Any], file_format: str, version: int) -> None:
    found = attrs.get("format"), attrs.get("format_version")
    if found[0] != file_format:
        raise CheckpointError(f"{path}: its format is {found[0]!r}, expected {file_format!r}")
    if found[1] != version:
        raise CheckpointError(f"{path}: {file_format} of format version {found[1]}, this program reads {version}")


def _datasets(file: h5py.File) -> list[tuple[Entry, int]]:
    """The checksum table, then all other datasets in file order, each with its offset."""
    import h5py

    found: list[tuple[Entry, int]] = []

    def visit(name: str, node: h5py.Dataset | h5py.Group) -> None:
        if isinstance(node, h5py.Dataset):
            as_bytes = node.dtype != np.dtype("<f4")
            entry = Entry(name, node.shape, node.dtype.str, as_bytes or name == TABLE)
            offset = node.id.get_offset()
            if entry.size_bytes and offset is None:
                raise ValueError(f"dataset {name} is not stored contiguously")
            found.append((entry, offset or 0))

    file.visititems(visit)
    found.sort(key=lambda item: (item[0].name != TABLE, item[1]))
    if not found or found[0][0].name != TABLE:
        raise ValueError(f"there is no dataset {TABLE}")
    return found


def _with_checksums(structure: Structure, entries: list[Entry]) -> Structure:
    """The structure with its table read and checked against size, datasets and its own checksum."""
    path, table, start, stop = structure.path, structure.table, structure.start, structure.stop
    if stop - start != sum(entry.size_bytes for entry in entries) or max(stop, table.stop) > structure.size_bytes:
        raise CheckpointError(
            f"{path}: datasets in bytes [{start}, {stop}), table up to {table.stop}, do not fit "
            f"the file of {structure.size_bytes} bytes"
        )
    raw = np.empty(table.shape[0], np.uint8)
    code = native.read_extent(path, table.offset, raw)
    values = raw.view("<u4")
    if code or len(values) != len(structure.blocks) + 1 or native.crc32c(values[:-1]) != values[-1]:
        raise CheckpointError(f"{path}: the checksum table is damaged or was never written")
    return replace(structure, checksums=tuple(values[:-1].tolist()))


def _to_attr(path: Path, key: str, value: Any) -> Any:
    """An attribute's stored form: numbers as they are, text as UTF-8 of fixed length, the rest as JSON text."""
    if isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) and not value.startswith(JSON_MARK) else JSON_MARK + json.dumps(value)
    data = text.encode()
    if len(data) > ATTR_BYTES:
        raise CheckpointError(f"{path}: attribute {key} takes {len(data)} bytes, more than {ATTR_BYTES}: use a blob")
    return np.bytes_(data) if data else np.bytes_(b"\0")  # HDF5 has no string of length 0


def _from_attr(value: Any) -> Any:
    if isinstance(value, bytes):
        text = value.rstrip(b"\0").decode()
        return json.loads(text.removeprefix(JSON_MARK)) if text.startswith(JSON_MARK) else text
    return value.item() if isinstance(value, np.generic) else value
