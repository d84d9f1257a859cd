"""Checks rank 0's decision about a step, the step's batch, its prompts and its stop tokens.

The decision says which rollouts are trained on, with which advantages, and by which rank.
`BatchCheck` computes rewards, advantages, masks and denominators once more, in plain Python, from
the rollouts that each rank sampled itself. A rollout may be trained on by another rank than the one
that sampled it; both hash its tokens, logprobs, advantages and mask, and rank 0 compares the
hashes. `check_data` reads rows of the data set again and compares them with the prompts and with
the arguments of the reward functions. `check_stop_ids` compares the engine's stop tokens with the
model's files. The last two run in the first and the third step of a process only.

Every check returns a CheckResult: the errors on this rank, as sentences, and the largest
differences. No check raises an error; update_check.py collects the results of all ranks.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from grpo_spmd.config.schema import DataConfig, LossConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.learn.advantages import Credit, turn_advantages
from grpo_spmd.learn.contexts import (
    completion_contexts,
    completion_turns,
    find_episode_error,
    row_contexts,
)
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.proofs.gradient_check import count_loss, join_ranks, sum_over_ranks
from grpo_spmd.proofs.plain import plain_kl
from grpo_spmd.proofs.synthetic import CheckResult, UpdateCheckSettings
from grpo_spmd.records import (
    Completion,
    Decision,
    Episode,
    MicroBatch,
    PrefixTree,
    RolloutBatch,
    RolloutGroup,
    Routes,
    ScoredRollouts,
    StepDecision,
    Turn,
)

_log = logging.getLogger("grpo_spmd")
# The number of prompts that each rank compares with the data set. A few are enough to show a
# systematic fault, and reading rows again takes time.
_NUM_PROMPTS = 4
# If completions of a group are equal, and the log probability of this coincidence is below this
# bound, then the engine has used a seed twice.
_MIN_LOG_CHANCE = -40.0
# A group has no spread if the standard deviation of its rewards is below this.
_MIN_DEVIATION = 1e-6
# CRC32 is never negative, so that negative numbers are free for two special cases.
NO_TOKENS = -2
"""The hash of a rollout without a sampled token. Such a rollout is in no micro-batch."""
_MISALIGNED = -1
"""The hash of a rollout with a token that is scored at another position than its own."""
# One row of a data set: values by column name.
_Row = dict[str, Any]


class BatchCheck:
    """Checks rank 0's decision about a step, and the micro-batches that the ranks made from it.

    `run` computes on each rank once more what should be decided about the rollouts that the rank
    sampled."""

    def __init__(
        self, settings: UpdateCheckSettings, tokenizer: Any = None, *, counts_rows: bool = True
    ) -> None:
        """The `tokenizer` is used only with `rollout.stop`, to look for the stop strings.

        `counts_rows` is that of Policy: False on a rank whose micro-batches another rank has too
        and counts (`model.sequence_parallel_size`)."""
        self._counts_rows = counts_rows
        self._tokenizer = tokenizer
        self._rollout = settings.rollout
        self._advantage = settings.advantage
        self._loss = settings.loss
        self._weights = settings.reward_weights
        self._stop_ids = settings.stop_ids
        self._environment = settings.environment
        # With gae the critic's own check compares the advantages, not this one.
        self._has_critic = self._advantage.estimator == "gae"

    def run(self, sampled: SampledStep, batch: RolloutBatch, decision: Decision) -> CheckResult:
        """Collective. Returns what is wrong with the rollouts that this rank sampled and with the
        micro-batches ("rows") that it trains on."""
        result = CheckResult()
        # Every rank makes the same collectives in the same order, even one without a trained group.
        self._check_completions(result, sampled)
        kl_penalties = _kl_penalties(batch, self._loss)
        rewards = self.rewards_of(sampled, decision)
        penalised = {i: reward - kl_penalties.get(i, 0.0) for i, reward in rewards.items()}
        step_mean, step_deviation = moments(join_ranks([*penalised.values()]))
        # (id, hash, reward) of each rollout that this rank sampled, to be compared on rank 0.
        reports: list[tuple[int, int, float]] = []
        # Positions of groups that have a spread and yet are not trained on. This is right only for
        # surplus groups; rank 0 knows which these are.
        not_trained: list[int] = []
        is_dynamic = self._rollout.dynamic_sampling
        for group, sums in zip(sampled.groups, self._weighted_sums(sampled), strict=True):
            position = group.prompt.position
            ids = decision.rollout_ids(group)
            # The only reason to drop a group: dynamic sampling found no spread in its rewards.
            is_alike = is_dynamic and moments(sums)[1] < _MIN_DEVIATION
            if not ids:
                not_trained += [] if is_alike else [position]
                continue
            if is_alike:
                result.errors.append(
                    f"the group at position {position} has rewards that are all alike, and dynamic "
                    "sampling kept it"
                )
            group_rewards = [penalised[i] for i in ids]
            center, scale = self._advantage_line(group_rewards, step_mean, step_deviation)
            if sampled.rules.zero_advantages:
                scale = math.inf
            # NaN: the reward is not known.
            expected = [
                0.0 if math.isnan(reward) or math.isinf(scale) else (reward - center) / scale
                for reward in group_rewards
            ]
            credits = self._token_advantages(
                result, group, group_rewards, scale, sampled.rules.discount, decision
            )
            for i, completion, advantage, credit in zip(
                ids, group.completions, expected, credits, strict=True
            ):
                self._check_rollout(result, i, completion, rewards[i], advantage, decision)
                num_tokens = len(completion.token_ids)
                contexts = completion_contexts(group.prompt.token_ids, completion)
                # The rank that trains on the rollout must get the same hash from its micro-batch
                # (_hash_rollouts).
                rollout_hash = _hash_rollout(
                    [(context.token_ids, np.flatnonzero(context.sampled)) for context in contexts],
                    completion.logprobs,
                    np.broadcast_to(credit, num_tokens),
                    mask=[decision.in_loss[i]] * num_tokens,
                    routes=[context.routes for context in contexts],
                )
                reports.append((i, rollout_hash, rewards[i]))
        result.metrics["advantages"] = decision.num_rollouts
        # (id, hash) of each rollout that this rank trains on.
        trained = [
            pair for row in batch.micro_batches for pair in _hash_rollouts(row, self._has_critic)
        ]
        # Dynamic sampling takes the first groups of the prompt stream. Groups at later positions
        # are surplus, but only if the step is full.
        num_wanted = self._rollout.num_prompts_per_step if is_dynamic else math.inf
        find = partial(find_misplaced, decision=decision.rank0_decision, num_wanted=num_wanted)
        result.errors.extend(on_rank0(find, [reports, trained, not_trained]))
        self._check_denominators(result, batch)
        return result

    def rewards_of(self, sampled: SampledStep, decision: Decision) -> dict[int, float]:
        """Returns rewards by rollout id, for the rollouts that this rank sampled and that are
        trained on.

        A reward is the weighted sum minus the overlong penalty. NaN: unknown."""
        return {
            i: reward - self._overlong_penalty(len(completion.token_ids))
            for group, sums in zip(sampled.groups, self._weighted_sums(sampled), strict=True)
            # Not strict: a group that is not trained on has no ids.
            for i, completion, reward in zip(
                decision.rollout_ids(group), group.completions, sums, strict=False
            )
        }

    def _weighted_sums(self, sampled: SampledStep) -> list[list[float]]:
        """Returns for each group the weighted sum of the rewards of each completion; NaN: unknown.

        The sums are computed from the value and the status of each reward call, without the code of
        `rewards/`. Rewards of weight 0 are left out; if all weights are 0, all count as 1."""
        completions = [c for group in sampled.groups for c in group.completions]
        sums = np.zeros(len(completions))
        num_applying = np.zeros(len(completions))
        has_weights = any(self._weights)
        scored = sampled.scored
        # Not strict: a rank without completions has no rewards by name.
        for weight, name in zip(self._weights, scored.by_name, strict=False):
            if has_weights and weight == 0:
                continue
            statuses = np.array(scored.statuses[name])
            values = np.array(scored.by_name[name], np.float64)
            if self._environment.gym and name == "environment":
                # An episode without a turn has no reward.
                turns = [() if c.episode is None else c.episode.turns for c in completions]
                values = np.array([self._gym_reward(turns_of_one) for turns_of_one in turns])
                statuses = np.where([len(x) > 0 for x in turns], "ok", "not_applicable")
            applies = statuses != "not_applicable"
            values[applies & (statuses != "ok")] = math.nan
            sums += np.where(applies, values, 0.0) * (weight if has_weights else 1.0)
            num_applying += applies
        # A run without any reward learns from a teacher alone: its sums of 0 count as known.
        is_known = np.isfinite(sums) & ((num_applying > 0) | (not self._weights))
        sums[~is_known] = math.nan
        return sums.reshape(-1, self._rollout.group_size).tolist()

    def _gym_reward(self, turns: Sequence[Turn]) -> float:
        """Returns the reward of a gym's episode: the discounted sum of the rewards of its turns."""
        factor = 1.0 if self._environment.discount is None else self._environment.discount
        return math.fsum((turn.reward or 0.0) * factor**n for n, turn in enumerate(turns))

    def _overlong_penalty(self, num_tokens: int) -> float:
        """Returns the penalty that is subtracted from the reward of a completion of `num_tokens`.

        It grows linearly within the last `overlong_buffer_tokens` before the limit."""
        buffer = self._advantage.overlong_buffer_tokens
        excess = num_tokens - (self._rollout.max_completion_tokens - buffer)
        if not buffer or excess <= 0:
            return 0.0
        return self._advantage.overlong_penalty * min(excess, buffer) / buffer

    def _advantage_line(
        self, rewards: Sequence[float], step_mean: float, step_deviation: float
    ) -> tuple[float, float]:
        """Returns (center, scale) of a group: each advantage is (reward - center) / scale.

        `rewards` are those of the group; NaN is unknown. `step_mean` and `step_deviation` are over
        the rewards of the whole step. The scale is infinite if there is nothing to learn: then
        every advantage is 0."""
        center, deviation = moments(rewards)
        num_known = sum(not math.isnan(reward) for reward in rewards)
        estimator = self._advantage.estimator
        divisors = {
            "group": deviation,
            "batch": max(step_deviation, _MIN_DEVIATION),
            "none": 1.0,
        }
        # The default of 1 is for dr_grpo, which only subtracts the group's mean.
        scale = {
            "reinforce_pp": step_deviation,
            "max_rl": center,
            # r - mean of the n - 1 others = (r - mean of all) / ((n - 1) / n).
            "rloo": (num_known - 1) / max(num_known, 1),
            "grpo": divisors[self._advantage.normalize_std],
        }.get(estimator, 1.0)
        if estimator == "reinforce_pp":
            center = step_mean
            deviation = step_deviation
        is_usable = min(scale, deviation) >= _MIN_DEVIATION
        return center, scale if is_usable else math.inf

    def _check_rollout(
        self,
        result: CheckResult,
        i: int,
        completion: Completion,
        reward: float,
        expected: float,
        decision: Decision,
    ) -> None:
        """Checks the advantage and the loss mask that rank 0 decided for the rollout with id `i`.

        `expected` is what the advantage should be. `reward` is the reward before the KL penalty;
        NaN: unknown."""
        advantage = decision.advantages[i]
        if not self._has_critic and not _is_close(advantage, expected):
            result.errors.append(
                f"rollout {i} has the advantage {advantage:.6g}, not {expected:.6g}"
            )
        is_masked = self._loss.mask_truncated and completion.finish_reason == "length"
        in_loss = decision.in_loss[i]
        # A rollout counts in the loss if its reward is known, or if all weights are 0; but not if
        # it was cut off at the length limit and loss.mask_truncated is set.
        is_wanted = not any(self._weights) or not math.isnan(reward)
        if in_loss != (is_wanted and not is_masked):
            result.errors.append(f"rollout {i} is wrongly {'' if in_loss else 'not '}in the loss")

    def _token_advantages(
        self,
        result: CheckResult,
        group: RolloutGroup,
        rewards: Sequence[float],
        scale: float,
        discount: float | None,
        decision: Decision,
    ) -> Sequence[Credit]:
        """Returns for each rollout of a group one advantage for all of its sampled tokens, or one
        advantage for each of them.

        With `discount` (environment.discount) each turn of an episode has its own advantage; these
        are checked here. With a critic all results are 0, since the critic's own check compares
        the advantages. `rewards` and `scale` are those of the group, as in `_advantage_line`."""
        if self._has_critic:
            return [0.0] * len(group.completions)
        ids = decision.rollout_ids(group)
        advantages = [decision.advantages[i] for i in ids]
        if discount is None:
            return advantages
        episodes = [completion.episode for completion in group.completions]
        slope = decision.advantage_slope
        credits = turn_advantages(advantages, rewards, episodes, discount, slope)
        is_known = [not math.isnan(reward) for reward in rewards]
        # If the returns of whole episodes have no spread, `scale` is infinite, and all turns have
        # the advantage of their episode.
        expected = _turn_advantages(advantages, episodes, is_known, scale, discount)
        for i, credit, values, is_scored in zip(ids, credits, expected, is_known, strict=True):
            if is_scored and not np.allclose(credit, values, rtol=1e-4, atol=1e-5):
                result.errors.append(
                    f"the advantages of rollout {i}'s turns do not follow from the turns' returns"
                )
        return credits

    def _check_completions(self, result: CheckResult, sampled: SampledStep) -> None:
        """Checks that the completions of a group differ, and that each ends where it should.

        Equal long completions show that the engine has used a seed twice."""
        for group in sampled.groups:
            copies = Counter(tuple(completion.token_ids) for completion in group.completions)
            logprobs = {tuple(c.token_ids): c.logprobs for c in group.completions}
            for ids, count in copies.items():
                # The log probability that `count - 1` of the group's other completions repeat this
                # one by chance.
                num_ways = math.comb(len(group.completions) - 1, count - 1)
                log_chance = math.log(num_ways) + (count - 1) * math.fsum(logprobs[ids])
                if log_chance < _MIN_LOG_CHANCE:
                    result.errors.append(
                        f"{count} completions of a group are equal: a chance of e{log_chance:.0f}"
                    )
            for completion in group.completions:
                self._check_turns(result, completion)

    def _check_turns(self, result: CheckResult, completion: Completion) -> None:
        """Checks that each turn of a completion ends at its first stop token or stop string, or at
        the length limit. A completion without an episode is one turn."""
        episode = completion.episode
        turns = completion_turns(completion)
        if episode is not None:
            rule = find_episode_error(completion.token_ids, episode)
            if rule:
                result.errors.append(f"an episode is not valid: {rule}")
        # Only an agent may go on after a turn that was cut off at the length limit.
        is_agent = bool(self._environment.agent)
        if not is_agent and any(reason == "length" for _, reason in turns[:-1]):
            result.errors.append("an episode goes on after a turn that was cut off")
        limit = self._rollout.max_completion_tokens
        unit = "completion" if episode is None else "turn"
        for ids, reason in turns:
            *earlier, final = ids or [-1]
            if self._stop_ids.intersection(earlier) or self._has_stop_string(earlier):
                result.errors.append(
                    f"a {unit} goes on after a token that ends it (generation_config's "
                    "eos_token_id, or rollout.stop)"
                )
                continue
            if reason == "stop":
                # vLLM keeps a blank before the first word that some tokenizers drop in decoding.
                is_right = final in self._stop_ids or self._has_stop_string(ids, before=" ")
            else:
                # A turn of an episode may have less room than the limit.
                is_right = len(ids) == limit if episode is None else 0 < len(ids) <= limit
                is_right &= not self._has_stop_string(ids)
            if not is_right:
                result.errors.append(
                    f"a {unit} of {len(ids)} tokens that ends with {final} has finish_reason "
                    f"{reason!r}"
                )

    def _has_stop_string(self, ids: Sequence[int], before: str = "") -> bool:
        """Returns whether vLLM would find a stop string (`rollout.stop`) in the text of `ids`.

        `before` is put in front of that text: some tokenizers drop a blank in decoding."""
        if not self._rollout.stop:
            return False
        text = before + self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        # If the text ends within a character of several tokens ("\ufffd"), vLLM does not look for
        # stop strings until the character is complete.
        return not text.endswith("\ufffd") and any(stop in text for stop in self._rollout.stop)

    def _check_denominators(self, result: CheckResult, batch: RolloutBatch) -> None:
        """Collective. Counts the tokens and sequences of each mini-batch over all ranks, and
        compares the counts with the denominators that the batch states."""
        counted = [rows if self._counts_rows else [] for rows in batch.mini_batches]
        counts = iter(sum_over_ranks(count for rows in counted for count in count_loss(rows)))
        stated = zip(batch.num_loss_tokens, batch.num_loss_sequences, strict=True)
        for number, pair in enumerate(stated):
            count = next(counts), next(counts)
            if count != pair:
                result.errors.append(
                    f"mini-batch {number} is to divide by {pair} tokens and sequences, but has "
                    f"{count}"
                )


