"""A step's decision and what was made of it, once more from each rank's own rollouts: rewards, advantages, masks, plan,
denominators, and that what a rank trains on is what another sampled. Plain Python, nothing of learn/."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from grpo_spmd.config.schema import AdvantageConfig, LossConfig, RolloutConfig
from grpo_spmd.distributed.collectives import on_rank0, on_rank0_bytes, scatter_from_rank0
from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.learn.advantages import Credit, turn_advantages
from grpo_spmd.learn.contexts import completion_contexts, completion_turns, find_episode_error
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.proofs.gradient_check import CheckResult
from grpo_spmd.records import (
    Completion,
    Decision,
    MicroBatch,
    RolloutBatch,
    RolloutGroup,
    StepDecision,
    Turn,
)

_LEAST_CHANCE = -40.0  # nats, that samples which do not know of each other are alike
_ALIKE = 1e-6  # rewards of a group that differ by less have no spread


class BatchCheck:
    def __init__(
        self,
        rollout: RolloutConfig,
        advantage: AdvantageConfig,
        loss: LossConfig,
        weights: Sequence[float],
        stop_ids: Collection[int],
        is_agent: bool,
    ) -> None:
        """`weights` of the rewards, in their order. `stop_ids`: tokens that end a completion, or a turn. `is_agent`:
        one who asks for turns may go on after one that was cut off."""
        self._rollout, self._advantage, self._loss = rollout, advantage, loss
        self._weights, self._stop_ids, self._is_agent = weights, set(stop_ids), is_agent
        self._has_critic = advantage.estimator == "gae"  # whose advantages critic_check.py looks at

    def run(self, sampled: SampledStep, batch: RolloutBatch, decision: Decision) -> CheckResult:
        """Collective."""
        found, size = CheckResult(), self._rollout.group_size
        self._check_completions(found, sampled)
        rewards, slots = self._rewards(sampled), decision.slots
        kl = _kl_penalties(
            batch,
            [i for g in sampled.groups for i in _ids(slots.get(g.prompt.position), size)],
            self._loss,
        )
        shorter = self.rewards_of(sampled, decision)
        dropped: list[int] = []  # positions of groups with a spread that are not trained on
        for number, group in enumerate(sampled.groups):
            own, position = rewards[number * size : (number + 1) * size], group.prompt.position
            is_alike = moments([r for r in own if r is not None])[1] < _ALIKE
            if position not in slots:
                dropped += [] if self._rollout.dynamic_sampling and is_alike else [position]
                continue
            slot = slots[position]
            if self._rollout.dynamic_sampling and is_alike:
                found.errors.append(
                    f"group {slot} has rewards that are all alike, and dynamic sampling kept it"
                )
        penalised = {i: reward - kl.get(i, 0.0) for i, reward in shorter.items()}
        known = np.array([r for r in penalised.values() if not math.isnan(r)], np.float64)
        whole = on_rank0_bytes(moments_of_all, known.tobytes())
        mine: list[tuple[int, int, float]] = []
        discount = sampled.rules.discount
        for group in sampled.groups:
            ids = _ids(slots.get(group.prompt.position), size)
            (center, divisor), of_group = (
                self._line([penalised[i] for i in ids], *whole),
                [penalised[i] for i in ids],
            )
            divisor = math.inf if sampled.rules.zero_advantages else divisor
            advantages = [
                0.0 if math.isnan(r) or math.isinf(divisor) else (r - center) / divisor
                for r in of_group
            ]
            scored = [n for n, r in enumerate(of_group) if not math.isnan(r)]
            # Where whole returns are alike, no line through them says what those of turns are worth.
            has_line = moments([of_group[n] for n in scored])[1] >= _ALIKE
            credit = partial(_credit, group, scored, divisor if has_line else math.inf)
            credited: Sequence[Credit] = ()
            if ids and discount is not None and not self._has_critic:
                of_turns = [one.episode for one in group.completions]
                credited = turn_advantages(
                    [decision.advantages[i] for i in ids],
                    [penalised[i] for i in ids],
                    of_turns,
                    discount,
                )
            entries = zip(ids, group.completions if ids else (), advantages, strict=True)
            for number, (i, completion, expected) in enumerate(entries):
                given = 0.0 if self._has_critic else decision.advantages[i]
                if not self._has_critic and not same(given, expected):
                    found.errors.append(
                        f"rollout {i} has the advantage {given:.6g}, not {expected:.6g}"
                    )
                is_cut = self._loss.mask_truncated and completion.finish_reason == "length"
                if decision.in_loss[i] != (not math.isnan(shorter[i]) and not is_cut):
                    found.errors.append(
                        f"rollout {i} is {'' if decision.in_loss[i] else 'not '}in the loss"
                    )
                count = len(completion.token_ids)
                contexts = completion_contexts(group.prompt.token_ids, completion)
                tokens = [
                    (context.token_ids, np.flatnonzero(context.sampled)) for context in contexts
                ]
                of_tokens = (
                    np.broadcast_to(credited[number], count) if credited else np.full(count, given)
                )
                if credited and not math.isnan(shorter[i]):
                    above = [given + over for over in credit(completion, discount or 0.0)]
                    if not np.allclose(of_tokens, above, rtol=1e-4, atol=1e-5):
                        found.errors.append(
                            f"rollout {i} has other advantages of its turns than their returns say"
                        )
                name = _name(tokens, completion.logprobs, of_tokens, [decision.in_loss[i]] * count)
                mine.append((i, name, shorter[i]))
        found.metrics["advantages"] = float(len(mine))
        trained = [
            pair
            for micro_batch in batch.micro_batches
            for pair in _hash_rollouts(micro_batch, self._has_critic)
        ]
        # With so many groups in the step those of later positions are surplus.
        wanted = self._rollout.num_prompts_per_step if self._rollout.dynamic_sampling else math.inf
        judge = partial(find_misplaced, of_all=decision.rank0_decision, wanted=wanted)
        found.errors.extend(on_rank0_bytes(judge, told(mine, trained, dropped)))
        self._check_denominators(found, batch)
        return found

    def rewards_of(self, sampled: SampledStep, decision: Decision) -> dict[int, float]:
        """Of this rank's rollouts that are trained on, by id, the rewards less the penalties for their length; NaN: not
        known."""
        found, rewards, size = dict[int, float](), self._rewards(sampled), self._rollout.group_size
        for number, group in enumerate(sampled.groups):
            ids, own = (
                _ids(decision.slots.get(group.prompt.position), size),
                rewards[number * size :],
            )
            for i, completion, reward in zip(ids, group.completions, own, strict=False):
                found[i] = (
                    math.nan
                    if reward is None
                    else reward - self._penalty(len(completion.token_ids))
                )
        return found

    def _rewards(self, sampled: SampledStep) -> list[float | None]:
        """The weighted sums over the functions that apply; None: one failed, or none applies."""
        columns, sums = list(sampled.scored.by_name.values()), list[float | None]()
        if not columns:  # a teacher teaches alone
            return [0.0 for group in sampled.groups for _ in group.completions]
        for values in zip(*columns, strict=True):
            weights = self._weights if any(self._weights) else [1.0] * len(values)
            known = [(w, v) for w, v in zip(weights, values, strict=True) if v is not None]
            total = sum(w * v for w, v in known)
            sums.append(total if known and math.isfinite(total) else None)
        return sums

    def _penalty(self, num_tokens: int) -> float:
        buffer, longest = (
            self._advantage.overlong_buffer_tokens,
            self._rollout.max_completion_tokens,
        )
        over = num_tokens - (longest - buffer)
        return (
            self._advantage.overlong_penalty * min(over, buffer) / buffer
            if buffer and over > 0
            else 0.0
        )

    def _line(
        self, group: Sequence[float], mean_of_all: float, deviation_of_all: float
    ) -> tuple[float, float]:
        """An advantage is (reward - the first) / the second; infinite where there is nothing to learn."""
        known, kind = [r for r in group if not math.isnan(r)], self._advantage.estimator
        center, deviation = moments(known)
        divisor, usable = 1.0, deviation >= _ALIKE
        if kind == "reinforce_pp":
            center, divisor, usable = mean_of_all, deviation_of_all, deviation_of_all >= _ALIKE
        elif kind == "max_rl":
            divisor, usable = center, usable and center >= _ALIKE
        elif kind == "rloo" and usable:  # minus the mean of the others
            divisor = (len(known) - 1) / len(known)
        elif kind == "grpo":
            by = {"group": deviation, "batch": max(deviation_of_all, _ALIKE), "none": 1.0}
            divisor = by[self._advantage.normalize_std]
        return center, divisor if usable else math.inf

    def _check_completions(self, found: CheckResult, sampled: SampledStep) -> None:
        """A completion ends at its first stop token, or at the longest length; a group's were drawn one by one."""
        longest = self._rollout.max_completion_tokens
        for group in sampled.groups:
            copies = Counter(tuple(completion.token_ids) for completion in group.completions)
            for ids, logprobs in {
                tuple(c.token_ids): c.logprobs for c in group.completions
            }.items():
                others, more = len(group.completions) - 1, copies[ids] - 1
                chance = math.log(math.comb(others, more)) + more * math.fsum(logprobs)
                if chance < _LEAST_CHANCE:
                    found.errors.append(
                        f"{more + 1} completions of a group are one: a chance of e{chance:.0f}"
                    )
        for completion in (c for group in sampled.groups for c in group.completions):
            episode, turns = completion.episode, completion_turns(completion)
            if episode is not None and (why := find_episode_error(completion.token_ids, episode)):
                found.errors.append(f"an episode is none: {why}")
            if not self._is_agent and any(reason == "length" for _, reason in turns[:-1]):
                found.errors.append("an episode goes on after a turn that was cut off")
            for said, reason in turns:
                *before, last = said or [-1]
                # In an episode a turn may have less room.
                is_cut = len(said) == longest if episode is None else 0 < len(said) <= longest
                what = "completion" if episode is None else "turn"
                if self._stop_ids.intersection(before):
                    found.errors.append(
                        f"a {what} goes on after a token that ends it (generation_config's eos_token_id)"
                    )
                elif last not in self._stop_ids if reason == "stop" else not is_cut:
                    ending = (
                        f"{len(said)} tokens that ends with {last} has finish_reason {reason!r}"
                    )
                    found.errors.append(f"a {what} of {ending}")

    def _check_denominators(self, found: CheckResult, batch: RolloutBatch) -> None:
        """Collective."""
        own = []
        for rows in batch.mini_batches:
            own.append(sum(int(row.loss_mask.sum()) for row in rows))
            own.append(sum(len(row.sequence_index[row.loss_mask].unique()) for row in rows))
        counted = on_rank0(
            lambda of_ranks: [sum(column) for column in zip(*of_ranks, strict=True)], own
        )
        for number, pair in enumerate(
            zip(batch.num_loss_tokens, batch.num_loss_sequences, strict=True)
        ):
            if (there := (counted[2 * number], counted[2 * number + 1])) != pair:
                found.errors.append(
                    f"mini-batch {number} is to divide by {pair} tokens and sequences, and has {there}"
                )


