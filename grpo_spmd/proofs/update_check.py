"""The running check of the update: at a process's first step and every `proofs.every_steps`, what the trainer computes
beside a plain recomputation. Nothing of the run is changed by it, to the bit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.config.schema import (
    AdvantageConfig,
    DataConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import PolicyUpdater, Reference
from grpo_spmd.model.hf_files import checkpoint_folder, tensor_files
from grpo_spmd.model.lora import adapters_at_zero
from grpo_spmd.model.policy import Policy, hf_named_parameters
from grpo_spmd.model.sharding import first_row
from grpo_spmd.proofs.adamw_check import AdamwCheck
from grpo_spmd.proofs.batch_check import BatchCheck
from grpo_spmd.proofs.data_check import check_data, check_stop_ids
from grpo_spmd.proofs.gradient_check import (
    CheckResult,
    GradientCheck,
    SyntheticTeacher,
    SyntheticValues,
)
from grpo_spmd.records import Decision, MicroBatch, RolloutBatch

_log = logging.getLogger("grpo_spmd")
_FIRST_WINDOW, _LATER_WINDOW = (
    3,
    2,
)  # optimizer steps beside a plain AdamW: moments go wrong from one to the next
_NUM_TENSORS, _NUM_ROWS = 8, 4  # of the reference, compared with the model's files
_MAX_NAMED = 4


# Collective. Checks one signal's part of a step. The last argument has the rewards of the rollouts that this rank
# sampled, by rollout id.
SignalCheck = Callable[[SampledStep, RolloutBatch, Decision, dict[int, float]], CheckResult]


@dataclass(frozen=True)
class SignalProofs:
    """What teachers and critic contribute to the update check."""

    checks: Sequence[SignalCheck] = ()
    """Checks of what a signal wrote into the micro-batches."""
    make_teacher: Callable[[], SyntheticTeacher] | None = None
    """Makes a teacher for the synthetic rows of the gradient check, if the run has a teacher."""
    values: SyntheticValues | None = None
    """Value targets for these rows, if the critic learns in the policy's update."""


@dataclass(frozen=True)
class UpdateCheckSettings:
    """The settings of the run that the recomputation follows."""

    every_steps: int
    """`proofs.every_steps`. 0: only at the first step."""
    model_path: str
    dtype: str
    """`model.dtype`, the compute dtype."""
    stop_ids: frozenset[int]
    """Tokens at which the engine stops."""
    data: DataConfig
    rollout: RolloutConfig
    advantage: AdvantageConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    reward_weights: Sequence[float]
    """The weights of all rewards, in their order."""
    is_agent: bool = False
    """True if the episodes are those of `environment.agent`."""


class UpdateCheckError(RuntimeError):
    """The trainer computes something else than a plain recomputation."""

    says_all = True  # in the report of a failure


