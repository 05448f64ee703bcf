"""Megatron-core's GPT from a ModelSpec, on CPU and GPU alike: groups, module, gradient buffers.

Ranks of the trainer communicator are placed TP fastest, then DP, then PP (design, section
4): rank = tp + TP * (dp + DP * pp). Every parameter is zero until `TrainerBinding` loads it;
the rows that pad the vocabulary stay zero for good, since they get no gradient.

The same layers, and so the same parameter names, run everywhere: Megatron's local layer
spec, with two parts exchanged where Transformer Engine is installed (norm and core
attention). Limits: dense models, no context, expert or sequence parallelism, one model
chunk per stage.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal_hpc.config import ActorConfig, Dtype, Parallel
from areal_hpc.layout.megatron import padded_vocab, trainer_shapes
from areal_hpc.layout.spec import ModelSpec
from areal_hpc.trainer import cpu
from areal_hpc.trainer.attention import RunAttention
from areal_hpc.trainer.optimizer import Optimizer

TRANSFORMER_ENGINE = HAVE_TE and torch.cuda.is_available()


@dataclass(frozen=True)
class Groups:
    """This rank's place in the trainer, and the reductions over all of it."""

    parallel: Parallel
    rank: int
    dp: int
    tp: int
    pp: int
    device: torch.device

    @property
    def first_stage(self) -> bool:
        return self.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.pp == self.parallel.pp - 1

    def all(self, values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        """Collective over all trainer ranks: element-wise reduction of `values`, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()

    def over_dp(self, values: list[float]) -> list[float]:
        """Collective over the DP ranks of this (tp, pp): element-wise sum of `values`, in fp64."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
        return tensor.tolist()

    def close(self) -> None:
        """Collective over all trainer ranks: gives up Megatron's and torch's groups."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_groups(
    role_comm: Any, parallel: Parallel, store: dist.Store, deadline_s: float = 1800.0, local_rank: int = 0
) -> Groups:
    """Collective over `role_comm` (the trainer ranks): torch.distributed and Megatron's groups.

    `store` is the one that world.torch_store gives; gloo on the CPU, NCCL on GPUs, where the
    rank takes GPU `local_rank` of those that it sees (modulo their number). A collective that
    waits longer than `deadline_s` raises on its rank. Raises ValueError when the
    communicator's size is not that of `parallel`.
    """
    if role_comm.size != parallel.size:
        raise ValueError(
            f"trainer {parallel}: dp {parallel.dp} * tp {parallel.tp} * pp {parallel.pp} = {parallel.size} ranks, "
            f"the trainer communicator has {role_comm.size}"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = cpu.device()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=role_comm.rank,
        world_size=role_comm.size,
        timeout=datetime.timedelta(seconds=deadline_s),
    )
    with cpu.emulation():
        parallel_state.initialize_model_parallel(
            parallel.tp,
            parallel.pp,
            order="tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
            distributed_timeout_minutes=max(1, round(deadline_s / 60)),
        )
    return Groups(
        parallel,
        role_comm.rank,
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        device,
    )


class PackedGPT(GPTModel):
    """GPTModel for `Packed` microbatches; two steps of its forward differ.

    Rotary angles are taken per token once, not per sequence in each layer (Transformer
    Engine's own format "thd" keeps its fused kernel). The output layer sees only the rows
    whose next token is asked for: prompts cost no logits.
    """

    def _preprocess(self, *args: Any, **kwargs: Any) -> tuple:
        hidden, rotary, *rest = super()._preprocess(*args, **kwargs)
        packed = kwargs["packed_seq_params"]
        if packed.qkv_format != "thd":
            rotary = rotary[packed.position_T]
        return hidden, rotary, *rest

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.post_process:
            hidden_states = hidden_states.index_select(0, kwargs["packed_seq_params"].rows_A)
        return super()._postprocess(hidden_states, **kwargs)


def _transformer_config(spec: ModelSpec, actor: ActorConfig, parallel: Parallel) -> TransformerConfig:
    on_gpu = cpu.device().type == "cuda"
    dtype = torch_dtype(actor)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        qk_layernorm=spec.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,
        # a microbatch's length differs from the next one's; alltoall is what the check of it wants
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # the loss comes divided by the minibatch's tokens over all DP ranks: nothing rescales it
        calculate_per_token_loss=True,
        # fusions that are compiled at run time, or need Apex
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **(recompute if actor.activation_recompute else {}),
    )


def _layer_spec(spec: ModelSpec) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
    attention = layer.submodules.self_attention.submodules
    if not TRANSFORMER_ENGINE:
        attention.core_attention = RunAttention
        return layer
    attention.core_attention = TEDotProductAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TENorm
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = TENorm
    return layer


def torch_dtype(actor: ActorConfig) -> torch.dtype:
    return torch.bfloat16 if actor.dtype is Dtype.bfloat16 else torch.float32


class Model:
    """One rank's part of the model: `module` (its pipeline stage), inside `ddp` (gradient
    buffers), with its `optimizer`.

    Collective over the trainer ranks. Raises RuntimeError naming the parameter when a live
    shape is not the one that layout.megatron expects: then no box of it could be trusted.
    """

    def __init__(self, spec: ModelSpec, actor: ActorConfig, groups: Groups, seed: int) -> None:
        parallel = groups.parallel
        self.spec, self.actor, self.groups = spec, actor, groups
        self.packed_format = "thd" if TRANSFORMER_ENGINE else "sbhd"
        self.distributed_optimizer = actor.distributed_optimizer and parallel.dp > 1
        torch.manual_seed(seed)
        with cpu.emulation():
            self.config = _transformer_config(spec, actor, parallel)
            # All-reduce and scatter only: the loss is divided where it is computed
            self.config.finalize_model_grads_func = lambda chunks, _tokens, **kwargs: finalize_model_grads(
                chunks, None, **kwargs
            )
            self.module = PackedGPT(
                self.config,
                _layer_spec(spec),
                vocab_size=padded_vocab(spec, parallel.tp),
                max_sequence_length=spec.max_position,
                pre_process=groups.first_stage,
                post_process=groups.last_stage,
                share_embeddings_and_output_weights=spec.tied,
                position_embedding_type="rope",
                rotary_base=spec.rope_theta,
            ).to(device=groups.device, dtype=self.config.params_dtype)  # torch's norms are made in fp32
            self._prepare_parameters()
            self._check_shapes()
            self.ddp = DistributedDataParallel(
                self.config,
                DistributedDataParallelConfig(
                    use_distributed_optimizer=self.distributed_optimizer, grad_reduce_in_fp32=True
                ),
                self.module,
            )
        self.optimizer = Optimizer(self, actor.optimizer)

    def _prepare_parameters(self) -> None:
        """Zeros everywhere, and what Megatron's own initialisation would have marked.

        Every matrix is split over TP; a weight without the mark counts as a replica of TP
        rank 0's, and the gradient norm would leave out all others' (megatron-core 0.16.1).
        """
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.zero_()
                if parameter.ndim == 2:
                    across = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                    set_tensor_model_parallel_attributes(parameter, True, 1 if across else 0, 1)

    def _check_shapes(self) -> None:
        g = self.groups
        expected = dict(trainer_shapes(self.spec, g.parallel, g.tp, g.pp))
        live = {name: tuple(p.shape) for name, p in self.module.named_parameters()}
        if live != expected:
            wrong = sorted(n for n in live.keys() | expected.keys() if live.get(n) != expected.get(n))
            raise RuntimeError(
                f"trainer {g.parallel}, tp {g.tp}, pp {g.pp}: Megatron's {wrong[0]} has shape {live.get(wrong[0])}, "
                f"layout/megatron.py expects {expected.get(wrong[0])} ({len(wrong)} parameters differ)"
            )
