"""Builds the parts of a run, and closes them.

A part is a long-lived object of the run on one rank, such as the engine, the policy or the log.
`open_run` builds all parts and returns them as a `Run`, whose parts loop.py calls step by step. The
order of building matters: cheap checks come first, the engine comes before the policy, and the run
folder is written late, so that a run that is refused leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import yaml

from grpo_spmd.checkpoint.manifest import model_fingerprint
from grpo_spmd.checkpoint.run_dir import Start, begin_in
from grpo_spmd.checkpoint.save import Checkpoints
from grpo_spmd.checkpoint.state import find_start, load_state, run_facts
from grpo_spmd.checks.fit import decide_for_device, keep_recorded, values_text
from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.checks.memory import engine_tokens, most_sequences
from grpo_spmd.config.describe import config_to_dict, flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import decided, decided_values, with_cpu_defaults
from grpo_spmd.config.schema import Config
from grpo_spmd.data.prompts import PromptStream, TailStream
from grpo_spmd.data.tokens import build_prompts
from grpo_spmd.diagnosis.findings import summary_lines
from grpo_spmd.diagnosis.run import read_run
from grpo_spmd.distributed import doctor, interrupt
from grpo_spmd.distributed.collectives import barrier, on_rank0
from grpo_spmd.distributed.exit import bounded_teardown
from grpo_spmd.distributed.preemption import Preempted, Preemption
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
from grpo_spmd.learn.update import PolicyUpdater, ValueHead
from grpo_spmd.model.config_json import (
    checkpoint_folder,
    has_recurrent_layers,
    load_config,
    load_tokenizer,
    stop_token_ids,
)
from grpo_spmd.model.families.refusals import refuse_untrainable
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import (
    Policy,
    Scores,
    build_policy,
    build_reference,
    choose_fused_kernel,
)
from grpo_spmd.model.routing import refuse_balance_loss
from grpo_spmd.observe.console import banner, log_to_file, log_to_terminal
from grpo_spmd.observe.followers import open_followers
from grpo_spmd.observe.launches import Launch, begin_launch, host_and_device
from grpo_spmd.observe.log import MetricsLog, Progress
from grpo_spmd.observe.memory import MemoryLedger, PhaseTimer, remedies
from grpo_spmd.observe.metrics_file import cut_metrics
from grpo_spmd.observe.rollout_writer import RolloutDump, RolloutWriter, save_tokenizer
from grpo_spmd.proofs.logprob_check import LogprobCheck
from grpo_spmd.proofs.schedule import weakened_proofs
from grpo_spmd.proofs.synthetic import UpdateCheckSettings
from grpo_spmd.proofs.update_check import UpdateCheck
from grpo_spmd.records import MicroBatch
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import Reward, watched_rewards
from grpo_spmd.rewards.scorers import Scorers
from grpo_spmd.rewards.trl import TrainerState
from grpo_spmd.rollout.buffer import RolloutBuffer
from grpo_spmd.rollout.evaluate import Evaluator, HeldOut
from grpo_spmd.rollout.sample import ExpectedLengths, Sampler, open_tail
from grpo_spmd.signals.opening import Signals, open_reward_models, open_rewards, open_signals

# Modules of episodes are imported only by runs that have an environment.
if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments

_log = logging.getLogger("grpo_spmd")


@dataclass
class Sampling:
    """The parts that sample and score. An evaluation without training has no others."""

    environments: Environments | None
    rewards: RewardPool
    engine: RolloutEngine
    policy: Policy
    score: Scorers

    def open_evaluator(
        self, config: Config, held_out: HeldOut, writer: RolloutWriter | None = None
    ) -> Evaluator:
        """Returns the evaluator of the held-out sets.

        If a `writer` is given, the evaluator writes its completions to the run folder with it.
        """
        return Evaluator(
            held_out,
            self.engine,
            self.score,
            config.eval,
            config.seed,
            config.reward_pool.max_error_frac,
            writer,
            self.environments,
            # The first reward says which completions are correct, so its failures count even if its
            # weight is 0.
            watched_rewards=watched_rewards(self.score.weights) - {*[*self.score.weights][:1]},
        )

    def close(self) -> None:
        """Collective. Ends the rewards' and environments' processes, the engine and the session."""
        self.rewards.close()
        if self.environments is not None:
            self.environments.close()
        # No rank may tear down before every rank has saved.
        barrier()
        with bounded_teardown():
            self.engine.shutdown()
            end_session()


@dataclass
class Run(Sampling):
    """The parts of a run on this rank. Every rank has all of them."""

    config: Config
    session: Session
    preemption: Preemption
    stream: PromptStream | TailStream
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
    num_finished_steps: int
    """The number of steps that were finished when the current step began."""
    begun_position: int = 0
    """The position of the prompt stream when the current step began."""
    begun_state: dict[str, Any] = field(default_factory=dict)
    """The state of the prompt stream when the current step began."""

    def steps(self) -> Iterator[int]:
        """Collective. Yields the numbers of the remaining steps; the run's first step is 1.

        A step begins when its number is yielded. Raises Preempted if the run has to stop."""
        for step in range(self.num_finished_steps + 1, self.config.training.num_steps + 1):
            self.begin_step(step)
            yield step

    def begin_step(self, step: int) -> None:
        """Collective. Records the state in which a step begins, and tells the parts of the step.

        A preempted run saves this state, from which it repeats the step. Raises Preempted if the
        run has to stop.
        """
        # This comes first, because `preemption.begin_step` may raise.
        self.num_finished_steps = step - 1
        self.begun_position = self.stream.position
        self.begun_state = self.stream.state()
        self.rewards.begin_step(
            TrainerState(step - 1, self.config.training.num_steps, self.stream.epoch)
        )
        self.preemption.begin_step(self.checkpoints.time_to_save_s)

    def hand_device_to_trainer(self) -> dict[str, float]:
        """Frees the device for the training phases, and returns memory metrics.

        The engine goes to sleep, which frees its device memory. Models and optimizer that were
        offloaded to host memory move back to the device.
        """
        return self.engine.sleep(self.offload.held_bytes) | self.offload.to_device()

    def log_state(self) -> dict[str, Any]:
        """Returns the state of the logs and the prompt stream, which a checkpoint saves."""
        return self.logprob_check.state() | self.progress.state() | self.stream.state()

    def save_begun_step(self, reason: str) -> None:
        """Collective. Saves a checkpoint of the state in which the current step began.

        Called when the run was preempted. `reason` is written to the log and launches.jsonl.
        """
        self.engine.sleep()
        self.offload.to_device()
        state = self.log_state() | self.begun_state
        self.checkpoints.save_preempted(
            self.num_finished_steps, self.begun_position, state, reason=reason
        )
        self.launch.end("preempted", reason)

    def log_diagnosis(self) -> None:
        """Logs on rank 0 what the diagnosis (grpo_spmd/diagnosis) finds in the finished run.

        Any error in it becomes a warning.
        """
        if not self.session.is_rank0:
            return
        try:
            for line in summary_lines(read_run(self.launch.run_dir)):
                _log.info("diagnosis: %s", line)
        except Exception as error:  # the diagnosis is informative and must not fail a finished run
            _log.warning("the run could not be diagnosed: %r", error)

    def close(self) -> None:
        """Collective. Records the end of the launch, and closes the log and all other parts."""
        # After a preemption the end has been recorded already, and this does nothing.
        self.launch.end("done")
        self.log.close()
        super().close()


def open_run(config: Config, inputs: Inputs) -> Run | None:
    """Collective. Builds all parts of a run, with the state of its checkpoint if it has one.
    Returns None if the run is over already.

    Raises ConfigError for faults that only show with this machine, data or model. Then nothing is
    left behind in the run folder.
    """
    # The process group does not exist yet, so each rank encodes all prompts itself.
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    prompts = build_prompts(
        inputs.rows, tokenizer, config.data, config.rollout.num_prompts_per_step
    )
    held_out = build_held_out(config, inputs, tokenizer)
    session = start_session(
        config.model.num_replicas, config.watchdog, config.model.sequence_parallel_size
    )
    preemption = Preemption(config.training.max_time_s)
    log_to_terminal(session.rank)
    if session.is_rank0:
        lines = banner(
            config.model, config.data, config.rollout, config.rewards, config.training.num_steps
        )
        for line in (*lines, *inputs.notes):
            _log.info(line)
    run_dir = Path(config.run_dir)
    # Facts that identify the run. find_start compares them with those of the checkpoints in the
    # folder, to refuse those of another run.
    facts = run_facts(flatten_config(config), prompts, session, held_out)
    start = find_start(
        run_dir,
        config.checkpoint.resume,
        session,
        facts=facts,
        num_steps=config.training.num_steps,
        has_closing_eval=bool(config.eval.every_steps),
    )
    if start.is_over:
        end_session()
        return None
    config = decide_memory(config, start.trainer.get("config", {}), session)
    facts = replace(facts, config=flatten_config(config))
    # What is known without the engine is refused before it starts, so the result is not used here.
    choose_sharing(config, replays_routes=False)
    sampling = open_sampling(config, inputs, tokenizer, session, preemption, held_out)
    environments, rewards = sampling.environments, sampling.rewards
    engine, policy, score = sampling.engine, sampling.policy, sampling.score
    share_prefixes, obstacle = choose_sharing(config, replays_routes=policy.replays_routes)
    if obstacle:
        _log.info("training.share_prefixes: off, since %s", obstacle)
    temperature = config.rollout.temperature
    reference = build_reference(policy, config.model, temperature, config.loss.kl_coef, session)
    # Teachers look up prompts by their position in this second stream, which never advances.
    prompt_at = PromptStream(prompts, config.seed, config.data.shuffle).at
    signals = open_signals(config, policy, session, reference, prompt_at, tokenizer)
    updater = open_updater(config, policy, signals.value_head)
    for sentence in weakened_proofs(facts.config):
        _log.warning(sentence)
    # The running check recomputes what the updater does, from the same settings.
    check_settings = UpdateCheckSettings(
        every_steps=config.proofs.every_steps,
        is_on=config.proofs.update,
        checks_signals=config.proofs.signals,
        bound_factor=config.proofs.bound_factor,
        model_path=config.model.path,
        dtype=config.model.dtype,
        stop_ids=frozenset(stop_token_ids(config.model.path, tokenizer)),
        data=config.data,
        rollout=config.rollout,
        advantage=config.advantage,
        loss=config.loss,
        optimizer=config.optimizer,
        training=config.training,
        reward_weights=[*score.weights.values()],
        warmup_steps=0 if signals.critic is None else config.critic.warmup_steps,
        environment=config.environment,
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
    # Micro-batches are balanced over ranks by FLOPs, in which attention grows faster than tokens.
    cost_ratio = attention_cost_ratio(policy.num_active_parameters, policy.model.config)
    step_rules = make_step_rules(
        config,
        session.world_size,
        cost_ratio,
        score.weights,
        share_prefixes=share_prefixes,
    )
    offload = HostOffload(
        config.model.offload, policy, reference, updater.optimizer, signals.offloadable_models
    )
    weight_sync = WeightSync(
        policy,
        engine,
        config.rollout.sync_bucket_bytes(session.device.type),
        config.proofs.every_steps if config.proofs.weights else None,
        offload,
        # The buffer keeps completions under the name (a digest) of the weights that sampled them.
        is_named=config.checkpoint.rollout_buffer,
    )
    writer = RolloutWriter(run_dir, config.logging, session)
    evaluator = sampling.open_evaluator(
        config, held_out, writer if config.logging.rollouts_every_steps > 0 else None
    )
    checkpoints = Checkpoints(
        run_dir,
        config.checkpoint,
        config.training.num_steps,
        session,
        policy,
        updater,
        facts,
        signals.critic,
    )
    # From here on policy, optimizer and critic have the state of the checkpoint, if there is one.
    checkpoints.load(start)
    # Tail batching launches more prompts than a step needs and defers the slow ones. Deferred
    # prompts in the checkpoint come first, even if tail batching has been switched off since.
    fresh = PromptStream(prompts, config.seed, config.data.shuffle, start.position)
    stream: PromptStream | TailStream = fresh
    tail = None
    if config.rollout.tail_batching != 1 or start.waiting:
        stream, tail = open_tail(fresh, len(prompts), config.rollout, start.waiting)
    # The run folder is written only now, when nothing can be refused any more.
    num_dropped = inputs.num_rows - len(prompts) - sum(map(len, held_out.values()))
    launch = open_run_dir(config, session, num_dropped, start, inputs.start_time, tokenizer)
    # Time limits are set per process group, so engine and policy must have made theirs before.
    set_collective_timeouts(config.watchdog)
    logprob_check = LogprobCheck(
        config.model.dtype, config.proofs.max_mismatch, is_on=config.proofs.logprobs
    )
    logprob_check.restore(start.trainer)
    phase, log = open_log(
        config,
        session,
        inputs.start_time,
        policy.num_active_parameters,
        logprob_check,
        pool_bytes=engine.pool_bytes,
        first_step=start.step + 1,
    )
    # The tokens' logprobs and other scores go to files of their own, beside the rollouts.
    score_writer = RolloutWriter(run_dir, config.logging, session, "token_scores")
    buffer = None
    if config.checkpoint.rollout_buffer:
        # With the buffer a preempted step continues from its finished completions.
        buffer = RolloutBuffer(
            config.run_dir,
            config.seed,
            # Completions without routes are of no use to a policy that replays, and the reverse.
            replace(config.model, router_replay=engine.records_routes),
            config.rollout,
            session=session,
            environment=None if environments is None else config.environment,
            rewards=() if environments is None else environments.looking_rewards,
        )
    sampler = Sampler(
        engine,
        config.rollout.group_size,
        config.seed,
        buffer=buffer,
        # The groups with the longest expected completions begin first.
        lengths=ExpectedLengths() if config.rollout.schedule == "shared_queue" else None,
        tail=tail,
        environments=environments,
        # Complete groups are scored while other groups are still being sampled.
        early_rewards=rewards,
        tokenizer=tokenizer,
    )
    return Run(
        **vars(sampling),
        config=config,
        session=session,
        preemption=preemption,
        stream=stream,
        reference=reference,
        updater=updater,
        signals=signals,
        update_check=update_check,
        step_rules=step_rules,
        offload=offload,
        weight_sync=weight_sync,
        sampler=sampler,
        evaluator=evaluator,
        checkpoints=checkpoints,
        phase=phase,
        logprob_check=logprob_check,
        dump=RolloutDump(writer, config.logging.rollouts_every_steps, score_writer),
        log=log,
        progress=Progress(start.trainer, start.step),
        launch=launch,
        num_finished_steps=start.step,
    )


def open_updater(
    config: Config, policy: Policy, value_head: ValueHead | None = None
) -> PolicyUpdater:
    """Returns the updater of the policy, which has its optimizer and its loss.

    `value_head` is the critic if that is a value head on the policy's own model; the updater then
    trains it too.
    """
    return PolicyUpdater(
        policy,
        config.optimizer,
        config.loss,
        config.policy_training,
        config.rollout.max_completion_tokens,
        value_head,
    )


def build_held_out(config: Config, inputs: Inputs, tokenizer: Any) -> HeldOut:
    """Returns the prompts of each held-out set of `data.eval`, by the set's name."""
    num_per_step = config.rollout.num_prompts_per_step
    return {
        name: build_prompts(rows, tokenizer, config.data, num_per_step, name)
        for name, rows in inputs.eval_rows.items()
    }


