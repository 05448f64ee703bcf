"""Binding: the live tensors of a vLLM model <-> the boxes that this rank must hold.

A destination is written in place where the kernel reads the plain layout (every dense
weight on a GPU; norms and embeddings on a CPU). vLLM's CPU kernels pack a linear layer's
weight and free it (`process_weights_after_loading`, vLLM 0.32): there the boxes land in a
scratch of the layer's shape, which is given to its module and packed again. A module that
shares a weight (the `lm_head` of tied embeddings) is packed again too.
Shapes are those of `areal_hpc.layout.vllm`; the constructor compares them with the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from areal_hpc.layout.boxes import Box
from areal_hpc.layout.spec import ModelSpec
from areal_hpc.layout.vllm import rollout_pieces, rollout_shapes


@dataclass(slots=True, eq=False)
class _Target:
    """One live parameter. `scratch` holds what arrives for it when it cannot be written in place."""

    module: torch.nn.Module
    key: str
    shape: tuple[int, ...]
    in_place: bool
    padded: bool  # some elements belong to no box (vocabulary padding); they are kept at zero
    scratch: torch.Tensor | None = None

    @property
    def parameter(self) -> torch.nn.Parameter:
        return getattr(self.module, self.key)


class RolloutBinding:
    """Boxes and views of one rank of a replica.

    `boxes[i]` is what `open()[i]` must be filled with, in `dtype`. Raises ValueError naming
    the tensor when the layout's arithmetic and the live model disagree.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        spec: ModelSpec,
        *,
        tp: int,
        tp_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype, self.device = dtype, device
        self._model = model
        self._pieces = rollout_pieces(spec, tp, tp_rank)
        self.boxes: list[Box] = [piece.box for piece in self._pieces]
        self._targets = self._bind(rollout_shapes(spec, tp, tp_rank), tied=spec.tied)

    @property
    def nbytes(self) -> int:
        """Bytes that one version brings to this rank."""
        return sum(box.size for box in self.boxes) * self.dtype.itemsize

    def open(self) -> list[torch.Tensor]:
        """Views to receive one version in, one for each box, with the box's shape.

        What is written in place is live at once: the engine must be paused, and a version
        that fails to arrive whole leaves a model that must not run.
        """
        for target in self._targets.values():
            if not target.in_place:
                make = torch.zeros if target.padded else torch.empty
                target.scratch = make(target.shape, dtype=self.dtype, device=self.device)
        return [self._tensor(piece.param)[piece.region] for piece in self._pieces]

    def finalise(self) -> None:
        """Give each module what arrived for it, one module at a time, and let it pack."""
        by_module: dict[torch.nn.Module, list[_Target]] = {}
        for target in self._targets.values():
            by_module.setdefault(target.module, []).append(target)
        for module in self._model.modules():
            for target in by_module.get(module, ()):
                if target.scratch is not None:
                    target.parameter.data = target.scratch
                    target.scratch = None
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)

    def _tensor(self, name: str) -> torch.Tensor:
        target = self._targets[name]
        return target.parameter.data if target.in_place else target.scratch

    def _bind(self, shapes: dict[str, tuple[int, ...]], tied: bool) -> dict[str, _Target]:
        live = {
            f"{path}.{key}": (module, key)
            for path, module in self._model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        }
        covered = dict.fromkeys(shapes, 0)
        for piece in self._pieces:
            covered[piece.param] += piece.box.size
        if tied and "lm_head.weight" in live:
            head, embedding = self._model.lm_head.weight, self._model.model.embed_tokens.weight
            if head is not embedding:
                raise ValueError("lm_head.weight: the configuration ties it to the embedding, vLLM's model does not")
            del live["lm_head.weight"]
        for name in sorted(live.keys() ^ shapes.keys()):
            has, lacks = ("vLLM's model", "its layout") if name in live else ("its layout", "vLLM's model")
            raise ValueError(f"{name}: {has} has it, {lacks} does not")
        return {name: self._target(name, *live[name], shape, covered[name]) for name, shape in shapes.items()}

    def _target(self, name: str, module: torch.nn.Module, key: str, shape: tuple[int, ...], covered: int) -> _Target:
        parameter = getattr(module, key)
        freed = parameter.numel() == 0  # a packed linear layer still knows the sizes that it was built with
        found = (module.output_size_per_partition, module.input_size_per_partition) if freed else tuple(parameter.shape)
        if found != tuple(shape):
            raise ValueError(f"{name}: the layout gives shape {tuple(shape)}, vLLM's model has {found}")
        in_place = not freed and parameter.dtype == self.dtype
        padded = covered < prod(shape)
        if in_place and padded:
            parameter.data.zero_()
        return _Target(module, key, tuple(shape), in_place, padded)
