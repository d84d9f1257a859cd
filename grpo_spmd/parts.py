"""Opens the parts of a run in order, hands them to the loop, and closes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo_spmd.checkpoint.restore import find_start
from grpo_spmd.checkpoint.run_dir import Start, begin_in
from grpo_spmd.checkpoint.save import Checkpoints
from grpo_spmd.checkpoint.state import run_facts
from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.checks.memory import engine_tokens
from grpo_spmd.config.describe import config_to_dict, flatten_config
from grpo_spmd.config.schema import Config
from grpo_spmd.data.prompts import PromptStream
from grpo_spmd.data.tokens import build_prompts
from grpo_spmd.distributed import doctor
from grpo_spmd.distributed.collectives import barrier, on_rank0
from grpo_spmd.distributed.exit import bounded_teardown
from grpo_spmd.distributed.preemption import Preemption
from grpo_spmd.distributed.session import (
    Session,
    end_session,
    set_collective_timeouts,
    start_session,
)
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.files import write_durably
from grpo_spmd.learn.balance import attention_cost_ratio
from grpo_spmd.learn.sampled_step import StepRules
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.families.refusals import refuse_untrainable
from grpo_spmd.model.hf_files import load_tokenizer, stop_token_ids
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import Policy, Scores, build_policy, build_reference
from grpo_spmd.observe.console import banner, log_to_file, log_to_terminal
from grpo_spmd.observe.followers import open_followers
from grpo_spmd.observe.launches import Launch, begin_launch, place_of
from grpo_spmd.observe.log import MetricsLog
from grpo_spmd.observe.memory import MemoryLedger, remedies
from grpo_spmd.observe.metrics_file import cut_metrics
from grpo_spmd.observe.phase_timer import PhaseTimer
from grpo_spmd.observe.progress import Progress
from grpo_spmd.observe.rollout_dump import RolloutDump
from grpo_spmd.observe.rollout_writer import RolloutWriter
from grpo_spmd.observe.tokenizer_file import save_tokenizer
from grpo_spmd.proofs.logprob_check import LogprobCheck
from grpo_spmd.proofs.update_check import UpdateCheck, UpdateCheckSettings
from grpo_spmd.records import MicroBatch, Prompt, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import Reward
from grpo_spmd.rewards.trl import TrainerState
from grpo_spmd.rollout.buffer import EpisodeBuffer, RolloutBuffer
from grpo_spmd.rollout.evaluate import Evaluator
from grpo_spmd.rollout.sample import EarlyScoring, ExpectedLengths, Sampler
from grpo_spmd.signals.opening import Signals, open_signals
from grpo_spmd.signals.rewards import open_reward_models, open_rewards

if TYPE_CHECKING:  # off by default, and then not even imported
    from grpo_spmd.data.prompts import TailStream
    from grpo_spmd.episodes.environments import Environments
    from grpo_spmd.rollout.sample import TailBatching

_log = logging.getLogger("grpo_spmd")


@dataclass
class Run:
    """The parts of a run on this rank."""

    config: Config
    session: Session
    preemption: Preemption
    stream: PromptStream | TailStream
    rewards: RewardPool
    score: Callable[..., ScoredRollouts]
    environments: Environments | None
    engine: RolloutEngine
    policy: Policy
    reference: Callable[[MicroBatch], Scores] | None
    updater: PolicyUpdater
    signals: Signals
    update_check: UpdateCheck
    step_rules: StepRules
    offload: HostOffload
    weight_sync: WeightSync
    sampler: Sampler
    evaluator: Evaluator
    checkpoints: Checkpoints
    phase: PhaseTimer
    logprob_check: LogprobCheck
    dump: RolloutDump
    log: MetricsLog
    progress: Progress
    launch: Launch
    num_finished_steps: int  # when it was opened
    begun: tuple[int, int, dict[str, Any]] = (
        0,
        0,
        {},
    )  # with the step under way: finished steps, the prompt stream

    def steps(self) -> Iterator[int]:
        """Collective. The steps that the run still has to make, each begun when it is drawn. Raises Preempted."""
        for step in range(self.num_finished_steps + 1, self.config.training.num_steps + 1):
            self.begin_step(step)
            yield step

    def begin_step(self, step: int) -> None:
        """Collective. Note where the step begins, and ask whether to begin it. Raises Preempted."""
        self.begun = step - 1, self.stream.position, self.stream.state()
        self.rewards.begin_step(
            TrainerState(step - 1, self.config.training.num_steps, self.stream.epoch)
        )
        self.preemption.begin_step(self.checkpoints.time_to_save_s)

    def hand_device_to_trainer(self) -> dict[str, float]:
        """The engine sleeps, and what of the trainer waited in host memory comes back. Returns memory metrics."""
        return self.engine.sleep(self.offload.held_bytes) | self.offload.to_device()

    def log_state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.logprob_check.state() | self.progress.state() | self.stream.state()

    def save_begun_step(self, reason: str) -> None:
        """Collective. Preempted: save the state with which the step under way began, and leave word of it."""
        self.engine.sleep()
        self.offload.to_device()
        step, position, of_stream = self.begun
        self.checkpoints.save_preempted(step, position, self.log_state() | of_stream, reason)
        self.launch.end("preempted", reason)

    def close(self) -> None:
        """Collective. In the reverse order, all ranks together."""
        self.launch.end("done")  # unless it was preempted
        self.log.close()
        self.rewards.close()
        if self.environments is not None:
            self.environments.close()
        barrier()  # all is saved
        with bounded_teardown():
            self.engine.shutdown()
            end_session()


def open_run(config: Config, inputs: Inputs) -> Run | None:
    """Collective. Everything that a run needs, where it goes on if it does; None where the run is over already. Raises
    ConfigError for what could be seen only now, and leaves nothing behind in the run folder."""
    tokenizer = load_tokenizer(config.model.path)
    data, per_step = config.data, config.rollout.num_prompts_per_step
    prompts = build_prompts(inputs.rows, tokenizer, data, per_step)
    held_out = {
        name: build_prompts(rows, tokenizer, data, per_step, name)
        for name, rows in inputs.eval_rows.items()
    }
    session = start_session(
        config.model.num_replicas, config.rollout.tensor_parallel_size, config.watchdog
    )
    preemption = Preemption(config.training.max_time_s)
    log_to_terminal(session.rank)
    if session.is_rank0:
        for line in banner(
            config.model, data, config.rollout, config.rewards, config.training.num_steps
        ):
            _log.info(line)
    run_dir, num_steps = Path(config.run_dir), config.training.num_steps
    facts = run_facts(flatten_config(config), prompts, session, held_out)
    start = find_start(
        run_dir, config.checkpoint.resume, session, facts, num_steps, bool(config.eval.every_steps)
    )
    if start.is_over:
        end_session()
        return None
    environments = open_environments(
        config, inputs.rewards, tokenizer, session, preemption.check_scoring
    )
    rewards, scorers = open_rewards(config, inputs, tokenizer, session, preemption, environments)
    refuse_untrainable(config.model.path, config.max_rollout_tokens)
    # The engine first: it measures the GPU's free memory, then sleeps and leaves it to the policy.
    longest, stops = config.max_rollout_tokens, stop_token_ids(config.model.path, tokenizer)
    engine = RolloutEngine(
        config.model, config.rollout, engine_tokens(config), session, stops, preemption.should_abort
    )
    policy = build_policy(
        config.model, config.rollout.temperature, session, seed=config.seed, longest=longest
    )
    reference = build_reference(
        policy, config.model, config.rollout.temperature, config.loss.kl_coef, session
    )
    score = open_reward_models(config, scorers, engine, tokenizer, session, preemption)
    weights = [*score.weights.values()]
    max_completion, max_error_frac = (
        config.rollout.max_completion_tokens,
        config.reward_pool.max_error_frac,
    )
    prompt_at = PromptStream(prompts, config.seed, data.shuffle).at
    signals = open_signals(config, policy, session, reference, prompt_at, tokenizer)
    updater = PolicyUpdater(
        policy, config.optimizer, config.loss, config.training, max_completion, signals.value_head
    )
    check_settings = UpdateCheckSettings(
        every_steps=config.proofs.every_steps,
        model_path=config.model.path,
        dtype=config.model.dtype,
        stop_ids=frozenset(stops),
        data=data,
        rollout=config.rollout,
        advantage=config.advantage,
        loss=config.loss,
        optimizer=config.optimizer,
        training=config.training,
        reward_weights=weights,
        is_agent=bool(config.environment.agent),
    )
    update_check = UpdateCheck(
        check_settings,
        session=session,
        policy=policy,
        reference=reference,
        updater=updater,
        tokenizer=tokenizer,
        signals=signals.proofs(check_settings),
    )
    cost_ratio = attention_cost_ratio(policy.num_parameters, policy.model.config)
    step_rules = open_step_rules(config, session.world_size, cost_ratio, weights)
    offload = HostOffload(
        config.model.offload, policy, reference, updater.optimizer, signals.offloadable_models
    )
    bucket_bytes, keeps = (
        config.rollout.sync_bucket_bytes(session.device.type),
        config.checkpoint.rollout_buffer,
    )
    weight_sync = WeightSync(
        policy, engine, bucket_bytes, config.proofs.every_steps, offload, is_named=keeps
    )
    writer, every_steps = (
        RolloutWriter(run_dir, config.logging, session),
        config.logging.rollouts_every_steps,
    )
    of_eval = (
        config.eval,
        config.seed,
        max_error_frac,
        writer if every_steps else None,
        environments,
    )
    evaluator = Evaluator(held_out, engine, score, *of_eval)
    checkpoints = Checkpoints(
        run_dir, config.checkpoint, num_steps, session, policy, updater, facts, signals.critic
    )
    checkpoints.load(start)
    stream, tail = open_stream(config, prompts, start)
    # Only now, when all that could still be refused has been tried: a refusal leaves nothing behind.
    num_dropped = inputs.num_rows - len(prompts) - sum(map(len, held_out.values()))
    launch = open_run_dir(config, session, num_dropped, start, inputs.start_time, tokenizer)
    set_collective_timeouts(config.watchdog)  # now that engine and policy have made their groups
    logprob_check = LogprobCheck(config.model.dtype, config.proofs.max_mismatch)
    logprob_check.restore(start.trainer)
    of_policy = policy.num_parameters, logprob_check
    phase, log = open_log(
        config, session, inputs.start_time, *of_policy, engine.pool_bytes, start.step + 1
    )
    dump = RolloutDump(
        writer, every_steps, RolloutWriter(run_dir, config.logging, session, "token_scores")
    )
    buffer = open_buffer(config, session, environments) if keeps else None
    lengths = ExpectedLengths() if config.rollout.schedule == "shared_queue" else None
    of_groups = buffer, lengths, tail, environments, EarlyScoring(rewards, tokenizer)
    sampler = Sampler(engine, config.rollout.group_size, config.seed, *of_groups)
    return Run(
        config, session, preemption, stream, rewards, score, environments, engine, policy, reference,
        updater, signals, update_check, step_rules, offload, weight_sync, sampler, evaluator, checkpoints, phase,
        logprob_check, dump, log, Progress(start.trainer, start.step), launch, start.step,
    )  # fmt: skip


def open_step_rules(
    config: Config, num_ranks: int, cost_ratio: float, weights: Sequence[float]
) -> StepRules:
    """`cost_ratio`: as balance.py has it. `weights` of the rewards: where all are 0, these are only watched."""
    sections, is_measured = (
        (config.rollout, config.advantage, config.loss, config.training),
        not any(weights),
    )
    discount, max_error_frac = config.environment.discount, config.reward_pool.max_error_frac
    return StepRules(
        *sections,
        max_error_frac,
        num_ranks,
        cost_ratio,
        None if is_measured else discount,
        is_measured,
    )


def open_environments(
    config: Config,
    rewards: Sequence[Reward],
    tokenizer: Any,
    session: Session,
    check: Callable[[], None],
) -> Environments | None:
    """None where the policy talks to nobody. Raises ConfigError."""
    if not config.environment.is_on:
        return None
    from grpo_spmd.episodes.environments import Environments
    from grpo_spmd.episodes.open_episode import EpisodeLimits

    longest = config.max_rollout_tokens
    of_turn, of_all = (
        config.rollout.max_completion_tokens,
        config.training.max_tokens_per_micro_batch,
    )
    limits = EpisodeLimits(
        config.environment.max_turns,
        longest - config.data.max_prompt_tokens,
        of_turn,
        longest,
        of_all,
    )
    log_file = Path(config.run_dir, "logs", f"environments_rank_{session.rank}.log")
    is_first = session.rank % config.rollout.tensor_parallel_size == 0
    sources = config.environment, config.pool_rewards, rewards, tokenizer, limits
    return Environments(*sources, log_file if is_first else None, check)


def open_buffer(
    config: Config, session: Session, environments: Environments | None
) -> RolloutBuffer:
    """Collective. Returns what keeps finished completions, or whole episodes, on disk."""
    if environments is None:
        return RolloutBuffer(
            config.run_dir, config.seed, config.model, config.rollout, session=session
        )
    return EpisodeBuffer(
        config.run_dir,
        config.seed,
        config.model,
        config.rollout,
        session=session,
        environment=config.environment,
        rewards=environments.looking_rewards,
    )


def open_stream(
    config: Config, prompts: Sequence[Prompt], start: Start
) -> tuple[PromptStream | TailStream, TailBatching | None]:
    """What waits since the start's steps is trained on first, also where tail batching is off by now."""
    fresh = PromptStream(prompts, config.seed, config.data.shuffle, start.position)
    if config.rollout.tail_batching == 1 and not start.waiting:
        return fresh, None
    from grpo_spmd.rollout.sample import open_tail

    return open_tail(fresh, len(prompts), config.rollout, start.waiting)


