"""vLLM's weight-transfer engine over whatever moves boxes between ranks.

vLLM calls it in three steps, all between `pause` and `resume` of the engine:
`start_weight_update` opens the binding's views, `update_weights` hands them to the
caller's `receive`, `finish_weight_update` gives the weights to their modules. It knows
no MPI: `receive` (an exchange, or a loop over files) fills the views or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from areal_hpc.rollout.binding import RolloutBinding

BACKEND = "areal_hpc"  # its name in vLLM's WeightTransferConfig

Receive = Callable[[list[torch.Tensor]], None]


@dataclass
class BindInfo(WeightTransferInitInfo):
    """What the engine is told once: where the boxes lie in the live model."""

    binding: RolloutBinding


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    """What it is told for each version: who fills the views, in the order of `binding.boxes`."""

    receive: Receive


class BoxTransferEngine(WeightTransferEngine[BindInfo, ReceiveInfo]):
    """Drives `receive(views)` over the boxes of this rank. Order: start, update, finish."""

    init_info_cls = BindInfo
    update_info_cls = ReceiveInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: BindInfo) -> None:
        self.binding = init_info.binding

    def start_weight_update(self) -> None:
        self.views = self.binding.open()

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        update_info.receive(self.views)

    def finish_weight_update(self) -> None:
        self.views = []
        self.binding.finalise()

    def shutdown(self) -> None:
        """Nothing to release: the transport belongs to the caller."""


WeightTransferEngineFactory.register_engine(BACKEND, BoxTransferEngine)
