"""Exit codes and the exit file: the worst code wins, the first writer is believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.exits import Exit, Outcome, exit_path, read_exit, worst, write_exit


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 75], 75), ([75, 78, 0], 78), ([78, 1, 75], 1), ([0, 137], 137)],
)
def test_worst(codes: list[int], code: int) -> None:
    assert worst(codes) == code


def test_the_first_outcome_stays(tmp_path: Path) -> None:
    path = exit_path(tmp_path, "7", 2)
    path.parent.mkdir()
    assert path.name == "exit.7.2.json" and read_exit(path) is None
    assert write_exit(path, Outcome(Exit.CRASH, "first", 3, "trainer", 5, [12, 13]))
    assert not write_exit(path, Outcome(Exit.DONE, "second"))
    found = read_exit(path)
    assert found is not None and found.time > 0
    assert (found.code, found.message, found.rank, found.role) == (1, "first", 3, "trainer")
    assert (found.version, found.ordinals) == (5, [12, 13])


def test_a_half_written_file_is_none_yet(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text('{"code": 1, "mess')
    assert read_exit(tmp_path / "e.json") is None
