"""The configurations that ship are valid, and their datasets load where they need no file."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.configfile import load
from areal_hpc.tasks import load as load_task

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config(path: Path) -> None:
    config = load(path)
    assert config.experiment_name == path.stem
    for split, dataset in (("train", config.train_dataset), ("valid", config.valid_dataset)):
        if dataset.type != "file":
            assert len(load_task(dataset, config.seed, split)) >= dataset.batch_size


def test_there_are_configs() -> None:
    assert {path.stem for path in CONFIGS} >= {"quickstart_arithmetic", "smollm2_chain_sum", "areal_32b"}
