"""The rollout engine: vLLM (0.26 to 0.33) inside this process, its states, and generations shared out over engines."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from grpo_spmd.config.schema import ModelConfig, RolloutConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.distributed.collectives import any_rank, barrier, on_first_in_group
from grpo_spmd.distributed.session import Session
from grpo_spmd.distributed.store import claim
from grpo_spmd.engine.conversations import Conversations
from grpo_spmd.engine.direct_load import DirectLoad
from grpo_spmd.engine.gather import Piece
from grpo_spmd.engine.leftovers import forget_engine, note_engine
from grpo_spmd.engine.reload import EngineAdapters, WeightReload
from grpo_spmd.engine.requests import (
    Answers,
    EngineStateError,
    Finished,
    NextRequest,
    Place,
    Race,
    Request,
    deal,
    share_out,
)
from grpo_spmd.engine.start import (
    SleepCheck,
    allocator_settings_kept,
    isolated,
    start_vllm,
    warn_of_slow_seeds,
)
from grpo_spmd.engine.weight_map import EngineTensor, engine_tensors
from grpo_spmd.model.families.build import keep_hf_classes, one_line_for
from grpo_spmd.observe.memory import MemoryUse, measure
from grpo_spmd.records import Completion

_log = logging.getLogger("grpo_spmd")
_AGREE_EVERY_STEPS = (
    8  # ranks that share an engine ask each other this often whether to end a generation early
)


class RolloutEngine:
    """One vLLM engine on this rank, or on a group of `tensor_parallel_size` consecutive ranks.

    States: asleep -> `wake_weights` -> `load_weights` -> `wake_kv_cache` -> `generate` -> `sleep`. It raises
    EngineStateError rather than answer from weights of another step. On a CPU vLLM takes the same calls in the same
    order, so that a mistake shows there too, but frees nothing.
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
        `max_rollout_tokens`: longest prompt plus longest completion. `should_abort` is asked before each step of a
        shared generation; once True it must stay so."""
        self.policy_version: int | None = None
        self._weights_awake, self._kv_cache_awake, self._holds_weights = True, True, False
        self._rested_from: MemoryUse | None = (
            None  # what was in use before the rest; None: it does not rest
        )
        self._rollout, self._session, self._should_abort = rollout, session, should_abort
        self._sleep_level, self._stop_token_ids = (
            rollout.sleep_level_with(model.lora),
            sorted(stop_token_ids),
        )
        self._sleep_check = SleepCheck(session.device, tp_size=rollout.tensor_parallel_size)
        self._num_shared_calls = 0  # the same on all ranks: it names the queue of a call
        self.tp_size = rollout.tensor_parallel_size
        self.engine_rank, self.tp_rank = divmod(session.rank, self.tp_size)
        self.num_engines = session.world_size // self.tp_size
        has_group = session.engine_group is not None
        assert has_group == (self.tp_size > 1), (
            "start_session was given another tensor_parallel_size"
        )
        self._on_cpu = session.device.type == "cpu"
        _log.info(
            "starting vLLM: %d engines of %d ranks, on %s",
            self.num_engines,
            self.tp_size,
            session.device.type,
        )
        put_back_hf_classes, by_vllm = (
            keep_hf_classes(model.path),
            one_line_for(model.path, "cannot be built by vLLM"),
        )
        with (
            isolated(),
            allocator_settings_kept(session.device),
            warnings.catch_warnings(),
            by_vllm,
        ):
            warnings.simplefilter("ignore", FutureWarning)  # about vLLM's own use of torch
            self._llm = start_vllm(model, rollout, max_rollout_tokens, session)
        self._engine = self._llm.llm_engine
        note_engine(self._engine)
        warn_of_slow_seeds(self._engine.vllm_config, session.device.type)
        self._model: nn.Module = self._llm.apply_model(lambda model: model)[0]
        put_back_hf_classes(self._model)
        self._reload = WeightReload(self._llm, self._model, self._on_cpu)
        self._adapters = (
            EngineAdapters(self._model, model.lora.rank)
            if model.lora.base_stays_in_engine
            else None
        )
        self.takes_adapters = (
            self._adapters is not None
        )  # by themselves (`load_adapters`), onto a base that stays
        self.dtype: torch.dtype = (
            self._engine.vllm_config.model_config.dtype
        )  # of the weights that it holds
        self.sleep()

    @property
    def needs_weights(self) -> bool:
        """Whether a sync must bring all weights, since the engine does not hold a base that stays."""
        return not (self.takes_adapters and self._holds_weights)

    def wake_weights(self) -> None:
        """Bring back the memory of the weights; what is in it means nothing before the next `load_weights`."""
        self._end_rest()
        torch.cuda.empty_cache()  # what the update freed: while torch caches it, vLLM's pool finds no room
        self._llm.wake_up(tags=["weights"])
        self._weights_awake, self.policy_version = True, None

    def load_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        policy_version: int,
        direct: DirectLoad | None = None,
        pieces: Iterable[Piece] = (),
    ) -> None:
        """Collective over the engine's ranks. Replace every weight by (checkpoint name, full tensor) pairs, or the base
        where `load_adapters` is to follow; those that `direct` copies first, from `pieces`. Raises EngineStateError:
        asleep, requests still running, or an engine parameter that was not covered."""
        if not self._weights_awake:
            raise EngineStateError("load_weights: the engine is asleep; call wake_weights first")
        self.policy_version, self._holds_weights = None, False
        with isolated():
            if direct is not None:
                self._llm.apply_model(lambda _: direct(pieces))
            self._reload(weights, direct.covered if direct is not None else ())
        self.reset_prefix_cache()  # it holds keys and values of the old weights
        self._holds_weights = True
        self.policy_version = None if self.takes_adapters else policy_version

    def load_adapters(self, adapters: Mapping[str, Tensor], policy_version: int) -> None:
        """Collective over the engine's ranks. Replace all adapters by full tensors LAYER.lora_A.weight and
        LAYER.lora_B.weight (which has the factor alpha / rank in it). Raises EngineStateError: asleep, without the
        base, requests still running, or an adapter without a place here."""
        if self._adapters is None or not (self._weights_awake and self._holds_weights):
            text = "load_adapters: the engine is asleep or lacks the base; call wake_weights and load_weights first"
            raise EngineStateError(text)
        self.policy_version = None
        with isolated():
            self._adapters.load(adapters)
        self.reset_prefix_cache()
        self.policy_version = policy_version

    def reset_prefix_cache(self) -> None:
        """Collective over the engine's ranks. Forget all cached prefixes. Raises EngineStateError: requests run."""
        if not self._llm.reset_prefix_cache():  # says False, and raises nothing, while requests run
            raise EngineStateError(
                "requests are still running, the prefix cache could not be reset"
            )

    def wake_kv_cache(self) -> None:
        """Bring back the memory of the KV cache: after the sync, whose buckets are free again."""
        torch.cuda.empty_cache()
        self._llm.wake_up(tags=["kv_cache"])
        self._kv_cache_awake = True

    def sleep(self, held_bytes: int | None = None) -> dict[str, float]:
        """Free weights and KV cache for the policy's update; without a GPU vLLM only takes note of it. Returns the
        metrics of SleepCheck, given `held_bytes`, what the trainer itself holds."""
        before = self._rested_from if self._sleep_level == 1 else None
        sleeps_already = (
            before is not None
        )  # a rest is that sleep; the other one drops only what is on the device
        if before is None:
            self._end_rest()
            before = measure(self._session.device, self.pool_bytes())
        if self._adapters is not None:
            self._adapters.drop()
        if not sleeps_already:
            self._llm.sleep(level=self._sleep_level)
        self._weights_awake, self._kv_cache_awake, self._rested_from = False, False, None
        self.policy_version = None
        if held_bytes is None:
            return {}
        return self._sleep_check.check(
            before, measure(self._session.device, self.pool_bytes()), held_bytes
        )

    def rest(self) -> None:
        """Make room on the device between two generations by the same weights, which wait in host memory, whatever
        `sleep_level` is. The next generation ends it, with an empty prefix cache, as does a sleep."""
        if self._weights_awake and self._kv_cache_awake and self._rested_from is None:
            self._rested_from = measure(self._session.device, self.pool_bytes())
            self._llm.sleep(level=1)

    def _end_rest(self) -> None:
        if self._rested_from is not None:
            torch.cuda.empty_cache()  # of the other model
            self._llm.wake_up(tags=["weights", "kv_cache"])
            self._rested_from = None

    def pool_bytes(self) -> int:
        """Bytes of vLLM's sleep pool (weights, KV cache), awake or asleep; 0 without a GPU."""
        if self._on_cpu:
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        return int(CuMemAllocator.get_instance().get_current_usage())

    def tensors(self, hf_names: Collection[str]) -> list[EngineTensor]:
        """Where the rows of HF's tensors are in this rank's engine; the same in number and kind on all ranks."""
        return engine_tensors(self._model, hf_names) + (
            self._adapters.tensors() if self._adapters is not None else []
        )

    def direct_load(self, names: Mapping[str, str]) -> DirectLoad:
        """To be made when a proof has passed. `names`: of the policy's tensors, by each name that they have."""
        return DirectLoad(self._model, self.tensors(names), names, self.dtype)

    def shutdown(self) -> None:
        """Collective. Stop vLLM. From 0.24 on this ends the default process group too, so all ranks must be here."""
        barrier()
        doctor.stop()  # from here on ranks end one by one, and none of them is lost
        self._engine.engine_core.shutdown()
        forget_engine(self._engine)

    def generate(self, requests: Sequence[Request], policy_version: int) -> list[Completion]:
        """Collective over the engine's ranks: each must pass the same requests. One completion each, in their order.
        A completion depends on the weights, the prompt, its seed and temperature, not on the batch. Logprobs are those
        of the distribution that was sampled from (greedy: of temperature 1). A "stop" completion ends with the
        end-of-sequence token. Raises EngineStateError: asleep, or it holds another version than `policy_version`."""
        places = [(0, number) for number in range(len(requests))]
        done = self._generate(
            iter([places]), 1, policy_version, lambda _, n, turns: None if turns else requests[n]
        )
        assert done is not None
        return [done[place][0] for place in places]

    def generate_shared(
        self,
        job_sizes: Sequence[int],
        next_request: NextRequest,
        policy_version: int,
        finished: Finished | None = None,
        expected: Sequence[float] | None = None,
        race: Race | None = None,
        answers: Answers | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, list[list[Completion]]]:
        """Collective. Share jobs out over all engines. Job j is `job_sizes[j]` >= 1 conversations, all on one engine,
        each of one request or of several in turn. Raises EngineStateError as `generate` does.

        `rollout.schedule: static` deals all jobs in turn. `shared_queue` deals an engine what it can run at once, at
        most its fair share; whoever then runs fewer claims one of the rest, so that short completions leave no engine
        idle. `expected`, equal on all ranks, decides which come first (`deal`). Once `should_abort` is True on a rank,
        its engine drops what is unfinished and claims no more. Others notice by themselves or finish: the caller has
        all ranks agree that nothing comes of it (`Preemption.guard`). With a `race`, which all ranks have or none, jobs
        that are not done when it is over are dropped, and not returned.

        `next_request(job, number within it, completions of this conversation so far)` gives the next request or None,
        the same on any rank. Where it says LATER the others go on, this conversation keeps its room, and `answers`
        (on all ranks or none, asked on an engine's first) say what follows. What waits is dropped like what runs.
        `finished` gets (job, number, completion) at once, on all ranks of the engine. Returned are, by
        job of this engine, the completions of each conversation, on all its ranks; nothing if it aborted. `meanwhile`
        is called before each step of the engine.
        """
        static = self._rollout.schedule == "static" or self.num_engines == 1
        max_num_seqs = None if static else self._engine.vllm_config.scheduler_config.max_num_seqs
        largest = max(job_sizes, default=1)
        max_in_flight, num_dealt = share_out(
            len(job_sizes), largest, self.num_engines, max_num_seqs
        )
        dealt, queued = deal(job_sizes, expected, num_dealt, self.num_engines)
        queue = f"jobs/{self._num_shared_calls}"
        self._num_shared_calls += 1

        def places(jobs: Iterable[int]) -> list[Place]:
            return [(job, number) for job in jobs for number in range(job_sizes[job])]

        def batches() -> Iterator[list[Place]]:
            yield places(dealt[self.engine_rank])
            while queued and (claimed := self._claim(queue, len(queued))) is not None:
                yield places([queued[claimed]])

        of_engine = batches()
        done = self._generate(
            of_engine,
            max_in_flight,
            policy_version,
            next_request,
            finished,
            self._must_abort,
            race,
            answers,
            meanwhile,
        )
        for _ in of_engine:  # ended early: whoever claims must claim until there is nothing left
            pass
        by_job: dict[int, list[list[Completion]]] = {}
        for (job, _), completions in sorted((done or {}).items()):
            by_job.setdefault(job, []).append(completions)
        return {job: of_job for job, of_job in by_job.items() if len(of_job) == job_sizes[job]}

    def _claim(self, queue: str, num_jobs: int) -> int | None:
        """Collective over the engine's ranks, which schedule alike and so ask together: what the first one claims."""
        group = self._session.engine_group
        claimed = partial(claim, queue, num_jobs, self.num_engines)
        return claimed() if group is None else on_first_in_group(claimed, group)

    def _must_abort(self, num_steps: int) -> bool:
        """Collective over the engine's ranks: whether one of them should abort. They run, and stop, in lockstep."""
        if (group := self._session.engine_group) is None:
            return self._should_abort()
        return num_steps % _AGREE_EVERY_STEPS == 0 and any_rank(self._should_abort(), group)

    def _is_over(self, race: Race, num_steps: int) -> bool:
        """Collective over the engine's ranks: what its first one finds, asked now and then."""
        if num_steps % _AGREE_EVERY_STEPS:
            return False
        found, group = self.tp_rank == 0 and race.is_over(), self._session.engine_group
        return found if group is None else any_rank(found, group)

    def _abort(self, names: Sequence[str]) -> None:
        """Drop these requests, all that are unfinished, and leave an engine that has none."""
        self._engine.abort_request(names)
        core = self._engine.engine_core.engine_core
        # The model's side learns of it at the next step; asynchronous scheduling (GPU) may have a batch under way.
        while core.scheduler.has_requests() or getattr(core, "batch_queue", None):
            self._engine.step()

    def _generate(
        self,
        batches: Iterator[Sequence[Place]],
        max_in_flight: int,
        policy_version: int,
        next_request: NextRequest,
        finished: Finished | None = None,
        must_abort: Callable[[int], bool] = lambda num_steps: False,
        race: Race | None = None,
        answers: Answers | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[Place, list[Completion]] | None:
        """The completions of each place, without those that are unfinished when `race` is over, or None where
        `must_abort(steps done)` said so. Takes the next batch while fewer than `max_in_flight` are unfinished."""
        self._refuse_unless_ready(policy_version)
        self._end_rest()
        conversations = Conversations(
            next_request, answers, self._session.engine_group, self.engine_rank
        )
        scheduler = self._engine.engine_core.engine_core.scheduler
        all_taken, num_steps, just_finished = False, 0, list[Place]()
        # On a CPU vLLM compiles a helper of its logprobs on first use, for seconds; its result is the same without.
        stance = torch.compiler.set_stance("force_eager") if self._on_cpu else nullcontext()
        # A bar once a rollout takes some seconds, of the first rank's requests; None is tqdm's "only on a terminal".
        quiet = True if self._session.rank else None
        bar: tqdm[Any] = tqdm(
            desc="generate", unit="completion", delay=3, leave=False, disable=quiet
        )
        with isolated(), stance, bar as progress:
            while True:
                # While requests wait for room (the KV cache may hold fewer than max_num_seqs), leave batches to others.
                _, num_waiting = scheduler.get_request_counts()
                self._start(conversations.go_on(just_finished))
                while (
                    not all_taken
                    and not num_waiting
                    and conversations.num_open < max(max_in_flight, 1)
                ):
                    batch = next(batches, None)
                    all_taken = batch is None
                    self._start(conversations.go_on(batch or ()))
                self._start(conversations.answered())
                progress.total = progress.n + conversations.num_open
                if all_taken and not conversations.num_open:
                    return conversations.complete()
                # While nothing runs, whether to end is asked each time: no step is done, and a wait is long.
                num_since = num_steps if conversations.running else 0
                if must_abort(num_since):
                    self._abort(list(conversations.running))
                    return None
                if race is not None and self._is_over(race, num_since):
                    unfinished = scheduler.requests
                    race.drop(
                        conversations.num_tokens(
                            [one.num_output_tokens for one in unfinished.values()]
                        )
                    )
                    self._abort(list(conversations.running))
                    return conversations.complete()
                num_steps += 1
                if meanwhile is not None:
                    meanwhile()
                outputs = (
                    [output for output in self._engine.step() if output.finished]
                    if conversations.running
                    else []
                )
                just_finished = [
                    conversations.end_turn(output.request_id, _completion(output))
                    for output in outputs
                ]
                if finished is not None:
                    for place in just_finished:
                        finished(*place, conversations.completions[place][-1])
                progress.update(len(outputs))

    def _start(self, requests: Iterable[tuple[str, Request]]) -> None:
        for name, request in requests:
            self._add_request(name, request)

    def _refuse_unless_ready(self, policy_version: int) -> None:
        if not (self._weights_awake and self._kv_cache_awake):
            text = "generate: the engine is asleep; wake_weights, load_weights and wake_kv_cache come first"
            raise EngineStateError(text)
        if (held := self.policy_version) != policy_version:
            versions = f"policy_version {held}, this step needs {policy_version}"
            raise EngineStateError(f"generate: the engine holds {versions}")

    def _add_request(self, name: str, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        most = self._rollout.max_completion_tokens
        if request.max_tokens is not None:
            most = min(request.max_tokens, most) if request.is_rollout else request.max_tokens
        params = SamplingParams(
            max_tokens=most,
            temperature=self._rollout.temperature
            if request.temperature is None
            else request.temperature,
            seed=request.seed,
            stop_token_ids=self._stop_token_ids,
            logprobs=0 if request.is_rollout else None,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        adapters = self._adapters.request if self._adapters is not None else None
        self._engine.add_request(
            name, {"prompt_token_ids": request.prompt_ids}, params, lora_request=adapters
        )


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    token_ids, found = list(sampled.token_ids), sampled.logprobs
    logprobs = list(found.logprobs) if found is not None else []
    assert found is None or len(token_ids) == len(logprobs), (len(token_ids), len(logprobs))
    return Completion(token_ids, logprobs, sampled.finish_reason)
