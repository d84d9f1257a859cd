"""A step's decision and what was made of it, once more from each rank's own rollouts: rewards, advantages, masks, plan,
denominators, and that what a rank trains on is what another sampled. Plain Python, nothing of learn/."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.proofs.gradient_check import Found
from grpo_spmd.records import Decision, MicroBatch, RolloutBatch

_LEAST_CHANCE = -40.0  # nats, that samples which do not know of each other are alike
_ALIKE = 1e-6  # rewards of a group that differ by less have no spread


class BatchCheck:
    def __init__(
        self,
        rollout: RolloutConfig,
        advantage: AdvantageConfig,
        loss: LossConfig,
        rewards: Sequence[RewardConfig],
        stop_ids: Collection[int],
    ) -> None:
        """`stop_ids`: tokens that end a completion."""
        self._rollout, self._advantage, self._loss = rollout, advantage, loss
        self._weights, self._stop_ids = [reward.weight for reward in rewards], set(stop_ids)

    def run(self, sampled: SampledStep, batch: RolloutBatch, decision: Decision) -> Found:
        """Collective."""
        found, size = Found(), self._rollout.group_size
        self._check_completions(found, sampled)
        rewards = self._rewards(sampled)
        slots = {position: slot for slot, position in enumerate(decision.positions)}
        penalised = _less_kl(batch, decision, self._loss)
        whole = _moments([r for r in penalised if not math.isnan(r)])
        mine: dict[int, int] = {}
        for number, group in enumerate(sampled.groups):
            own = rewards[number * size : (number + 1) * size]
            slot = slots.get(group.prompt.position)
            is_alike = _moments([r for r in own if r is not None])[1] < _ALIKE
            if slot is None:
                is_surplus = len(slots) == self._rollout.num_prompts_per_step and group.prompt.position > max(slots)
                if not (self._rollout.dynamic_sampling and (is_alike or is_surplus)):
                    found.wrong.append(f"the group at position {group.prompt.position} is not trained on")
                continue
            if self._rollout.dynamic_sampling and is_alike:
                found.wrong.append(f"group {slot} has rewards that are all alike, and dynamic sampling kept it")
            ids = range(slot * size, (slot + 1) * size)
            advantages = self._advantages(penalised[slot * size : (slot + 1) * size], *whole)
            for i, completion, reward, expected in zip(ids, group.completions, own, advantages, strict=True):
                shorter = math.nan if reward is None else reward - self._penalty(len(completion.token_ids))
                if not _same(decision.rewards[i], shorter):
                    found.wrong.append(f"rollout {i} has the reward {decision.rewards[i]:.6g}, here {shorter:.6g}")
                if not _same(given := decision.advantages[i], expected):
                    found.wrong.append(f"rollout {i} has the advantage {given:.6g}, not {expected:.6g}")
                is_cut = self._loss.mask_truncated and completion.finish_reason == "length"
                if decision.in_loss[i] != (reward is not None and not is_cut):
                    found.wrong.append(f"rollout {i} is {'' if decision.in_loss[i] else 'not '}in the loss")
                count = len(completion.token_ids)
                mine[i] = _name(
                    [*group.prompt.token_ids, -1, *completion.token_ids], completion.logprobs,
                    [given] * count, [decision.in_loss[i]] * count,
                )  # fmt: skip
        found.measured["advantages"] = float(len(mine))
        trained = {i: name for micro_batch in batch.micro_batches for i, name in _named_rollouts(micro_batch)}
        found.wrong.extend(on_rank0(_misplaced, [list(mine.items()), list(trained.items())]))
        self._check_plan(found, batch, decision)
        return found

    def _rewards(self, sampled: SampledStep) -> list[float | None]:
        """The weighted sums over the functions that apply; None: one failed, or none applies."""
        columns, sums = list(sampled.scored.by_name.values()), list[float | None]()
        for values in zip(*columns, strict=True):
            known = [(w, v) for w, v in zip(self._weights, values, strict=True) if v is not None]
            total = sum(w * v for w, v in known)
            sums.append(total if known and math.isfinite(total) else None)
        return sums

    def _penalty(self, num_tokens: int) -> float:
        buffer, longest = self._advantage.overlong_buffer_tokens, self._rollout.max_completion_tokens
        over = num_tokens - (longest - buffer)
        return self._advantage.overlong_penalty * min(over, buffer) / buffer if buffer and over > 0 else 0.0

    def _advantages(self, group: Sequence[float], mean_of_all: float, deviation_of_all: float) -> list[float]:
        known, kind = [r for r in group if not math.isnan(r)], self._advantage.estimator
        center, deviation = _moments(known)
        divisor, usable = 1.0, deviation >= _ALIKE
        if kind == "reinforce_pp":
            center, divisor, usable = mean_of_all, deviation_of_all, deviation_of_all >= _ALIKE
        elif kind == "rloo" and usable:  # minus the mean of the others
            divisor = (len(known) - 1) / len(known)
        elif kind == "grpo":
            by = {"group": deviation, "batch": max(deviation_of_all, _ALIKE), "none": 1.0}
            divisor = by[self._advantage.normalize_std]
        return [0.0 if math.isnan(r) or not usable else (r - center) / divisor for r in group]

    def _check_completions(self, found: Found, sampled: SampledStep) -> None:
        """A completion ends at its first stop token, or at the longest length; a group's were drawn one by one."""
        longest = self._rollout.max_completion_tokens
        for group in sampled.groups:
            copies = Counter(tuple(completion.token_ids) for completion in group.completions)
            for ids, logprobs in {tuple(c.token_ids): c.logprobs for c in group.completions}.items():
                others, more = len(group.completions) - 1, copies[ids] - 1
                chance = math.log(math.comb(others, more)) + more * math.fsum(logprobs)
                if chance < _LEAST_CHANCE:
                    found.wrong.append(f"{more + 1} completions of a group are one: a chance of e{chance:.0f}")
        for completion in (c for group in sampled.groups for c in group.completions):
            *before, last = completion.token_ids or [-1]
            is_stopped = completion.finish_reason == "stop"
            if self._stop_ids.intersection(before):
                found.wrong.append("a completion goes on after a token that ends it (generation_config's eos_token_id)")
            elif last not in self._stop_ids if is_stopped else len(before) + 1 != longest:
                reason, count = completion.finish_reason, len(completion.token_ids)
                found.wrong.append(f"a completion of {count} tokens that ends with {last} has finish_reason {reason!r}")

    def _check_plan(self, found: Found, batch: RolloutBatch, decision: Decision) -> None:
        """Collective."""
        planned = Counter(i for ranks in decision.plan for rows in ranks for row in rows for i in row)
        if planned != Counter(range(len(decision.rewards))):
            found.wrong.append("the plan does not have each rollout once")
        own = []
        for rows in batch.mini_batches:
            own.append(sum(int(row.loss_mask.sum()) for row in rows))
            own.append(sum(len(row.sequence_index[row.loss_mask].unique()) for row in rows))
        counted = on_rank0(lambda of_ranks: [sum(column) for column in zip(*of_ranks, strict=True)], own)
        for number, pair in enumerate(zip(batch.num_loss_tokens, batch.num_loss_sequences, strict=True)):
            if (there := (counted[2 * number], counted[2 * number + 1])) != pair:
                found.wrong.append(f"mini-batch {number} is to divide by {pair} tokens and sequences, and has {there}")