def _kl_penalties(batch: RolloutBatch, loss: LossConfig) -> dict[int, float]:
    """Returns the KL penalties of the rollouts of all ranks by rollout id. Collective with
    `loss.kl_in: reward`; else the result is empty.

    The trainer subtracts the penalty from the reward. It is computed on the rank that trains on the
    rollout, and needed on the rank that sampled it. A rollout without a completion token is in no
    micro-batch and has no penalty."""
    if loss.kl_in != "reward" or not loss.kl_coef:
        return {}
    penalties: dict[int, float] = {}
    for row in batch.micro_batches:
        for number, i in enumerate(row.rollout_ids):
            rollout_values = row.sequence_index == number
            # In float32, as the trainer computes it: if the rewards of a group differ only by their
            # penalties, rounding changes the advantages.
            terms = plain_kl(
                cast(Tensor, row.old_logprobs)[rollout_values],
                cast(Tensor, row.ref_logprobs)[rollout_values],
                loss.kl_estimator,
            )
            penalties[i] = loss.kl_coef * float(terms.double().sum())
    return dict(join_ranks(list(penalties.items())))


def _turn_advantages(
    advantages: Sequence[float],
    episodes: Sequence[Episode | None],
    is_known: Sequence[bool],
    scale: float,
    discount: float,
) -> list[npt.NDArray[Any]]:
    """Returns for each rollout of a group the advantages of its sampled tokens, turn after turn.

    `advantages` has one number for each rollout; `scale` is that of `_advantage_line`. For a turn,
    let x be (return from this turn on) - (return of the whole episode). Every token of the turn has
    the rollout's advantage plus (x - mean of x over the group's rollouts with a known reward) /
    `scale`."""
    turns_by_rollout = [episode.turns if episode is not None else () for episode in episodes]
    # One start more than the longest episode has turns: the return after its end is 0.
    starts = range(1 + max(map(len, turns_by_rollout)))
    returns = np.array(
        [
            [
                sum((turn.reward or 0.0) * discount**n for n, turn in enumerate(turns[start:]))
                for start in starts
            ]
            for turns in turns_by_rollout
        ]
    )
    excess = returns - returns[:, :1]
    centred = excess - excess[is_known].sum(axis=0) / max(sum(is_known), 1)
    return [
        advantage + np.repeat(x[: len(turns)], [turn.num_tokens for turn in turns]) / scale
        for advantage, x, turns in zip(advantages, centred, turns_by_rollout, strict=True)
    ]


