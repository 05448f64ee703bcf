"""Tasks of the package reasoning-gym (over 100 generators with their own scoring), by name in `path`.

`options` are the generator's own (e.g. `{min_terms: 2, max_terms: 3}` of `chain_sum`). Items are made when asked
for. Item `i` is the first of the generator's rows i, i + size, i + 2 size, ... whose question falls in the split. An
answer inside `<answer>` tags is scored, else the whole completion. Source: reasoning_gym.factory.create_dataset.
"""

from __future__ import annotations

import difflib
import json

from areal_hpc.config import ConfigError, DatasetConfig
from areal_hpc.tasks import Item, digest, held_out

TRIES = 100  # rows looked at for one item; one in five is held out, so a miss means a generator with few questions


class ReasoningGym:
    def __init__(self, name: str, size: int, options: dict, seed: int, split: str) -> None:
        from importlib.metadata import version

        import reasoning_gym

        try:
            # the generator seeds row i with seed + i: seeds of two runs must not be neighbours
            self._rows = reasoning_gym.create_dataset(name, seed=seed * 1_000_003, size=size * TRIES, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"options={options}: not what reasoning-gym's {name} takes: {error}") from None
        self._size, self._split = size, split
        self._fingerprint = digest(
            "reasoning_gym", version("reasoning-gym"), name, size, json.dumps(options, sort_keys=True), seed, split
        )

    def __len__(self) -> int:
        return self._size

    def item(self, i: int) -> Item:
        if not 0 <= i < self._size:
            raise IndexError(f"item {i} of a dataset of {self._size}")
        for row in range(i, self._size * TRIES, self._size):
            entry = self._rows[row]
            if held_out(entry["question"]) == (self._split == "valid"):
                return Item(entry["question"], str(entry["answer"]), row=row)
        raise ValueError(
            f"item {i}: none of {TRIES} rows belongs to {self._split}; the generator has too few questions"
        )

    def score(self, item: Item, completion: str) -> float:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(completion)
        answer = completion.strip() if answer is None else answer
        return float(self._rows.score_answer(answer, entry=self._rows[item.row]))

    def fingerprint(self) -> str:
        return self._fingerprint


def load(config: DatasetConfig, seed: int, split: str) -> ReasoningGym:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError("type=reasoning_gym: needs the package reasoning-gym in this environment") from None
    if config.path not in DATASETS:
        near = difflib.get_close_matches(config.path, DATASETS, 3, 0.3)
        raise ConfigError(f"path={config.path}: no task of reasoning-gym; near it are {', '.join(near) or 'none'}")
    return ReasoningGym(config.path, config.size, config.options, seed, split)