def open_sampling(
    config: Config,
    inputs: Inputs,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
    held_out: HeldOut,
) -> Sampling:
    """Collective. Builds environments, rewards, engine and policy.

    Raises ConfigError if one of them cannot be built or trained.
    """
    environments = open_environments(
        config, inputs.rewards, tokenizer, session, preemption.check_scoring
    )
    rewards, scorers = open_rewards(config, inputs, tokenizer, session, preemption, environments)
    # A model that cannot be trained is refused before the engine starts, which takes minutes.
    refuse_untrainable(config.model.path, config.max_rollout_tokens)
    choose_fused_kernel(config.model.logprob_kernel, session.device)
    if config.loss.router_aux_coef:
        refuse_balance_loss(config.model.path)
    # The engine comes before the policy: it measures the GPU's free memory when it is built, and
    # then sleeps, so that the policy can use the memory.
    engine = RolloutEngine(
        config.model,
        config.rollout,
        engine_tokens(config),
        session,
        stop_token_ids(config.model.path, tokenizer),
        preemption.should_abort,
        most_sequences(config, session.world_size, sum(map(len, held_out.values()))),
    )
    policy = build_policy(
        config.model,
        config.rollout.temperature,
        session,
        seed=config.seed,
        max_rollout_tokens=config.max_rollout_tokens,
        replays_routes=engine.records_routes,
    )
    if config.loss.router_aux_coef and not policy.replays_routes:
        raise ConfigError(
            f"loss.router_aux_coef: no routes of {config.model.path} are recorded, and the "
            "load-balance loss is computed from them; set it to 0"
        )
    score = open_reward_models(config, scorers, engine, tokenizer, session, preemption)
    return Sampling(environments, rewards, engine, policy, score)