def _ids(slot: int | None, group_size: int) -> range:
    """Of a group's rollouts; none where it is not trained on."""
    return range(0) if slot is None else range(slot * group_size, (slot + 1) * group_size)


def _kl_penalties(
    batch: RolloutBatch, sampled: Sequence[int], loss: LossConfig
) -> dict[int, float]:
    """Collective, with `loss.kl_in: reward`. What is taken off the rewards of the rollouts `sampled`; else nothing."""
    if loss.kl_in != "reward" or not loss.kl_coef:
        return {}
    own: dict[int, float] = {}
    for row in batch.micro_batches:
        for place, i in enumerate(row.rollout_ids):
            p, ref = (
                cast(Tensor, x)[row.sequence_index == place]
                for x in (row.old_logprobs, row.ref_logprobs)
            )
            # In float32 as the trainer's: where nothing else tells the rewards of a group apart, its rounding shows.
            terms = {
                "k1": p - ref,
                "k2": (p - ref) ** 2 / 2,
                "k3": torch.expm1(ref - p) - (ref - p),
            }
            own[i] = loss.kl_coef * float(terms[loss.kl_estimator].double().sum())
    arrays = (
        np.array([*own], np.int32),
        np.array([*own.values()], np.float64),
        np.array(sampled, np.int32),
    )
    share = scatter_from_rank0(kl_penalties_by_rank, pack([len(own), len(sampled)], arrays))
    return dict(zip(sampled, np.frombuffer(share).tolist(), strict=True))


