"""Opens the rewards and the signals of a run.

Rewards come from functions, servers, environments, reward models and judges. A *signal* is what
trains single tokens besides the rewards: the teachers together are one signal, the critic is the
other. The modules of reward models, judges and signals are imported only if the config asks for
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.checks.memory import judge_prompt_tokens
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.rules import check_known_rewards
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.distributed.preemption import Preemption
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import StopCheck, ValueHead
from grpo_spmd.model.offload import OffloadableModel
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.gradient_check import SignalProofs
from grpo_spmd.proofs.synthetic import UpdateCheckSettings
from grpo_spmd.records import Decision, Prompt, RolloutBatch
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import watched_rewards
from grpo_spmd.rewards.scorers import Scorer, Scorers

if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments
    from grpo_spmd.signals.critic import Critic
    from grpo_spmd.signals.teacher import Teacher


def open_rewards(
    config: Config,
    inputs: Inputs,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
    environments: Environments | None,
) -> tuple[RewardPool, Scorers]:
    """Returns the pool of reward functions and servers, and the scorers of the run's rewards.

    Judges that the engine serves and reward models are not among them (see open_reward_models).

    Raises ConfigError if rewards are needed, and neither config nor environment gives one.
    """
    functions: Sequence[RewardConfig] = config.pool_rewards
    weights = {reward.metric_name: reward.weight for reward in functions}
    scorers = []
    if environments is not None:
        # Only the first rank of an engine starts environments, so only it knows their rewards.
        if session.rank % config.rollout.engine_ranks == 0:
            check_known_rewards(config, environments.weights)
        functions = environments.other_rewards
        weights = environments.weights
        scorers = [environments.scorer]
    config_weights = {reward.metric_name: reward.weight for reward in config.rewards}
    pool = RewardPool(
        functions,
        config.reward_pool,
        Path(config.run_dir, "logs", f"rewards_rank_{session.rank}.log"),
        columns=inputs.columns,
        check=preemption.check_scoring,
        ranks=(session.rank, session.world_size),
        watched=watched_rewards(config_weights | weights),
        secrets=config.secret_variables,
    )
    score = preemption.guard(functools.partial(pool.score, tokenizer=tokenizer))
    return pool, Scorers(score, weights, scorers)


def open_reward_models(
    config: Config,
    scorers: Scorers,
    engine: RolloutEngine,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
) -> Scorers:
    """Collective. Builds the reward models and the judges that the run's own engine serves. Returns
    `scorers` with their scorers added at the end. Raises ConfigError."""
    more: list[Scorer] = []
    for index, reward in enumerate(config.rewards):
        if reward.metric_name in scorers.weights and (reward.model or reward.is_engine_judge):
            raise ConfigError(
                f"rewards.{index}.name: the environment's own reward is called "
                f"{reward.metric_name!r} too; give the model or judge another name"
            )
    # Each module is imported only if the config asks for it.
    if any(reward.is_engine_judge for reward in config.rewards):
        from grpo_spmd.rollout.reward_models import EngineJudges

        prompt_tokens = judge_prompt_tokens(config)
        check = preemption.check_before_update
        more.append(EngineJudges(config.rewards, prompt_tokens, tokenizer, engine, session, check))
    if any(reward.model is not None for reward in config.rewards):
        from grpo_spmd.rollout.reward_models import build_reward_models

        models = build_reward_models(
            config.rewards,
            config.model,
            config.micro_batch_tokens,
            policy_tokenizer=tokenizer,
            engine=engine,
            session=session,
            proofs=config.proofs,
        )
        more.append(models)
    if not more:
        return scorers
    # Order of the weights: the config's rewards first, then the environments' own.
    weights = {reward.metric_name: reward.weight for reward in config.rewards}
    weights |= {name: w for name, w in scorers.weights.items() if name not in weights}
    return Scorers(scorers.score_functions, weights, [*scorers.scorers, *more])


# The signals: the teachers and the critic.


@dataclass(frozen=True)
class Signals:
    """The critic and the teachers of a run, either of which may be absent (None).

    `teacher` stands for all teachers. Both have these members, and every call of their methods is
    collective. `offloadable_models` are the signal's own models, each with its optimizer; they wait
    in host memory while the engine is awake. `attach` writes the signal into the micro-batches
    before the first update of the step, and returns the decision with the signal's metrics added on
    rank 0. `update` trains the signal's own model on the batch after the policy's update, and
    returns this rank's metrics. `check` returns the signal's part of the running check.
    """

    critic: Critic | None = None
    teacher: Teacher | None = None

    def __iter__(self) -> Iterator[Critic | Teacher]:
        """Yields the signals that the run has, the critic first."""
        yield from (signal for signal in (self.critic, self.teacher) if signal is not None)

    @property
    def value_head(self) -> ValueHead | None:
        """The critic, if it is a value head on the policy, which is trained in the policy's update;
        else None."""
        return self.critic.value_head if self.critic is not None else None

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        """The models of all signals, each with its optimizer."""
        return [model for signal in self for model in signal.offloadable_models]

    def freezes_policy(self, step: int) -> bool:
        """Returns True in the first `critic.warmup_steps` steps of a run, in which only the critic
        is trained."""
        return self.critic is not None and step <= self.critic.warmup_steps

    def attach(
        self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck, sampled: SampledStep
    ) -> Decision:
        """Collective. Calls `attach` of the critic, which replaces rewards by advantages, and then
        of the teacher. Returns the decision that both have revised."""
        for signal in self:
            decision = signal.attach(batch, decision, stop_check, sampled)
        return decision

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. Calls `update` of all signals. Returns their metrics together."""
        metrics: Reductions = {}
        for signal in self:
            metrics |= signal.update(batch)
        return metrics

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        """Returns what the signals contribute to the running check of the update."""
        return SignalProofs(
            [signal.check(settings) for signal in self],
            None if self.teacher is None else self.teacher.config,
            None if self.critic is None else self.critic.value_targets,
        )


def open_signals(
    config: Config,
    policy: Policy,
    session: Session,
    reference: object = None,
    prompt_at: Callable[[int], Prompt] | None = None,
    tokenizer: Any = None,
) -> Signals:
    """Collective. Builds the models of the run's critic and teachers.

    `reference` is the run's reference model, which a teacher may share. `prompt_at` returns the
    prompt at a position of the prompt stream. Raises ConfigError, also for a model that cannot be a
    critic.
    """
    critic: Critic | None = None
    teacher: Teacher | None = None
    # Each module is imported only if the config asks for it.
    if config.critic.path is not None:
        from grpo_spmd.signals.critic import open_critic

        critic = open_critic(config, policy, session)
    if config.teacher.url:
        from grpo_spmd.signals.served_teacher import open_served_teacher

        teacher = open_served_teacher(config, policy, session, prompt_at, tokenizer)
    elif config.teacher.is_on:
        from grpo_spmd.signals.teacher import open_model_teacher

        teacher = open_model_teacher(config, policy, session, reference, prompt_at, tokenizer)
    return Signals(critic, teacher)
