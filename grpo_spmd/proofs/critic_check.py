"""The critic's part of a step once more: values by a plain forward pass, returns and advantages from them and from what
the sampling ranks know of the rewards. Plain Python, nothing of learn/gae.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.config.critic import CriticConfig
from grpo_spmd.config.schema import LossConfig
from grpo_spmd.distributed.collectives import on_rank0, shares_of_rank0
from grpo_spmd.distributed.packed import Unpacked, pack
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.model.values import ValueModel
from grpo_spmd.proofs.gradient_check import Found, plain_layers
from grpo_spmd.records import Completion, Decision, MicroBatch, RolloutBatch

# Of a rank's first row, whose values are computed plainly: sequences, tokens from the first sampled one on, and how
# long a prompt may be, since plain attention takes memory by its square.
_NUM_SEQUENCES, _NUM_TOKENS, _LONGEST_PROMPT = 4, 32, 2048
_BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}  # mean |difference| of a value, of the values' size
_NEAR = {"rel_tol": 1e-3, "abs_tol": 1e-4}  # of float32 sums over a completion


class CriticCheck:
    def __init__(
        self, model: ValueModel, critic: CriticConfig, normalize_std: str, loss: LossConfig, dtype: str
    ) -> None:
        self._model, self._critic, self._loss = model, critic, loss
        self._whitens, self._bound = normalize_std == "batch", _BOUNDS[dtype]

    def __call__(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, rewards: Mapping[int, float]
    ) -> Found:
        """Collective. `rewards`: of the rollouts that this rank sampled and some rank trains on; NaN: not known."""
        found = Found()
        self._check_values(found, batch.micro_batches[0])
        of_tokens = self._rewards_of_trained(sampled, batch, decision, rewards)
        plain = [self._plainly(found, row, of_tokens) for row in batch.micro_batches]
        counted = [a for row in plain for a, counts, _ in row if counts]
        number, total = (sum(each) for each in zip(*_of_ranks([len(counted), math.fsum(counted)]), strict=True))
        mean = total / max(number, 1)
        squares = sum(part[0] for part in _of_ranks([math.fsum((a - mean) ** 2 for a in counted)]))
        deviation = math.sqrt(squares / max(number - 1, 1) + 1e-8)
        if not self._whitens:
            mean, deviation = 0.0, 1.0
        for row in plain:
            for a, counts, held in row:
                expected = (a - mean) / deviation if counts else 0.0
                if not math.isclose(held, expected, **_NEAR):
                    found.wrong.append(f"a token has the advantage {held:.6g}, and gae gives {expected:.6g}")
        return found

    def _check_values(self, found: Found, row: MicroBatch) -> None:
        """Collective. Of the first row, as it holds them, and by a plain pass of some of its sequences. For that the
        head gets something to say: it may be zero."""
        starts = torch.nonzero(row.position_ids == 0)[:, 0].tolist()[:_NUM_SEQUENCES]
        places, lengths = row.predict_index.tolist(), list[int]()
        for start, length in zip(starts, row.sequence_lengths, strict=False):  # to some tokens behind the prompt
            first = next((place for place in places if start <= place < start + length), start)
            lengths.append(min(length, first - start + _NUM_TOKENS) if first - start < _LONGEST_PROMPT else 1)
        ids = torch.zeros(len(starts), max(lengths), dtype=torch.int64, device=row.input_ids.device)
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            ids[number, :length] = row.input_ids[start : start + length]
        with torch.no_grad():
            again = self._model(row)
            with _lively(self._model.head):
                by_trainer = self._model(row)
                with plain_layers(self._model.backbone):
                    plainly = self._model.plain_values(ids)
        cast(FSDPModule, self._model).reshard()
        assert row.old_values is not None
        size = float(again.abs().mean()) + 1e-6
        what = "a value that the advantages are made of, of its size,"
        found.within(what, "values", float((row.old_values - again).abs().mean()) / size, self._bound)
        by_plain, held = list[float](), list[float]()
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            own = [c for c, place in enumerate(places) if start <= place < start + length]
            by_plain += [float(plainly[number, places[c] - start]) for c in own]
            held += [float(by_trainer[c]) for c in own]
        if held:
            off = math.fsum(abs(a - b) for a, b in zip(held, by_plain, strict=True))
            size = math.fsum(map(abs, by_plain)) + 1e-6
            found.within("a value beside that of a plain forward pass, of its size,", "values", off / size, self._bound)

    def _plainly(
        self, found: Found, row: MicroBatch, rewards: Mapping[int, Sequence[float]]
    ) -> list[tuple[float, bool, float]]:
        """Of each token its advantage, not whitened, whether it counts, and what the row holds. The values that the row
        holds are taken as they are."""
        assert row.old_values is not None
        assert row.returns is not None
        columns = row.old_values, row.returns, row.advantages, row.loss_mask, row.sequence_index
        values, returns, advantages, mask, index = (column.tolist() for column in columns)
        kl, tokens = self._kl(row), list[tuple[float, bool, float]]()
        for place, i in enumerate(row.rollout_ids):
            own, critic = [c for c, of in enumerate(index) if of == place], self._critic
            lam = critic.lam_policy
            if lam == "length":
                lam = max(0.0, 1.0 - 1.0 / (critic.length_alpha * len(own)))
            given = [reward - kl[c] for reward, c in zip(rewards[i], own, strict=True)]
            v = [values[c] for c in own]
            taught, judged = (lambda_returns(given, v, critic.gamma, each) for each in (critic.lam, float(lam)))
            for n, c in enumerate(own):
                if not math.isclose(returns[c], taught[n], **_NEAR):
                    found.wrong.append(
                        f"a value is taught {returns[c]:.6g}, and the returns of rollout {i} say another"
                    )
                tokens.append((judged[n] - v[n], mask[c], advantages[c]))
        return tokens

    def _kl(self, row: MicroBatch) -> list[float]:
        """What is taken off each token's reward."""
        if self._loss.kl_in != "reward":
            return [0.0] * len(row.target_ids)
        p, ref = cast(Tensor, row.old_logprobs), cast(Tensor, row.ref_logprobs)
        terms = {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}
        found: list[float] = (self._loss.kl_coef * terms[self._loss.kl_estimator].double()).tolist()
        return found

    def _rewards_of_trained(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, rewards: Mapping[int, float]
    ) -> dict[int, list[float]]:
        """Collective. The reward at each token of the rollouts that this rank trains on, by whom sampled them."""
        ids, dense, size = list[int](), list[list[float]](), sampled.rules.rollout.group_size
        for group in sampled.groups:
            if (slot := decision.slots.get(group.prompt.position)) is None:
                continue
            for i, completion in enumerate(group.completions, start=slot * size):
                reward = 0.0 if math.isnan(rewards[i]) else rewards[i]
                ids.append(i)
                dense.append(_at_tokens(completion, reward, sampled.rules.discount is not None))
        trained = [i for row in batch.micro_batches for i in row.rollout_ids]
        counts = [len(each) for each in dense]
        flat = np.array([reward for each in dense for reward in each], np.float64)
        arrays = np.array(ids, np.int32), np.array(counts, np.int32), flat, np.array(trained, np.int32)
        share = Unpacked(shares_of_rank0(_dealt, pack([len(ids), len(flat), len(trained)], arrays)))
        return {i: share.array(np.float64, count).tolist() for i, count in zip(trained, share.header, strict=True)}


