"""Tiny random models in Hugging Face format, and Hugging Face's own log-probabilities of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# heads of 32: vLLM's CPU attention takes none smaller; 100 is no multiple of vLLM's vocabulary padding
SIZES = dict(
    vocab_size=100,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=None,
)


class TinyModel:
    """A model directory at `path` and any number of versions of its weights, each from a seed."""

    def __init__(self, path: Path, family: str, tied: bool) -> None:
        self.path = path
        self.config: PretrainedConfig = CONFIGS[family](**SIZES, tie_word_embeddings=tied)
        self.config.architectures = [f"{family.capitalize()}ForCausalLM"]
        self.config.save_pretrained(path)
        self._models: dict[int, torch.nn.Module] = {}

    def version(self, seed: int) -> torch.nn.Module:
        """Hugging Face's model with the weights of `seed`: every tensor differs from every other version's."""
        if seed not in self._models:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            self._models[seed] = model
        return self._models[seed]

    def tensors(self, seed: int) -> dict[str, torch.Tensor]:
        return dict(self.version(seed).named_parameters())

    @torch.no_grad()
    def logp(self, seed: int, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float32 [len - 1]: log p(tokens[s] | those before) for s from 1."""
        ids = torch.tensor(tokens)
        logp = (self.version(seed)(ids[None]).logits[0] / temperature).log_softmax(-1)
        return logp[:-1].gather(1, ids[1:, None])[:, 0].numpy()


def receiver(boxes: Sequence, tensors: dict[str, torch.Tensor]) -> Callable[[list[torch.Tensor]], None]:
    """A `receive` that fills the views from full tensors, box by box."""

    @torch.no_grad()
    def receive(views: list[torch.Tensor]) -> None:
        for box, view in zip(boxes, views, strict=True):
            view.copy_(tensors[box.name][tuple(map(slice, box.start, box.stop))])

    return receive
