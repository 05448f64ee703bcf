"""Progress: what rank 0 shows while a run goes on. A live display on a terminal, else one line a step.

It writes to the stream it is given (rank 0's own output, kept before ranks send theirs to
log files) and starts no thread: the display is drawn when `step`, `phase` or `tick` is called,
at most `FPS` times a second, a few milliseconds each. Numbers come from the records that
`Metrics.step` returns; keys that a record lacks are shown as a dash.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

FPS = 4
SMOOTH = 20  # steps that rates and time left are taken over


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind a stream, 0 where there is none to draw on.

    A launcher may give its ranks a pseudo-terminal although its own output is a file: such a
    one has no size (Open MPI 4; where the launcher's output is a terminal it hands its size on).
    """
    try:
        if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            return 0
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def duration(seconds: float) -> str:
    """`4s`, `3:12` or `2:03:59`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest}s"


class Progress:
    """The display of one attempt: `total` steps in all, `done` of them before it began."""

    def __init__(self, stream: TextIO, title: str, total: int, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self._stream = stream
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=SMOOTH)
        self._phase, self._phase_since = "starting", time.monotonic()
        self._drawn = 0.0
        self._live = _live(stream)
        if self._live:
            self._live.start()
            self._draw()

    def step(self, record: Mapping[str, Any]) -> None:
        """A training step is done."""
        self.done = record["version"]
        self._recent.append(record)
        if self._live:
            self.tick()
        else:
            width = len(str(self.total))
            self._print(f"step {self.done:>{width}}/{self.total}  " + "  ".join(self._facts(record)))

    def phase(self, name: str) -> None:
        """What the trainer does now: "update", "save", "wait for ordinal 812". On a terminal only."""
        self._phase, self._phase_since = name, time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Cheap enough for a loop that waits: draws when the last drawing is old enough."""
        if self._live and time.monotonic() - self._drawn >= 1 / FPS:
            self._draw()

    def say(self, line: str) -> None:
        """A line that stays: a checkpoint, an evaluation, a stop."""
        if self._live:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            self._print(line)

    def close(self) -> None:
        """The last state stays on the terminal."""
        if self._live:
            self._draw()
            self._live.stop()
            self._live = None

    def seconds_left(self) -> float | None:
        """From the mean time of the last steps; None before the first."""
        if not self._recent:
            return None
        return (self.total - self.done) * sum(r["step_s"] for r in self._recent) / len(self._recent)

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()

    def _rate(self, key: str, records: list[Mapping[str, Any]]) -> str:
        """Tokens a second of one side, over the whole time of the steps."""
        if not records or any(key not in r for r in records):
            return "-"
        return f"{sum(r[key] for r in records) / max(sum(r['step_s'] for r in records), 1e-9):,.0f}"

    def _facts(self, record: Mapping[str, Any]) -> list[str]:
        last, left = [record], self.seconds_left()
        head = record.get("wait_ordinal", -1)
        return [
            f"reward {_number(record, 'reward_mean', '.3f')}",
            f"staleness {_number(record, 'staleness_mean', '.2f')} (max {_number(record, 'staleness_max', 'g')})",
            f"trainer {self._rate('trained_tokens', last)} tok/s",
            f"rollout {self._rate('generated_tokens', last)} tok/s",
            f"wait {_number(record, 'wait_s', '.2f')} s" + (f" for ordinal {head}" if head >= 0 else ""),
            f"{duration(record['step_s'])} a step" if record["step_s"] >= 10 else f"{record['step_s']:.2f} s a step",
            f"{duration(left)} left" if left is not None else "",
        ]

    def _draw(self) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        self._drawn = time.monotonic()
        recent, left = list(self._recent), self.seconds_left()
        record = recent[-1] if recent else {}
        head = record.get("wait_ordinal", -1)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self.title, "bold"),
            Text(f"step {self.done}/{self.total}"),
            ProgressBar(total=max(self.total, 1), completed=self.done, width=24),
            Text(f"{duration(left)} left" if left is not None else "", "cyan"),
        )
        facts = Table.grid(padding=(0, 2))
        mean = f"(last {len(recent)}: {_mean(recent, 'reward_mean'):.3f})" if recent else ""
        facts.add_row("reward", f"{_number(record, 'reward_mean', '.3f')} {mean}", "staleness", _staleness(record))
        trainer, rollout = (f"{self._rate(k, recent)} tok/s" for k in ("trained_tokens", "generated_tokens"))
        facts.add_row("trainer", trainer, "rollout", rollout)
        wait = f"{_number(record, 'wait_s', '.2f')} s" + (f", ordinal {head}" if head >= 0 else "")
        facts.add_row("waited", wait, "now", f"{self._phase}, {duration(self._drawn - self._phase_since)}")
        self._live.update(Group(bar, facts), refresh=True)


def _live(stream: TextIO) -> Any:
    """rich's live display on a terminal, None elsewhere; drawn by us alone, from no thread of its own."""
    width = terminal_width(stream)
    if width == 0:
        return None
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream, force_terminal=True, width=width)
    return Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


def _number(record: Mapping[str, Any], key: str, form: str) -> str:
    value = record.get(key)
    return "-" if value is None else format(value, form)


def _mean(records: list[Mapping[str, Any]], key: str) -> float:
    values = [r[key] for r in records if r.get(key) is not None]
    return sum(values) / len(values) if values else float("nan")


def _staleness(record: Mapping[str, Any]) -> str:
    return f"{_number(record, 'staleness_mean', '.2f')} mean, {_number(record, 'staleness_max', 'g')} max"
