"""The critic's part of a step once more: values by a plain forward pass, returns and advantages from them and from what
the sampling ranks know of the rewards, and nothing of learn/advantages.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.config.schema import CriticConfig, LossConfig
from grpo_spmd.distributed.collectives import on_rank0, scatter_from_rank0
from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.model.values import PolicyValues, ValueModel
from grpo_spmd.proofs.gradient_check import Found, plain_layers
from grpo_spmd.proofs.made_up_values import lively
from grpo_spmd.records import Completion, Decision, MicroBatch, RolloutBatch

# Of a rank's first row, whose values are computed plainly: sequences, tokens from the first sampled one on, and how
# long a prompt may be, since plain attention takes memory by its square.
_NUM_SEQUENCES, _NUM_TOKENS, _LONGEST_PROMPT = 4, 32, 2048
_BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}  # mean |difference| of a value, of the values' size
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # of float32 sums over a completion
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Plain:
    """Of a row's tokens [C], as they should be, and as it holds them."""

    advantages: Numbers  # not whitened
    counts: npt.NDArray[np.bool_]
    held: Numbers


@dataclass(frozen=True)
class _Given:
    """Of one rollout, by the rank that sampled it: its sampled tokens, and rewards at places among them."""

    num_tokens: int
    places: npt.NDArray[np.int32]
    rewards: Numbers


class CriticCheck:
    def __init__(
        self,
        model: ValueModel | PolicyValues,
        critic: CriticConfig,
        normalize_std: str,
        loss: LossConfig,
        dtype: str,
    ) -> None:
        self._model, self._critic, self._loss = model, critic, loss
        self._whitens, self._bound = normalize_std == "batch", _BOUNDS[dtype]

    def __call__(
        self,
        sampled: SampledStep,
        batch: RolloutBatch,
        decision: Decision,
        rewards: Mapping[int, float],
    ) -> Found:
        """Collective. `rewards`: of the rollouts that this rank sampled and some rank trains on; NaN: not known."""
        found = Found()
        self._check_values(found, batch.micro_batches[0])
        given = self._rewards_of_trained(sampled, batch, decision, rewards)
        plain = [self._plainly(found, row, given) for row in batch.micro_batches]
        counted = np.concatenate([np.zeros(0), *(row.advantages[row.counts] for row in plain)])
        number, total = (
            sum(each) for each in zip(*_of_ranks([len(counted), counted.sum()]), strict=True)
        )
        mean = total / max(number, 1)
        squares = sum(part[0] for part in _of_ranks([((counted - mean) ** 2).sum()]))
        deviation = math.sqrt(squares / max(number - 1, 1) + 1e-8)
        if not self._whitens:
            mean, deviation = 0.0, 1.0
        for row in plain:
            expected = np.where(row.counts, (row.advantages - mean) / deviation, 0.0)
            for c in _apart(row.held, expected)[:1]:
                found.wrong.append(
                    f"a token has the advantage {row.held[c]:.6g}, and gae gives {expected[c]:.6g}"
                )
        return found

    def _check_values(self, found: Found, row: MicroBatch) -> None:
        """Collective. Of the first row, as it holds them, and by a plain pass of some of its sequences. For that the
        head gets something to say: it may be zero."""
        starts = torch.nonzero(row.position_ids == 0)[:, 0].tolist()[:_NUM_SEQUENCES]
        places, lengths = row.predict_index.tolist(), list[int]()
        for start, length in zip(
            starts, row.sequence_lengths, strict=False
        ):  # to some tokens behind the prompt
            first = next((place for place in places if start <= place < start + length), start)
            lengths.append(
                min(length, first - start + _NUM_TOKENS) if first - start < _LONGEST_PROMPT else 1
            )
        ids = torch.zeros(len(starts), max(lengths), dtype=torch.int64, device=row.input_ids.device)
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            ids[number, :length] = row.input_ids[start : start + length]
        with torch.no_grad():
            again = self._model(row)
            with lively(self._model.head):
                by_trainer = self._model(row)
                with plain_layers(self._model.backbone):
                    plainly = self._model.plain_values(ids)
        cast(FSDPModule, self._model).reshard()
        assert row.old_values is not None
        size = float(again.abs().mean()) + 1e-6
        what = "a value that the advantages are made of, of its size,"
        found.within(
            what, "values", float((row.old_values - again).abs().mean()) / size, self._bound
        )
        by_plain, held = list[float](), list[float]()
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = [c for c, place in enumerate(places) if start <= place < start + length]
            by_plain += [float(plainly[number, places[c] - start]) for c in own]
            held += [float(by_trainer[c]) for c in own]
        if held:
            off = math.fsum(abs(a - b) for a, b in zip(held, by_plain, strict=True))
            size = math.fsum(map(abs, by_plain)) + 1e-6
            found.within(
                "a value beside that of a plain forward pass, of its size,",
                "values",
                off / size,
                self._bound,
            )

    def _plainly(self, found: Found, row: MicroBatch, given: Mapping[int, _Given]) -> _Plain:
        """The values that the row holds are taken as they are."""
        assert row.old_values is not None
        assert row.returns is not None
        columns = (x.double().cpu().numpy() for x in (row.old_values, row.returns, row.advantages))
        values, returns, held = columns
        mask, index = row.loss_mask.cpu().numpy(), row.sequence_index.cpu().numpy()
        ids, lengths = row.rollout_ids, np.bincount(index, minlength=len(row.rollout_ids))
        if wrong := [i for i, n in zip(ids, lengths, strict=False) if n != given[i].num_tokens]:
            found.wrong.append(f"rollouts {wrong[:5]} have other tokens than were sampled")
        if wrong or not ids:
            return _Plain(np.zeros_like(held), np.zeros_like(mask), np.zeros_like(held))
        # A rollout a line, which ends in the last column.
        longest, order = int(lengths.max()), np.argsort(index, kind="stable")
        first = longest - lengths
        column = np.empty_like(index)
        column[order] = np.concatenate([np.arange(start, longest) for start in first])
        rewards, v = np.zeros((len(ids), longest)), np.zeros((len(ids), longest))
        for line, i in enumerate(ids):
            rewards[line, first[line] + given[i].places] = given[i].rewards
        rewards[index, column] -= self._kl(row)
        v[index, column] = values
        critic = self._critic
        lam = np.full(len(ids), critic.lam)
        lam_policy = np.full(len(ids), critic.lam_policy) if critic.lam_policy != "length" else None
        if lam_policy is None:
            lam_policy = np.maximum(0.0, 1.0 - 1.0 / (critic.length_alpha * lengths))
        taught, judged = (
            lambda_returns(rewards, v, critic.gamma, each)[index, column]
            for each in (lam, lam_policy)
        )
        for c in _apart(returns, taught)[:1]:
            what = f"and the returns of rollout {ids[index[c]]} say {taught[c]:.6g}"
            found.wrong.append(f"a value is taught {returns[c]:.6g}, {what}")
        return _Plain(judged - values, mask, held)

    def _kl(self, row: MicroBatch) -> Numbers:
        """[C] What is taken off each token's reward."""
        if self._loss.kl_in != "reward":
            return np.zeros(len(row.target_ids))
        p, ref = cast(Tensor, row.old_logprobs), cast(Tensor, row.ref_logprobs)
        terms = {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}
        found: Numbers = (
            (self._loss.kl_coef * terms[self._loss.kl_estimator].double()).cpu().numpy()
        )
        return found

    def _rewards_of_trained(
        self,
        sampled: SampledStep,
        batch: RolloutBatch,
        decision: Decision,
        rewards: Mapping[int, float],
    ) -> dict[int, _Given]:
        """Collective. Of the rollouts that this rank trains on, by whom sampled them. Rank 0 gets 24 bytes a rollout,
        and 12 more for each further turn with a reward."""
        given, size = dict[int, _Given](), sampled.rules.rollout.group_size
        for group in sampled.groups:
            if (slot := decision.slots.get(group.prompt.position)) is None:
                continue
            for i, completion in enumerate(group.completions, start=slot * size):
                reward = 0.0 if math.isnan(rewards[i]) else rewards[i]
                given[i] = _given(completion, reward, sampled.rules.discount is not None)
        trained = [i for row in batch.micro_batches for i in row.rollout_ids]
        payload = pack([len(trained)], [np.array(trained, np.int32)]) + _packed(given)
        return _unpacked(PackedReader(scatter_from_rank0(_dealt, payload)))