def open_log(
    config: Config,
    session: Session,
    began: float,
    num_parameters: int,
    logprob_check: LogprobCheck,
    pool_bytes: Callable[[], int] = lambda: 0,
    first_step: int = 1,
) -> tuple[PhaseTimer, MetricsLog]:
    """The clock of the steps from `first_step` on, and the log of their metrics; `began`: the launch, on the monotonic
    clock; `pool_bytes` is the engine's."""
    run_dir, num_workers = Path(config.run_dir), config.reward_pool.num_workers
    may_help = remedies(
        config.model, config.rollout, config.training, config.max_rollout_tokens, num_workers
    )
    timer = PhaseTimer(
        session.device, MemoryLedger(session.device, pool_bytes, may_help), first_step
    )
    followers = (
        open_followers(run_dir, config.logging, config_to_dict(config))
        if session.is_rank0
        else None
    )
    of_loss = logprob_check, config.loss, config.training
    return timer, MetricsLog(run_dir, session, timer, *of_loss, num_parameters, followers, began)


def open_run_dir(
    config: Config,
    session: Session,
    num_dropped_prompts: int,
    start: Start,
    began: float,
    tokenizer: Any = None,
) -> Launch:
    """Collective. Make the run folder, with the resolved `config.yaml`, `tokenizer` and a log file of each rank; its
    line of launches.jsonl, of a launch that `began` on the monotonic clock.

    Where a run goes on in it, its metrics are cut back to the steps before the start, as if it had never come further.
    Raises ConfigError where another run has taken the folder since it was checked.
    """
    run_dir, logs = Path(config.run_dir), Path(config.run_dir, "logs")

    def claim(places: list[Any]) -> int | None:
        begin_in(run_dir, start)
        cut_metrics(run_dir / "metrics.jsonl", start.step)
        text = yaml.safe_dump(config_to_dict(config), sort_keys=False)
        write_durably(run_dir / "config.yaml", text.encode("utf-8"))
        save_tokenizer(run_dir, tokenizer)
        return begin_launch(run_dir, start.step + 1, began, places, session.is_restart)

    launch = Launch(run_dir, on_rank0(claim, place_of(session.device)), session.is_rank0)
    logs.mkdir(parents=True, exist_ok=True)  # a node's own, where the folder is not shared
    doctor.write_reports_to(logs, launch.fail)
    log_to_file(logs / f"rank_{session.rank}.log")
    if num_dropped_prompts and session.is_rank0:
        longest = config.data.max_prompt_tokens
        _log.warning(
            "data: dropped %d prompts longer than data.max_prompt_tokens=%d",
            num_dropped_prompts,
            longest,
        )
    return launch