def _credit(
    group: RolloutGroup,
    known: Sequence[int],
    divisor: float,
    completion: Completion,
    discount: float,
) -> list[float]:
    """What each token of an episode has over its rollout's advantage: by how much the return from its turn on, less
    the whole one, is above the mean of that over the group."""

    def over(own: Sequence[Turn], first: int) -> float:
        rewards = [(n, turn.reward or 0.0) for n, turn in enumerate(own)]
        return sum(r * discount ** (n - first) for n, r in rewards[first:]) - sum(
            r * discount**n for n, r in rewards
        )

    turns = [one.episode.turns if one.episode is not None else () for one in group.completions]
    own = completion.episode.turns if completion.episode is not None else ()
    means = [sum(over(turns[n], first) for n in known) / len(known) for first in range(len(own))]
    return [
        (over(own, first) - means[first]) / divisor
        for first, turn in enumerate(own)
        for _ in range(turn.num_tokens)
    ]


def _hash_rollouts(row: MicroBatch, has_critic: bool = False) -> list[tuple[int, int]]:
    """The rollouts of a micro-batch, each with a name for its numbers; -1: some token is scored at another place."""
    of_tokens = torch.zeros_like(row.advantages) if has_critic else row.advantages
    columns = row.rollout_logprobs, of_tokens, row.loss_mask
    ids, index, predict, targets, positions, logprobs, advantages, mask = (
        x.cpu().numpy()
        for x in (
            row.input_ids,
            row.sequence_index,
            row.predict_index,
            row.target_ids,
            row.position_ids,
            *columns,
        )
    )
    starts, order, found = np.flatnonzero(positions == 0), np.argsort(index, kind="stable"), []
    bounds = np.searchsorted(index[order], np.arange(len(row.rollout_ids) + 1))
    following, sequences = np.append(ids[1:], -1), np.searchsorted(starts, predict, "right") - 1
    for place, i in enumerate(row.rollout_ids):
        own = order[bounds[place] : bounds[place + 1]]
        if not len(own) or not np.array_equal(targets[own], following[predict[own]]):
            found.append((i, -1))
            continue
        of_own, places = sequences[own], predict[own] + 1
        tokens = [
            (ids[start:], places[of_own == n] - start)
            for n, start in enumerate(starts)
            if n in of_own
        ]
        found.append((i, _name(tokens, logprobs[own], advantages[own], mask[own])))
    return found


