"""A run that is stopped in every way and started again: what was trained, recounted from the archive alone.

The recount (archive.py) imports nothing of areal_hpc.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from archive import checkpoints, item_of, prompts, samples, segments
from conftest import Interrupted

pytestmark = pytest.mark.timeout(900)


def test_every_start_ends_as_it_should(interrupted: Interrupted) -> None:
    codes = {how: code for how, (code, _) in interrupted.ends.items()}
    texts = {how: text for how, (_, text) in interrupted.ends.items()}
    said = "\n".join(f"--- {how}: {codes[how]}\n{text}" for how, text in texts.items())
    kill = codes.pop("kill")
    assert codes == {"signals": 75, "imports": 1, "stop file": 75, "to its end": 0}, said
    assert kill not in (0, 75, 78), said
    assert texts["signals"].count("stopped at step") == 1, "two signals, one stop"
    assert "by a signal" in texts["signals"] and "checkpoint of step" in texts["signals"]
    assert "no new checkpoint" in texts["imports"], "75 is for a start that gained something"
    assert "by areal-hpc stop" in texts["stop file"] and interrupted.stop.returncode == 0
    run = interrupted.run
    assert len(run.exits()) == 6, "an exit file of each start, the refused one's too"
    outcomes = [outcome for outcome in run.exits() if outcome["code"] != 78]
    assert [outcome["code"] for outcome in outcomes] == [75, 1, 75, 1, 0], outcomes
    assert "no new checkpoint" in outcomes[1]["message"] and "gone without a word" in outcomes[3]["message"]
    assert not (run.dir / "run.lock").exists() and not list((run.dir / "log").glob("hang.*"))


def test_helpers_were_there_and_are_gone(interrupted: Interrupted) -> None:
    """`finish` finds what outlives a launch by its environment; this shows that it sees helpers."""
    seen = interrupted.processes
    assert sum("areal_hpc.cli train" in line and "mpirun" not in line for line in seen) == 3, seen
    assert sum("areal_hpc.spawner" in line for line in seen) >= 2, "of the leader and of local rank 0"
    assert any("areal_hpc.tasks.worker" in line for line in seen), seen


def test_attempts_begin_where_a_checkpoint_was(interrupted: Interrupted) -> None:
    attempts = interrupted.run.attempts()
    assert [a["attempt"] for a in attempts] == [0, 1, 2, 3, 4]
    starts = [a["from_step"] for a in attempts]
    print(f"attempts from steps {starts}")
    assert starts[0] == 0 < starts[1] == starts[2] < starts[3] <= starts[4] < interrupted.run.steps
    assert [a["checkpoint"] for a in attempts] == ["", *(f"step-{s:08d}.h5" for s in starts[1:])]
    assert attempts[2]["config_changes"] == {"actor.backend": ["megatron:d1t1p1", "megatron:d2t1p1"]}
    assert attempts[3]["config_changes"] == {"actor.backend": ["megatron:d2t1p1", "megatron:d1t1p1"]}


def test_every_ordinal_is_trained_once_over_the_surviving_weights(interrupted: Interrupted) -> None:
    run = interrupted.run
    asked, trained = prompts(run.questions, run.model), samples(run.dir)
    assert Counter(s.ordinal for s in trained) == dict.fromkeys(range(run.B * run.steps), run.n_samples)
    for sample in trained:
        assert sample.step == sample.ordinal // run.B
        assert sample.item == item_of(run.seed, sample.ordinal, run.rows)
        assert sample.prompt == asked[sample.item], f"ordinal {sample.ordinal}"
    age = np.concatenate([sample.step - sample.version for sample in trained])
    assert age.min() >= 0 and age.max() <= run.eta, "fifo: no token is staler than eta"
    assert {sample.attempt for sample in trained} >= {0, 4}


def test_samples_of_a_group_differ_and_no_two_ordinals_share_them(interrupted: Interrupted) -> None:
    """Seeds follow from ordinal and sample, so a group that came twice would be seen here."""
    answers = Counter(tuple(sample.tokens.tolist()) for sample in samples(interrupted.run.dir))
    assert max(answers.values()) == 1


def test_segments_and_checkpoints_that_count(interrupted: Interrupted) -> None:
    run = interrupted.run
    assert all(path.is_file() for path in segments(run.dir))
    spans = [tuple(map(int, path.name.split(".")[0].split("-")[1:])) for path in segments(run.dir)]
    assert spans[0][0] == 0 and spans[-1][1] == run.steps
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans)), "every step once"
    assert len(checkpoints(run.dir)) == 2, "saver.keep_last"
    files = sum(path.is_file() for path in run.dir.rglob("*"))
    assert files <= 50 + 3 * 1 + 3 * len(run.attempts()) + 2 + len(list((run.dir / "trajectories").iterdir()))


def test_metrics_say_which_attempt_and_one_record_of_a_step_counts(interrupted: Interrupted) -> None:
    run = interrupted.run
    starts = [a["from_step"] for a in run.attempts()]
    records = run.metrics()
    counted = [r for r in records if not any(r["version"] > start for start in starts[r["attempt"] + 1 :])]
    assert [r["step"] for r in counted] == list(range(run.steps))
    tokens = Counter()
    for sample in samples(run.dir):
        tokens[sample.step] += len(sample.tokens)
    assert {r["step"]: r["trained_tokens"] for r in counted} == tokens
    print(f"{len(records) - len(counted)} of {len(records)} records are superseded")
