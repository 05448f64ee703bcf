"""One log file per node for everything the ranks print, libraries included.

Descriptors 1 and 2 are replaced, not Python's objects, so that what C libraries and helper
processes write lands there too. The file is opened for appending: lines of several ranks mix
but do not overwrite each other, and a later start of the run goes on behind an earlier one.
Records of Python's logging say which rank they are from.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO


def log_path(run_dir: str | Path, node: str) -> Path:
    return Path(run_dir) / "log" / f"{node}.log"


def redirect(path: Path, name: str, keep: bool) -> tuple[TextIO, int]:
    """Send descriptors 1 and 2 to `path`; `name` (like "rank 3 trainer") begins each log record.

    Returns the launch's stdout as a text file for the progress display (with `keep`; else one
    that swallows what is written) and the launch's stderr as a descriptor for last words.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(1), "w", buffering=1) if keep else open(os.devnull, "w")  # noqa: SIM115
    stderr = os.dup(2)
    os.set_inheritable(stderr, False)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True,
        format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    return terminal, stderr
