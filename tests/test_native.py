"""The native part against published vectors, a bit-by-bit CRC, and plain Python file calls."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_hpc import native


def crc32c_by_bit(data: bytes, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("crc32c", [native.crc32c, native.crc32c_table])
@pytest.mark.parametrize(
    ("data", "expected"),  # RFC 3720, B.4
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
    ],
)
def test_published_vectors(crc32c, data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@given(st.binary(max_size=300), st.integers(0, 7), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=200)
def test_any_length_alignment_and_seed(data: bytes, skip: int, seed: int) -> None:
    part = memoryview(data)[skip:]
    expected = crc32c_by_bit(bytes(part), seed)
    assert native.crc32c(part, seed) == expected
    assert native.crc32c_table(part, seed) == expected


@pytest.mark.parametrize("size", [12287, 12288, 12289, 24576 + 4101, 1 << 20])
def test_long_buffers_agree_with_the_table_and_in_parts(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    whole = native.crc32c_table(data)
    assert native.crc32c(data) == whole
    assert native.crc32c(data[4000:], native.crc32c(data[:4000])) == whole


def test_buffers_must_be_contiguous() -> None:
    with pytest.raises((BufferError, ValueError)):
        native.crc32c(np.zeros(8, np.uint8)[::2])
    with pytest.raises(TypeError):
        native.crc32c("text")


def test_interpreter_runs_on_during_a_checksum() -> None:
    data = np.ones(1 << 28, np.uint8)
    turns = 0
    thread = threading.Thread(target=native.crc32c_table, args=(data,))
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 10


def test_write_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    data = np.arange(10, dtype="<f4")
    assert native.write_extent(path, 40, data) == 0
    assert path.read_bytes() == bytes(40) + data.tobytes() + bytes(20)
    back = np.empty(10, "<f4")
    assert native.read_extent(path, 40, back) == 0
    assert np.array_equal(back, data)
    assert native.write_extent(path, 0, b"") == 0  # only syncs


def test_errors_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert native.write_extent(path, 0, b"x") == errno.ENOENT
    path.write_bytes(b"12345")
    assert native.read_extent(path, 3, bytearray(3)) == errno.ENODATA
    assert native.write_extent(tmp_path, 0, b"x") == errno.EISDIR
    assert native.write_extent(path, -1, b"x") == errno.EINVAL
    assert native.sync_dir(tmp_path / "none") == errno.ENOENT
    assert native.sync_dir(path) == errno.ENOTDIR
    assert native.sync_dir(tmp_path) == 0
    with pytest.raises(BufferError):
        native.read_extent(path, 0, b"not writable")


def test_a_file_size_limit_is_an_errno(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert native.write_extent(path, 0, bytes(8192)) == errno.EFBIG
        assert native.reserve(path, 8192) == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_reserve_grows_and_never_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    code = native.reserve(path, 1 << 20)
    if code == errno.EOPNOTSUPP:
        pytest.skip(f"the file system of {tmp_path} has no fallocate(2)")
    assert code == 0
    assert os.stat(path).st_size == 1 << 20
    assert os.stat(path).st_blocks * 512 >= 1 << 20
    assert native.reserve(path, 10) == 0
    assert native.reserve(path, 0) == 0
    assert os.stat(path).st_size == 1 << 20
