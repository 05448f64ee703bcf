"""The inference engine: vLLM in this process, stepped by hand by the rollout loop.

One `Engine` is one rank of one replica; with tp > 1 every rank of the replica makes the
same calls in the same order (the leader's decisions, shared by the caller), and all then
produce the same tokens. It starts with dummy weights: every version, the first included,
arrives through `update`. Promises:

- each generated token carries the log-probability of the distribution that it was sampled
  from (after temperature; vLLM's `processed_logprobs`) and the version that made it;
- what a request draws depends on its seed, its prompt and the weights, not on the batch;
- KV is shared between requests of one version only (`cache_salt`), and `pause` drops it all.

It knows no MPI, no ordinals and no rewards. Shapes: P prompt, T new tokens, S probe tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_hpc.config import ConfigError, RolloutConfig
from areal_hpc.layout.boxes import Box
from areal_hpc.layout.spec import ModelSpec
from areal_hpc.rollout.build import build

if TYPE_CHECKING:
    from torch.distributed import Store

    from areal_hpc.rollout.weights import Receive

PROBE = "probe"  # request id of the probe
UNVERSIONED = -1  # the dummy weights' version


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A sample that ended. tokens_T int32 (a stop token included), logp_T float32 (nats,
    of the sampling distribution), version_T int32; `finish` is "stop" or "length"."""

    request_id: str
    tokens_T: np.ndarray
    logp_T: np.ndarray
    version_T: np.ndarray
    finish: str


@dataclass(slots=True, eq=False)
class _Sample:
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)

    def finish(self, request_id: str, reason: str) -> Finished:
        arrays = (np.array(self.tokens, np.int32), np.array(self.logp, np.float32), np.array(self.version, np.int32))
        return Finished(request_id, *arrays, reason)


