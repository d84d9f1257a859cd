"""The critic of a run: values of a step's tokens, advantages of them (GAE), and its own update. PPO as Schulman et al.
2017 have it, with a lambda of its own for what the values are taught (VC-PPO, Yuan et al. 2025)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import (
    Config,
    CriticConfig,
    LossConfig,
    OptimizerConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import any_rank, on_rank0, scatter_from_rank0
from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.distributed.reductions import Max, Mean, Reductions, merge
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.advantages import (
    advantages_of_tokens,
    explained_variance,
    length_lambda,
    value_loss,
    whitening,
)
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.step_messages import split_sampled, trained_ids
from grpo_spmd.learn.update import StopCheck, ValueHead
from grpo_spmd.model.offload import OffloadableModel
from grpo_spmd.model.optimizer import build_optimizer, resume_schedule
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.values import PolicyValues, ValueModel, build_value_model
from grpo_spmd.proofs.gradient_check import CheckResult, eager_attention
from grpo_spmd.proofs.update_check import SignalProofs, UpdateCheckSettings
from grpo_spmd.records import Completion, Decision, MicroBatch, RolloutBatch, StepDecision

_NUM_SUMS = 8  # of `_Estimate.sums`


@dataclasses.dataclass(frozen=True)
class _Estimate:
    """Of one micro-batch, float64."""

    advantages: npt.NDArray[np.float64]  # [C], not whitened
    returns: npt.NDArray[np.float64]  # [C]
    sums: npt.NDArray[
        np.float64
    ]  # over tokens that count: their number, A and A^2, V, R and R^2, R - V and its square


class Critic:
    """A Signal: gives each token its advantage before the policy's update, and learns from the same rollouts behind
    it."""

    def __init__(
        self,
        model: ValueModel | PolicyValues,
        config: CriticConfig,
        normalize_std: str,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
    ) -> None:
        """`normalize_std`: "batch" whitens the advantages of a step, "none" leaves them."""
        self.model, self._config, self._loss, self._training = model, config, loss, training
        self._coef = config.coef if config.is_on_policy else 1.0
        self._found: Reductions = {}  # of the mini-batch under way
        self._whitens, self._max_grad_norm = normalize_std == "batch", optimizer.max_grad_norm
        floor = optimizer.min_lr / optimizer.lr * config.lr if optimizer.lr else 0.0
        own = dataclasses.replace(optimizer, lr=config.lr, min_lr=floor)
        self.optimizer, self._schedule = build_optimizer(
            model, own, training.num_run_optimizer_steps
        )
        self._num_updates = self._skipped_in_a_row = 0

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        return [(self.model, self.optimizer)]

    @property
    def value_head(self) -> ValueHead | None:
        """None: this critic learns in an update of its own."""
        return None

    @property
    def warmup_steps(self) -> int:
        """First steps of the run in which only the critic learns."""
        return self._config.warmup_steps

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        return SignalProofs([self._check(settings)])

    def _check(self, settings: UpdateCheckSettings) -> CriticCheck:
        return CriticCheck(
            self.model,
            self._config,
            settings.advantage.normalize_std,
            settings.loss,
            settings.dtype,
        )

    def trained_parameters(self) -> dict[str, DTensor]:
        return {name: cast(DTensor, parameter) for name, parameter in self.model.named_parameters()}

    def state(self) -> dict[str, int]:
        """What a checkpoint must hold beside parameters and moments."""
        return {"num_updates": self._num_updates, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._num_updates, self._skipped_in_a_row = state["num_updates"], state["skipped_in_a_row"]
        resume_schedule(self.optimizer, self._schedule, self._num_updates)

    @torch.no_grad()
    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Collective. Put values, returns and advantages into the micro-batches, whose advantages were rewards until
        now, each at the token that it was given for. The decision has of each rollout the mean of its tokens'."""
        rows = batch.micro_batches
        try:
            for row in rows:
                stop_check(False)
                row.old_values = self.model(row)
        finally:
            cast(FSDPModule, self.model).reshard()
        estimates = [self._estimate(row) for row in rows]
        mean, factor, decision = self._whiten(rows, estimates, decision)
        for row, estimate in zip(rows, estimates, strict=True):
            device, mask = row.advantages.device, row.loss_mask
            advantages = torch.from_numpy((estimate.advantages - mean) * factor).to(
                device, torch.float32
            )
            row.advantages = torch.where(mask, advantages, 0.0)
            row.returns = torch.from_numpy(estimate.returns).to(device, torch.float32)
        return decision

    def _estimate(self, row: MicroBatch) -> _Estimate:
        config, rewards = self._config, row.advantages.double()
        if self._loss.kl_in == "reward":
            assert row.old_logprobs is not None
            assert row.ref_logprobs is not None
            kl = kl_estimate(row.old_logprobs, row.ref_logprobs, self._loss.kl_estimator)
            rewards = rewards - self._loss.kl_coef * kl.double()
        assert row.old_values is not None
        lengths = _lengths(row)
        given = rewards.cpu().numpy(), row.old_values.double().cpu().numpy(), lengths
        lam = (
            length_lambda(lengths, config.length_alpha)
            if config.lam_policy == "length"
            else config.lam_policy
        )
        advantages = advantages_of_tokens(*given, config.gamma, lam)
        values, returns = (
            given[1],
            advantages_of_tokens(*given, config.gamma, config.lam) + given[1],
        )
        mask = row.loss_mask.cpu().numpy()
        a, v, r = advantages[mask], values[mask], returns[mask]
        sums = (
            len(a),
            a.sum(),
            (a**2).sum(),
            v.sum(),
            r.sum(),
            (r**2).sum(),
            (r - v).sum(),
            ((r - v) ** 2).sum(),
        )
        return _Estimate(advantages, returns, np.array(sums, np.float64))

    def _whiten(
        self, rows: list[MicroBatch], estimates: list[_Estimate], decision: Decision
    ) -> tuple[float, float, Decision]:
        """Collective. What is taken off the advantages, and what they are multiplied by, over all ranks' tokens; the
        decision with the rollouts' means."""
        trained = [i for rows_of_rank in decision.rows for row in rows_of_rank for i in row]
        means = {i: mean for pair in zip(rows, estimates, strict=True) for i, mean in _means(*pair)}
        own = np.array([means.get(i, math.nan) for i in trained], np.float64)
        sums, of_all = (
            sum((each.sums for each in estimates), np.zeros(_NUM_SUMS)),
            decision.rank0_decision,
        )
        decided: list[StepDecision] = []  # on rank 0

        def decide(parts: list[bytes]) -> list[bytes]:
            assert of_all is not None
            told = [np.frombuffer(part, np.float64) for part in parts]
            count, a, a_squares, v, *others = sum(
                (each[:_NUM_SUMS] for each in told), np.zeros(_NUM_SUMS)
            ).tolist()
            mean, factor = whitening(count, a, a_squares) if self._whitens else (0.0, 1.0)
            of_rollouts = np.full(len(of_all.rewards), math.nan)
            of_rollouts[trained_ids(of_all)[0]] = np.concatenate(
                [each[_NUM_SUMS:] for each in told]
            )
            advantages = np.nan_to_num((of_rollouts - mean) * factor).astype(np.float32)
            metrics = {
                "critic/value_mean": v / count if count else None,
                "critic/explained_variance": explained_variance(
                    count, tuple(others[:2]), tuple(others[2:])
                ),
                "critic/advantage_std": math.sqrt(max(0.0, a_squares / count - (a / count) ** 2))
                if count
                else None,
            }
            decided.append(
                dataclasses.replace(of_all, advantages=advantages, metrics=of_all.metrics | metrics)
            )
            header = np.array([mean, factor]).tobytes()
            return [header + part for part in split_sampled(of_all, advantages)]

        share = scatter_from_rank0(decide, np.concatenate([sums, own]).tobytes())
        mean, factor = np.frombuffer(share, np.float64, 2).tolist()
        values = np.frombuffer(share, np.float32, offset=16).tolist()
        advantages = dict(zip(decision.advantages, values, strict=True))
        changed = dataclasses.replace(
            decision, advantages=advantages, rank0_decision=next(iter(decided), None)
        )
        return mean, factor, changed

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. One optimizer step for each mini-batch of each epoch, as the policy makes them: the loss is a
        mean over tokens, whatever that of the policy is. One whose loss or gradient is not finite on some rank changes
        nothing. Raises FloatingPointError after training.max_nonfinite_in_a_row of them."""
        sums, num_skipped = self.no_update(), 0
        for _ in range(self._training.num_epochs):
            for mini_batch, num_tokens in zip(
                batch.mini_batches, batch.num_loss_tokens, strict=True
            ):
                if num_tokens:  # on all ranks alike
                    found = self._step(mini_batch, num_tokens)
                    num_skipped += not found
                    sums = merge([sums, found])
        return sums | {"critic/skipped_updates": Max(float(num_skipped))}

    @staticmethod
    def no_update() -> Reductions:
        """What a rank adds to the metrics where no update was made."""
        sums: Reductions = {
            "critic/loss": Mean(),
            "critic/clip_frac": Mean(),
            "critic/skipped_updates": Max(0.0),
        }
        return sums | {"critic/grad_norm": Max(), "critic/lr": Max()}

    def _step(self, mini_batch: list[MicroBatch], num_tokens: int) -> Reductions:
        """Nothing where the step was not made."""
        for row in mini_batch:
            self.loss_term(self.model(row), row, num_tokens).backward()
        grad_norm = self.clip_gradient()
        loss_here = cast(Mean, self._found["critic/loss"].on_host()).total
        is_made = not any_rank(
            not (math.isfinite(grad_norm) and math.isfinite(cast(float, loss_here)))
        )
        sums = self.stepped(is_made)
        if self._skipped_in_a_row >= (most := self._training.max_nonfinite_in_a_row):
            what = "updates of the critic in a row had a loss or gradient that is not finite"
            raise FloatingPointError(f"{most} {what} (training.max_nonfinite_in_a_row)")
        return sums

    def loss_term(self, values: Tensor, row: MicroBatch, num_tokens: int) -> Tensor:
        """What these values [C] of a row add to the loss of its mini-batch, of `num_tokens` over all ranks."""
        assert row.old_values is not None
        assert row.returns is not None
        loss, clipped = value_loss(
            values, row.old_values, row.returns, row.loss_mask, self._config.clip_value
        )
        count = row.loss_mask.sum()
        found: Reductions = {
            "critic/loss": Mean(loss.detach(), count),
            "critic/clip_frac": Mean(clipped, count),
        }
        self._found = merge([self._found, found])
        return self._coef * loss / num_tokens

    def clip_gradient(self) -> float:
        """Collective. Bound the gradient by optimizer.max_grad_norm, apart from the policy's; its norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        grad_norm = float(cast(DTensor, norm).full_tensor())
        self._found["critic/grad_norm"] = Max(grad_norm)
        return grad_norm

    def stepped(self, is_made: bool) -> Reductions:
        """Make the optimizer step, or drop the gradient. What the mini-batch adds to the metrics, if it was made."""
        sums = (
            {name: reduction.on_host() for name, reduction in self._found.items()}
            if is_made
            else {}
        )
        if is_made:
            sums["critic/lr"] = Max(float(self._schedule.get_last_lr()[0]))
            self.optimizer.step()
            self._schedule.step()
        self.forget()
        self._num_updates += is_made
        self._skipped_in_a_row = 0 if is_made else self._skipped_in_a_row + 1
        return sums

    def forget(self) -> None:
        """Drop the gradient, and what was found of it."""
        self.optimizer.zero_grad(set_to_none=True)
        self._found = {}


