"""What a careful colleague would say about a valid config: one line each, with the numbers, only where it is true."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_spmd.config.schema import AdvantageConfig, Config, LossConfig
from grpo_spmd.preflight.arithmetic import ratio_is_one


def advice(config: Config, num_ranks: int) -> Iterator[str]:
    loss, training, longest = config.loss, config.training, config.max_rollout_tokens
    budget, low, high = training.max_tokens_per_micro_batch, loss.clip_ratio_low, loss.clip_ratio_high
    if budget < 2 * longest:
        what = f"{budget} holds fewer than 2 of the longest rollouts ({longest} tokens)"
        yield f"training.max_tokens_per_micro_batch {what}: long ones are not packed"
    if ratio_is_one(config):
        what = f"loss.clip_ratio_low {low:g}, clip_ratio_high {high:g} and dual_clip never bind"
        yield f"one optimizer step a rollout: the ratio is exactly 1, so that {what}"
    elif loss.policy == "gspo" and max(low, high) > 0.01:
        what = f"with clip bounds {low:g} and {high:g}, sized for ratios of tokens"
        yield f"loss.policy gspo {what}: the GSPO paper has 3e-4 and 4e-4"
    yield from _about_the_algorithm(loss, config.advantage, config.rollout.group_size)
    if config.advantage.estimator == "max_rl" and any(reward.weight < 0 for reward in config.rewards):
        what = "divides by the group's mean reward, and where that is not above 0 the group teaches nothing"
        yield f"advantage.estimator max_rl with a weight below 0 among rewards: it {what}"
    yield from _about_shares(config, num_ranks)
    steps, warmup = training.num_optimizer_steps * training.num_steps, config.optimizer.warmup_steps
    if warmup >= steps:
        what = f"optimizer.warmup_steps {warmup} covers the run's {steps} optimizer steps"
        yield f"{what}: lr {config.optimizer.lr:g} is reached at its end or never"
    if not config.checkpoint.every_steps and training.num_steps >= 100:
        what = f"a run that dies before the end of its {training.num_steps} steps has nothing to go on from"
        yield f"checkpoint.every_steps 0: {what}"


def _about_the_algorithm(loss: LossConfig, advantage: AdvantageConfig, group: int) -> Iterator[str]:
    over_group = advantage.estimator == "grpo" and advantage.normalize_std == "group"
    if loss.policy == "gspo" and loss.aggregation == "token":
        what = "long sequences count for more; the paper takes the mean over sequences (sequence)"
        yield f"loss.policy gspo with aggregation token: {what}"
    if advantage.estimator == "dr_grpo" and loss.aggregation != "constant":
        what = f"advantage.estimator dr_grpo with loss.aggregation {loss.aggregation}"
        yield f"{what}: the paper divides by a constant (constant)"
    if loss.kl_in == "reward" and over_group:
        what = "where rewards are alike, small differences of KL become advantages"
        yield f"loss.kl_in reward with normalize_std group: {what}"
    if loss.policy == "gspo" and loss.rollout_correction in ("token_tis", "icepop"):
        what = f"loss.policy gspo with rollout_correction {loss.rollout_correction}"
        yield f"{what}: weights of tokens in a loss of sequences (sequence_tis)"
    if loss.policy == "cispo" and (low := loss.clip_ratio_low) < 1:
        yield f"loss.policy cispo with clip_ratio_low {low:g}: it is usually run without a lower bound (1)"
    if advantage.estimator == "rloo" and group < 4:
        what = f"advantage.estimator rloo with rollout.group_size {group}"
        yield f"{what}: each baseline is the mean of only {group - 1} other rewards"
    if over_group and group == 2:
        what = "every pair gets the same two advantages, however far its rewards are apart"
        yield f"rollout.group_size 2 with normalize_std group: {what}"


def _about_shares(config: Config, num_ranks: int) -> Iterator[str]:
    rollout = config.rollout
    prompts, engines = rollout.num_prompts_per_step, num_ranks // rollout.tensor_parallel_size
    if prompts % engines:
        what = f"some sample {-(-prompts // engines)} groups a step, others {prompts // engines}"
        if prompts < engines:
            what = f"{engines - prompts} never sample while others do; raise it to {engines} or a multiple"
        yield f"rollout.num_prompts_per_step {prompts} is no multiple of {engines} engines: {what}"
    per_step = prompts * rollout.group_size // config.training.num_mini_batches
    if per_step < num_ranks:
        what = f"{num_ranks - per_step} of them have nothing to train on; raise rollout.num_prompts_per_step"
        yield f"{per_step} completions per optimizer step for {num_ranks} ranks: {what}"
    if rollout.dynamic_sampling and rollout.dynamic_sampling_max_rounds == 1:
        yield "rollout.dynamic_sampling with dynamic_sampling_max_rounds 1: groups are dropped, and never replaced"