def choose_sharing(
    config: Config, *, replays_routes: bool
) -> tuple[bool | Literal["auto"], str | None]:
    """Decides whether sequences with a common prefix are computed with one copy of the prefix.

    Returns (StepRules.share_prefixes, an obstacle). The obstacle is a text that says why the rows
    of this run cannot share prefixes, so that the first value is False; else it is None.
    `replays_routes` says whether the policy uses the experts that the engine chose. Raises
    ConfigError if training.share_prefixes is true and there is an obstacle.
    """
    share_prefixes = config.training.share_prefixes
    obstacle = sharing_obstacle(config, replays_routes=replays_routes) if share_prefixes else None
    if share_prefixes is True and obstacle:
        raise ConfigError(f"training.share_prefixes: {obstacle}; set it to auto or false")
    return (False if obstacle else share_prefixes), obstacle


def sharing_obstacle(config: Config, *, replays_routes: bool) -> str | None:
    """Returns why the sequences of a row cannot share prefixes in this run; None if they can."""
    if replays_routes:
        return (
            "the engine may have taken other experts for a prompt in each of its completions "
            "(model.router_replay)"
        )
    if config.model.sequence_parallel_size > 1:
        return "ranks share whole rows (model.sequence_parallel_size)"
    if config.teacher.sees_other_prompt:
        return (
            "prompts of the teacher's own need not begin alike, and its rows would have many times "
            "the tokens (teacher.prompt_key, teacher.prompt_template)"
        )
    paths = [config.model.path, *config.teacher.paths.values(), config.critic.path or "policy"]
    for path in paths:
        # A teacher or critic may be the policy itself. One that cannot be read is refused where it
        # is opened, by the name of its key.
        with suppress(ConfigError):
            if path != "policy" and has_recurrent_layers(load_config(path).to_dict()):
                return f"{path} has recurrent layers, whose state would have to be forked"
    return None


