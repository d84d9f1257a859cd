"""Runs vLLM (0.26 to 0.33) in this process as the rollout engine, and spreads a generation over the
engines of all ranks.

When the engine sleeps, it frees the memory of its weights and KV cache for the policy's update.
When it rests, between two generations with the same weights, it frees the same memory but keeps the
weights in host memory. `policy_version` is the step whose weights the engine holds.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from grpo_spmd.config.schema import ModelConfig, RolloutConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.distributed.collectives import (
    all_gather_numbers,
    any_rank,
    barrier,
    claim,
    on_first_in_group,
)
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session, engine_group
from grpo_spmd.engine.reload import DirectLoad, EngineAdapters, WeightReload
from grpo_spmd.engine.requests import (
    Capacity,
    ConversationId,
    Conversations,
    EarlyStop,
    EngineStateError,
    GenerationHooks,
    Request,
    deal,
    share_out,
)
from grpo_spmd.engine.routes import RouteRecorder, why_not_recorded
from grpo_spmd.engine.speculation import Speculation, attach_speculation
from grpo_spmd.engine.start import (
    SleepCheck,
    allocator_settings_kept,
    isolated,
    memory_taken_in_sleep,
    running_engines,
    start_vllm,
    warn_of_slow_seeds,
)
from grpo_spmd.engine.weight_map import EngineTensor, engine_tensors
from grpo_spmd.model.config_json import is_constant, load_config
from grpo_spmd.model.families.build import SavedLayout, as_config_error, keep_hf_classes
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.routing import num_experts
from grpo_spmd.observe.memory import MemoryUse, measure
from grpo_spmd.records import Completion

_log = logging.getLogger("grpo_spmd")
# The ranks of an engine agree on whether to end a generation early once in this many engine steps.
_AGREE_EVERY_STEPS = 8


class RolloutEngine:
    """Runs one vLLM engine on this rank, or on a group of consecutive ranks.

    An engine that is asleep must get these calls in order: `wake_weights`, `load_weights`,
    `wake_kv_cache`, then `generate` any number of times, then `sleep`. EngineStateError is raised
    rather than sampling with the weights of another step. On a CPU vLLM frees nothing, but the same
    order is required, so that a wrong one is found there too.
    """

    records_routes = False
    """True if completions come with their routes: the experts that the routers of an MoE chose for
    each token (`Routes`)."""
    _recorder: RouteRecorder | None = None
    _speculation: Speculation | None = None

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        max_rollout_tokens: int,
        session: Session,
        stop_token_ids: Iterable[int],
        should_abort: Callable[[], bool] = lambda: False,
        num_sequences: float = math.inf,
    ) -> None:
        """Collective. Starts the engine with dummy weights, then puts it to sleep.

        The first sync brings the real weights. `max_rollout_tokens` is the longest prompt plus the
        longest completion. `should_abort` is called before each engine step of `generate_shared`;
        once it has returned True it must always do so. `num_sequences` is the largest number of
        requests that one engine gets at a time."""
        self._rollout = rollout
        self._session = session
        self._should_abort = should_abort
        self._stop_token_ids = sorted(stop_token_ids)
        self._sleep_level = rollout.sleep_level_with(model.lora)
        self._on_cpu = session.device.type == "cpu"
        self.tp_size = rollout.engine_ranks
        # The number of this rank's engine, and this rank's position within the engine.
        self.engine_rank, self.tp_rank = divmod(session.rank, self.tp_size)
        # The ranks that share this rank's engine. None if this rank has an engine of its own.
        self._group = engine_group(self.tp_size)
        self.num_engines = session.world_size // self.tp_size
        self.policy_version: int | None = None
        self._weights_awake = True
        self._kv_cache_awake = True
        self._holds_weights = False
        # The memory that was in use before the current rest. None if the engine does not rest.
        self._use_before_rest: MemoryUse | None = None
        self._sleep_check = SleepCheck(session.device)
        # Names the queue of each call of `generate_shared`, so it must be equal on all ranks.
        self._num_shared_calls = 0
        # The pairs (temperature, top_p) of all requests since the last call of `take_sampling`.
        self._sampling: set[tuple[float, float]] = set()
        _log.info(
            "starting vLLM: %d engines of %d ranks, on %s",
            self.num_engines,
            self.tp_size,
            session.device.type,
        )
        restore_hf_classes = keep_hf_classes(model.path)
        with (
            isolated(),
            allocator_settings_kept(session.device),
            warnings.catch_warnings(),
            as_config_error(model.path, "cannot be built by vLLM"),
        ):
            # FutureWarnings here are about vLLM's own use of torch.
            warnings.simplefilter("ignore", FutureWarning)
            self._llm = start_vllm(
                model, rollout, max_rollout_tokens, session=session, num_sequences=num_sequences
            )
        self._engine = self._llm.llm_engine
        running_engines.add(self._engine)
        vllm_config = self._engine.vllm_config
        warn_of_slow_seeds(vllm_config, session.device.type)
        # GPUs may differ in free memory, and all ranks must compute the same schedule from these
        # numbers: take the minimum.
        cache = vllm_config.cache_config
        self._capacity = Capacity(
            min(all_gather_numbers(vllm_config.scheduler_config.max_num_seqs)),
            min(all_gather_numbers(cache.num_gpu_blocks * cache.block_size)),
        )
        self._model: nn.Module = self._llm.apply_model(lambda model: model)[0]
        restore_hf_classes(self._model)
        if model.router_replay:
            self._record_routes(model.path)
        if rollout.speculation is not None:
            self._speculation = attach_speculation(self._llm)
        self._reload = WeightReload(self._llm, self._model, self._on_cpu)
        self.takes_adapters = model.lora.base_stays_in_engine
        """True if a sync sends only the LoRA adapters, and the engine keeps the base weights."""
        self._adapters = (
            EngineAdapters(self._model, model.lora.rank) if self.takes_adapters else None
        )
        self.dtype: torch.dtype = self._engine.vllm_config.model_config.dtype
        """The dtype of the engine's weights."""
        self.sleep()

    def _record_routes(self, path: str) -> None:
        """Arranges that the engine records routes, the experts that an MoE's routers choose for
        each token, so that training can replay them. Does nothing for a dense model.

        On a GPU vLLM itself records them, if `recording_options` have asked it to. On a CPU a
        RouteRecorder does. If routes are not recorded, `records_routes` stays False. Then a warning
        gives the reason, except where vLLM could record routes and was not asked to."""
        hf_config = load_config(path)
        if not num_experts(hf_config):
            return
        if not self._on_cpu:
            options = getattr(self._engine.vllm_config, "aux_output_config", None)
            self.records_routes = options is not None and options.enable_return_routed_experts
            if options is None:
                _log.warning(
                    "model.router_replay: off: vLLM returns routes from version 0.32 on, with its "
                    "V2 runner, for attention models and rollout.tensor_parallel_size: 1"
                )
            return
        reason = why_not_recorded(self._llm)
        if reason is not None:
            _log.warning("model.router_replay: off, since in this engine %s", reason)
            return
        self._recorder = RouteRecorder(self._llm, hf_config)
        self.records_routes = True

    @property
    def needs_weights(self) -> bool:
        """True if a sync must send all weights, False if the engine still holds the base weights
        and needs only the adapters."""
        return not (self.takes_adapters and self._holds_weights)

    def wake_weights(self) -> None:
        """Makes vLLM allocate the memory of the weights again. If the sleep dropped the weights
        (sleep level 2), this memory holds garbage until `load_weights`."""
        self._end_rest()
        self._wake("weights")
        self._weights_awake = True
        self.policy_version = None

    def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        policy_version: int,
        direct: DirectLoad | None = None,
        gathered: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        """Collective over the engine's ranks. Replaces every weight.

        `weights` yields (name in the checkpoint, full tensor) pairs for vLLM's loader. If `direct`
        is given, it runs first: it takes its tensors from `gathered` and copies them into the
        engine, and `weights` yields the other tensors. If `takes_adapters`, all of these are the
        base weights, and `load_adapters` must follow. Raises EngineStateError if the engine is
        asleep, if requests still run, or if an engine parameter got no new values."""
        if not self._weights_awake:
            raise EngineStateError("load_weights: the engine is asleep; call wake_weights first")
        self.policy_version = None
        self._holds_weights = False
        with isolated():
            if direct is not None:
                self._llm.apply_model(lambda _: direct(gathered))
            self._reload(weights, direct.covered if direct is not None else ())
        self.reset_prefix_cache()  # it was computed with the old weights
        self._holds_weights = True
        self.policy_version = None if self.takes_adapters else policy_version

    def load_adapters(self, adapters: Mapping[str, Tensor], policy_version: int) -> None:
        """Collective over the engine's ranks. Replaces all LoRA adapters.

        `adapters` has full tensors named LAYER.lora_A.weight and LAYER.lora_B.weight; B includes
        the factor alpha / rank. Raises EngineStateError if the engine is asleep or has no base
        weights, if requests still run, or if the engine has no layer for an adapter."""
        if self._adapters is None or not (self._weights_awake and self._holds_weights):
            raise EngineStateError(
                "load_adapters: the engine is asleep or lacks the base; call wake_weights and "
                "load_weights first"
            )
        self.policy_version = None
        with isolated():
            self._adapters.load(adapters)
        self.reset_prefix_cache()
        self.policy_version = policy_version

    def reset_prefix_cache(self) -> None:
        """Collective over the engine's ranks. Drops all cached prefixes.

        Raises EngineStateError if requests still run: vLLM then only returns False."""
        if not self._llm.reset_prefix_cache():
            raise EngineStateError(
                "requests are still running, the prefix cache could not be reset"
            )

    def wake_kv_cache(self) -> None:
        """Makes vLLM allocate the memory of the KV cache again. Call it once the weight sync has
        freed its communication buffers, whose memory the cache may need."""
        self._wake("kv_cache")
        self._kv_cache_awake = True

    def sleep(self, held_bytes: int | None = None) -> dict[str, float]:
        """Frees weights and KV cache for the policy's update. Without a GPU vLLM frees nothing.

        `held_bytes` is the memory that the trainer's tensors take on the device. If it is given,
        the sleep is checked against it: returns the metrics of `SleepCheck.check`, else {}."""
        use_before = self._use_before_rest
        if self._adapters is not None:
            self._adapters.drop()
        # An engine that rests already sleeps at level 1: leave it so, even if the sleep level is 2.
        # It has no memory on the device, and waking it only to drop the weights would copy them
        # back first.
        if use_before is None:
            use_before = self._put_to_sleep(self._sleep_level)
        self._weights_awake = False
        self._kv_cache_awake = False
        self._use_before_rest = None
        self.policy_version = None
        if held_bytes is None:
            return {}
        return self._sleep_check.check(use_before, self._measure(), held_bytes)

    def rest(self) -> None:
        """Makes room on the device between two generations with the same weights.

        The weights stay in host memory, whatever the sleep level is. The rest ends with the next
        generation, `wake_weights` or `sleep`. The prefix cache is empty afterwards. Does nothing
        unless the engine is fully awake."""
        if self._weights_awake and self._kv_cache_awake and self._use_before_rest is None:
            self._use_before_rest = self._put_to_sleep(1)

    def _put_to_sleep(self, level: int) -> MemoryUse:
        """Has vLLM sleep at `level`. Returns the memory in use before the sleep.

        Raises RuntimeError if another process meanwhile took more memory than the sleep freed."""
        use_before = self._measure()
        try:
            self._llm.sleep(level=level)
        except AssertionError as error:
            used_bytes = (use_before.driver_used, self._measure().driver_used)
            text = memory_taken_in_sleep(str(error), used_bytes, self.pool_bytes())
            if text is None:
                raise
            raise RuntimeError(text) from error
        return use_before

    def _end_rest(self) -> None:
        """Wakes the engine if it rests."""
        if self._use_before_rest is not None:
            self._wake("weights", "kv_cache")
            self._use_before_rest = None

    def _wake(self, *tags: str) -> None:
        """Has vLLM allocate memory again."""
        # The memory that the update or other models freed is still in torch's cache, where vLLM's
        # pool cannot take it.
        torch.cuda.empty_cache()
        self._llm.wake_up(tags=list(tags))

    def pool_bytes(self) -> int:
        """Returns the size in bytes of the pool that vLLM frees in a sleep (weights and KV cache),
        0 on a CPU."""
        if self._on_cpu:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        return int(CuMemAllocator.get_instance().get_current_usage())

    def _measure(self) -> MemoryUse:
        """Returns the memory that is in use on this rank's device now."""
        return measure(self._session.device, self.pool_bytes())

    def tensors(self, hf_names: Collection[str], saved: SavedLayout) -> list[EngineTensor]:
        """Returns a description of each tensor of this rank's engine: which rows of which HF tensor
        it holds. All ranks return equally many, in the same order.

        `hf_names` are the names of the policy's parameters. `saved` (`Policy.saved`) has those
        parameters that checkpoints store under other names."""
        adapters = self._adapters.tensors() if self._adapters is not None else []
        return engine_tensors(self._model, hf_names, saved) + adapters

    def constants(self) -> dict[str, Tensor]:
        """Returns those parameters of this rank's engine that the policy has as constants, which
        nothing trains (`is_constant`), by HF name."""
        parameters = self._model.named_parameters()
        return {hf_name(name): values for name, values in parameters if is_constant(name)}

    def direct_load(self, names: Mapping[str, str], saved: SavedLayout) -> DirectLoad:
        """Returns a DirectLoad for this rank's engine. Call it only after a proof has passed.

        `names` maps each HF name to the name under which the tensor is gathered (`DirectLoad`)."""
        return DirectLoad(self._model, self.tensors(names, saved), names, self.dtype)

    def shutdown(self) -> None:
        """Collective. Stops vLLM, which from 0.24 on also destroys the default process group."""
        barrier()
        # From here on ranks end one by one, and the doctor would report the first ones as lost.
        doctor.stop()
        self._engine.engine_core.shutdown()
        running_engines.discard(self._engine)

    def generate(self, requests: Sequence[Request], policy_version: int) -> list[Completion]:
        """Collective over the engine's ranks, with the same requests. Returns their completions.

        On a CPU a completion depends on the weights and on the request's prompt, seed and sampling
        parameters, not on the other requests in the batch. On a GPU the batch may change the last
        bits of the logits, and thus a token, unless VLLM_BATCH_INVARIANT=1 is set. Different
        versions of vLLM sample different completions from the same seed (0.26 uses Philox, 0.33
        Murmur3). Logprobs are those of the distribution that was sampled from; for greedy decoding,
        those at temperature 1. A completion with finish_reason "stop" ends with a stop token, or
        with the token that completes one of the strings in `rollout.stop`. Raises EngineStateError
        if the engine is asleep or holds another version than `policy_version`."""
        # Each request is a conversation of one turn.
        ids = [(0, number) for number in range(len(requests))]
        hooks = GenerationHooks(lambda _, number, turns: None if turns else requests[number])
        completions = self._generate(iter([ids]), 1, policy_version, hooks)
        assert completions is not None
        return [completions[id_][0] for id_ in ids]

    def generate_shared(
        self,
        job_sizes: Sequence[int],
        hooks: GenerationHooks,
        policy_version: int,
        expected_tokens: Sequence[float] | None = None,
    ) -> dict[int, list[list[Completion]]]:
        """Collective. Samples the conversations of all jobs, shared out over all engines.

        Job j has `job_sizes[j]` >= 1 conversations, which all run on one engine. A conversation is
        one request, or several in turn. Returns the jobs that this rank's engine has finished (the
        same on all ranks of the engine): for each job number a list of conversations, each a list
        of completions. Returns {} if the generation was aborted. Raises EngineStateError as
        `generate` does.

        With `rollout.schedule: static` all jobs are dealt to engines at the start. With
        `shared_queue` an engine starts with as many jobs as it can run at once, at most its fair
        share. The other jobs are queued, and an engine claims the next one whenever it has room, so
        that short completions leave no engine idle. `expected_tokens`, by job and equal on all
        ranks, decides which jobs come first (`deal`).

        Once `should_abort` returns True on a rank, its engine drops all conversations and claims no
        more jobs. Other engines may see that later or finish first, so the caller must make all
        ranks agree that the result is void (`Preemption.guard`). Jobs that `hooks.early_stop` cuts
        short are not returned.
        """
        is_static = self._rollout.schedule == "static" or self.num_engines == 1
        num_at_once = None if is_static else self._capacity.num_requests(expected_tokens)
        max_in_flight, num_dealt = share_out(
            len(job_sizes), max(job_sizes, default=1), self.num_engines, num_at_once
        )
        schedule = deal(job_sizes, expected_tokens, num_dealt, self.num_engines)
        queue = f"jobs/{self._num_shared_calls}"
        self._num_shared_calls += 1

        def conversation_ids(jobs: Iterable[int]) -> list[ConversationId]:
            """Returns the ids of all conversations of `jobs`."""
            return [(job, number) for job in jobs for number in range(job_sizes[job])]

        def claim_batches() -> Iterator[list[ConversationId]]:
            """Collective over the engine's ranks. Yields the conversations for this engine: first
            those of its dealt jobs, then those of one claimed job at a time."""
            yield conversation_ids(schedule.dealt[self.engine_rank])
            while schedule.queued:
                claimed = self._claim(queue, len(schedule.queued))
                if claimed is None:
                    return
                yield conversation_ids([schedule.queued[claimed]])

        batches = claim_batches()
        completions = self._generate(
            batches, max_in_flight, policy_version, hooks, must_abort=self._must_abort
        )
        # Even after an early end every engine must go on claiming until it gets None, since the
        # last such claim deletes the queue from the store (`claim`). Drop these jobs.
        for _ in batches:
            pass
        by_job: dict[int, list[list[Completion]]] = {}
        for (job, _), turns in sorted((completions or {}).items()):
            by_job.setdefault(job, []).append(turns)
        return {job: turns for job, turns in by_job.items() if len(turns) == job_sizes[job]}

    def _claim(self, queue: str, num_jobs: int) -> int | None:
        """Collective over the engine's ranks. The first of them claims the next job of `queue`.

        Returns the claimed job's position in the queue, None if no job is left."""
        return on_first_in_group(partial(claim, queue, num_jobs, self.num_engines), self._group)

    def _must_abort(self, num_steps: int) -> bool:
        """Collective over the engine's ranks. Returns True on all of them if `should_abort` is True
        on one of them. Called before each engine step; several ranks agree only every few steps."""
        group = self._group
        if group is None:
            return self._should_abort()
        # The ranks of an engine make the same steps, so all of them reach `any_rank` at this one.
        return num_steps % _AGREE_EVERY_STEPS == 0 and any_rank(self._should_abort(), group)

    def _is_stopped(self, early_stop: EarlyStop, num_steps: int) -> bool:
        """Collective over the engine's ranks. Returns True on all of them if `early_stop` ends the
        generation.

        Only the engine's first rank asks `early_stop`, and only once in several steps."""
        if num_steps % _AGREE_EVERY_STEPS:
            return False
        group = self._group
        is_over = self.tp_rank == 0 and early_stop.is_over()
        return is_over if group is None else any_rank(is_over, group)

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Makes vLLM drop these requests, which must be all of its unfinished requests."""
        self._engine.abort_request(request_ids)
        core = self._engine.engine_core.engine_core
        # vLLM's model runner forgets aborted requests at the next step. With asynchronous
        # scheduling (on a GPU) a batch may still be running.
        while core.scheduler.has_requests() or getattr(core, "batch_queue", None):
            self._engine.step()

    def _generate(
        self,
        batches: Iterator[Sequence[ConversationId]],
        max_in_flight: int,
        policy_version: int,
        hooks: GenerationHooks,
        must_abort: Callable[[int], bool] = lambda num_steps: False,
    ) -> dict[ConversationId, list[Completion]] | None:
        """Samples the conversations in `batches`. Returns the completions of those that are over.

        The next batch is drawn whenever fewer than `max_in_flight` conversations are open and vLLM
        has no request waiting for room. Returns None if `must_abort`, called with the number of
        engine steps so far, returned True. Raises EngineStateError unless the engine is ready."""
        self._refuse_unless_ready(policy_version)
        self._end_rest()
        if self._recorder is not None:
            self._recorder.clear()
        conversations = Conversations(hooks, self._group, self.engine_rank)
        speculation = self._speculation
        generation: AbstractContextManager[None] = nullcontext()
        if speculation is not None:
            # The value comes from measured times, which differ between ranks. All ranks of the
            # engine must make the same drafts, so take the first rank's.
            base_rows = on_first_in_group(speculation.base_rows, self._group)
            generation = speculation.generation(base_rows, conversations.running)
        scheduler = self._engine.engine_core.engine_core.scheduler
        no_more_batches = False
        num_steps = 0
        just_finished: list[ConversationId] = []
        # On a CPU vLLM compiles a helper function for its logprobs on first use, which takes
        # seconds. Uncompiled, the function returns the same.
        stance = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
        # Rank 0 shows the progress of its own engine. disable=None is tqdm's "only on a terminal".
        bar: tqdm[Any] = tqdm(
            desc="generate",
            unit="completion",
            delay=3,
            leave=False,
            disable=True if self._session.rank else None,
        )
        with isolated(), stance, generation, bar as progress:
            while True:
                # vLLM lets requests wait if the KV cache has no room for them, even below
                # max_num_seqs. As long as some wait, leave the next batches to other engines.
                _, num_waiting = scheduler.get_request_counts()
                self._add_requests(conversations.advance(just_finished))
                while (
                    not no_more_batches
                    and not num_waiting
                    and conversations.num_open < max(max_in_flight, 1)
                ):
                    batch = next(batches, None)
                    no_more_batches = batch is None
                    self._add_requests(conversations.advance(batch or ()))
                self._add_requests(conversations.take_late_requests())
                progress.total = progress.n + conversations.num_open
                if no_more_batches and not conversations.num_open:
                    return conversations.finished()
                # While no request runs, each pass of this loop waits long for late requests, and
                # `num_steps` does not change. Pass 0, at which the ranks always communicate: they
                # do so if the number is a multiple of _AGREE_EVERY_STEPS.
                step_to_agree = num_steps if conversations.running else 0
                if must_abort(step_to_agree):
                    self._abort(list(conversations.running))
                    return None
                if hooks.early_stop is not None and self._is_stopped(
                    hooks.early_stop, step_to_agree
                ):
                    requests = scheduler.requests
                    num_tokens = [request.num_output_tokens for request in requests.values()]
                    hooks.early_stop.drop(conversations.num_tokens(num_tokens))
                    self._abort(list(conversations.running))
                    return conversations.finished()
                num_steps += 1
                if hooks.before_step is not None:
                    hooks.before_step()
                start_s = time.perf_counter()
                outputs = self._engine.step() if conversations.running else []
                if speculation is not None and conversations.running:
                    speculation.end_step(time.perf_counter() - start_s)
                just_finished = []
                for output in outputs:
                    if not output.finished:
                        continue
                    completion = self._with_routes(output, _completion(output))
                    if speculation is not None:
                        speculation.end_request(
                            output.request_id, output.prompt_token_ids, completion.token_ids
                        )
                    just_finished.append(conversations.end_turn(output.request_id, completion))
                if hooks.on_completion is not None:
                    for id_ in just_finished:
                        hooks.on_completion(*id_, conversations.completions[id_][-1])
                progress.update(len(just_finished))

    def _refuse_unless_ready(self, policy_version: int) -> None:
        """Raises EngineStateError unless the engine is awake and holds `policy_version`."""
        if not (self._weights_awake and self._kv_cache_awake):
            raise EngineStateError(
                "generate: the engine is asleep; wake_weights, load_weights and wake_kv_cache "
                "come first"
            )
        if self.policy_version != policy_version:
            raise EngineStateError(
                f"generate: the engine holds policy_version {self.policy_version}, this step needs "
                f"{policy_version}"
            )

    def take_sampling(self) -> list[tuple[float, float]]:
        """Returns the distinct (temperature, top_p) pairs of all requests since the last call."""
        sampling = sorted(self._sampling)
        self._sampling.clear()
        return sampling

    def take_speculation(self) -> Reductions:
        """Returns the metrics of speculative decoding since the last call.

        Returns {} without `rollout.speculation`, and on all but the first of the ranks that share
        an engine, so that each engine is counted once."""
        if self._speculation is None or self.tp_rank:
            return {}
        return self._speculation.take_metrics()

    def _add_requests(self, requests: Iterable[tuple[str, Request]]) -> None:
        """Adds (request id, request) pairs to vLLM's queue.

        vLLM gives each request its own generator, seeded with the request's seed, so that the order
        of requests does not change what is sampled."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rollout = self._rollout
        for request_id, request in requests:
            max_tokens = request.max_tokens or rollout.max_completion_tokens
            if request.is_rollout:
                max_tokens = min(max_tokens, rollout.max_completion_tokens)
            temperature = request.temperature
            stop = [*rollout.stop] if request.ends_at_stops else []
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=rollout.temperature if temperature is None else temperature,
                top_p=request.top_p,
                seed=request.seed,
                stop_token_ids=self._stop_token_ids,
                # vLLM looks for stop strings in the text after each token. The last token may go on
                # beyond the stop string; it is kept whole, as it was sampled.
                stop=stop,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                detokenize=bool(stop),
                # 0 asks for the logprob of the sampled token alone, None for no logprobs.
                logprobs=0 if request.is_rollout else None,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            # Read them back: vLLM raises very low temperatures to 0.01, and sets top_p to 1 for
            # greedy decoding.
            self._sampling.add((params.temperature, params.top_p))
            if self._speculation is not None:
                self._speculation.add_request(request_id, request)
            self._engine.add_request(
                request_id,
                {"prompt_token_ids": request.prompt_ids},
                params,
                lora_request=self._adapters.request if self._adapters is not None else None,
            )

    def _with_routes(self, output: Any, completion: Completion) -> Completion:
        """Returns `completion` with the routes of its tokens (the experts that the routers chose),
        if routes are recorded. `output` is vLLM's RequestOutput.

        Raises EngineStateError unless there are routes for exactly the tokens that the model
        read: the prompt and all but the last token of the completion."""
        if not self.records_routes:
            return completion
        # The last sampled token is never an input of the model, so that it has no route.
        num_tokens = len(output.prompt_token_ids) + len(completion.token_ids) - 1
        if self._recorder is not None:
            routes = self._recorder.take(output.request_id, num_tokens)
        else:
            routes = output.outputs[0].routed_experts
        # Only rollouts that train have logprobs. The routes of evaluations and judges would wait in
        # memory for nothing.
        if not completion.logprobs:
            return completion
        if routes is None or len(routes) != num_tokens:
            raise EngineStateError(
                f"generate: vLLM returned routes of {0 if routes is None else len(routes)} tokens "
                f"where it read {num_tokens}; set model.router_replay=false"
            )
        return replace(completion, routes=routes)


def _completion(output: Any) -> Completion:
    """Returns the completion in vLLM's RequestOutput. Its logprobs are [] if none were asked
    for."""
    sampled = output.outputs[0]
    token_ids = list(sampled.token_ids)
    logprobs = [] if sampled.logprobs is None else list(sampled.logprobs.logprobs)
    assert len(logprobs) in (0, len(token_ids)), (len(token_ids), len(logprobs))
    return Completion(token_ids, logprobs, sampled.finish_reason)
