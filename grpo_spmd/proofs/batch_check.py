"""A step's decision and what was made of it, once more from each rank's own rollouts: rewards, advantages, masks, plan,
denominators, and that what a rank trains on is what another sampled. Plain Python, nothing of learn/."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.proofs.decision_check import misplaced, moments, moments_of_all, same
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
        rewards, slots = self._rewards(sampled), decision.slots
        kl = _kl_penalties(batch, self._loss)
        shorter: dict[int, float] = {}  # rewards without the penalty for their length
        dropped: list[int] = []  # positions of groups with a spread that are not trained on
        for number, group in enumerate(sampled.groups):
            own, position = rewards[number * size : (number + 1) * size], group.prompt.position
            is_alike = moments([r for r in own if r is not None])[1] < _ALIKE
            if position not in slots:
                dropped += [] if self._rollout.dynamic_sampling and is_alike else [position]
                continue
            slot = slots[position]
            if self._rollout.dynamic_sampling and is_alike:
                found.wrong.append(f"group {slot} has rewards that are all alike, and dynamic sampling kept it")
            for i, completion, reward in zip(_ids(slot, size), group.completions, own, strict=True):
                shorter[i] = math.nan if reward is None else reward - self._penalty(len(completion.token_ids))
        penalised = {i: reward - kl.get(i, 0.0) for i, reward in shorter.items()}
        whole = on_rank0(moments_of_all, [r for r in penalised.values() if not math.isnan(r)])
        mine: list[tuple[int, int, float]] = []
        for group in sampled.groups:
            ids = _ids(slots.get(group.prompt.position), size)
            advantages = self._advantages([penalised[i] for i in ids], *whole)
            for i, completion, expected in zip(ids, group.completions if ids else (), advantages, strict=True):
                if not same(given := decision.advantages[i], expected):
                    found.wrong.append(f"rollout {i} has the advantage {given:.6g}, not {expected:.6g}")
                is_cut = self._loss.mask_truncated and completion.finish_reason == "length"
                if decision.in_loss[i] != (not math.isnan(shorter[i]) and not is_cut):
                    found.wrong.append(f"rollout {i} is {'' if decision.in_loss[i] else 'not '}in the loss")
                count = len(completion.token_ids)
                name = _name(
                    [*group.prompt.token_ids, -1, *completion.token_ids], completion.logprobs,
                    [given] * count, [decision.in_loss[i]] * count,
                )  # fmt: skip
                mine.append((i, name, shorter[i]))
        found.measured["advantages"] = float(len(mine))
        trained = [pair for micro_batch in batch.micro_batches for pair in _named_rollouts(micro_batch)]
        # With so many groups in the step those of later positions are surplus.
        wanted = self._rollout.num_prompts_per_step if self._rollout.dynamic_sampling else math.inf
        judge = partial(misplaced, of_all=decision.of_all, wanted=wanted)
        found.wrong.extend(on_rank0(judge, [mine, trained, dropped]))
        self._check_denominators(found, batch)
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
        center, deviation = moments(known)
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

    def _check_denominators(self, found: Found, batch: RolloutBatch) -> None:
        """Collective."""
        own = []
        for rows in batch.mini_batches:
            own.append(sum(int(row.loss_mask.sum()) for row in rows))
            own.append(sum(len(row.sequence_index[row.loss_mask].unique()) for row in rows))
        counted = on_rank0(lambda of_ranks: [sum(column) for column in zip(*of_ranks, strict=True)], own)
        for number, pair in enumerate(zip(batch.num_loss_tokens, batch.num_loss_sequences, strict=True)):
            if (there := (counted[2 * number], counted[2 * number + 1])) != pair:
                found.wrong.append(f"mini-batch {number} is to divide by {pair} tokens and sequences, and has {there}")


def _ids(slot: int | None, group_size: int) -> range:
    """Of a group's rollouts; none where it is not trained on."""
    return range(0) if slot is None else range(slot * group_size, (slot + 1) * group_size)


def _kl_penalties(batch: RolloutBatch, loss: LossConfig) -> dict[int, float]:
    """Collective, with `loss.kl_in: reward`. What is taken off the rewards, of all ranks' rollouts; else nothing."""
    if loss.kl_in != "reward" or not loss.kl_coef:
        return {}
    own: list[tuple[int, float]] = []
    for row in batch.micro_batches:
        for place, i in enumerate(row.rollout_ids):
            p, ref = (cast(Tensor, x)[row.sequence_index == place] for x in (row.old_logprobs, row.ref_logprobs))
            # In float32 as the trainer's: where nothing else tells the rewards of a group apart, its rounding shows.
            terms = {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}
            own.append((i, loss.kl_coef * float(terms[loss.kl_estimator].double().sum())))
    return {i: value for part in on_rank0(list, own) for i, value in part}


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