def lambda_returns(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}), nothing behind the last token."""
    returns, value, later = list[float](), 0.0, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        later = r + gamma * ((1.0 - lam) * value + lam * later)
        value = v
        returns.append(later)
    return returns[::-1]


def _at_tokens(completion: Completion, reward: float, by_turn: bool) -> list[float]:
    """The reward at the last token; `by_turn`: those of turns where these end, and there what is left."""
    found = [0.0] * len(completion.token_ids)
    if not found:
        return found
    if by_turn and completion.episode is not None:
        last = -1
        for turn in completion.episode.turns:
            last += turn.num_tokens
            if turn.num_tokens:
                found[last] += turn.reward or 0.0
    found[-1] += reward - math.fsum(found)
    return found


def _dealt(of_ranks: Sequence[bytes]) -> list[bytes]:
    """On rank 0: to each rank the rewards of tokens of what it trains on, one behind the other, and how many."""
    known, wanted = dict[int, Any](), list[list[int]]()
    for packed in map(Unpacked, of_ranks):
        number, length, num_trained = packed.header
        ids, counts = packed.array(np.int32, number).tolist(), packed.array(np.int32, number)
        ends, flat = counts.cumsum(), packed.array(np.float64, length)
        known |= {i: flat[end - n : end] for i, n, end in zip(ids, counts, ends, strict=True)}  # a rank may have none
        wanted.append(packed.array(np.int32, num_trained).tolist())
    return [pack([len(known[i]) for i in ids], [known[i] for i in ids]) for ids in wanted]


def _of_ranks(numbers: list[float]) -> list[list[float]]:
    """Collective."""
    found: list[list[float]] = on_rank0(list, numbers)
    return found


@contextmanager
def _lively(head: nn.Linear) -> Iterator[None]:
    """Within it the head adds a product with a fixed vector."""

    def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        width = inputs[0].shape[-1]
        vector = torch.randn(width, generator=torch.Generator().manual_seed(0)) / math.sqrt(width)
        return output + (inputs[0] @ vector.to(inputs[0]))[..., None]

    handle = head.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
