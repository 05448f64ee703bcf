"""What the trainer's MPI tests share: tiny models, one fixed batch, and several layouts in one launch.

Layouts smaller than the world run beside each other, each on its own sub-world:
torch.distributed and Megatron are initialised and destroyed once for each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_hpc.config import ActorConfig, MicroBatchConfig, OptimizerConfig, Parallel
from areal_hpc.layout.families import logical_tensors
from areal_hpc.layout.spec import ModelSpec, read_spec

VOCAB = 101  # does not divide by 2: one padding row at TP 2
LAYOUTS = [  # (layout, distributed optimizer), reference first
    (Parallel(1, 1, 1), True),
    (Parallel(1, 2, 1), True),
    (Parallel(1, 1, 2), True),
    (Parallel(2, 1, 1), True),
    (Parallel(2, 1, 1), False),
    (Parallel(1, 2, 2), True),
    (Parallel(2, 2, 1), True),
    (Parallel(2, 1, 2), True),
    (Parallel(2, 2, 2), True),
]


def make_model(name: str, path: Path) -> None:
    """A random model with grouped queries; weights large enough for uneven attention, every bias and norm drawn."""
    import transformers

    family, tied = name.split("-")
    kind = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied == "tied",
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | ({"head_dim": 16} if family == "qwen3" else {})
    torch.manual_seed(len(name))
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.2)
            parameter.copy_(spread + (1.0 if parameter_name.endswith("norm.weight") else 0.0))
    model.save_pretrained(path)


def sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, VOCAB, n).astype(np.int32) for n in (9, 31, 14, 14, 22, 5, 18, 31, 27, 9, 12)]


def reference_logp(path: Path) -> list[np.ndarray]:
    """Hugging Face's log-probabilities, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    out = []
    with torch.no_grad():
        for tokens in sequences():
            ids = torch.from_numpy(tokens.astype(np.int64))
            out.append(model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].numpy())
    return out


def actor_config(distributed: bool, **changes: Any) -> ActorConfig:
    return ActorConfig(
        path="unused",
        distributed_optimizer=distributed,
        mb_spec=MicroBatchConfig(64),  # several microbatches on every rank
        optimizer=OptimizerConfig(lr=1e-4, eps=1e-8),
        **changes,
    )


@dataclass
class Run:
    """What one layout computed: on its first rank the whole weights, elsewhere None."""

    logp: list[np.ndarray]
    metrics: list[dict[str, float]]
    weights: dict[str, np.ndarray] | None


def train(comm: Any, store: Any, path: Path, parallel: Parallel, actor: ActorConfig, minibatches: int = 1) -> Run:
    """Loads the model on `comm`, takes log-probabilities and makes three steps of one fixed batch."""
    from areal_hpc.trainer.actor import Actor
    from areal_hpc.trainer.binding import TrainerBinding
    from areal_hpc.trainer.model import Model, build_groups

    groups = build_groups(comm, parallel, store, deadline_s=60)
    try:
        model = Model(read_spec(path), actor, groups, seed=1)
        binding = TrainerBinding(model)
        binding.load_hf(path)
        trainer = Actor(model, actor, temperature=0.7, total_steps=3)
        logp = trainer.logp(sequences())
        batch = share_of(fixed_samples(trainer), minibatches, groups)
        outcomes = [trainer.update(step, batch) for step in range(3)]
        assert all(o.finite and o.applied == minibatches for o in outcomes)
        assert binding.step_count == 3 * minibatches
        return Run(logp, [o.metrics for o in outcomes], whole_weights(comm, model.spec, binding))
    finally:
        groups.close()


def fixed_samples(trainer: Any) -> list[Any]:
    """One batch for every layout: behaviour log-probabilities near the model's, advantages of both signs."""
    from areal_hpc.trainer.packing import Sample

    rng = np.random.default_rng(3)
    return [
        Sample(s, 3, (rng.normal(0, 0.2, len(s) - 3) + probability[2:]).astype(np.float32), float(rng.normal()))
        for s, probability in zip(sequences(), trainer.logp(sequences()), strict=True)
    ]


def share_of(samples: list[Any], minibatches: int, groups: Any) -> list[list[Any]]:
    """This DP rank's share of the samples, by minibatch."""
    from areal_hpc.trainer.packing import assign

    shares = assign([len(sample.tokens_S) for sample in samples], minibatches, groups.parallel.dp)
    return [[samples[i] for i in cut] for cut in shares[groups.dp]]


def whole_weights(comm: Any, spec: ModelSpec, binding: Any) -> dict[str, np.ndarray] | None:
    """Weights, masters and moments of all ranks put together on the first, replicas compared on the way."""
    mine = [("weight", box, view.float().numpy()) for box, view in binding.weight_views(copies=True)]
    for kind, views in binding.state_views(copies=True).items():
        mine += [(kind, box, view.numpy()) for box, view in views]
    everyone = comm.gather(mine)
    if everyone is None:
        return None
    out: dict[str, np.ndarray] = {}
    for kind in ("weight", "master", "exp_avg", "exp_avg_sq"):
        for name, shape in logical_tensors(spec).items():
            out[f"{kind}/{name}"] = np.full(shape, np.nan, np.float32)
    for held in everyone:
        for kind, box, values in held:
            region = out[f"{kind}/{box.name}"][tuple(slice(a, b) for a, b in zip(box.start, box.stop))]
            seen = ~np.isnan(region)
            # a replica (another DP rank, or the tied copy of the last stage) is the same to the bit
            np.testing.assert_array_equal(region[seen], values[seen], err_msg=f"{kind} {box}")
            region[...] = values
    assert not [name for name, values in out.items() if np.isnan(values).any()], "elements that no rank holds"
    return out


def torch_store(comm: Any) -> Any:
    """One store for all sub-worlds of the launch; every layout takes a prefix of its own."""
    import torch.distributed as dist

    port = None
    if comm.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
    port = comm.bcast(port)
    return store if comm.rank == 0 else dist.TCPStore("127.0.0.1", port, is_master=False)


def on_subworlds(world: Any, store: Any, prefix: str, layouts: list[Parallel], body: Any) -> dict[int, Any]:
    """Runs `body(comm, store, index)` of every layout at once, each on its own ranks of `world`.

    Returns, on every rank, index -> what the layout's first rank returned. `prefix` is new in each call.
    """
    from torch.distributed import PrefixStore

    owner = [index for index, parallel in enumerate(layouts) for _ in range(parallel.size)]
    mine = owner[world.rank] if world.rank < len(owner) else -1
    comm = world.Split(mine + 1, world.rank)
    result, error = None, None
    if mine >= 0:
        try:
            result = body(comm, PrefixStore(f"{prefix}/{mine}", store), mine)
        except Exception as caught:
            error = caught
    arrived = world.Ibarrier()  # idle ranks sleep: the cores belong to the sub-worlds that still run
    while not arrived.Test():
        time.sleep(0.002)
    failed = world.allgather(f"{type(error).__name__}: {error}" if error else None)
    if error:
        raise error
    assert not any(failed), failed
    heads = world.allgather((mine, result) if comm.rank == 0 and mine >= 0 else None)
    comm.Free()
    return dict(head for head in heads if head is not None)
