#!/usr/bin/env python
"""Makes a small random model with a character tokenizer: the quickstart's, and those of the tests.

A Hugging Face directory (config.json, safetensors in fp32, tokenizer) of one of the families that areal_hpc knows. The
default is the quickstart's: Qwen2, hidden 128, 4 layers, heads of 32 (the smallest that vLLM's CPU attention takes),
tied embeddings, 0.8M parameters. Usage: python tools/make_tiny_model.py DIR [--family llama] [--seed 1] ...
"""

from __future__ import annotations

import argparse
import os
import string
import sys
from pathlib import Path

CHARACTERS = string.digits + "+-*/=() .,?:;!'" + string.ascii_letters + "\n"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3
HEAD_DIM = 32
FAMILIES = ("llama", "qwen2", "qwen3")


def save_tokenizer(path: str | Path) -> None:
    """One token a character, with neither a chat template nor tokens added at the start."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(path)


def make(
    path: str | Path,
    *,
    family: str = "qwen2",
    seed: int = 1,
    layers: int = 4,
    hidden: int = 128,
    ffn: int = 384,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 128,
    max_position: int = 512,
    tied: bool = True,
    noise: float = 0.0,
) -> int:
    """Writes the model and its tokenizer to `path`; returns the number of its parameters.

    `vocab` may exceed the tokenizer's (rows that no text uses). `noise` is the standard deviation of what is added to
    every tensor: biases start at 0 and norms at 1, which hides a tensor that went astray.
    """
    import torch
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position,
        tie_word_embeddings=tied,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
    )
    torch.manual_seed(seed)
    model = model_class(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    model.save_pretrained(path)
    save_tokenizer(path)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    parser = argparse.ArgumentParser(description="A small random model and a character tokenizer.")
    parser.add_argument("path", help="folder to write")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2")
    parser.add_argument("--untied", action="store_true", help="an output matrix of its own")
    sizes = {"seed": 1, "layers": 4, "hidden": 128, "ffn": 384, "heads": 4, "kv_heads": 2, "vocab": 128}
    for name, default in {**sizes, "max_position": 512}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--noise", type=float, default=0.0, help="added to every tensor, biases and norms too")
    arguments = vars(parser.parse_args())
    tied, path = not arguments.pop("untied"), arguments.pop("path")
    count = make(path, tied=tied, **arguments)
    print(f"{path}: {arguments['family']}, {count:,} parameters")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
