"""How vLLM joins the ranks of one replica: their torch group, and the executor that names it.

The group is made before vLLM starts, over a store whose port its owner holds; vLLM takes an
initialised group as its own. On CPUs vLLM (0.32) names the group's shared memory by how the
group was found: by the address of its store, and with the stock external launcher (`env://`)
alike for all replicas of a node. It takes the names away again only in a process that exits.
Where a name is left by a job that was killed, or is another replica's, the start fails with
errno 17: hence a name that nobody else ever had, and one that is gone once it has served.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import torch.distributed as dist
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


def join(store: dist.Store | None, tp: int, tp_rank: int) -> str:
    """Make the replica's torch group (collective over the replica) and return its name.

    `store` is the replica's TCPStore; a replica of one rank (tp = 1) needs none. The name is
    drawn by the first rank that asks; no other group has it, whether it lives or was killed.
    A group that this process already has is used again; raises RuntimeError when its size is not `tp`.
    """
    if store is None and tp > 1:
        raise ValueError(f"a replica of tp={tp} needs the torch store that its ranks share; got none")
    if not dist.is_initialized():
        shared = dist.HashStore() if store is None else dist.PrefixStore("vllm", store)
        backend = current_platform.dist_backend
        dist.init_process_group(backend, store=shared, rank=tp_rank, world_size=tp)
    if dist.get_world_size() != tp:
        raise RuntimeError(f"this process has a torch group of {dist.get_world_size()} ranks; its replica has tp={tp}")
    drawn = uuid.uuid4().hex
    return f"tcp://replica:{drawn if store is None else store.compare_set('name', '', drawn).decode()}"


def forget(name: str) -> None:
    """Take the shared memory of the replica's group `name` out of this node's names.

    To be called when vLLM has started: by then every rank has mapped it, and whatever ends
    the job from here on leaves nothing of it.
    """
    for path in Path("/dev/shm").glob(f"{name.rpartition(':')[2]}-*"):
        path.unlink(missing_ok=True)  # another rank's is the same work


def replica_executor(name: str, tp_rank: int, device: int) -> type[ExecutorWithExternalLauncher]:
    """The executor class of this rank: one worker, here, in the replica's group `name`.

    vLLM names the group's shared memory by what follows the last colon of `name`.
    `device` is the accelerator's index among those visible to this process.
    """

    class ReplicaExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return name, tp_rank, device

    return ReplicaExecutor
