"""The running check of the update: the trainer's numbers are compared with a plain recomputation.

`UpdateCheck` runs in the first and the third step of a process and every `proofs.every_steps`
steps. Before the update it runs the other checks of this folder, the checks of the signals
(teachers and critic) and those of the reference model. As an UpdateObserver it then follows a few
optimizer steps, its "window", with `AdamwCheck`: AdamW is written out plainly for two small
tensors, with clipping, moments, weight decay and learning rate.

The check does not change the results of the run, not in a single bit. Any difference above its
bound ends the run on all ranks, with one message that says what differs on which rank.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import MOMENT_BLOCK, OptimizerConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import (
    Learner,
    MiniBatch,
    PolicyUpdater,
    Reference,
    UpdateObserver,
)
from grpo_spmd.model.config_json import checkpoint_folder, tensor_files
from grpo_spmd.model.families.build import SavedTensor, read_rows
from grpo_spmd.model.policy import Policy, hf_named_parameters
from grpo_spmd.model.sharding import as_matrix, first_matrix_row, reshard
from grpo_spmd.proofs.batch_check import BatchCheck, check_data, check_stop_ids
from grpo_spmd.proofs.gradient_check import (
    GradientCheck,
    SignalProofs,
    UpdateCheckError,
    check_no_gradient,
    count_loss,
    gradient_squares,
    raise_if_wrong,
    sum_over_ranks,
)
from grpo_spmd.proofs.schedule import ProofSchedule, rows_to_check
from grpo_spmd.proofs.synthetic import CheckResult, UpdateCheckSettings
from grpo_spmd.records import Decision, RolloutBatch

_log = logging.getLogger("grpo_spmd")
# The number of optimizer steps that are followed after an early check (first and third step) and
# after a later one. A fault of moments may only show from one optimizer step to the next.
_EARLY_WINDOW = 3
_LATER_WINDOW = 2
# How much of the reference is compared with the model's files: the number of tensors (about), and
# of rows of each.
_NUM_TENSORS = 8
_NUM_ROWS = 4


class UpdateCheck(UpdateObserver):
    """The check of a run's updates. `run_if_due` checks a step before its update; as an
    UpdateObserver the object then checks the update's optimizer steps."""

    def __init__(
        self,
        settings: UpdateCheckSettings,
        *,
        session: Session,
        policy: Policy,
        reference: Reference | None,
        updater: PolicyUpdater,
        tokenizer: Any,
        signals: SignalProofs,
    ) -> None:
        """`reference` returns the reference model's logprobs of a micro-batch; None: the run has
        none. `signals` has the checks of teachers and critic."""
        self._settings = settings
        self._session = session
        self._policy = policy
        self._reference = reference
        self._tokenizer = tokenizer
        self._signal_checks = signals.checks if settings.checks_signals else ()
        # The folder is looked up now: later it may be gone, or a hub id may stand for other files.
        self._folder = checkpoint_folder(settings.model_path)
        # Rows of the reference's tensors by name, as read from the model's files.
        self._stored_rows: dict[str, Tensor] = {}
        self._batch_check = BatchCheck(settings, tokenizer, counts_rows=policy.counts_rows)
        self._gradients = GradientCheck(policy, updater, settings, signals)
        # In the first steps of a critic's warm-up the policy makes no optimizer step.
        num_steps = settings.training.num_steps - settings.warmup_steps
        num_updates = num_steps * settings.training.num_optimizer_steps
        self._adamw = AdamwCheck(
            policy, updater, settings.optimizer, num_updates, counts_rows=policy.counts_rows
        )
        self._schedule = ProofSchedule(settings.every_steps)
        self._num_runs = 0
        self._step = 0
        self._seconds = 0.0
        # True from the check of a step until its update begins.
        self._expects_update = False

    def run_if_due(
        self, step: int, sampled: SampledStep, batch: RolloutBatch, decision: Decision
    ) -> None:
        """Collective. Checks the step if the check is due. It is called before each update.

        Raises Rank0Error on every rank if something is wrong; its message says what."""
        start = time.perf_counter()
        self._seconds = 0.0
        if not self._settings.is_on:
            return
        if self._expects_update:
            raise UpdateCheckError(f"step {step}: the policy was not updated in the step before")
        self._step = step
        self._adamw.claim = self._claim
        self._expects_update = any(batch.num_loss_tokens) and not self._is_frozen
        is_first = not self._num_runs
        is_early = self._schedule.is_early(step)
        if not self._schedule.is_due(step):
            # The batch is also checked in the step after the first one, while its optimizer steps
            # are followed: the first step cannot show faults from one step to the next.
            if self._adamw.window and self._num_runs == 1:
                raise_if_wrong([self._batch_check.run(sampled, batch, decision)], self._claim)
                self._seconds = time.perf_counter() - start
            return
        self._num_runs += 1
        results = [self._batch_check.run(sampled, batch, decision)]
        if is_early:
            results += [
                check_data(sampled.groups, sampled.scored, self._tokenizer, self._settings.data),
                check_stop_ids(self._folder, self._tokenizer, self._settings.stop_ids),
            ]
        device = self._session.device
        # All ranks make these checks in the same order: each has collectives. The gradient check
        # comes first, since it sets the bounds that the other two use.
        results += [
            self._gradients.run(
                sampled.groups,
                device,
                accumulates=is_early,
                shares_prefixes=decision.shares_prefixes,
            ),
            self._check_reference(sampled, decision),
            self._check_attached(batch),
        ]
        rewards = self._batch_check.rewards_of(sampled, decision)
        results += [check(sampled, batch, decision, rewards) for check in self._signal_checks]
        results.append(self._adamw.open(_EARLY_WINDOW if is_early else _LATER_WINDOW))
        # The checks above only collect errors: here those of any rank end the step on all ranks.
        metrics = raise_if_wrong(results, self._claim)
        self._seconds = time.perf_counter() - start
        if is_first:
            _log.info(
                "update check: %.2f s, logprobs %.0e, loss %.0e, gradient %.0e, %d advantages; "
                "AdamW over %d updates",
                self._seconds,
                metrics.get("logprobs", 0.0),
                metrics.get("loss", 0.0),
                metrics.get("gradient", 0.0),
                metrics["advantages"],
                self._adamw.window,
            )

    @property
    def _is_frozen(self) -> bool:
        """True in the first steps (critic.warmup_steps), in which only a critic learns."""
        return 0 < self._step <= self._settings.warmup_steps

    @property
    def _claim(self) -> str:
        """The beginning of the message of an error."""
        return f"step {self._step}: the update is not what a plain recomputation of it gives"

    def metrics(self) -> dict[str, float]:
        """Returns a metric: the seconds that the check took in this step."""
        return {"proofs/update_check_s": self._seconds}

    def before_backward(self, mini_batch: MiniBatch) -> None:
        """Collective. Checks the denominators of a mini-batch. See UpdateObserver."""
        self._expects_update = False
        if self._is_frozen:
            raise UpdateCheckError(
                f"step {self._step}: the policy is updated within the first "
                f"{self._settings.warmup_steps} steps, which are the critic's alone "
                "(critic.warmup_steps)"
            )
        with self._timed():
            self._adamw.before_backward(mini_batch)

    def after_backward(self) -> None:
        """Collective. Reads the gradients of a mini-batch before they are clipped."""
        with self._timed():
            self._adamw.after_backward()

    def after_step(self, is_made: bool) -> None:
        """Collective. Compares weights and moments with those of the plain AdamW. See
        AdamwCheck."""
        with self._timed():
            self._adamw.after_step(is_made)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Returns a context manager that adds its seconds to the check's time of this step, if
        optimizer steps are being followed."""
        is_followed = self._adamw.window > 0
        start = time.perf_counter()
        yield
        if is_followed:
            self._seconds += time.perf_counter() - start

    def _check_reference(self, sampled: SampledStep, decision: Decision) -> CheckResult:
        """Collective. Compares the reference's logprobs with plain ones, and its weights with the
        model's files."""
        result = CheckResult()
        policy = self._policy
        reference = self._reference
        if (reference is None) == (self._settings.loss.kl_coef > 0):
            result.errors.append(
                "there is a reference although loss.kl_coef is 0, or none although it is not"
            )
        if reference is None:
            return result
        # With adapters, the reference is the policy's model without them.
        has_adapters = policy.lora.rank > 0
        model = policy if has_adapters else reference
        if not isinstance(model, Policy) or (model is policy and not has_adapters):
            return CheckResult(["the reference is not a model of its own"])
        device = self._session.device
        self._gradients.compare_reference(
            result,
            reference,
            model,
            groups=sampled.groups,
            device=device,
            shares_prefixes=decision.shares_prefixes,
        )
        self._check_files(result, model)
        return result

    @torch.no_grad()
    def _check_files(self, result: CheckResult, model: Policy) -> None:
        """Compares some rows of some tensors of the reference, whose weights never change, with the
        files of the start model.

        The files are read at the first check only; later checks compare with the rows that were
        read then."""
        named = list(hf_named_parameters(model))
        # Tensors spread evenly over the model, and of each the first rows that this rank holds.
        files = tensor_files(self._folder) if self._num_runs == 1 else {}
        for name, parameter in named[:: max(1, len(named) // _NUM_TENSORS)]:
            rows = as_matrix(parameter.to_local())[:_NUM_ROWS].cpu()
            whole = SavedTensor(name, 0, tuple(parameter.shape))
            for saved in model.saved.get(name, [whole]):
                if saved.name in files and len(rows):
                    # The clone has the shape and dtype that the file's rows are read into.
                    stored = self._stored_rows.setdefault(name, rows.clone())
                    start = first_matrix_row(parameter)
                    read_rows(saved, files, self._folder, rows=stored, start=start)
            if name in self._stored_rows and not torch.equal(self._stored_rows[name], rows):
                result.errors.append(f"the reference's {name} is not that of {self._folder}")

    @torch.no_grad()
    def _check_attached(self, batch: RolloutBatch) -> CheckResult:
        """Collective. Scores the first, second and last micro-batch again, and compares with the
        old and reference logprobs that they hold for the loss."""
        result = CheckResult()
        old_by_engine = self._settings.loss.old_logprobs == "engine"
        needs_old = old_by_engine or len(batch.mini_batches) > 1
        for row in rows_to_check(batch.micro_batches):
            lacks_old = needs_old and row.old_logprobs is None
            if lacks_old or (row.ref_logprobs is None) != (self._reference is None):
                result.errors.append(
                    "the loss is not given the old or reference logprobs that it needs"
                )
            for name, attached, score in (
                ("old", row.old_logprobs, None if old_by_engine else self._policy),
                ("reference", row.ref_logprobs, self._reference),
            ):
                if attached is not None and score is not None:
                    result.check_difference(
                        f"the {name} logprob that the loss is given, in nats on average,",
                        "attached",
                        float((score(row)[0] - attached).abs().nan_to_num().mean()),
                        self._gradients.repeated_score_bound,
                    )
        # No backward pass follows that would free the gathered parameters.
        reshard(self._policy)
        return result


# AdamW written out.

# The epsilon in AdamW's denominator.
_EPS = 1e-8
# The names of the moments, and the largest 8-bit code of each: that of a block's largest value.
_MOMENTS = {"exp_avg": 127, "exp_avg_sq": 255}
# Bounds of the relative differences of a moment and of a step. 1e-7 and 1e-4 were measured.
_MOMENTS_BOUND = 1e-4
_STEP_BOUND = 1e-2
# The rounding of a float32 weight, relative to the weight.
_ROUNDING = 2e-7
# If a value is this near to the threshold between two codes, in units of codes, both are accepted.
_CODE_ROUNDING = 1e-2


@dataclass
class _Shadow:
    """This rank's rows of one tensor, with the weights and moments that plain AdamW gives them.
    Tensors are float64 on the host."""

    name: str
    parameter: DTensor
    weights: Tensor
    moments: dict[str, Tensor]
    """The moments by torch's names, "exp_avg" and "exp_avg_sq"."""
    gradient: Tensor
    """The gradient before clipping."""


class AdamwCheck(UpdateObserver):
    """Follows optimizer steps, and computes the weights and moments that each should leave.

    A "shadow" is the check's copy of this rank's rows of one small tensor, on which the check makes
    AdamW's steps in float64."""

    def __init__(
        self,
        policy: nn.Module,
        updater: Learner,
        config: OptimizerConfig,
        num_steps: int,
        counts_rows: bool = True,
    ) -> None:
        """`num_steps` is the number of optimizer steps of the whole run, on which the learning rate
        depends. `counts_rows` is that of Policy: False on a rank whose micro-batches another rank
        counts."""
        self._policy = policy
        self._updater = updater
        self._config = config
        self._num_steps = num_steps
        self._counts_rows = counts_rows
        trained = [
            (name, cast(DTensor, parameter))
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad
        ]
        # The smallest tensor with weight decay and the smallest without: the moments of all others
        # are computed by the same lines.
        self._followed: list[tuple[str, DTensor]] = []
        for decays in (True, False):
            same_kind = [pair for pair in trained if (pair[1].ndim > 1) == decays]
            if same_kind:
                self._followed.append(min(same_kind, key=lambda pair: (pair[1].numel(), pair[0])))
        self._shadows: list[_Shadow] = []
        # The number of optimizer steps that are still to be followed.
        self.window = 0
        # The errors in the optimizer steps since `open`.
        self._result = CheckResult()
        # The beginning of the message of an error.
        self.claim = ""
        self._num_updates = 0
        self._clip_factor = 1.0

    def open(self, window: int) -> CheckResult:
        """Starts to follow the optimizer over its next `window` steps, from copies of the weights
        and moments. Returns what is wrong with the optimizer's settings and its count of steps."""
        self.window = window
        self._result = CheckResult()
        self._shadows = []
        self._num_updates = self._updater.state()["num_updates"]
        self._check_groups()
        for name, parameter in self._followed:
            weights = _to_host(parameter)
            moments = self._moments(parameter)
            shadow = _Shadow(name, parameter, weights, moments, torch.zeros_like(weights))
            self._shadows.append(shadow)
            num_steps = int(self._updater.optimizer.state.get(parameter, {}).get("step", 0))
            if num_steps != self._num_updates:
                self._result.errors.append(
                    f"the optimizer counts {num_steps} steps of {name}, and {self._num_updates} "
                    "updates were made"
                )
        return self._result

    def _moments(self, parameter: DTensor) -> dict[str, Tensor]:
        """Returns the optimizer's moments of a parameter on the host, with 8-bit codes decoded.
        They are 0 before the first step, which creates them."""
        state = self._updater.optimizer.state.get(parameter, {})
        moments = {}
        for key, levels in _MOMENTS.items():
            moments[key] = _to_host(state.get(key, torch.zeros_like(parameter)))
            if state and self._is_coded(parameter):
                scales = _of_columns(_to_host(state[f"{key}_scale"]), parameter)
                moments[key] = moments[key].sign() * (moments[key] / levels) ** 2 * scales
        return moments

    def _is_coded(self, parameter: DTensor) -> bool:
        """Returns whether the moments of this parameter are stored as 8-bit codes."""
        return self._config.name == "adamw_8bit" and parameter.ndim > 1

    def before_backward(self, mini_batch: MiniBatch) -> None:
        """Collective. Checks the denominators, and that no gradient is left from before."""
        if not self.window:
            return
        check_no_gradient(self._result, self._policy.named_parameters())
        micro_batches, *denominators = mini_batch
        counts = sum_over_ranks(count_loss(micro_batches if self._counts_rows else []))
        if counts != denominators:
            self._result.errors.append(
                f"the loss divides by {denominators} tokens and sequences, and {counts} count over "
                "all ranks"
            )

    def after_backward(self) -> None:
        """Collective. Reads the gradients of the followed tensors, and computes the clip factor
        from the norm of the whole gradient over all shards, without FSDP's help."""
        if not self.window:
            return
        squares = sum_over_ranks([sum(gradient_squares(self._policy).values())])
        norm = math.sqrt(squares[0])
        self._clip_factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        for shadow in self._shadows:
            grad = shadow.parameter.grad
            shadow.gradient = torch.zeros_like(shadow.weights) if grad is None else _to_host(grad)

    def after_step(self, is_made: bool) -> None:
        """Collective. Compares the weights and moments that the step left with those that it should
        have left.

        `is_made` is False if the optimizer step was skipped: then nothing may have changed. Raises
        Rank0Error on every rank if something is wrong."""
        if not self.window:
            return
        self._num_updates += is_made
        for shadow in self._shadows:
            previous = shadow.weights
            if is_made:
                self._step(shadow)
            self._compare(shadow, previous)
        raise_if_wrong([self._result], self.claim)
        self.window -= 1

    def _step(self, shadow: _Shadow) -> None:
        """Makes AdamW's step on a shadow (Loshchilov and Hutter 2019)."""
        beta1, beta2 = self._config.betas
        step = self._num_updates
        rate = _learning_rate(self._config, step, self._num_steps)
        # Norms and biases, which have one dimension, do not decay.
        decay = self._config.weight_decay if shadow.parameter.ndim > 1 else 0.0
        gradient = shadow.gradient * self._clip_factor
        mean = beta1 * shadow.moments["exp_avg"] + (1 - beta1) * gradient
        square = beta2 * shadow.moments["exp_avg_sq"] + (1 - beta2) * gradient**2
        size = (square / (1 - beta2**step)).sqrt() + _EPS
        shadow.weights = (
            shadow.weights * (1 - rate * decay) - rate * (mean / (1 - beta1**step)) / size
        )
        shadow.moments = {"exp_avg": mean, "exp_avg_sq": square}

    def _compare(self, shadow: _Shadow, previous: Tensor) -> None:
        """Compares the trainer's weights and moments with those of a shadow. `previous` are the
        weights before the step."""
        weights = _to_host(shadow.parameter)
        # The rounding of the weights may be larger than the step, and is no error.
        rounding = _ROUNDING * float(previous.norm())
        error = max(0.0, float((weights - shadow.weights).norm()) - rounding)
        size = float((shadow.weights - previous).norm())
        self._check_size(f"the step of AdamW on {shadow.name}", error, size, bound=_STEP_BOUND)
        moments = self._moments(shadow.parameter)
        is_coded = self._is_coded(shadow.parameter)
        for key, moment in moments.items():
            expected = shadow.moments[key]
            if is_coded and self._num_updates:
                self._compare_codes(shadow, key)
                continue
            self._check_size(
                f"AdamW's {key} of {shadow.name}",
                float((moment - expected).norm()),
                float(expected.norm()),
                bound=_MOMENTS_BOUND,
            )
        # The shadow's next step starts from the trainer's weights and codes, so that
        # rounding of several steps does not add up.
        shadow.weights = weights
        if is_coded:
            shadow.moments = moments

    def _compare_codes(self, shadow: _Shadow, key: str) -> None:
        """Compares the trainer's 8-bit codes and scales of a moment with those that follow from the
        shadow's moment. `key` is the moment's name, such as "exp_avg"."""
        state = self._updater.optimizer.state[shadow.parameter]
        codes = _to_host(state[key])
        scales = _to_host(state[f"{key}_scale"])
        expected = shadow.moments[key]
        levels = _MOMENTS[key]
        blocks = expected.abs().split(MOMENT_BLOCK, dim=-1)
        largest = torch.stack([block.amax(-1) for block in blocks], dim=-1)
        subject = f"AdamW's {key}_scale of {shadow.name}"
        error = float((scales - largest).norm())
        self._check_size(subject, error, float(largest.norm()), bound=_MOMENTS_BOUND)
        # In a block of zeros the shares are 0 too; the clamp avoids a division by 0.
        share = expected.abs() / _of_columns(largest, shadow.parameter).clamp_min(1e-38)
        # Codes are rounded up above a threshold that each step moves (AdamW8bit).
        offset = self._num_updates * 0.6180339887498949 % 1
        # As in AdamW8bit, codes of exp_avg_sq are at least 1.
        lowest = int(key == "exp_avg_sq")
        low, high = (
            ((share + rounding * 1e-4).clamp_min(0).sqrt() * levels + offset + rounding)
            .floor()
            .clamp(lowest, levels)
            for rounding in (-_CODE_ROUNDING, _CODE_ROUNDING)
        )
        is_wrong = (codes.abs() < low) | (codes.abs() > high) | ((codes * expected < 0) & (low > 0))
        if is_wrong.any():
            self._result.errors.append(
                f"{int(is_wrong.sum())} of {codes.numel()} 8-bit codes of AdamW's {key} of "
                f"{shadow.name} are wrong"
            )

    def _check_size(self, subject: str, error: float, size: float, bound: float) -> None:
        """Records `error` divided by `size`, and adds an error if the quotient is above `bound`.

        `error` is the norm of a difference, `size` the norm of what it is a difference of."""
        relative = error / size if size else float(error > 0)
        self._result.check_difference(f"{subject}, relative to its size,", "AdamW", relative, bound)

    def _check_groups(self) -> None:
        """Checks the optimizer's settings and its list of tensors.

        Comparing weights is not enough: a decay of 1e-8 of a weight is below the weight's rounding.
        """
        ids: list[int] = []
        for group in self._updater.optimizer.param_groups:
            ids += map(id, group["params"])
            expected = {"betas": tuple(self._config.betas), "eps": _EPS}
            settings = {"betas": tuple(group["betas"]), "eps": group["eps"]}
            decays = {self._config.weight_decay if p.ndim > 1 else 0.0 for p in group["params"]}
            if settings != expected or decays != {group["weight_decay"]}:
                self._result.errors.append(
                    f"the optimizer has {settings} and weight_decay {group['weight_decay']} where "
                    f"{expected} and {sorted(decays)} are asked for"
                )
        if sorted(ids) != sorted(id(p) for p in self._policy.parameters() if p.requires_grad):
            self._result.errors.append(
                f"the optimizer has {len(ids)} tensors, which are not those that train, each once"
            )


def _learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Returns the learning rate of an optimizer step, counted from 1."""
    warmup = config.warmup_steps
    # The rate rises to `lr` by equal steps, then falls to `min_lr` over the rest of the run.
    if step <= warmup:
        return config.lr * step / warmup
    angle = math.pi / 2 * (step - 1 - warmup) / max(1, num_steps - warmup)
    fraction = {
        "constant": 1.0,
        "linear": 1 - angle / (math.pi / 2),
        "cosine": math.cos(angle) ** 2,
    }[config.schedule]
    return fraction * config.lr + (1 - fraction) * config.min_lr


def _of_columns(scales: Tensor, parameter: DTensor) -> Tensor:
    """Returns the scale of each column [..., columns] of a parameter from `scales` of its blocks of
    MOMENT_BLOCK columns [..., blocks]."""
    return scales[..., torch.arange(parameter.shape[-1]) // MOMENT_BLOCK]


def _to_host(tensor: Tensor) -> Tensor:
    """Returns a copy of this rank's rows of a tensor, float64 on the host."""
    rows = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return rows.detach().to("cpu", torch.float64, copy=True)
