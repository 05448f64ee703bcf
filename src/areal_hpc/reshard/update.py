"""The plan of a weight update: trainer layout to rollout layout, from arithmetic alone.

Every rank computes it from the model's spec and the places, so nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_hpc.config import Parallel
from areal_hpc.layout.boxes import Box
from areal_hpc.layout.megatron import trainer_pieces
from areal_hpc.layout.spec import ModelSpec
from areal_hpc.layout.vllm import rollout_pieces
from areal_hpc.placement import Place, Role
from areal_hpc.reshard.plan import Plan, make_plan


def update_plan(spec: ModelSpec, trainer: Parallel, rollout: Parallel, places: Sequence[Place]) -> Plan:
    """Who sends what to whom in a weight update; ranks are world ranks (`places[rank]`).

    Source boxes are in the order of `trainer_pieces`, destination boxes in that of
    `rollout_pieces`. Raises ConfigError when the model does not divide over a layout,
    ValueError when the two layouts do not cover each other.
    """
    sources: list[list[Box]] = [[] for _ in places]
    destinations: list[list[Box]] = [[] for _ in places]
    for place in places:
        if place.role is Role.TRAINER:
            sources[place.rank] = [p.box for p in trainer_pieces(spec, trainer, place.tp, place.pp)]
        else:
            destinations[place.rank] = [p.box for p in rollout_pieces(spec, rollout.tp, place.tp)]
    return make_plan(sources, destinations)


PROBE_TOKENS = 32


def probe_tokens(spec: ModelSpec, version: int) -> np.ndarray:
    """Fixed tokens whose log-probabilities prove `version` (design, section 6): int32 [S].

    Drawn from the whole vocabulary, others for each version, so that over a run every row of the
    embedding is looked at. S is PROBE_TOKENS, or what the model has positions for.
    """
    size = min(PROBE_TOKENS, spec.max_position - 1)
    return np.random.Generator(np.random.PCG64(version)).integers(0, spec.vocab, size, dtype=np.int32)
