"""Trajectories: every trained group, in write-once segments of flat arrays.

Format `areal-hpc trajectories`, version 1. Plain h5py reads it; nothing is compressed.
G groups (one per ordinal) in the order of (step, ordinal), S samples in group order, P prompt
tokens and T new tokens of all of them one after the other:

    ordinal, item, step         int64 (G)    the prompt's number; its row of the dataset; the step that trained it
    attempt, replica            int32 (G)    the attempt and the replica that generated it
    prompt_offsets              int64 (G+1)  group g's prompt is prompt_tokens[prompt_offsets[g]:prompt_offsets[g+1]]
    prompt_tokens               int32 (P)
    sample_group                int32 (S)    the group of sample s (index into the arrays of length G)
    sample_offsets              int64 (S+1)  sample s has [sample_offsets[s]:sample_offsets[s+1]] of the next three
    tokens                      int32 (T)
    logp                        float32 (T)  behaviour log-probability of each token, nats
    version                     int32 (T)    version of the weights that made it
    reward                      float64 (S)
    status, finish              S16 (S)      b"ok", b"timeout", b"error"; b"stop", b"length", ...
    checksums                   as in a checkpoint (see checkpoint.py)

A segment is written by the checkpoint's own path (reserve, reshard, write, sync, rename) and is never
opened for writing again. It counts only if a checkpoint names it: on a restart `supersede` renames the
others, and what they hold is trained again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.layout.boxes import Box
from areal_hpc.records import Group, Status, Trajectory
from areal_hpc.storage import hdf5
from areal_hpc.storage.hdf5 import CheckpointError, Entry
from areal_hpc.storage.meeting import Meeting
from areal_hpc.storage.reading import read_dataset
from areal_hpc.storage.software import software_versions
from areal_hpc.storage.writing import SaveReport, write_file

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT = "areal-hpc trajectories"
FORMAT_VERSION = 1

GROUP_COLUMNS = {"ordinal": "<i8", "item": "<i8", "step": "<i8", "attempt": "<i4", "replica": "<i4"}
SAMPLE_COLUMNS = {"sample_group": "<i4", "reward": "<f8", "status": "|S16", "finish": "|S16"}
TOKEN_COLUMNS = {"tokens": "<i4", "logp": "<f4", "version": "<i4"}
OFFSETS = {"prompt_offsets": "<i8", "sample_offsets": "<i8"}
DTYPES = GROUP_COLUMNS | SAMPLE_COLUMNS | TOKEN_COLUMNS | OFFSETS | {"prompt_tokens": "<i4"}

Trained = tuple[int, Group]  # the step that trained it, and the group


def segment_path(directory: Path, attempt: int, first_step: int, stop_step: int) -> Path:
    """Where the groups trained by steps first_step <= step < stop_step of an attempt lie."""
    return directory / f"steps-{first_step:08d}-{stop_step:08d}.attempt-{attempt}.h5"


@dataclass(frozen=True, slots=True)
class _Row:
    """A group's place in the segment: what every rank must know of every group."""

    step: int
    ordinal: int
    prompt: int  # tokens
    samples: tuple[int, ...]  # tokens of each


def write_segment(
    path: Path,
    comm: MPI.Comm,
    groups: Sequence[Trained],
    attrs: dict[str, Any],
    *,
    writers: Sequence[int],
    deadline_s: float = 1800.0,
    on_wait: Callable[[], None] = lambda: None,
) -> SaveReport:
    """Collective over `comm`: write this rank's `groups` and everyone's into one file.

    `attrs` and `writers` are rank 0's. A rank may have no group, and so may all. Raises
    CheckpointError as `checkpoint.save`; also where two ranks archive the same step and ordinal.
    """
    meeting = Meeting(comm, path, deadline_s, on_wait)
    lead = (dict(attrs), list(writers), software_versions()) if comm.rank == 0 else None
    mine = sorted(groups, key=lambda trained: (trained[0], trained[1].ordinal))
    everyone = meeting.share((lead, [_row(step, group) for step, group in mine]))
    attrs, writers, software = everyone[0][0]
    attrs = {"format": FORMAT, "format_version": FORMAT_VERSION, "software": software} | attrs
    rows = sorted((row for _, found in everyone for row in found), key=lambda row: (row.step, row.ordinal))
    keys = [(row.step, row.ordinal) for row in rows]
    if len(set(keys)) != len(keys):
        twice = next(key for key, after in itertools.pairwise(keys) if key == after)
        raise CheckpointError(f"{path}: step {twice[0]} archives ordinal {twice[1]} twice")
    places = _Places(rows)
    entries = [Entry(name, (places.length(name),), dtype, as_bytes=True) for name, dtype in DTYPES.items()]
    with meeting.step("laying out the groups"):
        held = [part for step, group in mine for part in _parts(places, step, group)]
    if comm.rank == 0:
        held += [_part("prompt_offsets", 0, places.prompts), _part("sample_offsets", 0, places.tokens)]
    return write_file(path, meeting, entries, attrs, [part for part in held if part[0].size], writers)