def _has_whole_paths(row: MicroBatch, tree: PrefixTree) -> bool:
    """Returns True if the tree gives the last node of each sequence the keys of the whole sequence.

    In the `tree` of a row each prefix that sequences share is stored once, as a node. A token of
    the last node attends to all keys on the way from the root, which must be exactly the tokens of
    its sequence."""
    columns = tree.index, tree.keys, tree.starts, tree.key_starts
    index, keys, starts, key_starts = (column.cpu().numpy() for column in columns)
    sequences = np.split(index, np.cumsum(row.sequence_lengths)[:-1])
    last_nodes = [int(np.searchsorted(starts, s[-1], side="right")) - 1 for s in sequences]
    return all(
        np.array_equal(keys[key_starts[node] : key_starts[node + 1]], sequence)
        for node, sequence in zip(last_nodes, sequences, strict=True)
    )


def _hash_rollouts(row: MicroBatch, has_critic: bool = False) -> list[tuple[int, int]]:
    """Returns (rollout id, hash) of each rollout in a micro-batch, on the rank that trains on it.

    With `has_critic` advantages are hashed as 0, as `BatchCheck.run` does on the sampling rank.

    The hash is _MISALIGNED if a target is not the token after the position that predicts it, if
    positions do not count from 0 in each sequence, or if a sequence starts elsewhere."""
    contexts = row_contexts(row)
    positions = torch.cat([torch.arange(length) for length in row.sequence_lengths])
    starts = np.cumsum([0, *row.sequence_lengths]).tolist()
    is_aligned = (
        torch.equal(positions, row.position_ids.cpu()) and starts == row.sequence_starts.tolist()
    )
    if row.tree is not None:
        # Where a shared prefix is stored once (the tree), the stored token that stands for a token
        # must have the same id and position.
        read = row.tree.tokens[row.tree.index]
        is_aligned &= all(torch.equal(x, x[read]) for x in (row.input_ids, row.position_ids))
        is_aligned &= _has_whole_paths(row, row.tree)
    index, targets, logprobs, advantages, mask = (
        column.cpu().numpy()
        for column in (
            row.sequence_index,
            row.target_ids,
            row.rollout_logprobs,
            row.advantages,
            row.loss_mask,
        )
    )
    if has_critic:
        advantages = np.zeros_like(advantages)
    hashes = []
    for number, i in enumerate(row.rollout_ids):
        entries = np.flatnonzero(index == number)
        rollout_contexts = [c for c in contexts if c.rollout_id == i]
        tokens = [(c.token_ids, c.sampled_at) for c in rollout_contexts]
        routes = [c.routes for c in rollout_contexts]
        # The token that each position predicts; -1 if a wrong position points behind the last one.
        following = np.concatenate([[-1], *(np.append(ids, -1)[at] for ids, at in tokens)])[1:]
        rollout_hash = _MISALIGNED
        if is_aligned and np.array_equal(targets[entries], following):
            rollout_hash = _hash_rollout(
                tokens, logprobs[entries], advantages[entries], mask[entries], routes
            )
        hashes.append((i, rollout_hash))
    return hashes