class Engine:
    """vLLM on one rank of a replica. See the module's docstring for what it promises.

    path: the Hugging Face directory, read for `config.json` alone. max_model_len: longest
    prompt + answer, in tokens. seed: vLLM's own; samples bring theirs. store: the replica's
    torch TCPStore (None when tp is 1). device: index of the accelerator among the visible
    ones. Raises ConfigError naming the key for lengths that the model or its KV memory cannot have.
    `facts`: versions and choices of vLLM that the draws depend on, for the run's records.
    """

    def __init__(
        self,
        spec: ModelSpec,
        path: str | Path,
        config: RolloutConfig,
        *,
        max_model_len: int,
        seed: int,
        tp_rank: int = 0,
        store: Store | None = None,
        device: int = 0,
    ) -> None:
        if max_model_len > spec.max_position:
            raise ConfigError(
                f"rollout.max_model_len={max_model_len}: the model has positions for {spec.max_position} tokens"
            )
        self.max_model_len = max_model_len
        self.version = UNVERSIONED
        self.capacity = config.max_num_seqs
        self.tokens = 0  # generated so far
        self._samples: dict[str, _Sample] = {}
        self._probe_logp: np.ndarray | None = None
        self._probe_tokens = 0  # of the probe under way
        self._paused = False
        self._admitted = 0
        self._eos = list(spec.eos_ids)
        self._client, self.binding, self.facts = build(
            spec, path, config, max_model_len=max_model_len, seed=seed, tp_rank=tp_rank, store=store, device=device
        )
        self._set_version(UNVERSIONED)
        self._warm_up()

    # -- requests ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Samples admitted and not finished; the probe is not counted."""
        return len(self._samples)

    @property
    def room(self) -> int:
        """Samples that `add` still takes: at most `rollout.max_num_seqs` run at once."""
        return self.capacity - len(self._samples)

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._samples) or self._probe_tokens > 0

    def add(
        self,
        request_id: str,
        prompt_P: Sequence[int],
        *,
        seed: int,
        max_new_tokens: int,
        temperature: float = 1.0,
        ignore_eos: bool = False,
    ) -> None:
        """Admit one sample under the present version. While paused it waits for `resume`.

        Raises ValueError naming the request when its id is taken, the replica is full, or
        prompt + new tokens exceed max_model_len.
        """
        if request_id in self._samples or request_id == PROBE:
            raise ValueError(f"request {request_id}: the engine has a request of this id")
        if self.room <= 0:
            raise ValueError(f"request {request_id}: the replica is full with {self.running} samples (max_num_seqs)")
        if not len(prompt_P) or max_new_tokens < 1 or len(prompt_P) + max_new_tokens > self.max_model_len:
            raise ValueError(
                f"request {request_id}: a prompt of {len(prompt_P)} and {max_new_tokens} new tokens; both must be "
                f"at least 1 and their sum at most max_model_len={self.max_model_len}"
            )
        self._samples[request_id] = _Sample()
        self._admit(
            request_id,
            prompt_P,
            seed=seed,
            max_tokens=max_new_tokens,
            temperature=temperature,
            stop_token_ids=[] if ignore_eos else self._eos,
            logprobs=0,
        )

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these samples; ids that the engine does not have are ignored."""
        known = [request_id for request_id in request_ids if self._samples.pop(request_id, None) is not None]
        self._client.abort_requests(known)

    def step(self) -> list[Finished]:
        """One engine step; the samples that ended in it.

        Between `resume` and the probe's result the caller withholds what it returns.
        Raises RuntimeError while paused.
        """
        if self._paused:
            raise RuntimeError(f"step of a paused engine (version {self.version}): call resume first")
        outputs = self._client.get_output()
        finished = []
        for output in outputs.outputs:
            if output.request_id == PROBE:
                self._probe_logp = output.new_prompt_logprobs_tensors.logprobs[:, 0].numpy().copy()
                self._probe_tokens = 0
                continue
            sample = self._samples[output.request_id]
            sample.tokens += output.new_token_ids
            self.tokens += len(output.new_token_ids)
            sample.logp.append(output.new_logprobs.logprobs[0, 0])
            sample.version.append(int(outputs.weight_version))
            if output.finish_reason is not None:
                del self._samples[output.request_id]
                finished.append(sample.finish(output.request_id, str(output.finish_reason)))
        return finished

    # -- versions ---------------------------------------------------------------------------

    @property
    def boxes(self) -> list[Box]:
        """What this rank needs of a version, in the order of the views that `receive` is given."""
        return self.binding.boxes

    def pause(self) -> None:
        """Stop between two steps: samples stay, all KV is dropped, no step until `resume`."""
        self._client.engine_core.pause_scheduler("keep", clear_cache=True)
        self._paused = True

    def resume(self) -> None:
        """Go on: unfinished samples compute their KV again, under the present weights."""
        self._client.engine_core.resume_scheduler()
        self._paused = False

    def update(self, version: int, receive: Receive) -> None:
        """Load one version, while paused: `receive(views)` fills the views, then the modules pack.

        Commits `version` on success. What `receive` raises passes through and leaves a model
        that must not run. Raises RuntimeError when the engine is not paused.
        """
        if not self._paused:
            raise RuntimeError(f"update to version {version} of a running engine: call pause first")
        self._client.collective_rpc("start_weight_update")
        self._client.collective_rpc("update_weights", args=({"receive": receive},))
        self._client.collective_rpc("finish_weight_update")
        self._set_version(version)

    # -- the probe --------------------------------------------------------------------------

    def probe_start(self, tokens_S: Sequence[int]) -> None:
        """Ask for the log-probabilities of fixed tokens at temperature 1, the prefix cache not read.

        It takes part in the next step, ahead of all samples, on a seat of its own.
        Raises ValueError when one is under way or S is not from 2 to max_model_len - 1.
        """
        if self._probe_tokens:
            raise ValueError(f"probe of version {self.version}: the one before has not ended")
        if not 2 <= len(tokens_S) < self.max_model_len:
            raise ValueError(f"probe of {len(tokens_S)} tokens: expected from 2 to {self.max_model_len - 1}")
        self._probe_tokens = len(tokens_S)
        self._probe_logp = None
        self._admit(PROBE, tokens_S, priority=-1, seed=0, max_tokens=1, prompt_logprobs=0)

    def probe_result(self) -> np.ndarray | None:
        """float32 [S - 1]: log p(token s | those before it) for s from 1; given once, None until then."""
        result, self._probe_logp = self._probe_logp, None
        return result

    def close(self) -> None:
        """Free the model and its caches. The torch group stays: it belongs to the process."""
        self._client.shutdown()

    # -- inside -----------------------------------------------------------------------------

    def _set_version(self, version: int) -> None:
        self.version = version
        self._client.set_weight_version(str(version))

    def _admit(self, request_id: str, prompt: Sequence[int], priority: int = 0, **sampling: Any) -> None:
        """Hand a request to vLLM's scheduler. Its order is by (priority, arrival), and the arrival is
        a count, not a time: the ranks of a replica must decide alike."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._admitted += 1
        self._client.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=[int(token) for token in prompt],
                mm_features=None,
                sampling_params=SamplingParams(detokenize=False, **sampling),
                pooling_params=None,
                arrival_time=float(self._admitted),
                lora_request=None,
                cache_salt=str(self.version),
                data_parallel_rank=None,
                priority=priority,
            )
        )

    def _warm_up(self) -> None:
        """Two tokens and a probe on the dummy weights: what is loaded or compiled at first use is so now."""
        self.add("warm-up", [0, 0], seed=0, max_new_tokens=2, ignore_eos=True)
        self.probe_start([0, 0])
        while self.busy:
            self.step()
        self.probe_result()
        self._client.reset_prefix_cache()
        self.tokens = 0
