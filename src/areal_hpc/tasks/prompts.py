"""From an item to the token ids of its prompt, the same on every rank and in every attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_hpc.config import ConfigError
from areal_hpc.tasks import Item


def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of a directory. Raises ConfigError naming the key where there is none."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        raise ConfigError(f"tokenizer_path={path}: no such directory; expected that of a Hugging Face tokenizer")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer_path={path}: no tokenizer that can be loaded: {error}") from None


def encode(tokenizer: Any, item: Item, system_prompt: str = "") -> list[int]:
    """Token ids of the prompt, up to where the model's answer begins.

    `tokenizer` is a Hugging Face tokenizer. With a chat template the item is a user's turn (or its own messages) behind
    `system_prompt`; without one it is the bare question, with no special tokens and no system prompt.
    """
    if not tokenizer.chat_template:
        return list(tokenizer.encode(item.prompt, add_special_tokens=False))
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages = system + list(item.messages or [{"role": "user", "content": item.prompt}])
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
