"""Replicas of TP ranks: mpirun -n N python -m mpi4py replicas.py MODEL_DIR FAMILY TIED TP

All replicas get the same requests, two updates in the middle of them and an abort, on a KV cache
that does not hold them all (so that vLLM preempts). Every rank must emit the same bits, and the
log-probabilities must be Hugging Face's of the version that made each token. The replicas start on
a node where a job that had the same port was killed, and hold no name of shared memory once they
have started. Rank 0 prints "ok".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from mpi4py import MPI
from tiny_models import TinyModel, receiver

from areal_hpc.config import RolloutConfig
from areal_hpc.layout.spec import read_spec
from areal_hpc.rendezvous import torch_store
from areal_hpc.rollout.engine import Engine

KV_BLOCKS = 16  # of 32 tokens; the eleven requests below grow to 3 blocks each


def run(engine: Engine, model: TinyModel) -> list[tuple]:
    """The samples and probes, in the order in which they came."""
    came: list[tuple] = []
    for turn in range(500):
        if turn in (0, 15, 40):
            engine.pause()
            engine.update(turn, receiver(engine.boxes, model.tensors(turn)))
            engine.resume()
            engine.probe_start(range(2, 50))
        if turn % 2 == 0 and turn < 24:
            engine.add(f"r{turn}", [3, 4, 5 + turn], seed=turn, max_new_tokens=64, ignore_eos=True)
        if turn == 20:
            engine.abort(["r4"])
        came += [(s.request_id, s.tokens_T, s.logp_T, s.version_T) for s in engine.step()]
        if (logp := engine.probe_result()) is not None:
            came.append(("probe", np.arange(2, 50), logp, np.array([engine.version])))
        if turn > 40 and not engine.busy:
            return came
    raise AssertionError(f"{engine.running} samples still run after 500 steps")


def check(came: list[tuple], model: TinyModel) -> None:
    samples = [entry for entry in came if entry[0] != "probe"]
    assert len(came) - len(samples) == 3
    assert {entry[0] for entry in samples} == {f"r{turn}" for turn in range(0, 24, 2)} - {"r4"}
    assert len({version for *_, version_T in samples for version in version_T.tolist()}) == 3
    for name, tokens_T, logp_T, version_T in came:
        if name == "probe":
            expected = model.logp(int(version_T[0]), tokens_T.tolist())
        else:
            text = [3, 4, 5 + int(name[1:]), *tokens_T.tolist()]
            by_version = {int(v): model.logp(int(v), text)[2:] for v in np.unique(version_T)}
            expected = np.array([by_version[int(v)][t] for t, v in enumerate(version_T)])
        np.testing.assert_allclose(logp_T, expected, atol=1e-4, err_msg=name)


@contextmanager
def left_by_a_killed_job(port: int, tp: int, tp_rank: int) -> Iterator[None]:
    """The shared memory of this rank, as vLLM names it after the address of the store."""
    ranks = "-".join(map(str, range(tp)))
    stale = Path(f"/dev/shm/{port}-tp:0-[{ranks}]-cpushm_{tp_rank}")
    stale.touch(exist_ok=False)
    try:
        yield
    finally:
        stale.unlink()


def check_no_names(tp: int) -> None:
    """What is mapped of the replica's shared memory, its ranks' and ours, has no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in lines if "cpushm" in line}
    assert len(mapped) == tp and all(name.endswith("(deleted)") for name in mapped), mapped


def main(path: str, family: str, tied: str, tp: int) -> None:
    world = MPI.COMM_WORLD
    replica = world.Split(world.rank // tp, world.rank)
    model = TinyModel(Path(path), family, tied == "tied") if world.rank == 0 else None
    world.Barrier()
    model = model or TinyModel(Path(path) / str(world.rank), family, tied == "tied")
    store = torch_store(replica, single_node=True)
    spec = read_spec(path)
    block_bytes = spec.layers * 2 * 32 * max(1, spec.kv_heads // tp) * spec.head_dim * 4
    config = RolloutConfig(
        backend=f"vllm:d{world.size // tp}t{tp}", kv_cache_gib=KV_BLOCKS * block_bytes / 2**30, max_num_seqs=12
    )
    with left_by_a_killed_job(store.port, tp, replica.rank):
        engine = Engine(spec, path, config, max_model_len=96, seed=1, tp_rank=replica.rank, store=store)
    check_no_names(tp)
    came = run(engine, model)
    everyone = world.allgather([(name, *(array.tobytes() for array in arrays)) for name, *arrays in came])
    if world.rank == 0:
        for rank, other in enumerate(everyone):
            assert other == everyone[0], f"rank {rank} emitted other bits than rank 0"
        check(came, model)
        print("ok", flush=True)
    world.Barrier()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
