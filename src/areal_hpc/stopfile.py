"""`stop` in a run's folder: a stop asked for by someone who cannot signal the ranks.

It names the job and restart that it was meant for, so one that came too late does not stop
the next start. Trainer rank 0 looks at step boundaries and treats it like SIGUSR1.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = "stop"


def ask(run_dir: str | Path, job: str, restart: int) -> None:
    """Asks this start of the run to stop; asking twice is asking once."""
    draft = Path(run_dir) / f"{FILE}.part.{os.getpid()}"
    draft.write_text(json.dumps({"job": job, "restart": restart}) + "\n")
    os.replace(draft, Path(run_dir) / FILE)


def clear(run_dir: str | Path) -> None:
    """Forgets what was asked of earlier starts; for the holder of the run's lock."""
    (Path(run_dir) / FILE).unlink(missing_ok=True)


def asked(run_dir: str | Path, job: str, restart: int) -> bool:
    """Whether this start of the run was asked to stop. One stat where nobody asked."""
    try:
        found = json.loads((Path(run_dir) / FILE).read_text())
    except FileNotFoundError:
        return False
    return (found["job"], found["restart"]) == (job, restart)