def evaluate_alone(
    config: Config, inputs: Inputs, checkpoint: Path, trainer: dict[str, Any]
) -> dict[str, Any]:
    """Collective. Evaluates a policy on all held-out sets, without training. Returns the metrics.

    The policy is that in the checkpoint folder `checkpoint`, and `trainer` is the content of its
    trainer.json. If `trainer` is empty, the policy is the model of model.path. Raises ConfigError.
    """
    if (
        trainer
        and model_fingerprint(checkpoint_folder(config.model.path))
        != (trainer["model_fingerprint"])
    ):
        raise ConfigError(
            f"model.path: {config.model.path} is not the model that {checkpoint} was trained from; "
            "name that one with model.path=FOLDER"
        )
    interrupt.quit_evaluation(config.run_dir)
    Path(config.run_dir, "logs").mkdir()
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template_kwargs)
    held_out = build_held_out(config, inputs, tokenizer)
    session = start_session(
        config.model.num_replicas, config.watchdog, config.model.sequence_parallel_size
    )
    log_to_terminal(session.rank)
    preemption = Preemption(config.training.max_time_s)
    config = decide_memory(config, trainer.get("config", {}), session)
    sampling = open_sampling(config, inputs, tokenizer, session, preemption, held_out)
    if trainer:
        # load_state also loads the optimizer's state; the updater is dropped right after it.
        load_state(sampling.policy, open_updater(config, sampling.policy), checkpoint, trainer)
    step = trainer.get("step", 0)
    epoch = trainer.get("position", 0) / len(inputs.rows)
    sampling.rewards.begin_step(TrainerState(step, config.training.num_steps, epoch))
    bucket_bytes = config.rollout.sync_bucket_bytes(session.device.type)
    weight_sync = WeightSync(sampling.policy, sampling.engine, bucket_bytes)
    set_collective_timeouts(config.watchdog)
    preemption.begin_step()
    # There is nothing to save.
    interrupt.quit_evaluation(config.run_dir)
    doctor.enter_phase("weight_sync", step + 1)
    weight_sync.sync(step + 1)
    doctor.enter_phase("eval", step + 1)
    try:
        metrics = sampling.open_evaluator(config, held_out).evaluate(step)
    except Preempted as preempted:
        raise KeyboardInterrupt(str(preempted)) from None
    sampling.close()
    return {"step": step, **metrics}