def _hash_rollout(
    contexts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    routes: Sequence[Routes | None] = (),
) -> int:
    """Returns the hash of a rollout, or NO_TOKENS if no token of it was sampled.

    `contexts` has, for each sequence that the policy read, its token ids and the positions of the
    sampled tokens among them. Tokens after the last sampled one do not count. `logprobs`,
    `advantages` and `mask` have one value for each sampled token. `routes` are those of the
    contexts: the experts that the engine chose for each token; none for a dense model."""
    chunks = [
        np.concatenate([ids[: sampled[-1] + 1], [-1], sampled]).astype(np.int64).tobytes()
        for ids, sampled in contexts
        if len(sampled)
    ]
    # Not strict: without a mixture of experts there are no routes.
    chunks += [
        experts[: sampled[-1]].tobytes()
        for (_, sampled), experts in zip(contexts, routes, strict=False)
        if experts is not None and len(sampled)
    ]
    chunks += [np.asarray(x, np.float32).tobytes() for x in (logprobs, advantages, mask)]
    return zlib.crc32(b"".join(chunks)) if any(chunks) else NO_TOKENS


def find_misplaced(
    reports: list[Any], decision: StepDecision | None, num_wanted: float
) -> list[str]:
    """Compares the decision with the reports of all ranks, and returns one sentence for each error.
    Runs on rank 0.

    The report of a rank has three lists: (id, hash, reward) of each rollout that the rank sampled,
    (id, hash) of each rollout that it trains on, and the positions in the prompt stream of the
    groups that have a spread and yet are not trained on. `num_wanted` is the number of groups of a
    full step; infinity without dynamic sampling."""
    assert decision is not None
    sampled, trained, not_trained = ([*chain(*lists)] for lists in zip(*reports, strict=True))
    positions = decision.positions.tolist()
    is_full = len(positions) == num_wanted
    errors = [
        f"the group at position {position} is not trained on"
        for position in not_trained
        # Groups behind the last position of a full step are surplus.
        if not (is_full and position > max(positions))
    ]
    for i, _, reward in sampled:
        decided = float(decision.rewards[i])
        if not _is_close(decided, reward):
            errors.append(f"rollout {i} has the reward {decided:.6g}, not {reward:.6g}")
    all_ids = list(range(len(decision.rewards)))
    if sorted(i for i, _, _ in sampled) != all_ids:
        errors.append("not each rollout of the step was sampled once")
    if sorted(decision.plan.ids.tolist()) != all_ids:
        errors.append("the plan does not have each rollout once")
    # The plan has one entry for each group of ranks that share their micro-batches (one rank
    # without model.sequence_parallel_size), and every rank of the group reports its rollouts.
    num_sharing = len(reports) // len(decision.plan.lengths[0])
    counts = Counter(i for i, _ in trained)
    hashes = {i: expected for i, expected, _ in sampled}
    faults = {
        "trained on twice": [i for i, count in counts.items() if count > num_sharing],
        "trained on with other tokens, logprobs or advantages": {
            i for i, actual in trained if hashes.get(i, actual) != actual
        },
        "not trained on": [
            i for i, expected in hashes.items() if counts[i] < num_sharing and expected != NO_TOKENS
        ],
    }
    return errors + [
        f"rollouts {sorted(ids)[:5]} are {fault}" for fault, ids in faults.items() if ids
    ]


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Returns (mean, unbiased standard deviation) of the known values; NaN stands for unknown.

    One value has a deviation of 0, and without any value both are 0."""
    known = np.array([value for value in values if not math.isnan(value)])
    if len(known) < 2:
        return float(known.sum()), 0.0
    return float(known.mean()), float(known.std(ddof=1))


def _is_close(a: float, b: float) -> bool:
    """Returns True if the numbers differ by float32 rounding at most, or are both NaN."""
    both_unknown = math.isnan(a) and math.isnan(b)
    return a == b or both_unknown or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)


# The data: prompts, arguments of the reward functions, and stop tokens.


def check_data(
    groups: Sequence[RolloutGroup], scored: ScoredRollouts, tokenizer: Any, data: DataConfig
) -> CheckResult:
    """Compares some of this rank's prompts, and the arguments that the reward functions got for
    them, with rows of data.train that are read again."""
    result = CheckResult()
    checked = groups[:_NUM_PROMPTS]
    try:
        rows = _read_rows(data.train, {group.prompt.row for group in checked})
    except (OSError, ValueError) as error:
        # The file was moved or changed after the run had read it, which is no fault of the run.
        _log.warning(
            "update check: prompts are not compared with data.train, which cannot be read again: "
            "%s",
            error,
        )
        return result
    for number, group in enumerate(checked):
        prompt = group.prompt
        row = rows.get(prompt.row)
        key = f"{data.train}, row {prompt.row}"
        if row is None:
            result.errors.append(f"there is a prompt of {key}, but no such row")
            continue
        if data.prompt_template is None and prompt.text != _prompt_of(row, data):
            result.errors.append(f"the prompt of {key} is not the one in that row")
        # A chat template may write today's date, which may have changed since the run began.
        is_chat = not isinstance(prompt.text, str)
        is_dated = is_chat and "strftime_now" in str(tokenizer.chat_template)
        if not is_dated and list(prompt.token_ids) != _token_ids(prompt.text, tokenizer, data):
            result.errors.append(f"the token ids of the prompt of {key} are not those of its text")
        expected = {
            name: value
            for name, value in row.items()
            if data.prompt_template or name != data.prompt_key
        }
        # reward_inputs has one entry for each completion, in the order of the groups. Not strict:
        # the slice goes on with the completions of later groups.
        start = number * len(group.completions)
        for completion, inputs in zip(
            group.completions, scored.reward_inputs[start:], strict=False
        ):
            episode = completion.episode
            # No function is called for an episode that failed before its first turn.
            if episode is not None and not episode.turns:
                continue
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            reply = [{"role": "assistant", "content": text}] if is_chat else text
            expected |= {
                "prompts": prompt.text_before(completion),
                "completions": reply if episode is None else episode.messages,
                "completion_ids": completion.token_ids,
            }
            # Compared as text, since values of a row may be arrays or NaN.
            wrong_names = [
                name for name, value in expected.items() if repr(inputs.get(name)) != repr(value)
            ]
            if wrong_names:
                result.errors.append(
                    f"the reward functions were given another {wrong_names[0]!r} for a "
                    "completion of "
                    f"{key} than the row and the completion have"
                )
    return result


def check_stop_ids(path: Path, tokenizer: Any, stop_ids: Collection[int]) -> CheckResult:
    """Compares the engine's `stop_ids` with the tokens that the model's own files name.

    These are eos_token_id of generation_config.json or config.json in the folder `path`, and the
    tokenizer's."""
    expected: set[int] = {tokenizer.eos_token_id} - {None}
    # As in vLLM and transformers, generation_config.json comes before config.json.
    for file in filter(Path.is_file, (path / "generation_config.json", path / "config.json")):
        ids = json.loads(file.read_text("utf-8-sig")).get("eos_token_id")
        if ids is not None:
            expected |= {ids} if isinstance(ids, int) else set(ids)
            break
    if expected == set(stop_ids):
        return CheckResult()
    return CheckResult(
        [
            f"completions should end at {sorted(expected)} (eos_token_id in {path}), but the "
            f"engine ends them at {sorted(stop_ids)}"
        ]
    )