def _lengths(row: MicroBatch) -> npt.NDArray[np.int64]:
    """Sampled tokens of each rollout; they lie one behind the other."""
    return np.bincount(row.sequence_index.cpu().numpy())


def _means(row: MicroBatch, estimate: _Estimate) -> list[tuple[int, float]]:
    """Of the advantages of each rollout's tokens; only of those that count."""
    mask, index = row.loss_mask.cpu().numpy(), row.sequence_index.cpu().numpy()
    size = max(len(row.rollout_ids), 1)
    counts = np.bincount(index, mask, size)
    with np.errstate(invalid="ignore"):  # 0 / 0: none counts
        means = np.bincount(index, np.where(mask, estimate.advantages, 0.0), size) / counts
    return list(zip(row.rollout_ids, means.tolist(), strict=False))


# Of a rank's first row, whose values are computed plainly: sequences, tokens from the first sampled one on, and how
# long a prompt may be, since plain attention takes memory by its square.
_NUM_SEQUENCES, _NUM_TOKENS, _LONGEST_PROMPT = 4, 32, 2048
_VALUE_BOUNDS = {
    "float32": 1e-4,
    "bfloat16": 0.05,
}  # mean |difference| of a value, of the values' size
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
        self._whitens, self._bound = normalize_std == "batch", _VALUE_BOUNDS[dtype]

    def __call__(
        self,
        sampled: SampledStep,
        batch: RolloutBatch,
        decision: Decision,
        rewards: Mapping[int, float],
    ) -> CheckResult:
        """Collective. `rewards`: of the rollouts that this rank sampled and some rank trains on; NaN: not known."""
        found = CheckResult()
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
                found.errors.append(
                    f"a token has the advantage {row.held[c]:.6g}, and gae gives {expected[c]:.6g}"
                )
        return found

    def _check_values(self, found: CheckResult, row: MicroBatch) -> None:
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
            with random_head(self._model.head):
                by_trainer = self._model(row)
                with eager_attention(self._model.backbone):
                    plainly = self._model.plain_values(ids)
        cast(FSDPModule, self._model).reshard()
        assert row.old_values is not None
        size = float(again.abs().mean()) + 1e-6
        what = "a value that the advantages are made of, of its size,"
        found.check_difference(
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
            found.check_difference(
                "a value beside that of a plain forward pass, of its size,",
                "values",
                off / size,
                self._bound,
            )

    def _plainly(self, found: CheckResult, row: MicroBatch, given: Mapping[int, _Given]) -> _Plain:
        """The values that the row holds are taken as they are."""
        assert row.old_values is not None
        assert row.returns is not None
        columns = (x.double().cpu().numpy() for x in (row.old_values, row.returns, row.advantages))
        values, returns, held = columns
        mask, index = row.loss_mask.cpu().numpy(), row.sequence_index.cpu().numpy()
        ids, lengths = row.rollout_ids, np.bincount(index, minlength=len(row.rollout_ids))
        if wrong := [i for i, n in zip(ids, lengths, strict=False) if n != given[i].num_tokens]:
            found.errors.append(f"rollouts {wrong[:5]} have other tokens than were sampled")
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
            found.errors.append(f"a value is taught {returns[c]:.6g}, {what}")
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


@contextmanager
def random_head(head: nn.Linear) -> Iterator[None]:
    """Within it the head, which may be zero, adds a product with a fixed vector."""

    def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + random_product(inputs[0])[..., None]

    handle = head.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def random_product(states: Tensor) -> Tensor:
    """[...] Of states [..., D]."""
    width = states.shape[-1]
    vector = torch.randn(width, generator=torch.Generator().manual_seed(0)) / math.sqrt(width)
    return states @ vector.to(states)


def open_own_critic(config: Config, policy: Policy, session: Session) -> Critic:
    """Collective. Builds the model of critic.path. Raises ConfigError for a model that cannot be a critic."""
    model = build_value_model(
        config.critic.path or "",
        config.model,
        session,
        longest=config.max_rollout_tokens,
        num_tokens=policy.model.get_input_embeddings().weight.shape[0],
    )
    return Critic(
        model,
        config.critic,
        config.advantage.normalize_std,
        loss=config.loss,
        optimizer=config.optimizer,
        training=config.training,
    )
