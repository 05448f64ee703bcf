"""Trajectories: every trained group, in write-once segments of flat arrays.

Format `areal-hpc trajectories`, version 1. Plain h5py reads it; nothing is compressed.
G groups (one per ordinal), S samples in group order, P prompt tokens and T new tokens of all of
them one after the other. The groups of one trainer home are one run, in the order of (step,
ordinal), so that each home writes one piece of every array, however many groups there are:

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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
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
    mine = sorted(groups, key=_key)
    everyone = meeting.share((lead, [_key(trained) for trained in mine], _Sizes.of(mine)))
    attrs, writers, software = everyone[0][0]
    attrs = {"format": FORMAT, "format_version": FORMAT_VERSION, "software": software} | attrs
    counted = Counter(key for _, keys, _ in everyone for key in keys)
    for (step, ordinal), times in counted.items():
        if times > 1:
            raise CheckpointError(f"{path}: step {step} archives ordinal {ordinal} twice")
    sizes = [found for _, _, found in everyone]
    total = _Sizes.sum(sizes)
    entries = [Entry(name, (total.of_array(name),), dtype, as_bytes=True) for name, dtype in DTYPES.items()]
    with meeting.step("laying out the groups"):
        held = list(_parts(mine, _Sizes.sum(sizes[: comm.rank]), first=comm.rank == 0))
    return write_file(path, meeting, entries, attrs, [part for part in held if part[0].size], writers)


def _key(trained: Trained) -> tuple[int, int]:
    """(step, ordinal): what a home's groups are sorted by, and what no two may share."""
    return trained[0], trained[1].ordinal


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Groups, samples, prompt tokens and new tokens of some ranks' part of a segment."""

    groups: int = 0
    samples: int = 0
    prompts: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, mine: Sequence[Trained]) -> _Sizes:
        samples = [t for _, group in mine for t in group.trajectories]
        prompts = sum(len(group.prompt_P) for _, group in mine)
        return cls(len(mine), len(samples), prompts, sum(len(t.tokens_T) for t in samples))

    @classmethod
    def sum(cls, parts: Sequence[_Sizes]) -> _Sizes:
        return cls(*(sum(getattr(part, f.name) for part in parts) for f in fields(cls)))

    def of_array(self, name: str) -> int:
        """Elements of the array `name`; an array of offsets has one more than what it cuts."""
        fixed = {
            "prompt_offsets": self.groups + 1,
            "sample_offsets": self.samples + 1,
            "prompt_tokens": self.prompts,
        }
        if name in fixed:
            return fixed[name]
        return self.groups if name in GROUP_COLUMNS else self.samples if name in SAMPLE_COLUMNS else self.tokens


def _parts(mine: Sequence[Trained], before: _Sizes, first: bool) -> Iterable[tuple[Box, Any]]:
    """This rank's piece of every array, behind those of the ranks before it.

    Offsets are the ends of what they cut; the 0 that begins them is the first rank's.
    """
    groups = [group for _, group in mine]
    samples = [t for group in groups for t in group.trajectories]
    numbers = np.arange(before.groups, before.groups + len(groups))
    columns: dict[str, Any] = {
        "step": [step for step, _ in mine],
        **{name: [getattr(group, name) for group in groups] for name in GROUP_COLUMNS if name != "step"},
        "sample_group": np.repeat(numbers, [len(group.trajectories) for group in groups]),
        "reward": [t.reward for t in samples],
        "status": [str(t.status).encode() for t in samples],
        "finish": [t.finish.encode() for t in samples],
        "prompt_tokens": _joined([group.prompt_P for group in groups]),
        "tokens": _joined([t.tokens_T for t in samples]),
        "logp": _joined([t.logp_T for t in samples]),
        "version": _joined([t.version_T for t in samples]),
    }
    for name, values in columns.items():
        yield _part(name, before.of_array(name), values)
    ends = {
        "prompt_offsets": before.prompts + np.cumsum([len(group.prompt_P) for group in groups], dtype=np.int64),
        "sample_offsets": before.tokens + np.cumsum([len(t.tokens_T) for t in samples], dtype=np.int64),
    }
    for name, values in ends.items():
        yield _part(name, before.of_array(name), values)
        if first:
            yield _part(name, 0, [0])


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0)


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
    return sorted(found, key=_key), structure.attrs


def supersede(directory: Path, named: Iterable[str]) -> list[Path]:
    """Rank 0, at a restart: rename segments whose file name is not in `named` to `*.superseded`; the new paths."""
    keep = set(named)
    renamed = []
    for path in sorted(directory.glob("*.h5")) if directory.is_dir() else ():
        if path.name not in keep:
            renamed.append(path.rename(path.with_name(path.name + ".superseded")))
    return renamed
