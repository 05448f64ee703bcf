"""Arithmetic in characters, `47+85=` answered by `132`: a task a model of a million parameters learns in minutes.

Operands have 1 to `digits` digits, uniform over their values; the operator is one of `operators`. Items are made at
load, about 10 us each. Validation holds no question twice; training may, since a small space has few.
"""

from __future__ import annotations

import operator
import random

from areal_hpc.config import ConfigError, DatasetConfig
from areal_hpc.tasks import Item, digest, held_out, take_options

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Arithmetic:
    def __init__(self, size: int, digits: int, operators: str, seed: int, split: str) -> None:
        self._fingerprint = digest("arithmetic", size, digits, operators, seed, split)
        # a string seeds by its SHA-512, alike in every process and Python
        draw = random.Random(f"arithmetic {seed} {split}")
        seen: set[str] = set()
        self._items: list[Item] = []
        for _ in range(200 * size):
            a, b, sign = draw.randrange(10**digits), draw.randrange(10**digits), draw.choice(operators)
            question = f"{a}{sign}{b}="
            valid = held_out(question)
            if valid != (split == "valid") or (valid and question in seen):
                continue
            seen.add(question)
            self._items.append(Item(question, str(OPERATORS[sign](a, b))))
            if len(self._items) == size:
                return
        raise ConfigError(
            f"size={size}: only {len(self._items)} held-out questions found with digits={digits}; "
            "expected a smaller size or more digits"
        )

    def __len__(self) -> int:
        return len(self._items)

    def item(self, i: int) -> Item:
        return self._items[i]

    def score(self, item: Item, completion: str) -> float:
        return float(completion.strip() == item.answer)

    def fingerprint(self) -> str:
        return self._fingerprint


def load(config: DatasetConfig, seed: int, split: str) -> Arithmetic:
    options = take_options(config, digits=2, operators="+")
    digits, operators = options["digits"], options["operators"]
    if not 1 <= digits <= 9:
        raise ConfigError(f"options.digits={digits}: expected 1 to 9")
    if not operators or set(operators) - set(OPERATORS):
        raise ConfigError(f"options.operators={operators}: expected some of {''.join(OPERATORS)}")
    return Arithmetic(config.size, digits, operators, seed, split)
