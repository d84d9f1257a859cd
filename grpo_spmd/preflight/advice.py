"""What a careful colleague would say about a valid config: one line each, with the numbers, only where it is true."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_spmd.config.schema import AdvantageConfig, Config, LossConfig
from grpo_spmd.preflight.arithmetic import ratio_is_one


def advice(config: Config, num_ranks: int) -> Iterator[str]:
    longest, budget = config.max_rollout_tokens, config.training.max_tokens_per_micro_batch
    low, high = config.loss.clip_ratio_low, config.loss.clip_ratio_high
    if budget < 2 * longest:
        yield (
            f"training.max_tokens_per_micro_batch {budget} holds fewer than 2 of the longest rollouts ({longest} "
            "tokens): long ones are not packed"
        )
    if ratio_is_one(config):
        yield (
            f"one optimizer step a rollout: the ratio is exactly 1, so that loss.clip_ratio_low {low:g}, "
            f"clip_ratio_high {high:g} and dual_clip never bind"
        )
    elif config.loss.policy == "gspo" and max(low, high) > 0.01:
        yield (
            f"loss.policy gspo with clip bounds {low:g} and {high:g}, sized for ratios of tokens: the GSPO paper has "
            "3e-4 and 4e-4"
        )
    yield from _about_the_algorithm(config.loss, config.advantage, config.rollout.group_size)
    yield from _about_shares(config, num_ranks)
    steps = config.training.num_optimizer_steps * config.training.num_steps
    if config.optimizer.warmup_steps >= steps:
        yield (
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} covers the run's {steps} optimizer steps: "
            f"lr {config.optimizer.lr:g} is reached at its end or never"
        )
    if not config.checkpoint.every_steps and config.training.num_steps >= 100:
        yield (
            f"checkpoint.every_steps 0: a run that dies before the end of its {config.training.num_steps} steps has "
            "nothing to go on from"
        )


def _about_the_algorithm(loss: LossConfig, advantage: AdvantageConfig, group: int) -> Iterator[str]:
    over_group = advantage.estimator == "grpo" and advantage.normalize_std == "group"
    if loss.policy == "gspo" and loss.aggregation == "token":
        yield (
            "loss.policy gspo with aggregation token: long sequences count for more; the paper takes the mean over "
            "sequences (sequence)"
        )
    if advantage.estimator == "dr_grpo" and loss.aggregation != "constant":
        yield (
            f"advantage.estimator dr_grpo with loss.aggregation {loss.aggregation}: the paper divides by a constant "
            "(constant)"
        )
    if loss.kl_in == "reward" and over_group:
        yield (
            "loss.kl_in reward with normalize_std group: where rewards are alike, small differences of KL become "
            "advantages"
        )
    if loss.policy == "gspo" and loss.rollout_correction in ("token_tis", "icepop"):
        yield (
            f"loss.policy gspo with rollout_correction {loss.rollout_correction}: weights of tokens in a loss of "
            "sequences (sequence_tis)"
        )
    if loss.policy == "cispo" and (low := loss.clip_ratio_low) < 1:
        yield f"loss.policy cispo with clip_ratio_low {low:g}: it is usually run without a lower bound (1)"
    if advantage.estimator == "rloo" and group < 4:
        yield (
            f"advantage.estimator rloo with rollout.group_size {group}: each baseline is the mean of only {group - 1} "
            "other rewards"
        )
    if over_group and group == 2:
        yield (
            "rollout.group_size 2 with normalize_std group: every pair gets the same two advantages, however far its "
            "rewards are apart"
        )


def _about_shares(config: Config, num_ranks: int) -> Iterator[str]:
    rollout = config.rollout
    prompts, engines = rollout.num_prompts_per_step, num_ranks // rollout.tensor_parallel_size
    if prompts % engines:
        yield (
            f"rollout.num_prompts_per_step {prompts} is no multiple of {engines} engines: "
            f"some sample {-(-prompts // engines)} groups a step, others {prompts // engines}"
        )
    per_step = prompts * rollout.group_size // config.training.num_mini_batches
    if per_step < num_ranks:
        yield (
            f"{per_step} completions per optimizer step for {num_ranks} ranks: {num_ranks - per_step} of them have "
            "nothing to train on"
        )
    if rollout.dynamic_sampling and rollout.dynamic_sampling_max_rounds == 1:
        yield "rollout.dynamic_sampling with dynamic_sampling_max_rounds 1: groups are dropped, and never replaced"