def make_step_rules(
    config: Config,
    num_ranks: int,
    cost_ratio: float,
    reward_weights: Mapping[str, float],
    share_prefixes: bool | Literal["auto"] = False,
) -> StepRules:
    """Returns the rules by which a step is sampled, scored and assembled.

    `cost_ratio` is the result of balance.attention_cost_ratio. `reward_weights` has the weight of
    each reward by name. `share_prefixes` is as in StepRules.
    """
    # If all weights are 0, rewards are only logged, and a teacher alone trains the policy.
    has_rewards = any(reward_weights.values())
    return StepRules(
        config.rollout,
        config.advantage,
        config.loss,
        config.training,
        max_error_frac=config.reward_pool.max_error_frac,
        num_ranks=num_ranks,
        sequence_ranks=config.model.sequence_parallel_size,
        attention_cost_ratio=cost_ratio,
        share_prefixes=share_prefixes,
        discount=config.environment.discount if has_rewards else None,
        zero_advantages=not has_rewards,
        watched_rewards=watched_rewards(reward_weights),
    )


def open_environments(
    config: Config,
    rewards: Sequence[Reward],
    tokenizer: Any,
    session: Session,
    check: Callable[[], None],
) -> Environments | None:
    """Returns the environments that episodes talk to, or None if the config has none.

    While this rank waits for environments, `check` is called repeatedly; it may raise to end the
    waiting. Raises ConfigError.
    """
    if not config.environment.is_on:
        return None
    from grpo_spmd.episodes.conversations import EpisodeLimits
    from grpo_spmd.episodes.environments import Environments

    limits = EpisodeLimits(
        config.environment.max_turns,
        # Tokens of a context after the prompt, then tokens that one turn samples.
        config.max_rollout_tokens - config.data.max_prompt_tokens,
        config.rollout.max_completion_tokens,
        # Tokens of a context with its completion, then tokens of all segments of an episode.
        config.max_rollout_tokens,
        config.micro_batch_tokens,
    )
    # Only the first rank of each engine runs episodes.
    has_episodes = session.rank % config.rollout.engine_ranks == 0
    log_file = Path(config.run_dir, "logs", f"environments_rank_{session.rank}.log")
    return Environments(
        config.environment,
        config.pool_rewards,
        rewards,
        tokenizer,
        limits,
        log_file if has_episodes else None,
        check,
        secrets=config.secret_variables,
    )


