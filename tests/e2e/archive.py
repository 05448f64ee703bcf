"""What a run's files say, read with plain h5py, json and numpy: nothing of areal_hpc is imported here.

Independent of the program: where the segments that count are named, which prompt an ordinal has, and what Hugging
Face's model says of every token that was trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np


@dataclass
class Sample:
    ordinal: int
    item: int
    step: int
    attempt: int
    replica: int
    prompt: list[int]
    tokens: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    reward: float
    status: str


def checkpoints(run: Path) -> dict[int, Path]:
    """Version -> checkpoint file."""
    return {int(path.stem.split("-")[1]): path for path in sorted((run / "checkpoints").glob("step-*.h5"))}


def segments(run: Path) -> list[Path]:
    """The segments that the newest checkpoint names: what the surviving weights were trained on."""
    newest = checkpoints(run)[max(checkpoints(run))]
    with h5py.File(newest, "r") as file:
        names = json.loads(file["blobs/segments"][:].tobytes())
    return [run / "trajectories" / name for name in names]


def samples(run: Path) -> list[Sample]:
    """All samples of the surviving segments, in the order of (step, ordinal)."""
    return [sample for path in segments(run) for sample in _samples(path)]


def _samples(path: Path) -> Iterator[Sample]:
    with h5py.File(path, "r") as file:
        a = {name: file[name][()] for name in file if name != "checksums"}
    for s, g in enumerate(a["sample_group"]):
        part = slice(a["sample_offsets"][s], a["sample_offsets"][s + 1])
        prompt = a["prompt_tokens"][a["prompt_offsets"][g] : a["prompt_offsets"][g + 1]]
        yield Sample(
            *(int(a[name][g]) for name in ("ordinal", "item", "step", "attempt", "replica")),
            prompt.tolist(),
            a["tokens"][part],
            a["logp"][part],
            a["version"][part],
            float(a["reward"][s]),
            a["status"][s].decode(),
        )


def prompts(questions: Path, model: Path) -> list[list[int]]:
    """Token ids of every row of a JSONL file under a tokenizer with one token a character."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    return [[vocabulary[character] for character in row["prompt"]] for row in rows]


def item_of(seed: int, ordinal: int, rows: int) -> int:
    """The row whose prompt has this ordinal: every epoch is a permutation of its own."""
    order = np.random.Generator(np.random.PCG64([seed, ordinal // rows])).permutation(rows)
    return int(order[ordinal % rows])


class Oracle:
    """Hugging Face's model with the weights of any version: its log-probabilities in fp32."""

    def __init__(self, model: Path, run: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._start, self._checkpoints = model, checkpoints(run)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()

    def logp(self, version: int, samples: list[Sample], temperature: float) -> list[np.ndarray]:
        """log pi(token | prompt and the tokens before it) of every answer token of every sample, under `version`."""
        import torch

        self._load(version)
        texts = [sample.prompt + sample.tokens.tolist() for sample in samples]
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)  # behind a text: nothing looks there
        for row, text in zip(ids, texts):
            row[: len(text)] = torch.tensor(text)
        with torch.no_grad():
            logp = (self._model(ids).logits.double() / temperature).log_softmax(-1)
        logp = logp[:, :-1].gather(2, ids[:, 1:, None])[..., 0].numpy()
        return [row[len(s.prompt) - 1 : len(t) - 1] for row, s, t in zip(logp, samples, texts)]

    def _load(self, version: int) -> None:
        import torch
        from safetensors.torch import load_file

        if version == 0:
            weights = load_file(self._start / "model.safetensors")
        else:
            with h5py.File(self._checkpoints[version], "r") as file:
                assert file.attrs["step"] == version
                weights = {name: torch.from_numpy(tensor[()]) for name, tensor in file["master"].items()}
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = {"lm_head.weight"} if self._model.config.tie_word_embeddings else set()
        assert set(missing) <= tied and not unexpected, (missing, unexpected)