def _name(
    tokens: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
    logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
) -> int:
    """Of a rollout: its contexts, each with the places of what was sampled in it, behind which nothing counts."""
    contexts = (
        np.concatenate([ids[: places[-1] + 1], [-1], places]).astype(np.int64)
        for ids, places in tokens
        if len(places)
    )
    numbers = (np.asarray(x, np.float32) for x in (logprobs, advantages, mask))
    parts = [array.tobytes() for arrays in (contexts, numbers) for array in arrays]
    return zlib.crc32(b"".join(parts)) if any(parts) else NOTHING


# Rank 0's side of the batch check: its decision beside what the ranks have found by themselves. Plain Python.


NOTHING = -2  # the name of a rollout without a sampled token, which is in no micro-batch
_SAMPLED = np.dtype([("id", np.int32), ("name", np.int64), ("reward", np.float64)])
_TRAINED = np.dtype([("id", np.int32), ("name", np.int64)])
_KINDS: tuple[npt.DTypeLike, ...] = _SAMPLED, _TRAINED, np.int64


def told(
    sampled: Sequence[tuple[int, int, float]],
    trained: Sequence[tuple[int, int]],
    dropped: Sequence[int],
) -> bytes:
    """What a rank tells rank 0: of the rollouts that it sampled (id, name, reward), of those that it trains on (id,
    name), and the positions of groups with a spread that are not trained on."""
    arrays = [
        np.array(values, kind)
        for values, kind in zip((sampled, trained, dropped), _KINDS, strict=True)
    ]
    return pack([len(array) for array in arrays], arrays)