def open_log(
    config: Config,
    session: Session,
    start_time: float,
    num_parameters: int,
    logprob_check: LogprobCheck,
    *,
    pool_bytes: Callable[[], int] = lambda: 0,
    first_step: int = 1,
) -> tuple[PhaseTimer, MetricsLog]:
    """Returns (timer of the phases, log of the steps' metrics).

    `start_time` is the time of the launch on the monotonic clock. `pool_bytes` returns the size of
    the engine's memory pool (weights and KV cache). `first_step` is the first step that this launch
    makes.
    """
    # The settings that a log line about low memory suggests.
    memory_remedies = remedies(
        config.model,
        config.rollout,
        config.training,
        config.max_rollout_tokens,
        config.reward_pool.num_workers,
    )
    ledger = MemoryLedger(session.device, pool_bytes, memory_remedies)
    timer = PhaseTimer(session.device, ledger, first_step)
    run_dir = Path(config.run_dir)
    # Followers are processes that send metrics to trackers; only rank 0 starts them.
    followers = None
    if session.is_rank0:
        followers = open_followers(run_dir, config.logging, config_to_dict(config))
    log = MetricsLog(
        run_dir,
        num_parameters,
        start_time,
        session=session,
        timer=timer,
        logprob_check=logprob_check,
        loss=config.loss,
        training=config.training,
        followers=followers,
    )
    return timer, log


