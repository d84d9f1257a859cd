"""Opens the rewards of a run: functions, servers, environments, reward models and judges. Reward
models and judges that the config does not name are not even imported."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.rules import check_known_rewards
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.preemption import Preemption
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.scorers import Scorer, Scorers

if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments


def open_rewards(
    config: Config,
    inputs: Inputs,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
    environments: Environments | None,
) -> tuple[RewardPool, Scorers]:
    """Returns the pool of reward functions, and what scores with all rewards but judges and reward
    models.

    Raises ConfigError if rewards are needed, and neither config nor environment gives one.
    """
    # An engine's other ranks have started no environment.
    if environments is not None and session.rank % config.rollout.tensor_parallel_size == 0:
        check_known_rewards(config, environments.weights)
    log_file = Path(config.run_dir, "logs", f"rewards_rank_{session.rank}.log")
    called = config.pool_rewards
    functions = called if environments is None else environments.other_rewards
    check = preemption.check_scoring
    ranks = session.rank, session.world_size
    pool = RewardPool(
        functions, config.reward_pool, log_file, columns=inputs.columns, check=check, ranks=ranks
    )
    score = preemption.guard(functools.partial(pool.score, tokenizer=tokenizer))
    if environments is None:
        return pool, Scorers(score, {reward.metric_name: reward.weight for reward in functions})
    return pool, Scorers(score, environments.weights, [environments.scorer])


def open_reward_models(
    config: Config,
    scorers: Scorers,
    engine: RolloutEngine,
    tokenizer: Any,
    session: Session,
    preemption: Preemption,
) -> Scorers:
    """Collective. Returns `scorers` with the engine's judges and the reward models behind them,
    which are built here. Raises ConfigError."""
    more: list[Scorer] = []
    for index, reward in enumerate(config.rewards):
        if reward.metric_name in scorers.weights and (reward.model or reward.is_engine_judge):
            kind = "model" if reward.model else "judge"
            raise ConfigError(
                f"rewards.{index}.name: the environment's own reward is called "
                f"{reward.metric_name!r} too; give the {kind} another name"
            )
    if any(reward.is_engine_judge for reward in config.rewards):
        from grpo_spmd.checks.memory import judge_prompt_tokens
        from grpo_spmd.rollout.engine_judge import EngineJudge, EngineJudges

        judges = [
            EngineJudge(f"rewards.{index}", config.rewards[index], tokenizer, max_prompt_tokens)
            for index, max_prompt_tokens in judge_prompt_tokens(config).items()
        ]
        more.append(
            EngineJudges(judges, engine, session.world_size, preemption.check_before_update)
        )
    if any(reward.model is not None for reward in config.rewards):
        from grpo_spmd.model.hf_files import checkpoint_folder
        from grpo_spmd.model.reward_model import build_reward_model
        from grpo_spmd.model.reward_model_files import read_reward_model
        from grpo_spmd.proofs.reward_model_check import RewardModelCheck
        from grpo_spmd.rollout.reward_models import ModelReward, RewardModels, RewardTexts

        max_tokens = config.training.max_tokens_per_micro_batch
        models: list[ModelReward] = []
        checks: dict[str, RewardModelCheck] = {}
        for index, reward in enumerate(config.rewards):
            if reward.model is None:
                continue
            folder = checkpoint_folder(reward.model, reward.revision)
            files = read_reward_model(index, reward, folder, max_tokens)
            texts = RewardTexts(files, tokenizer)
            model = build_reward_model(files, config.model, session)
            checks[files.name] = RewardModelCheck(files, model, tokenizer, config.model.dtype)
            models.append(ModelReward(files.name, model, texts, max_tokens))
        more.append(RewardModels(models, engine, checks, config.proofs.every_steps))
    if not more:
        return scorers
    # As the config lists them, then the environments' own.
    weights = {reward.metric_name: reward.weight for reward in config.rewards}
    weights |= {name: w for name, w in scorers.weights.items() if name not in weights}
    return Scorers(scorers.score_functions, weights, [*scorers.scorers, *more])
