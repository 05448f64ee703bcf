"""How vLLM joins the ranks of one replica: their torch group, and the executor that names it.

The group is made before vLLM starts, over a store whose port its owner holds; vLLM takes an
initialised group as its own. With the stock external launcher (`env://`, vLLM 0.32) all
replicas of a node would take one name in shared memory, and the second to start fails with
errno 17: hence a name of its own for each replica.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher


def join(store: dist.Store | None, tp: int, tp_rank: int) -> str:
    """Make the replica's torch group (collective over the replica) and return its name.

    `store` is the replica's TCPStore; a replica of one rank (tp = 1) needs none. The name
    is unique on this node for as long as the store's owner holds its port. A group that
    this process already has is used again; raises RuntimeError when its size is not `tp`.
    """
    if store is None and tp > 1:
        raise ValueError(f"a replica of tp={tp} needs the torch store that its ranks share; got none")
    if not dist.is_initialized():
        shared = dist.HashStore() if store is None else dist.PrefixStore("vllm", store)
        backend = current_platform.dist_backend
        dist.init_process_group(backend, store=shared, rank=tp_rank, world_size=tp)
    if dist.get_world_size() != tp:
        raise RuntimeError(f"this process has a torch group of {dist.get_world_size()} ranks; its replica has tp={tp}")
    return f"tcp://replica:{os.getpid() if store is None else store.port}"


def replica_executor(name: str, tp_rank: int, device: int) -> type[ExecutorWithExternalLauncher]:
    """The executor class of this rank: one worker, here, in the replica's group `name`.

    vLLM names the group's shared memory by what follows the last colon of `name`.
    `device` is the accelerator's index among those visible to this process.
    """

    class ReplicaExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            return name, tp_rank, device

    return ReplicaExecutor
