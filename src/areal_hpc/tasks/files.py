"""Questions and answers from a JSONL file: one JSON object a line, a string in each of the columns that are named.

`options`: `prompt_column` and `answer_column` (default `prompt`, `answer`); `score` says how a completion is compared:
`exact` (stripped text), or `number` (the last number in it, as a value: `The sum is 1,024.0` matches `1024`). Lines are
found by their offsets, 8 bytes each in memory. The fingerprint is of the file's bytes, not of its name.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from decimal import Decimal
from pathlib import Path

from areal_hpc.config import ConfigError, DatasetConfig
from areal_hpc.tasks import Item, digest, take_options

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """The value of the last number written in `text`; commas between digits are thousands."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


class File:
    def __init__(self, path: Path, prompt_column: str, answer_column: str, score: str) -> None:
        self._path, self._columns, self._score = path, (prompt_column, answer_column), score
        self._offsets, content, offset = array("q"), hashlib.sha256(), 0
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)
                content.update(line)
        self._fingerprint = digest("file", content.hexdigest(), prompt_column, answer_column, score)

    def __len__(self) -> int:
        return len(self._offsets)

    def item(self, i: int) -> Item:
        with open(self._path, "rb") as file:
            file.seek(self._offsets[i])
            line = file.readline()
        try:
            row = json.loads(line)
            prompt, answer = (row[column] for column in self._columns)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path}: item {i} is no JSON object with {self._columns}: {error!r}") from None
        return Item(str(prompt), str(answer))

    def score(self, item: Item, completion: str) -> float:
        if self._score == "exact":
            return float(completion.strip() == item.answer.strip())
        wanted = last_number(item.answer)
        return float(wanted is not None and last_number(completion) == wanted)

    def fingerprint(self) -> str:
        return self._fingerprint


def load(config: DatasetConfig, seed: int, split: str) -> File:
    options = take_options(config, prompt_column="prompt", answer_column="answer", score="exact")
    if options["score"] not in ("exact", "number"):
        raise ConfigError(f"options.score={options['score']}: expected exact or number")
    path = Path(config.path)
    if path.suffix != ".jsonl" or not path.is_file():
        raise ConfigError(f"path={config.path}: expected a file that ends in .jsonl")
    task = File(path, **options)
    if not len(task):
        raise ConfigError(f"path={config.path}: holds no items")
    task.item(0)  # the columns are there, or the run ends before a model is loaded
    return task
