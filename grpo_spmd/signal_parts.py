"""Opens what teaches: the rewards; and reward models, teachers and a critic where the config asks for them, without
which nothing of them is even imported."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.rules import check_known_rewards
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.preemption import Preemption
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.learn.signals import Signal, Signals
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.update_check import More
from grpo_spmd.records import Prompt, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool

if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments
    from grpo_spmd.learn.critic import Critic
    from grpo_spmd.learn.policy_critic import PolicyCritic
    from grpo_spmd.learn.teacher import Ask, Teacher
    from grpo_spmd.proofs.made_up_teacher import MadeUpTeacher
    from grpo_spmd.proofs.made_up_values import MadeUpValues


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


def open_signals(
    config: Config,
    policy: Policy,
    session: Session,
    reference: object = None,
    prompt_at: Callable[[int], Prompt] | None = None,
    tokenizer: Any = None,
) -> Signals:
    """Collective. Teachers and critic of the run, with their models built. `reference` is the run's, `prompt_at` gives
    the prompt at a place of its stream. Raises ConfigError."""
    signals: list[Signal] = []
    critic = open_critic(config, policy, session)
    if critic is not None:
        signals.append(critic)
    teacher = open_teacher(config, policy, session, reference, prompt_at, tokenizer)
    if teacher is not None:
        signals.append(teacher)
    num_held_steps = config.critic.warmup_steps if critic is not None else 0
    head = head_of(critic)
    return Signals(
        signals, teacher=teacher, critic=critic, head=head, num_held_steps=num_held_steps
    )


def checks_of(config: Config, signals: Signals) -> list[More]:
    """What proofs/ looks at of them."""
    checks: list[More] = []
    if config.teacher.is_on:
        from grpo_spmd.learn.teacher import Teacher
        from grpo_spmd.proofs.teacher_check import TeacherCheck

        assert isinstance(signals.teacher, Teacher)
        of_paths = signals.teacher, config.rollout.temperature, config.model.dtype
        checks.append(
            _check_of_servers(signals.teacher) if config.teacher.url else TeacherCheck(*of_paths)
        )
    if config.critic.path is not None:
        from grpo_spmd.learn.critic import Critic
        from grpo_spmd.proofs.critic_check import CriticCheck

        assert isinstance(signals.critic, Critic)
        dtype, normalize_std = config.model.dtype, config.advantage.normalize_std
        checks.append(
            CriticCheck(signals.critic.model, config.critic, normalize_std, config.loss, dtype)
        )
    return checks


def made_up_of(config: Config, policy: Policy) -> Callable[[], MadeUpTeacher] | None:
    """What makes the teacher of the gradient check's rows."""
    if not config.teacher.is_on:
        return None
    from grpo_spmd.proofs.made_up_teacher import MadeUpTeacher

    return lambda: MadeUpTeacher(
        config.teacher, policy, config.rollout.temperature, config.model.dtype
    )


def made_up_values_of(config: Config, signals: Signals) -> MadeUpValues | None:
    """What the gradient check's rows are given where the policy's loss has a value loss in it."""
    if signals.head is None:
        return None
    from grpo_spmd.learn.policy_critic import PolicyCritic
    from grpo_spmd.proofs.made_up_values import MadeUpValues

    assert isinstance(signals.head, PolicyCritic)
    return MadeUpValues(signals.head, config.critic, config.model.dtype)


