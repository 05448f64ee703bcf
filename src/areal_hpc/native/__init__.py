"""The native part: checksums and file ranges, in C++ and without the interpreter lock.

`crc32c` takes any contiguous buffer (bytes, memoryview, NumPy array; of a torch tensor its
`.numpy()`), at 64 bits a step with the CPU's instruction where it has one (SSE4.2) and from
tables elsewhere. The file calls know no HDF5 and no MPI and return an errno (0: done) instead
of raising, because ranks agree on the number before any of them acts on it.

Paths may be `str` or `os.PathLike`; offsets and sizes are bytes.
"""

from __future__ import annotations

import os

from areal_hpc import _native
from areal_hpc._native import crc32c, crc32c_hardware, crc32c_table

__all__ = ["crc32c", "crc32c_hardware", "crc32c_table", "read_extent", "reserve", "sync_dir", "write_extent"]

Path = str | os.PathLike


def write_extent(path: Path, offset: int, buffer) -> int:
    """Write the contiguous `buffer` at byte `offset` of an existing file and sync it: 0 or errno."""
    return _native.write_extent(os.fspath(path), offset, buffer)


def read_extent(path: Path, offset: int, buffer) -> int:
    """Fill the writable contiguous `buffer` from byte `offset`: 0 or errno; ENODATA where the file is too short."""
    return _native.read_extent(os.fspath(path), offset, buffer)


def reserve(path: Path, size_bytes: int) -> int:
    """Give the file's first `size_bytes` bytes disk blocks (`fallocate(2)`): 0 or errno.

    The file is made if need be; it grows to that size and never shrinks. EOPNOTSUPP where the
    file system cannot reserve, ENOSPC where there is no room (some blocks may then be taken).
    """
    return _native.reserve(os.fspath(path), size_bytes)


def sync_dir(directory: Path) -> int:
    """Make new names and renames in `directory` durable: 0 or errno."""
    return _native.sync_dir(os.fspath(directory))
