"""JSON Lines files that survive a kill: one writer, any number of readers at any time.

A line exists once its newline does. A writer that reopens a file cuts off what a killed
one left behind the last newline; a reader passes over it. Anything else that is not JSON
is damage and raises, naming file and line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Appender:
    """Appends records to one file; every record reaches the operating system at once."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab+")  # noqa: SIM115 (closed by close)
        self._cut_torn_tail()

    def _cut_torn_tail(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            self._file.seek(start)
            newline = self._file.read(end - start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        self._file.truncate(end)

    def append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def sync(self) -> None:
        """What was appended is on the disk when this returns."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """Every complete record; none when there is no file. Raises ValueError naming file and line."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
    return records