def _less_kl(batch: RolloutBatch, decision: Decision, loss: LossConfig) -> list[float]:
    """Collective, with `loss.kl_in: reward`. The rewards, less the KL term where it is taken from them."""
    if loss.kl_in != "reward" or not loss.kl_coef:
        return decision.rewards
    own: list[tuple[int, float]] = []
    for row in batch.micro_batches:
        for place, i in enumerate(row.rollout_ids):
            p, ref = (cast(Tensor, x)[row.sequence_index == place] for x in (row.old_logprobs, row.ref_logprobs))
            # In float32 as the trainer's: where nothing else tells the rewards of a group apart, its rounding shows.
            terms = {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}
            own.append((i, float(terms[loss.kl_estimator].double().sum())))
    kl = {i: value for part in on_rank0(list, own) for i, value in part}
    return [reward - loss.kl_coef * kl.get(i, 0.0) for i, reward in enumerate(decision.rewards)]


def _named_rollouts(row: MicroBatch) -> list[tuple[int, int]]:
    """The rollouts of a micro-batch, each with a name for its numbers; -1: some token is scored at another place."""
    columns = row.rollout_logprobs, row.advantages, row.loss_mask
    ids, index, predict, targets, positions, logprobs, advantages, mask = (
        x.cpu().numpy()
        for x in (row.input_ids, row.sequence_index, row.predict_index, row.target_ids, row.position_ids, *columns)
    )
    starts, order, found = np.flatnonzero(positions == 0), np.argsort(index, kind="stable"), []
    bounds = np.searchsorted(index[order], np.arange(len(row.rollout_ids) + 1))
    following = np.append(ids[1:], -1)
    for place, i in enumerate(row.rollout_ids):
        own = order[bounds[place] : bounds[place + 1]]
        if not len(own) or not np.array_equal(targets[own], following[predict[own]]):
            found.append((i, -1))
            continue
        first = predict[own[0]]
        start = starts[np.searchsorted(starts, first, "right") - 1]
        tokens = np.concatenate([ids[start : first + 1], [-1], targets[own]])
        found.append((i, _name(tokens, logprobs[own], advantages[own], mask[own])))
    return found


def _name(ids: ArrayLike, logprobs: ArrayLike, advantages: ArrayLike, mask: ArrayLike) -> int:
    numbers = (np.asarray(x, np.float32).tobytes() for x in (logprobs, advantages, mask))
    return zlib.crc32(np.asarray(ids, np.int64).tobytes() + b"".join(numbers))


def _misplaced(of_ranks: list[list[list[tuple[int, int]]]]) -> list[str]:
    """On rank 0: what the ranks that sampled say, and those that train."""
    sampled, trained = ([(i, name) for part in of_ranks for i, name in part[which]] for which in (0, 1))
    found: list[str] = []
    twice = [i for i, count in Counter(i for i, _ in trained).items() if count > 1]
    known: Mapping[int, int] = dict(trained)
    other = [i for i, name in sampled if known.get(i, name) != name]
    missing = [i for i, _ in sampled if i not in known]
    for what, ids in (("twice", twice), ("with other tokens, logprobs or advantages", other), ("not", missing)):
        if ids:
            found.append(f"rollouts {sorted(ids)[:5]} are trained on {what}")
    return found


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased deviation; 0 where there are too few."""
    mean = math.fsum(values) / max(len(values), 1)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