class UpdateCheck:
    """Also the UpdateObserver of an update: while its window is open it looks at each optimizer step."""

    def __init__(
        self,
        settings: UpdateCheckSettings,
        *,
        session: Session,
        policy: Policy,
        reference: Reference | None,
        updater: PolicyUpdater,
        tokenizer: Any,
        signals: SignalProofs = SignalProofs(),
    ) -> None:
        self._every_steps = settings.every_steps
        self._session = session
        self._policy = policy
        self._reference = reference
        self._tokenizer = tokenizer
        self._data = settings.data
        self._loss = settings.loss
        # Now: later the folder may be gone, and a hub id stand for other files.
        self._folder = checkpoint_folder(settings.model_path)
        self._stop_ids = set(settings.stop_ids)
        self._stored: dict[str, Tensor] = {}  # rows of the reference as the files have them
        self._batch_check = BatchCheck(
            settings.rollout,
            settings.advantage,
            settings.loss,
            weights=settings.reward_weights,
            stop_ids=settings.stop_ids,
            is_agent=settings.is_agent,
        )
        self._gradients = GradientCheck(
            policy,
            updater,
            settings.loss,
            temperature=settings.rollout.temperature,
            longest=settings.rollout.max_completion_tokens,
            dtype=settings.dtype,
            make_teacher=signals.make_teacher,
            values=signals.values,
        )
        self._adamw = AdamwCheck(
            policy, updater, settings.optimizer, settings.training.num_run_optimizer_steps
        )
        self._num_runs = 0
        self._window = 0
        self._step = 0
        self._signal_checks = signals.checks
        self._found = CheckResult()
        self._seconds = 0.0

    def run_if_due(
        self, step: int, sampled: SampledStep, batch: RolloutBatch, decision: Decision
    ) -> None:
        """Collective. Before the update of `step`. Raises Rank0Error on every rank, naming what is off."""
        self._seconds, self._step = 0.0, step
        is_first = not self._num_runs
        start = time.perf_counter()
        if not (is_first or (self._every_steps and step % self._every_steps == 0)):
            if (
                self._window and self._num_runs == 1
            ):  # what goes wrong from one step to the next is not in the first
                self._judge([self._batch_check.run(sampled, batch, decision)])
                self._seconds = time.perf_counter() - start
            return
        self._num_runs += 1
        parts = [self._batch_check.run(sampled, batch, decision)]
        if is_first:
            parts.append(check_data(sampled.groups, sampled.scored, self._tokenizer, self._data))
            parts.append(check_stop_ids(self._folder, self._tokenizer, self._stop_ids))
        parts.append(
            self._gradients.run(sampled.groups, self._session.device, accumulates=is_first)
        )
        parts.append(self._check_reference(sampled))
        parts.append(self._check_attached(batch))
        rewards = self._batch_check.rewards_of(sampled, decision)
        parts += [check(sampled, batch, decision, rewards) for check in self._signal_checks]
        self._window = _FIRST_WINDOW if is_first else _LATER_WINDOW
        self._found = CheckResult()
        self._adamw.open(self._found)
        measured = self._judge([*parts, self._found])
        self._seconds = time.perf_counter() - start
        if is_first:
            _log.info(
                "update check: %.2f s, logprobs %.0e, loss %.0e, gradient %.0e, %d advantages; AdamW over %d updates",
                *(
                    self._seconds,
                    *(measured.get(key, 0.0) for key in ("logprobs", "loss", "gradient")),
                ),
                *(measured["advantages"], self._window),
            )

    def metrics(self) -> dict[str, float]:
        """What it took of this step."""
        return {"proofs/update_check_s": self._seconds}

    def before_backward(
        self, mini_batch: list[MicroBatch], num_loss_tokens: int, num_loss_sequences: int
    ) -> None:
        """Collective, as all methods of an UpdateObserver."""
        self._timed(
            lambda: self._adamw.begin(mini_batch, num_loss_tokens, num_loss_sequences, self._found)
        )

    def after_backward(self) -> None:
        self._timed(self._adamw.gradients)

    def after_step(self, is_made: bool) -> None:
        def compare() -> None:
            self._adamw.end(is_made, self._found)
            self._judge([self._found])
            self._window -= 1

        self._timed(compare)

    def _timed(self, look: Callable[[], None]) -> None:
        if self._window:
            start = time.perf_counter()
            look()
            self._seconds += time.perf_counter() - start

    def _check_reference(self, sampled: SampledStep) -> CheckResult:
        """Collective. It scores as plainly computed, and has the weights of the model's files."""
        found, policy, reference = CheckResult(), self._policy, self._reference
        if (reference is None) == (self._loss.kl_coef > 0):
            found.errors.append(
                "there is a reference where no KL term asks for it, or none where one does"
            )
        if reference is None:
            return found
        check, rows = self._gradients, (sampled.groups, self._session.device)
        if policy.lora.rank:
            with adapters_at_zero(policy.model):
                plain = check.plain_logprobs(policy, *rows)
        elif isinstance(reference, Policy) and reference is not policy:
            plain = check.plain_logprobs(reference, *rows)
        else:
            return CheckResult(["the reference is not a model of its own"])
        difference = (check.trainer_logprobs(reference, *rows) - plain).abs()
        if len(difference) and plain.isfinite().all():  # else it is for the update to say
            what = "the reference's logprob of a token, in nats on average,"
            found.check_difference(what, "logprobs", float(difference.mean()), check.score_bound)
        self._check_files(found, policy if policy.lora.rank else reference)
        return found

    @torch.no_grad()
    def _check_files(self, found: CheckResult, model: Any) -> None:
        named = list(hf_named_parameters(model))
        files = tensor_files(self._folder) if self._num_runs == 1 else {}
        for name, parameter in named[:: max(1, len(named) // _NUM_TENSORS)]:
            held, first = parameter.to_local()[:_NUM_ROWS].cpu(), first_row(parameter)
            if name in files and len(held):
                with safe_open(files[name], framework="pt") as file:
                    self._stored[name] = file.get_slice(name)[first : first + len(held)].to(
                        held.dtype
                    )
            if name in self._stored and not torch.equal(self._stored[name], held):
                found.errors.append(f"the reference's {name} is not that of {self._folder}")

    @torch.no_grad()
    def _check_attached(self, batch: RolloutBatch) -> CheckResult:
        """Collective. The old and reference logprobs that the loss is given are those of policy and reference."""
        found, row, is_engine_judge = (
            CheckResult(),
            batch.micro_batches[0],
            self._loss.old_logprobs == "engine",
        )
        lacks_old = row.old_logprobs is None and (is_engine_judge or len(batch.mini_batches) > 1)
        if lacks_old or (row.ref_logprobs is None) != (self._reference is None):
            found.errors.append("the loss is not given the old or reference logprobs that it needs")
        old = ("old", row.old_logprobs, None if is_engine_judge else self._policy)
        for what, held, score in (old, ("reference", row.ref_logprobs, self._reference)):
            if held is not None and score is not None:
                off = float((score(row)[0] - held).abs().nan_to_num().mean())
                what = f"the {what} logprob that the loss is given, in nats on average,"
                found.check_difference(what, "attached", off, self._gradients.score_bound / 10)
        cast(FSDPModule, self._policy).reshard()
        return found

    def _judge(self, parts: list[CheckResult]) -> dict[str, float]:
        """Collective. The largest figures over ranks. Raises Rank0Error."""
        wrong = [text for found in parts for text in found.errors]
        measured: dict[str, float] = {}
        for found in parts:
            measured |= {
                key: max(value, measured.get(key, 0.0)) for key, value in found.metrics.items()
            }
        return on_rank0(
            lambda of_ranks: _raise_if_wrong(of_ranks, self._step),
            [wrong[:_MAX_NAMED], len(wrong), measured],
        )


def _raise_if_wrong(
    of_ranks: list[tuple[list[str], int, dict[str, float]]], step: int
) -> dict[str, float]:
    """On rank 0."""
    by_text: dict[str, list[int]] = {}
    for rank, (wrong, _, _) in enumerate(of_ranks):
        for text in dict.fromkeys(wrong):
            by_text.setdefault(text, []).append(rank)
    if by_text:
        said = [
            f"rank {', '.join(map(str, ranks))}: {text}"
            for text, ranks in list(by_text.items())[:_MAX_NAMED]
        ]
        more = sum(count for _, count, _ in of_ranks) - len(said)
        rest = f"; and {more} more" if more > 0 else ""
        what = "the update is not what a plain recomputation of it gives"
        raise UpdateCheckError(f"step {step}: {what}: {'; '.join(said)}{rest}")
    keys = {key for _, _, measured in of_ranks for key in measured}
    largest = {key: max(measured.get(key, 0.0) for _, _, measured in of_ranks) for key in keys}
    largest["advantages"] = sum(measured.get("advantages", 0.0) for _, _, measured in of_ranks)
    return largest