def decide_memory(config: Config, recorded: Mapping[str, Any], session: Session) -> Config:
    """Collective. Returns the config with a value for each `auto` that the memory planner decides.

    These are the keys in DECIDED_KEYS. `recorded` is the flat config of the checkpoint from which
    the run starts; its values are kept. On a CPU the values are constants. On GPUs, unless the
    checkpoint has all values, rank 0 asks the planner about the smallest GPU of all ranks, and logs
    its answer. Raises ConfigError if the planner finds that the run cannot fit.
    """
    config = keep_recorded(config, recorded)
    if session.device.type != "cuda":
        return with_cpu_defaults(config)
    # The planner takes seconds, and it has judged the same values when the run began.
    values = decided_values(config)
    if values.items() <= recorded.items():
        _log.info("as in the checkpoint: %s", values_text(values))
        return config
    properties = torch.cuda.get_device_properties(session.device)

    def ask(devices: list[Any]) -> dict[str, Any]:
        """Returns the planner's values for the smallest of all ranks' GPUs. Runs on rank 0."""
        size, name = min((row["bytes"], row["name"]) for row in devices)
        decision = decide_for_device(config, name, size / 2**30, session.world_size)
        _log.log(logging.INFO if decision.is_certain else logging.WARNING, "%s", decision.line)
        return decision.values

    device = {"bytes": properties.total_memory, "name": properties.name}
    return decided(config, on_rank0(ask, device))


def open_run_dir(
    config: Config,
    session: Session,
    num_dropped_prompts: int,
    start: Start,
    start_time: float,
    tokenizer: Any = None,
) -> Launch:
    """Collective. Makes the run folder with the resolved `config.yaml`, the tokenizer and a log
    file of each rank, and adds the launch to launches.jsonl. Returns the launch's record.

    If a run resumes, the metrics of steps after its checkpoint are deleted, since these steps are
    done again. `start_time` is the time of the launch on the monotonic clock. Raises ConfigError if
    another run has taken the folder since it was checked.
    """
    run_dir = Path(config.run_dir)
    logs = run_dir / "logs"

    def claim(devices: list[Any]) -> int | None:
        """Writes the files of the run folder, on rank 0, and adds the launch to launches.jsonl.

        `devices` has host and device of each rank. Returns the number of the launch, or None if
        launches.jsonl cannot be written.
        """
        # First, because it raises if the folder is another run's, of which nothing may change.
        begin_in(run_dir, start)
        cut_metrics(run_dir / "metrics.jsonl", start.step)
        text = yaml.safe_dump(config_to_dict(config), sort_keys=False)
        write_durably(run_dir / "config.yaml", text.encode("utf-8"))
        save_tokenizer(run_dir, tokenizer)
        return begin_launch(run_dir, start.step + 1, start_time, devices, session.is_restart)

    launch = Launch(run_dir, on_rank0(claim, host_and_device(session.device)), session.is_rank0)
    # Every rank makes the logs folder: without a shared file system each node has its own.
    logs.mkdir(parents=True, exist_ok=True)
    doctor.write_reports_to(logs, launch.fail)
    log_to_file(logs / f"rank_{session.rank}.log")
    if num_dropped_prompts and session.is_rank0:
        _log.warning(
            "data: dropped %d prompts longer than data.max_prompt_tokens=%d",
            num_dropped_prompts,
            config.data.max_prompt_tokens,
        )
    return launch