def _read_rows(source: str, numbers: Collection[int]) -> dict[int, _Row]:
    """Returns the rows with these numbers, counted from 0. `source` is as in `data.train`.

    Raises OSError or ValueError if the data cannot be read."""
    if source.startswith("hub:"):
        import datasets

        _, repo, subset, split = source.split(":", 3)
        table = datasets.load_dataset(repo, subset or None, split=split)
        return {number: dict(table[number]) for number in numbers}
    if source.endswith(".parquet"):
        import pyarrow.parquet

        if Path(source).is_dir():
            table = pyarrow.parquet.read_table(source, memory_map=True)
            return {number: table.slice(number, 1).to_pylist()[0] for number in numbers}
        rows: dict[int, _Row] = {}
        start = 0
        # All ranks read the file at once, so none should hold all of it in memory.
        file = pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
        for batch in file.iter_batches(4096, use_threads=False):
            for number in numbers:
                if start <= number < start + len(batch):
                    rows[number] = batch.slice(number - start, 1).to_pylist()[0]
            start += len(batch)
        return rows
    with Path(source).open("rb") as file:
        # Empty lines of a JSONL file are no rows.
        return {
            number: json.loads(line.decode("utf-8-sig"))
            for number, line in enumerate(filter(bytes.strip, file))
            if number in numbers
        }


def _prompt_of(row: _Row, data: DataConfig) -> Any:
    """Returns the prompt that the trainer should have made from this row: a string or chat
    messages."""
    prompt = row.get(data.prompt_key)
    if isinstance(prompt, str) and (data.as_chat or data.system_prompt):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and data.system_prompt and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
    return prompt


def _token_ids(prompt: Any, tokenizer: Any, data: DataConfig) -> list[int]:
    """Returns the token ids of a prompt as the tokenizer gives them, without the trainer's code."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    # The class's method: the run has replaced the tokenizer's by one with chat_template_kwargs
    # bound to it (config_json.load_tokenizer).
    render = type(tokenizer).apply_chat_template
    options = {"add_generation_prompt": True, "return_dict": False, **data.chat_template_kwargs}
    return list(render(tokenizer, prompt, **options))
