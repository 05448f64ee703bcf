"""Builds vLLM for one rank of a replica: its environment, its settings and why, its binding."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from areal_hpc.config import RolloutConfig, require
from areal_hpc.layout.spec import ModelSpec
from areal_hpc.layout.vllm import kv_heads

if TYPE_CHECKING:
    from torch.distributed import Store
    from vllm.v1.engine.core_client import InprocClient

    from areal_hpc.rollout.binding import RolloutBinding

CPU_BLOCK = 32  # tokens of a KV block; the CPU kernels want a multiple of 32
STEP_TOKENS = 8192  # tokens of one engine step at most, if the model's longest sample is not longer


def build(
    spec: ModelSpec,
    path: str | Path,
    config: RolloutConfig,
    *,
    max_model_len: int,
    seed: int,
    tp_rank: int,
    store: Store | None,
    device: int,
) -> tuple[InprocClient, RolloutBinding, dict[str, str]]:
    """vLLM's engine in this process with dummy weights, its binding, and facts for the run's records.

    Collective over the ranks of the replica. The arguments are those of `Engine`.
    """
    if not torch.cuda.is_available():
        _check_cache(spec, config, max_model_len)
    environment()
    import vllm
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.core_client import InprocClient

    from areal_hpc.rollout.binding import RolloutBinding
    from areal_hpc.rollout.executor import forget, join, replica_executor
    from areal_hpc.rollout.weights import BACKEND

    tp, on_cpu = config.parallel.tp, current_platform.is_cpu()
    memory: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_utilization}
    if on_cpu:
        memory = {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30), "block_size": CPU_BLOCK}
    name = join(store, tp, tp_rank)
    vllm_config = EngineArgs(
        model=str(path),
        skip_tokenizer_init=True,
        generation_config="vllm",
        load_format="dummy",
        dtype=config.dtype.value,
        seed=seed % 2**32,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs + 1,  # the probe's seat
        # A seeded request whose prefill is cut in two kills the CPU engine (vLLM 0.32, V1 model
        # runner: "CPU Generator does not use offset"); so no step may cut one.
        enable_chunked_prefill=not on_cpu,
        max_num_batched_tokens=max(max_model_len, STEP_TOKENS),
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy="priority",
        async_scheduling=False,  # it would blur which version made a token
        enforce_eager=config.enforce_eager or on_cpu,
        logprobs_mode="processed_logprobs",
        tensor_parallel_size=tp,
        distributed_executor_backend="external_launcher",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        disable_log_stats=True,
        **memory,
    ).create_engine_config()
    client = InprocClient(vllm_config, replica_executor(name, tp_rank, device), log_stats=False)
    forget(name)
    runner = client.engine_core.model_executor.driver_worker.worker.model_runner
    facts = {"vllm": vllm.__version__, "model_runner": f"{type(runner).__module__}.{type(runner).__name__}"}
    binding = RolloutBinding(
        runner.get_model(), spec, tp=tp, tp_rank=tp_rank, dtype=vllm_config.model_config.dtype, device=runner.device
    )
    client.collective_rpc("init_weight_transfer_engine", args=({"binding": binding},))
    return client, binding, facts


def _check_cache(spec: ModelSpec, config: RolloutConfig, max_model_len: int) -> None:
    """That the KV memory of a rank holds the longest sample. vLLM takes one block for itself."""
    blocks = -(-max_model_len // CPU_BLOCK) + 1
    heads, width = kv_heads(spec, config.parallel.tp), getattr(torch, config.dtype.value).itemsize
    need = 2 * spec.layers * heads * spec.head_dim * width * blocks * CPU_BLOCK / 2**30
    require(
        config.kv_cache_gib >= need,
        "rollout.kv_cache_gib",
        config.kv_cache_gib,
        f"at least {need:.3g}: what one sample of {max_model_len} tokens takes on each rank",
    )


def environment() -> None:
    """What vLLM reads from the environment when it is imported; set before that, by us alone.

    The engine lives in this process, reaches no network, reports no usage, and logs warnings
    and errors to stderr.
    """
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_LOGGING_STREAM="ext://sys.stderr",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
    )
    if not torch.cuda.is_available():
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # ranks share the cores; the launcher binds them
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_gib, in whole GiB
        # Sampling helpers are under torch.compile: without this the first step runs a C++ compiler,
        # for seconds and after MPI_Init, and gains nothing.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # oneDNN keeps a compiled kernel for each shape (its default: 1024), and steps differ in their number of
        # tokens: hundreds of MB over a run's first thousand steps. 64 cost no speed.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
