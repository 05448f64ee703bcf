"""Tasks: what a prompt is and how an answer is scored.

A task is a numbered list of items and a score. It knows no tokens, ranks or versions; two processes that load it with
the same arguments see the same items, in any order of asking. `fingerprint` changes when any item would. A new task is
one file here and one line in `_load`. Training and validation are disjoint: where a task makes its items, by a hash of
the question (`held_out`), whatever the seeds are; where they come from a file, by giving two files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from areal_hpc.config import ConfigError, DatasetConfig

SPLITS = ("train", "valid")


@dataclass(frozen=True, slots=True)
class Item:
    """A question and its reference answer. `messages` replaces the question where a chat has more than one turn;
    `row` is where a generator finds the item again, if its score looks at more than the answer."""

    prompt: str
    answer: str
    messages: tuple[dict[str, str], ...] = ()
    row: int = -1


class Task(Protocol):
    """`score` may be called in another process than `item`, by a task loaded alike."""

    def __len__(self) -> int: ...

    def item(self, i: int) -> Item:
        """Item `i` of 0 <= i < len(self)."""

    def score(self, item: Item, completion: str) -> float:
        """How good `completion` (the decoded answer, special tokens left out) is: 0 to 1."""

    def fingerprint(self) -> str:
        """A hash of everything the items follow from."""


def held_out(question: str) -> bool:
    """One question in five belongs to validation, by its hash and nothing else."""
    return hashlib.sha256(question.encode()).digest()[0] % 5 == 0


def digest(*parts: object) -> str:
    """A short hash for fingerprints."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def take_options(config: DatasetConfig, **defaults: object) -> dict:
    """The task's own options with their defaults. Raises ConfigError for an unknown one or another type."""
    for name, value in config.options.items():
        if name not in defaults:
            raise ConfigError(f"options.{name}: unknown to type {config.type}, which takes {', '.join(defaults)}")
        if type(value) is not type(defaults[name]):
            raise ConfigError(f"options.{name}={value}: expected a {type(defaults[name]).__name__}")
    return {**defaults, **config.options}


def load(config: DatasetConfig, seed: int, split: str) -> Task:
    """The task that a dataset's keys name; `split` is train or valid, `seed` that of the run.

    Raises ConfigError naming the dataset and the key that is wrong.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split}: expected {' or '.join(SPLITS)}")
    try:
        return _load(config, seed, split)
    except ConfigError as error:
        raise ConfigError(f"{split}_dataset.{error}") from None


def _load(config: DatasetConfig, seed: int, split: str) -> Task:
    from areal_hpc.tasks import arithmetic, files, reasoning_gym

    kinds = {"arithmetic": arithmetic, "reasoning_gym": reasoning_gym, "file": files}
    if config.type not in kinds:
        raise ConfigError(f"type={config.type}: expected one of {', '.join(kinds)}")
    return kinds[config.type].load(config, seed, split)