def open_teacher(
    config: Config,
    policy: Policy,
    session: Session,
    reference: object,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> Teacher | None:
    """Collective. As open_signals; None where the config has none."""
    if not config.teacher.is_on:
        return None
    if config.teacher.url:
        return _open_servers(config, policy, session, prompt_at, tokenizer)
    import dataclasses

    from grpo_spmd.checks.signals import check_vocabulary
    from grpo_spmd.learn.teacher import Teacher, TeacherModel
    from grpo_spmd.model.policy import build_policy

    models = dict[str, TeacherModel]()
    for name, path in config.teacher.paths.items():
        is_start = path == config.model.path
        if is_start and policy.lora.rank:
            models[name] = TeacherModel(policy, is_base=True, is_own=False)
        elif is_start and isinstance(reference, Policy):
            models[name] = TeacherModel(reference, is_own=False)
        else:
            own, temperature = (
                dataclasses.replace(config.model, path=path),
                config.rollout.temperature,
            )
            role = f"teacher {name}".strip()
            model = build_policy(
                own, temperature, session, trainable=False, longest=policy.longest, role=role
            )
            models[name] = TeacherModel(model)
            check_vocabulary(
                config.model.path, path, f"teacher.path.{name}" if name else "teacher.path"
            )
    return Teacher(config.teacher, models, policy, prompt_at, _ask_of(config, tokenizer))


def _open_servers(
    config: Config,
    policy: Policy,
    session: Session,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> Teacher:
    """Collective. As open_teacher, of teachers behind addresses."""
    from grpo_spmd.checks.signals import check_server, open_server
    from grpo_spmd.learn.served_teacher import ServedTeacher

    models = on_rank0(
        lambda _: {name: check_server(config, name) for name in config.teacher.urls}, None
    )
    servers = {name: open_server(config, name, model) for name, model in models.items()}
    ranks, most = (session.rank, session.world_size), config.reward_pool.max_error_frac
    ask_of = _ask_of(config, tokenizer)
    return ServedTeacher(
        config.teacher, servers, policy, prompt_at, ask_of, ranks=ranks, max_error_frac=most
    )


def _check_of_servers(teacher: Teacher) -> More:
    from grpo_spmd.learn.served_teacher import ServedTeacher
    from grpo_spmd.proofs.server_check import ServerCheck

    assert isinstance(teacher, ServedTeacher)
    return ServerCheck(teacher)


def _ask_of(config: Config, tokenizer: Any) -> Callable[[Prompt], Ask] | None:
    """What tells whose a prompt is, and what its teacher is shown; None where there is nothing to tell."""
    is_one, prompt_key = "" in config.teacher.names, config.teacher.prompt_key
    if is_one and prompt_key is None:
        return None
    from grpo_spmd.checks.signals import teacher_data
    from grpo_spmd.data.rows import read_rows
    from grpo_spmd.data.tokens import build_prompts
    from grpo_spmd.learn.teacher import Ask

    data = teacher_data(config)
    shown = None if data is None else build_prompts(read_rows(data), tokenizer, data, 1)

    def ask_of(prompt: Prompt) -> Ask:
        name = "" if is_one else str(prompt.columns["teacher"])
        return Ask(name, None if shown is None else shown[prompt.row].token_ids)

    return ask_of


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
    from grpo_spmd.checks.reward_models import prompt_tokens_of_judges
    from grpo_spmd.rollout.engine_judge import EngineJudge, EngineJudges

    judges = []
    for index, longest in prompt_tokens_of_judges(config).items():
        reward, where = config.rewards[index], f"rewards.{index}"
        if reward.metric_name in weights:
            what = f"the environment's own reward is called {reward.metric_name!r} too; give the judge another name"
            raise ConfigError(f"{where}.name: {what}")
        judges.append(EngineJudge(where, reward, tokenizer, longest))
    of_all = _in_order([reward for reward in config.rewards if reward.model is None], weights)
    of_run = engine, session.world_size, preemption.check_before_update
    return EngineJudges(judges, of_all, *of_run).behind(score), of_all


def open_critic(config: Config, policy: Policy, session: Session) -> Critic | None:
    """Collective. None where the config has none. Raises ConfigError for a model that cannot be one."""
    if config.critic.path is None:
        return None
    sections = (
        config.critic,
        config.advantage.normalize_std,
        config.loss,
        config.optimizer,
        config.training,
    )
    if config.critic.is_on_policy:
        from grpo_spmd.learn.policy_critic import PolicyCritic
        from grpo_spmd.model.values import PolicyValues

        return PolicyCritic(PolicyValues(policy, session), *sections)
    from grpo_spmd.learn.critic import Critic
    from grpo_spmd.model.values import build_value_model

    longest, num_tokens = (
        config.max_rollout_tokens,
        policy.model.get_input_embeddings().weight.shape[0],
    )
    return Critic(
        build_value_model(config.critic.path, config.model, session, longest, num_tokens), *sections
    )


def head_of(critic: Critic | None) -> PolicyCritic | None:
    """What the policy's update takes along."""
    if critic is None:
        return None
    from grpo_spmd.learn.policy_critic import PolicyCritic

    return critic if isinstance(critic, PolicyCritic) else None