def find_misplaced(of_ranks: list[bytes], of_all: StepDecision | None, wanted: float) -> list[str]:
    """On rank 0: what it decided, the ranks that sampled say, and those that train."""
    assert of_all is not None
    parts = [
        [
            packed.array(kind, number).tolist()
            for kind, number in zip(_KINDS, packed.header, strict=True)
        ]
        for packed in map(PackedReader, of_ranks)
    ]
    sampled, trained, dropped = (
        [each for part in parts for each in part[which]] for which in (0, 1, 2)
    )
    found, used = list[str](), of_all.positions.tolist()
    for position in dropped:
        if not (len(used) == wanted and position > max(used)):
            found.append(f"the group at position {position} is not trained on")
    for i, _, reward in sampled:
        if not same(there := float(of_all.rewards[i]), reward):
            found.append(f"rollout {i} has the reward {there:.6g}, here {reward:.6g}")
    if sorted(i for i, _, _ in sampled) != list(range(len(of_all.rewards))):
        found.append("not each rollout of the step was sampled once")
    if sorted(of_all.plan.ids.tolist()) != list(range(len(of_all.rewards))):
        found.append("the plan does not have each rollout once")
    twice = [i for i, count in Counter(i for i, _ in trained).items() if count > 1]
    known: Mapping[int, int] = dict(trained)
    other = [i for i, name, _ in sampled if known.get(i, name) != name]
    missing = [i for i, name, _ in sampled if i not in known and name != NOTHING]
    for what, ids in (
        ("twice", twice),
        ("with other tokens, logprobs or advantages", other),
        ("not", missing),
    ):
        if ids:
            found.append(f"rollouts {sorted(ids)[:5]} are trained on {what}")
    return found


def moments_of_all(of_ranks: Sequence[bytes]) -> tuple[float, float]:
    """Of float64s."""
    return moments(np.frombuffer(b"".join(of_ranks)).tolist())


def kl_penalties_by_rank(of_ranks: Sequence[bytes]) -> list[bytes]:
    """On rank 0, of each rank's trained ids (int32), what is taken off their rewards (float64) and sampled ids (int32):
    for each what is taken off those that it sampled, wherever they are trained on."""
    taken, sampled = dict[int, float](), list[list[int]]()
    for packed in map(PackedReader, of_ranks):
        num_trained, num_sampled = packed.header
        ids, values = (
            packed.array(np.int32, num_trained).tolist(),
            packed.array(np.float64, num_trained).tolist(),
        )
        taken |= zip(ids, values, strict=True)
        sampled.append(packed.array(np.int32, num_sampled).tolist())
    return [np.array([taken.get(i, 0.0) for i in ids], np.float64).tobytes() for ids in sampled]


def moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and unbiased deviation; 0 where there are too few."""
    mean = math.fsum(values) / max(len(values), 1)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def same(a: float, b: float) -> bool:
    return (
        a == b
        or (math.isnan(a) and math.isnan(b))
        or math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
    )
