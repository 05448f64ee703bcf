"""Checkpoints and segments on real parallel HDF5: any layout in, any layout out, and what damage does.

The reference is a whole tensor made from (kind, name); nothing of areal_hpc computes it. Boxes are cut
here by NumPy slices, but for the flat ranges of a distributed optimizer.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import json
import os
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from mpi4py import MPI

from areal_hpc import native
from areal_hpc.layout.boxes import Box, flat_boxes
from areal_hpc.records import Group, Status, Trajectory, pack_groups, unpack_groups
from areal_hpc.storage import checkpoint as ckpt
from areal_hpc.storage import trajectories as traj
from areal_hpc.storage.checkpoint import CheckpointError
from areal_hpc.storage.hdf5 import read_structure

KINDS = ("master", "exp_avg", "exp_avg_sq")
SHAPES = {
    "model.embed_tokens.weight": (1027, 1537),  # three kinds of it: more than one block
    "model.layers.0.self_attn.q_proj.weight": (96, 64),
    "model.layers.0.self_attn.q_proj.bias": (33,),
    "model.layers.0.mlp.experts.weight": (3, 5, 7),
    "model.norm.weight": (64,),
}
SMALL = {name: shape for name, shape in SHAPES.items() if "embed" not in name} | {"lm_head.weight": (40, 64)}
LAYOUTS = ("whole", "first", "last", "flat")
BLOBS = {"ledger": b'{"watermark": 7}', "config.yaml": b"seed: 1\n", "empty": b""}


@functools.cache
def reference(kind: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    seed = zlib.crc32(f"{kind}/{name}".encode())
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def boxes_of(layout: str, name: str, shape: tuple[int, ...], rank: int, size: int) -> list[Box]:
    """This rank's boxes: all of it, a cut along the first or last dim, or a flat range (distributed optimizer)."""
    start, stop = [0] * len(shape), list(shape)
    if layout == "flat":
        total = int(np.prod(shape))
        cut = [min(-(-total // size) * r, total) for r in (rank, rank + 1)]
        return [Box(name, a, b) for a, b in flat_boxes(shape, *cut)]
    if layout != "whole":
        dim = 0 if layout == "first" else -1
        start[dim], stop[dim] = shape[dim] * rank // size, shape[dim] * (rank + 1) // size
    return [Box(name, tuple(start), tuple(stop))]


def held_by(layout: str, comm: MPI.Comm, shapes=SHAPES, fill: bool = True) -> dict[str, list]:
    """kind -> boxes with views; strided ones where the layout cuts columns. Filled with the reference, or NaN."""
    held: dict[str, list] = {}
    for kind in KINDS:
        held[kind] = []
        for name, shape in shapes.items():
            full = torch.from_numpy(reference(kind, name, shape)) if fill else torch.full(shape, torch.nan)
            for box in boxes_of(layout, name, shape, comm.rank, comm.size):
                held[kind].append((box, full[tuple(map(slice, box.start, box.stop))]))
    return held


def assert_reference(held: dict[str, list], shapes=SHAPES) -> None:
    for kind, boxes in held.items():
        for box, view in boxes:
            expected = reference(kind, box.name, shapes[box.name])[tuple(map(slice, box.start, box.stop))]
            assert np.array_equal(view.numpy().view(np.uint32), expected.view(np.uint32)), (kind, box)


def save(path: Path, comm: MPI.Comm, layout: str = "first", shapes=SHAPES, writers=None, blobs=None, deadline_s=60.0):
    own = {f"rng/{comm.rank}": bytes([comm.rank]) * (5 + comm.rank)}
    if comm.rank == 0:
        own |= BLOBS if blobs is None else blobs
    attrs = {"step": 12, "attempt": 0, "run": "exp/tria\u0142", "note": {"best": [1, None]}}
    writers = list(range(comm.size)) if writers is None else writers
    return ckpt.save(path, comm, held_by(layout, comm, shapes), shapes, own, attrs, writers, deadline_s=deadline_s)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_to_any_layout(comm: MPI.Comm, shared_dir: Path, layout: str) -> None:
    path = ckpt.checkpoint_path(shared_dir, 12)
    writers = [comm.size - 1] if layout == "first" else None
    report = save(path, comm, layout, writers=writers)
    assert [p.name for p in shared_dir.iterdir()] == ["step-00000012.h5"]  # one file, nothing else
    assert report.size_bytes == path.stat().st_size
    for wanted_layout in LAYOUTS:
        wanted = held_by(wanted_layout, comm, fill=False)
        blobs, attrs = ckpt.load(path, comm, wanted, deadline_s=60)
        assert_reference(wanted)
        rng = {f"rng/{r}": bytes([r]) * (5 + r) for r in range(comm.size)}
        assert blobs == BLOBS | rng
        assert attrs["note"] == {"best": [1, None]} and attrs["run"] == "exp/tria\u0142" and attrs["step"] == 12
        assert attrs["software"]["h5py"] == h5py.__version__


def test_plain_h5py_sees_tensors_by_name(comm: MPI.Comm, shared_dir: Path) -> None:
    path = ckpt.checkpoint_path(shared_dir, 12)
    save(path, comm, "flat")
    if comm.rank == 0:
        with h5py.File(path, "r") as file:
            assert sorted(file) == ["blobs", "checksums", *sorted(KINDS)]
            assert file.attrs["format"] == b"areal-hpc checkpoint" and file.attrs["format_version"] == 1
            assert json.loads(bytes(file["blobs/ledger"][:])) == {"watermark": 7}
            for kind in KINDS:
                assert set(file[kind]) == set(SHAPES)
                for name, shape in SHAPES.items():
                    assert np.array_equal(file[kind][name][:], reference(kind, name, shape))
        assert ckpt.verify(path) == []
        check_file_against_its_documentation(path)
    comm.Barrier()


def check_file_against_its_documentation(path: Path) -> None:
    """The grid and its table, from the documented format alone."""
    raw = path.read_bytes()
    with h5py.File(path, "r") as file:
        found = []
        file.visititems(lambda name, node: found.append(node) if isinstance(node, h5py.Dataset) else None)
        places = sorted((d.id.get_offset(), d.nbytes) for d in found if d.nbytes and d.name != "/checksums")
        table = file["checksums"][:]
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(places))
    data = raw[places[0][0] : sum(places[-1])]
    blocks = [data[at : at + (16 << 20)] for at in range(0, len(data), 16 << 20)]
    assert len(blocks) > 1
    assert [native.crc32c_table(block) for block in blocks] == table[:-1].tolist()
    assert native.crc32c_table(table[:-1]) == table[-1]


def test_part_of_a_checkpoint_and_chosen_blobs(comm: MPI.Comm, shared_dir: Path) -> None:
    path = ckpt.checkpoint_path(shared_dir, 1)
    save(path, comm)
    wanted = {"exp_avg": held_by("last", comm, fill=False)["exp_avg"] if comm.rank == 0 else []}
    blobs, _ = ckpt.load(path, comm, wanted, blobs=lambda name: name == f"rng/{comm.rank}", deadline_s=60)
    assert_reference(wanted)
    assert blobs == {f"rng/{comm.rank}": bytes([comm.rank]) * (5 + comm.rank)}


def test_equal_content_gives_equal_bytes(comm: MPI.Comm, shared_dir: Path) -> None:
    paths = [shared_dir / f"step-0000000{n}.h5" for n in (1, 2)]
    for path, layout in zip(paths, ("first", "flat"), strict=True):
        save(path, comm, layout)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_groups_travel_as_a_blob(comm: MPI.Comm, shared_dir: Path) -> None:
    groups = [[make_group(3 * home + n) for n in range(3)] for home in range(comm.size)]
    path = shared_dir / "step-00000001.h5"
    blobs = {f"groups/{comm.rank}": pack_groups(groups[comm.rank])}
    ckpt.save(path, comm, held_by("last", comm, SMALL), SMALL, blobs, {}, [0], deadline_s=60)
    back, _ = ckpt.load(path, comm, {}, deadline_s=60)
    for home, expected in enumerate(groups):
        found = unpack_groups(back[f"groups/{home}"])
        assert [group.pack() for group in found] == [group.pack() for group in expected]


# What is refused, everywhere alike


def same_error(comm: MPI.Comm, call) -> str:
    """The CheckpointError that `call` must raise on every rank, with one text."""
    with pytest.raises(CheckpointError) as caught:
        call()
    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1, texts
    return texts[0]


def test_what_cannot_be_saved(comm: MPI.Comm, shared_dir: Path) -> None:
    path = shared_dir / "step-00000001.h5"
    held = held_by("first", comm, SMALL)
    if comm.rank == comm.size - 1:
        held["exp_avg"] = held["exp_avg"][:-1]

    def call(tensors=held, shapes=SMALL, blobs=None, attrs=None, to=path, writers=(0,)):
        ckpt.save(to, comm, tensors, shapes, blobs or {}, attrs or {}, writers, deadline_s=60)

    assert "lm_head.weight" in same_error(comm, call)  # a hole
    good = held_by("first", comm, SMALL)
    if comm.size > 1:
        text = same_error(comm, lambda: call(good, blobs={"ledger": b"1"}))
        assert "ranks 0 and 1 both bring a blob named ledger" in text
    assert "attribute note" in same_error(comm, lambda: call(good, attrs={"note": "x" * 5000}))
    assert f"below {comm.size}" in same_error(comm, lambda: call(good, writers=[0, comm.size]))
    if comm.rank == 0:
        (shared_dir / "file").touch()
    assert "step-00000002.h5" in same_error(comm, lambda: call(good, to=shared_dir / "file" / "step-00000002.h5"))
    comm.Barrier()
    assert [p.name for p in shared_dir.iterdir()] == ["file"]


def test_what_cannot_be_loaded(comm: MPI.Comm, shared_dir: Path) -> None:
    path = shared_dir / "step-00000001.h5"
    save(path, comm, shapes=SMALL)

    def load(box: Box, kind: str = "master", at: Path = path) -> str:
        view = torch.zeros(box.shape)
        return same_error(comm, lambda: ckpt.load(at, comm, {kind: [(box, view)]}, deadline_s=60))

    assert "no tensor x of kind master" in load(Box("x", (0,), (1,)))
    assert "no tensor model.norm.weight of kind critic" in load(Box("model.norm.weight", (0,), (1,)), "critic")
    assert "has shape (64,) in the file" in load(Box("model.norm.weight", (0,), (65,)))
    assert "step-00000009.h5" in load(Box("model.norm.weight", (0,), (1,)), at=shared_dir / "step-00000009.h5")
    if comm.rank == 0:
        with h5py.File(path, "r+") as file:
            file.attrs["format_version"] = 99
    comm.Barrier()
    text = load(Box("model.norm.weight", (0,), (1,)))
    assert "format version 99" in text and "reads 1" in text


def test_the_newest_that_verifies_wins(comm: MPI.Comm, shared_dir: Path) -> None:
    assert ckpt.load_newest(shared_dir / "none", comm, {}) is None
    for step in (3, 20, 100):
        save(ckpt.checkpoint_path(shared_dir, step), comm, shapes=SMALL)
    newest = ckpt.checkpoint_path(shared_dir, 100)
    if comm.rank == 0:
        (shared_dir / ".step-00000101.h5.tmp").write_bytes(b"left by a kill")
        flip(newest, newest.stat().st_size - 3000)
        os.truncate(ckpt.checkpoint_path(shared_dir, 20), 5000)
    comm.Barrier()
    wanted = held_by("last", comm, SMALL, fill=False)
    restored = ckpt.load_newest(shared_dir, comm, wanted, deadline_s=60)
    assert restored is not None and restored.path.name == "step-00000003.h5"
    assert ["step-00000100" in restored.refused[0], "step-00000020" in restored.refused[1]] == [True, True]
    assert_reference(wanted, SMALL)
    comm.Barrier()
    if comm.rank == 0:
        # Set aside, not removed: what is damaged must not count as one of the newest, nor be lost.
        assert "block 0" in ckpt.verify(newest.with_name(newest.name + ".refused"))[0]
        removed = ckpt.prune(shared_dir, 1)
        assert [p.name for p in removed] == [".step-00000101.h5.tmp"]
    comm.Barrier()
    good = ckpt.checkpoint_path(shared_dir, 3)
    assert ckpt.find(shared_dir) == [good]
    save(ckpt.checkpoint_path(shared_dir, 4), comm, shapes=SMALL)
    if comm.rank == 0:
        flip(good, good.stat().st_size - 3000)
        os.truncate(ckpt.checkpoint_path(shared_dir, 4), 5000)
    comm.Barrier()
    text = same_error(comm, lambda: ckpt.load_newest(shared_dir, comm, wanted, deadline_s=60))
    assert "no checkpoint can be loaded" in text and "step-00000003" in text and "step-00000004" in text
    comm.Barrier()
    assert [p.name for p in ckpt.find(shared_dir)] == ["step-00000004.h5", "step-00000003.h5"]
    comm.Barrier()
    if comm.rank == 0:
        assert [p.name for p in ckpt.supersede(shared_dir)] == [
            "step-00000004.h5.superseded",
            "step-00000003.h5.superseded",
        ]
        assert ckpt.find(shared_dir) == []


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def test_truncations_and_flips_never_load_wrong(world: MPI.Comm, shared_dir: Path) -> None:
    """Each rank damages its own copy: truncations at every 1/16, 200 flips over all ranks, half in the metadata."""
    path = shared_dir / f"step-{world.rank:08d}.h5"
    save(path, MPI.COMM_SELF, shapes=SMALL)
    good = path.read_bytes()
    start = read_structure(path, ckpt.FORMAT, ckpt.FORMAT_VERSION).blocks[0][0]
    metadata = len(good[:start].rstrip(b"\0"))

    def harmless() -> bool:
        wanted = held_by("whole", MPI.COMM_SELF, SMALL, fill=False)
        try:
            blobs, attrs = ckpt.load(path, MPI.COMM_SELF, wanted, deadline_s=60)
        except CheckpointError as error:
            assert path.name in str(error)
            assert ckpt.verify(path)
            assert all(bool(view.isnan().all()) for boxes in wanted.values() for _, view in boxes)  # untouched
            return False
        assert_reference(wanted, SMALL)
        assert blobs == BLOBS | {"rng/0": b"\0" * 5} and attrs["step"] == 12
        return True

    assert harmless()
    for part in range(16):
        path.write_bytes(good[: len(good) * part // 16])
        assert not harmless(), part
    path.write_bytes(good)
    rng = np.random.default_rng(world.rank)
    refused = 0
    flips = 200 // world.size
    for number in range(flips):
        offset, bit = int(rng.integers(0, metadata if number % 2 else len(good))), int(rng.integers(0, 8))
        flip(path, offset, bit)
        refused += not harmless()
        flip(path, offset, bit)
    assert harmless()
    assert refused > flips // 4  # the rest hit what no one reads: unused metadata space


# Disks that are full


@contextmanager
def small_tmpfs(comm: MPI.Comm, at: Path, size_bytes: int) -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    code = 0
    if comm.rank == 0 and libc.mount(b"tmpfs", bytes(at), b"tmpfs", 0, f"size={size_bytes}".encode()):
        code = ctypes.get_errno()
    code = comm.bcast(code)
    if code:
        pytest.skip(f"mounting a tmpfs: {errno.errorcode[code]} (needs CAP_SYS_ADMIN)")
    try:
        yield
    finally:
        comm.Barrier()
        if comm.rank == 0:
            libc.umount2(bytes(at), 2)


@pytest.mark.parametrize("reserving", [True, False], ids=["reserved", "unreserved"])
def test_full_disk(world: MPI.Comm, shared_dir: Path, monkeypatch: pytest.MonkeyPatch, reserving: bool) -> None:
    if not reserving:  # as on a file system without fallocate(2): the errno of the writes decides
        monkeypatch.setattr(native, "reserve", lambda path, size_bytes: errno.EOPNOTSUPP)
    with small_tmpfs(world, shared_dir, 30 << 20):
        first, second = shared_dir / "step-00000001.h5", shared_dir / "step-00000002.h5"
        save(first, world)
        text = same_error(world, lambda: save(second, world, "flat"))
        assert "No space left on device" in text and f"errno {errno.ENOSPC}" in text
        assert [p.name for p in shared_dir.iterdir()] == [first.name]
        wanted = held_by("last", world, fill=False)
        ckpt.load(first, world, wanted, deadline_s=60)
        assert_reference(wanted)


def test_one_rank_cannot_write(world: MPI.Comm, shared_dir: Path) -> None:
    """Only the last rank, one of two writers, is under a file size limit."""
    path = shared_dir / "step-00000001.h5"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == world.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        text = same_error(world, lambda: save(path, world, writers=[0, world.size - 1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"errno {errno.EFBIG}" in text and f"rank {world.size - 1}" in text
    assert list(shared_dir.iterdir()) == []
    save(path, world)
    assert ckpt.verify(path) == []


# Trajectories


def make_group(ordinal: int) -> Group:
    rng = np.random.default_rng(ordinal)
    group = Group(ordinal, ordinal * 7 % 5, rng.integers(0, 99, rng.integers(1, 9)), [], ordinal % 2, ordinal % 3)
    for sample in range(int(rng.integers(0, 5))):
        n = int(rng.integers(0, 40))
        tokens, logp, version = rng.integers(0, 99, n), rng.standard_normal(n), rng.integers(0, 9, n)
        status = [Status.OK, Status.TIMEOUT, Status.ERROR][sample % 3]
        group.trajectories.append(Trajectory(tokens, logp, version, float(rng.random()), status, "length"))
    return group


def test_segments_read_back(comm: MPI.Comm, shared_dir: Path) -> None:
    path = traj.segment_path(shared_dir, 1, 4, 8)
    everything = [(4 + ordinal // 5, make_group(ordinal)) for ordinal in range(20)]
    mine = [
        trained
        for trained in reversed(everything)
        if comm.size == 1 or trained[1].ordinal % (comm.size - 1) == comm.rank
    ]
    traj.write_segment(path, comm, mine, {"attempt": 1}, writers=[comm.size - 1], deadline_s=60)
    assert [p.name for p in shared_dir.iterdir()] == [path.name]
    back, attrs = traj.read_segment(path)
    assert attrs["attempt"] == 1
    assert [(step, group.pack()) for step, group in back] == [(step, group.pack()) for step, group in everything]
    with h5py.File(path, "r") as file:  # as the module's documentation says, with nothing of ours
        ordinals = file["ordinal"][:].tolist()
        assert sorted(ordinals) == list(range(20))
        assert file["step"][:].tolist() == [4 + ordinal // 5 for ordinal in ordinals]
        s = len(file["sample_group"]) - 1
        group = everything[ordinals[file["sample_group"][s]]][1]
        a, b = file["sample_offsets"][s : s + 2]
        assert np.array_equal(file["logp"][a:b], group.trajectories[-1].logp_T)
        assert file["finish"][s] == b"length"
        a, b = file["prompt_offsets"][3:5]
        assert np.array_equal(file["prompt_tokens"][a:b], everything[ordinals[3]][1].prompt_P)
    comm.Barrier()
    if comm.rank == 0:
        flip(path, path.stat().st_size - 500)
        with pytest.raises(CheckpointError, match="checksum"):
            traj.read_segment(path)
    comm.Barrier()


def test_a_finish_reason_that_the_format_has_no_room_for(comm: MPI.Comm, shared_dir: Path) -> None:
    bad = Group(comm.size, 0, np.arange(3), [Trajectory([1], [0.0], [0], 1.0, finish="a reason without end")])
    mine = [(1, bad)] if comm.rank == comm.size - 1 else [(1, make_group(comm.rank))]
    text = same_error(comm, lambda: traj.write_segment(shared_dir / "x.h5", comm, mine, {}, writers=[0], deadline_s=60))
    assert "a reason without end" in text and f"rank {comm.size - 1}" in text
    assert list(shared_dir.iterdir()) == []


def test_a_segment_without_groups_and_with_one_twice(comm: MPI.Comm, shared_dir: Path) -> None:
    path = shared_dir / "empty.h5"
    traj.write_segment(path, comm, [], {}, writers=[0], deadline_s=60)
    assert traj.read_segment(path)[0] == []
    if comm.size > 1:
        again = [(1, make_group(5))]
        text = same_error(comm, lambda: traj.write_segment(shared_dir / "x.h5", comm, again, {}, writers=[0]))
        assert "step 1 archives ordinal 5 twice" in text
    comm.Barrier()
    if comm.rank == 0:
        (shared_dir / "named.h5").touch()
        renamed = traj.supersede(shared_dir, ["named.h5"])
        assert [p.name for p in renamed] == ["empty.h5.superseded"]
        assert sorted(p.name for p in shared_dir.iterdir()) == ["empty.h5.superseded", "named.h5"]
    comm.Barrier()
