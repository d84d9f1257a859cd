"""Opens the rewards of a run: functions, servers, environments, reward models and judges. Reward models and judges that
the config does not name are not even imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.rules import check_known_rewards
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.distributed.preemption import Preemption
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.records import ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool

if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments


def open_rewards(
    config: Config,
    inputs: Inputs,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
    environments: Environments | None,
) -> tuple[RewardPool, Callable[..., ScoredRollouts], dict[str, float]]:
    """The pool of reward functions, what scores with all rewards but models, and the weights of these by name. Raises
    ConfigError where rewards are needed, and neither config nor environment gives one."""
    # An engine's other ranks have started no environment.
    if environments is not None and session.rank % config.rollout.tensor_parallel_size == 0:
        check_known_rewards(config, environments.weights)
    log_file = Path(config.run_dir, "logs", f"rewards_rank_{session.rank}.log")
    called = config.pool_rewards
    own = called if environments is None else environments.other_rewards
    check = preemption.check_scoring
    ranks = session.rank, session.world_size
    pool = RewardPool(
        own, config.reward_pool, log_file, columns=inputs.columns, check=check, ranks=ranks
    )
    score = functools.partial(pool.score, tokenizer=tokenizer)
    if environments is None:
        return pool, preemption.guard(score), {reward.metric_name: reward.weight for reward in own}
    return pool, preemption.guard(environments.scores(score)), environments.weights


def open_reward_models(
    config: Config,
    score: Callable[..., ScoredRollouts],
    weights: dict[str, float],
    engine: RolloutEngine,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
) -> tuple[Callable[..., ScoredRollouts], list[float]]:
    """Collective. `score` with the engine's judges and the models among the rewards behind it, which are built here;
    the weights of all, in the order of the config. `weights` are those of the others, by name. Raises ConfigError."""
    score, weights = open_engine_judges(
        config, score, weights, engine, tokenizer, session, preemption
    )
    if not any(reward.model is not None for reward in config.rewards):
        return score, [*weights.values()]
    if twice := [
        r.metric_name for r in config.rewards if r.model is not None and r.metric_name in weights
    ]:
        what = f"the environment's own reward is called {twice[0]!r}, as a reward model is"
        raise ConfigError(f"rewards: {what}; give the model another name")
    from grpo_spmd.model.hf_files import checkpoint_folder
    from grpo_spmd.model.reward_model import build_reward_model
    from grpo_spmd.model.reward_model_files import read_reward_model
    from grpo_spmd.proofs.reward_model_check import RewardModelCheck
    from grpo_spmd.rollout.reward_models import ModelReward, RewardModels, RewardTexts

    budget, models, checks = config.training.max_tokens_per_micro_batch, list[ModelReward](), {}
    for index, reward in enumerate(config.rewards):
        if reward.model is None:
            continue
        files = read_reward_model(
            index, reward, checkpoint_folder(reward.model, reward.revision), budget
        )
        texts = RewardTexts(files, tokenizer)
        model = build_reward_model(files, config.model, session)
        checks[files.name] = RewardModelCheck(files, model, tokenizer, config.model.dtype)
        models.append(ModelReward(files.name, model, texts, budget))
    of_all = _in_order(config.rewards, weights)
    scorer = RewardModels(models, of_all, engine, checks, config.proofs.every_steps)
    return scorer.behind(score), [*of_all.values()]


def _in_order(rewards: Sequence[RewardConfig], weights: dict[str, float]) -> dict[str, float]:
    """As the config lists them, then the environments' own."""
    of_config = {reward.metric_name: reward.weight for reward in rewards}
    return of_config | {name: weight for name, weight in weights.items() if name not in of_config}


def open_engine_judges(
    config: Config,
    score: Callable[..., ScoredRollouts],
    weights: dict[str, float],
    engine: RolloutEngine,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
) -> tuple[Callable[..., ScoredRollouts], dict[str, float]]:
    """`score` with the judges that are the run's own engine behind it, and the weights of all but models."""
    if not any(reward.is_engine_judge for reward in config.rewards):
        return score, weights
    from grpo_spmd.checks.memory import judge_prompt_tokens
    from grpo_spmd.rollout.engine_judge import EngineJudge, EngineJudges

    judges = []
    for index, longest in judge_prompt_tokens(config).items():
        reward, where = config.rewards[index], f"rewards.{index}"
        if reward.metric_name in weights:
            what = f"the environment's own reward is called {reward.metric_name!r} too; give the judge another name"
            raise ConfigError(f"{where}.name: {what}")
        judges.append(EngineJudge(where, reward, tokenizer, longest))
    of_all = _in_order([reward for reward in config.rewards if reward.model is None], weights)
    of_run = engine, session.world_size, preemption.check_before_update
    return EngineJudges(judges, of_all, *of_run).behind(score), of_all
