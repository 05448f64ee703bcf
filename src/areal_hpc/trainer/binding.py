"""Live trainer tensors as boxes of logical tensors: weights, master copies and moments.

Views only, no copies: what a box names is read or written through its tensor. Orders are
deterministic: `weight_views` follows layout.megatron.trainer_pieces, `state_views` the
model's parameters. DP replicas give identical boxes; a distributed optimizer gives each DP
rank the flat range that it owns, cut into boxes. `copies=True` adds the tied embedding that
the last of several stages holds beside the first one's: load it, never send or save it.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from areal_hpc.layout.boxes import Box, Piece, flat_boxes
from areal_hpc.layout.megatron import trainer_pieces
from areal_hpc.storage.hf import read_boxes
from areal_hpc.trainer.model import Model

KINDS = ("master", "exp_avg", "exp_avg_sq")


class TrainerBinding:
    """Boxes of one rank's model and of its optimizer."""

    def __init__(self, model: Model) -> None:
        self.model, self.optimizer = model, model.optimizer
        self.parameters = dict(model.module.named_parameters())

    def _pieces(self, copies: bool) -> list[Piece]:
        g = self.model.groups
        return trainer_pieces(self.model.spec, g.parallel, g.tp, g.pp, copies=copies)

    def weight_views(self, copies: bool = False) -> list[tuple[Box, Tensor]]:
        """The model's weights, in its dtype: the source of an update (all of them on each DP rank)."""
        return [(p.box, self.parameters[p.param].detach()[p.region]) for p in self._pieces(copies)]

    def state_views(self, copies: bool = False) -> dict[str, list[tuple[Box, Tensor]]]:
        """Master copies and moments, fp32, by kind; the boxes of the three kinds are the same."""
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in self._pieces(copies):
            pieces[piece.param].append(piece)
        views: dict[str, list[tuple[Box, Tensor]]] = {kind: [] for kind in KINDS}
        for shard in self.optimizer.shards():
            offset = 0
            for low, high in flat_boxes(tuple(self.parameters[shard.name].shape), shard.start, shard.stop):
                part = Box(shard.name, low, high)  # of the live tensor, not of a logical one
                for piece in pieces[shard.name]:
                    held = piece.clip(low, high)
                    if held is not None:
                        inside = Box(shard.name, held.at, tuple(map(int.__add__, held.at, held.box.shape))).within(part)
                        for kind in KINDS:
                            flat = getattr(shard, kind)[offset : offset + part.size]
                            views[kind].append((held.box, flat.view(part.shape)[inside]))
                offset += part.size
        return views

    @property
    def step_count(self) -> int:
        """Optimizer steps so far; a checkpoint keeps it, and sets it before `after_load`."""
        return self.optimizer.count

    @step_count.setter
    def step_count(self, value: int) -> None:
        self.optimizer.count = value

    def after_load(self) -> None:
        """Collective over all trainer ranks: loaded master copies become the model's weights.

        Raises RuntimeError when the last stage's tied embedding is not the first stage's.
        """
        self.optimizer.push()
        spec, groups = self.model.spec, self.model.groups
        if spec.tied and groups.parallel.pp > 1 and (groups.first_stage or groups.last_stage):
            mine = self.parameters["embedding.word_embeddings.weight" if groups.first_stage else "output_layer.weight"]
            group = parallel_state.get_embedding_group()
            other = mine.detach().clone()
            dist.broadcast(other, dist.get_process_group_ranks(group)[0], group=group)
            if not torch.equal(other, mine.detach()):
                raise RuntimeError(
                    f"tied embedding of trainer rank {groups.rank} (tp {groups.tp}, pp {groups.pp}): "
                    f"{int((other != mine).sum())} elements differ from the first stage's; load with copies=True"
                )

    def load_hf(self, path: str | Path) -> None:
        """Collective: master copies from a Hugging Face directory, moments to 0, then `after_load`.

        Each rank reads its own boxes only. Raises what `storage.hf.read_boxes` raises for a
        file or tensor that is missing or of another shape.
        """
        views = self.state_views(copies=True)
        wanted = {box: view for box, view in views["master"]}
        with torch.no_grad():
            for box, tensor in read_boxes(Path(path), wanted):
                wanted[box].copy_(tensor)
            for kind in KINDS[1:]:
                for _, view in views[kind]:
                    view.zero_()
        self.step_count = 0
        self.after_load()