def _row(step: int, group: Group) -> _Row:
    return _Row(step, group.ordinal, len(group.prompt_P), tuple(len(t.tokens_T) for t in group.trajectories))


class _Places:
    """Offsets of every group in the flat arrays, the same on all ranks."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        self.index = {(row.step, row.ordinal): g for g, row in enumerate(rows)}
        self.prompts = np.cumsum([0] + [row.prompt for row in rows], dtype=np.int64)
        self.samples = np.cumsum([0] + [len(row.samples) for row in rows], dtype=np.int64)
        self.tokens = np.cumsum([0] + [count for row in rows for count in row.samples], dtype=np.int64)

    def length(self, name: str) -> int:
        groups, samples = len(self.index), int(self.samples[-1])
        lengths = {"prompt_offsets": groups + 1, "sample_offsets": samples + 1, "prompt_tokens": int(self.prompts[-1])}
        if name in lengths:
            return lengths[name]
        return groups if name in GROUP_COLUMNS else samples if name in SAMPLE_COLUMNS else int(self.tokens[-1])


def _parts(places: _Places, step: int, group: Group) -> Iterable[tuple[Box, Any]]:
    """One group's piece of every array."""
    g = places.index[step, group.ordinal]
    s, samples = int(places.samples[g]), group.trajectories
    for name in GROUP_COLUMNS:
        yield _part(name, g, [step if name == "step" else getattr(group, name)])
    yield _part("prompt_tokens", int(places.prompts[g]), group.prompt_P)
    yield _part("sample_group", s, [g] * len(samples))
    yield _part("reward", s, [sample.reward for sample in samples])
    yield _part("status", s, [str(sample.status).encode() for sample in samples])
    yield _part("finish", s, [sample.finish.encode() for sample in samples])
    for name, field in {"tokens": "tokens_T", "logp": "logp_T", "version": "version_T"}.items():
        joined = np.concatenate([getattr(sample, field) for sample in samples]) if samples else []
        yield _part(name, int(places.tokens[s]), joined)


def _part(name: str, first: int, values: Any) -> tuple[Box, Any]:
    """The bytes of `values` at element `first` of the array, as a box in bytes and a uint8 tensor."""
    import torch

    if name in ("status", "finish") and any(len(value) > 16 for value in values):
        raise ValueError(f"{name} {max(values, key=len)!r} is longer than the 16 bytes that the format has for it")
    array = np.array(values, DTYPES[name])  # a copy: torch wants memory that it may write to
    start = first * array.itemsize
    return Box(name, (start,), (start + array.nbytes,)), torch.from_numpy(array.view(np.uint8))


def read_segment(path: Path) -> tuple[list[Trained], dict[str, Any]]:
    """Serial: the segment's groups in the order of (step, ordinal) and its attributes, verified.

    Raises CheckpointError naming the file when it is torn, damaged or of another format.
    """
    structure = hdf5.read_structure(path, FORMAT, FORMAT_VERSION)
    a = {name: read_dataset(structure, name) for name in DTYPES}
    samples: list[list[Trajectory]] = [[] for _ in a["ordinal"]]
    for s, g in enumerate(a["sample_group"]):
        part = slice(a["sample_offsets"][s], a["sample_offsets"][s + 1])
        samples[g].append(
            Trajectory(
                a["tokens"][part],
                a["logp"][part],
                a["version"][part],
                float(a["reward"][s]),
                Status(a["status"][s].decode()),
                a["finish"][s].decode(),
            )
        )
    found = []
    for g, trajectories in enumerate(samples):
        prompt_P = a["prompt_tokens"][a["prompt_offsets"][g] : a["prompt_offsets"][g + 1]]
        numbers = (int(a[name][g]) for name in ("attempt", "replica"))
        group = Group(int(a["ordinal"][g]), int(a["item"][g]), prompt_P, trajectories, *numbers)
        found.append((int(a["step"][g]), group))
    return found, structure.attrs


def supersede(directory: Path, named: Iterable[str]) -> list[Path]:
    """Rank 0, at a restart: rename segments whose file name is not in `named` to `*.superseded`; the new paths."""
    keep = set(named)
    renamed = []
    for path in sorted(directory.glob("*.h5")) if directory.is_dir() else ():
        if path.name not in keep:
            renamed.append(path.rename(path.with_name(path.name + ".superseded")))
    return renamed
