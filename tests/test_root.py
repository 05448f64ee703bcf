"""What trainer rank 0 decides: when a run ends, with which code, and what is evaluated. Its real parts: tests/e2e."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest

from areal_hpc.config import Config, DatasetConfig, EvaluatorConfig, Order, RolloutConfig, ShortBatch
from areal_hpc.observe.progress import Progress
from areal_hpc.placement import Role
from areal_hpc.records import DropReason
from areal_hpc.stream.buffer import Inventory
from areal_hpc.stream.ledger import Ledger
from areal_hpc.stream.messages import Committed, Cut, Evaluate, Evaluated, Save, Stop, Update
from areal_hpc.trainer.commands import Checkpoint, End, Train
from areal_hpc.trainer.root import MARGIN_S, Root, ShortBatchError

B, TOTAL = 2, 4


class Peers:
    """The mailbox of rank 0 with one home and one leader behind it, which answer at the next turn."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self._answers: list[object] = []

    def notify(self, message: object, dest: int) -> None:
        self.sent.append(message)
        match message:
            case Save():
                self._answers.append(Cut(0, message.step))
            case Evaluate():
                self._answers.append(Evaluated(0, message.version, 10, 4.0))
            case Update():
                self._answers.append(Committed(0, message.version))

    def pump(self, root: Root) -> None:
        while self._answers:
            root.handle(self._answers.pop(0))


def make_root(
    tmp_path, step: int = 0, *, left: float = math.inf, evaluated: set[int] | None = None, save_s: float = 0.0, **keys
) -> tuple[Root, Peers, SimpleNamespace]:
    """Rank 0 of a run that goes on at `step` with version `step` published; one trainer, one replica."""
    places = [SimpleNamespace(rank=0, role=Role.TRAINER), SimpleNamespace(rank=1, role=Role.ROLLOUT)]
    world = SimpleNamespace(
        rank=0, place=places[0], places=places, homes=[0], leaders=[1], run_dir=tmp_path, job="7", restart=0,
        stop_requested=lambda: world.signal, time_left=lambda: world.left, phase=lambda *_, **__: None,
        signal=False, left=left,
    )  # fmt: skip
    config = Config("exp", total_train_steps=TOTAL, train_dataset=DatasetConfig(batch_size=B), **keys)
    book = Ledger(B, 1, 1, TOTAL, config.rollout.max_drops_per_step)
    for done in range(step):
        book.trained(done, book.claim(B, done))
    peers, progress = Peers(), Progress(io.StringIO(), "test", TOTAL)
    root = Root(
        config, world, peers, Inventory(book, Order.fifo), progress, lambda: peers.pump(root),
        attempt_start=step, evaluated=evaluated or set(), save_s=save_s,
    )  # fmt: skip
    root.version = step
    root.handle(Committed(0, step))
    return root, peers, world


def train(root: Root) -> None:
    """The next step, with the version that it makes proved at once."""
    for t in range(root.step * B, root.step * B + B):
        root.inventory.ledger.claim(1, root.step)
        root.inventory.arrived(t, 0, 5, root.step)
    command = root.next()
    assert isinstance(command, Train)
    root.trained(command.decision)
    root.version = root.step
    root.handle(Committed(0, root.step))


@pytest.mark.parametrize("save_s", [0.0, 20.0])
def test_the_first_save_of_a_start_has_its_time(tmp_path, save_s: float) -> None:
    root, _, _ = make_root(tmp_path, left=MARGIN_S + 15.0, save_s=save_s)
    assert root.stopping() == (save_s > 0), "1.5 saves and the margin"
    root.saved(1, 1.0)
    assert root.save_s == 1.0, "from then on what was measured"


def test_a_stop_before_the_last_evaluation_is_not_the_end(tmp_path) -> None:
    keys = {"evaluator": EvaluatorConfig(at_end=True)}
    root, peers, world = make_root(tmp_path, TOTAL - 1, **keys)
    train(root)
    world.signal = True
    assert root.next() == Checkpoint(TOTAL)
    root.saved(TOTAL, 1.0)
    assert root.next() == End(75) and peers.sent[-1] == Stop(75)

    root, _, _ = make_root(tmp_path, TOTAL, **keys)
    assert root.next() == End(0)
    assert [version for version, _ in root.evaluations] == [TOTAL]

    root, _, _ = make_root(tmp_path, TOTAL, evaluated={TOTAL}, **keys)
    assert root.next() == End(0) and root.evaluations == []


def test_an_evaluation_that_a_stop_left_out_is_made_up(tmp_path) -> None:
    keys = {"evaluator": EvaluatorConfig(freq_steps=2)}
    root, _, world = make_root(tmp_path, 1, **keys)
    train(root)
    world.signal = True
    assert root.next() == Checkpoint(2) and root.evaluations == []
    root.saved(2, 1.0)
    assert root.next() == End(75)

    for evaluated in (set(), {2}):
        root, _, _ = make_root(tmp_path, 2, evaluated=evaluated, **keys)
        train(root)
        assert [version for version, _ in root.evaluations] == ([] if evaluated else [2])


@pytest.mark.parametrize("short", ShortBatch)
def test_a_short_batch_is_trained_or_ends_the_run(tmp_path, short: ShortBatch) -> None:
    root, _, _ = make_root(tmp_path, rollout=RolloutConfig(max_drops_per_step=0, short_batch=short))
    root.inventory.ledger.claim(B, 0)
    root.inventory.dropped([0], DropReason.REWARD)
    root.inventory.arrived(1, 0, 5, 0)
    if short is ShortBatch.train:
        assert root.next().decision.ordinals == (1,)
        return
    with pytest.raises(ShortBatchError, match=r"step 0: 1 of 2 groups survived.*max_drops_per_step=0.*'reward': 1"):
        root.next()