def lambda_returns(rewards: Numbers, values: Numbers, gamma: float, lam: Numbers) -> Numbers:
    """[n, L] G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}) of each line, nothing behind the last column; `lam`
    [n]."""
    returns, value, later = np.zeros_like(rewards), np.zeros(len(rewards)), np.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        later = rewards[:, t] + gamma * ((1.0 - lam) * value + lam * later)
        value, returns[:, t] = values[:, t], later
    return returns


def _apart(held: Numbers, expected: Numbers) -> npt.NDArray[np.intp]:
    """Where they differ by more than rounding; NaN does."""
    size = np.maximum(np.abs(held), np.abs(expected))
    return np.flatnonzero(~(np.abs(held - expected) <= np.maximum(_RELATIVE * size, _ABSOLUTE)))


def _given(completion: Completion, reward: float, by_turn: bool) -> _Given:
    """The reward at the last token; `by_turn`: those of turns where these end, and there what is left."""
    num_tokens, at = len(completion.token_ids), dict[int, float]()
    if by_turn and completion.episode is not None:
        last = -1
        for turn in completion.episode.turns:
            last += turn.num_tokens
            if turn.num_tokens and turn.reward:
                at[last] = turn.reward
    if num_tokens:
        at[num_tokens - 1] = at.get(num_tokens - 1, 0.0) + reward - math.fsum(at.values())
    return _Given(num_tokens, np.array([*at], np.int32), np.array([*at.values()], np.float64))


def _packed(given: Mapping[int, _Given]) -> bytes:
    counts = np.array(
        [[i, each.num_tokens, len(each.places)] for i, each in given.items()], np.int32
    )
    return pack(
        [len(given)], [counts, *(x for each in given.values() for x in (each.places, each.rewards))]
    )


def _unpacked(packed: PackedReader) -> dict[int, _Given]:
    counts = packed.array(np.int32, 3 * packed.header[0]).reshape(-1, 3).tolist()
    return {
        i: _Given(n, packed.array(np.int32, k), packed.array(np.float64, k)) for i, n, k in counts
    }


def _dealt(of_ranks: Sequence[bytes]) -> list[bytes]:
    """On rank 0: to each rank what it trains on."""
    known, wanted = dict[int, _Given](), list[list[int]]()
    for packed in map(PackedReader, of_ranks):
        wanted.append(packed.array(np.int32, packed.header[0]).tolist())
        known |= _unpacked(PackedReader(packed.rest()))  # a rank may have none
    return [_packed({i: known[i] for i in ids}) for ids in wanted]


def _of_ranks(numbers: list[float]) -> list[list[float]]:
    """Collective."""
    found: list[list[float]] = on_rank0(list, [float(number) for number in numbers])
    return found
