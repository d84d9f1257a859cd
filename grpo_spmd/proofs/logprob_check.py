"""Checks at every step that engine and policy give the sampled tokens the same logprobs.

A difference is policy minus engine, in nats, at one sampled token. The check bounds the mean and
the largest |difference|, and the tilt: the slope of the differences over (logprob + entropy).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_log = logging.getLogger("grpo_spmd")


class MismatchError(RuntimeError):
    """Raised if engine and policy give the sampled tokens logprobs that rounding cannot explain."""

    # The report of a failure prints the whole message.
    says_all = True


class _Bounds(NamedTuple):
    """The bounds of |policy - engine|, in nats, for one number format."""

    usual_mean: float
    """If the first step's mean is beyond this, a warning is logged."""
    first_mean: float
    """The bound of the first step's mean, beyond which the run stops."""
    min_mean: float
    """The smallest bound that a later mean may have."""
    max_mean: float
    """The largest bound that a later mean may have."""
    largest: float
    """The bound of the largest difference in a step."""
    tilt: float
    """The bound of |tilt|, in nats per nat."""


_BOUNDS = {
    "float32": _Bounds(1e-4, 1e-4, 1e-4, 1e-4, 0.05, 1e-4),
    "bfloat16": _Bounds(0.05, 0.1, 0.03, 0.1, 15.0, 0.015),
}
# A tilt counts only if it is this many standard errors away from 0.
_SIGMAS = 6.0

_CAUSES_FROM_THE_START = (
    "the policy does not compute this model as the engine does; the temperatures differ; the "
    "engine does not hold the policy's weights; or this model's rounding is that large (then set "
    "proofs.max_mismatch)"
)
_CAUSES_LATER = (
    "the engine answered from old weights or old cached prefixes (proofs.every_steps: 1 tells "
    "which tensor); rollouts are scored with other tokens than were sampled; or rounding has grown "
    "as the policy changed (then set proofs.max_mismatch)"
)


def bounds_of(
    dtype: str, max_mismatch: float | None, first_mean: float | None
) -> tuple[float, float]:
    """Returns the bounds of the (mean, largest) |policy - engine| of a step, in nats.

    `max_mismatch` is `proofs.max_mismatch`: if set, only the mean is bounded. `first_mean` is the
    mean of the run's first step, None at that step."""
    if max_mismatch is not None:
        return max_mismatch, math.inf
    bounds = _BOUNDS[dtype]
    # The bounds of later steps follow from the first step. As this may be wrong itself, its own
    # bound does not depend on the run.
    if first_mean is None:
        return bounds.first_mean, bounds.largest
    return min(max(4 * first_mean, bounds.min_mean), bounds.max_mean), bounds.largest


class LogprobCheck:
    """Stops a run whose engine and policy differ by more than rounding. Runs on rank 0.

    Differences are in nats for each sampled token. The bounds depend on the number format. In
    float32 the mean difference by rounding is about 1e-6, or 1e-5 in deep models: 1e-4 is a fault,
    such as a temperature that is wrong by 2 in 10,000. In bfloat16 it is 0.005 to 0.03, and grows
    as the policy is trained: the first step's mean may be up to 0.1, later ones up to four times
    the first, where this bound is at least 0.03 and at most 0.1. A first mean beyond 0.05 is logged
    as a warning. It may be rounding (models of 28 and 64 layers with sharp attention or key biases
    of 605 have 0.058 and 0.078) or a fault, such as attention scores that are wrong by a fifth.
    Stale prefixes give about 0.3, stale weights 1.

    Below these bounds the *tilt* tells rounding from a fault. It is the slope of (policy - engine)
    over (logprob + entropy), where the latter is 0 on average. Rounding has almost no tilt (at most
    6e-4 where the mean is 0.011 to 0.016, 0.004 where it is 0.07). A temperature that is wrong by
    5 % gives a tilt of 0.05, with a mean of 0.04 that could be rounding. As rounding of few tokens
    tilts by chance, a tilt must be at least six standard errors, and recent steps are counted
    together. "logprob" is the mean of the policy's and the engine's: the rounding of one side alone
    would be on both axes.

    The largest difference shows faults of a few completions, which a mean hides. In bfloat16 a few
    nats are no fault: logits of 50 are rounded by 0.1, a layer may amplify that, and a month has
    1e10 tokens. But 15 nats, a probability wrong by a factor of 3 million, come from tokens that
    were scored at another position or after another prefix. A NaN is a fault. An update whose loss
    is NaN is skipped, so a NaN here can only be a logprob of the engine that the loss does not use.
    """

    def __init__(self, dtype: str, max_mismatch: float | None, *, is_on: bool = True) -> None:
        """`max_mismatch`, if set, bounds the mean of every step, and nothing else is bounded.
        `is_on` is `proofs.logprobs`: if False, nothing is checked."""
        self._is_on = is_on
        self._dtype = dtype
        self._max_mismatch = max_mismatch
        self.first_step: tuple[float, float] | None = None
        """(mean, largest) |difference| of the run's first step. None before that step."""
        # Sums of a d, a^2 and (a d)^2 over all steps so far, older ones with smaller weights; for a
        # and d see mismatch_sums.
        self._tilt_sums = [0.0, 0.0, 0.0]

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint. Only rank 0 has it."""
        return {"mismatch_scale": self.first_step}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`, which `state()` returned in an earlier process. Does nothing if
        it has no first step."""
        if state.get("mismatch_scale") is not None:
            self.first_step = tuple(state["mismatch_scale"])

    def check(
        self,
        step: int,
        mean: float | None,
        largest: float | None,
        tilt_sums: Sequence[float] | None = None,
    ) -> None:
        """Checks one step. Raises MismatchError if a bound is exceeded.

        `mean` and `largest` are |policy - engine| over the tokens of all ranks, in nats; None if
        the step has no tokens. `tilt_sums` are the sums of `losses.TILT_SUMS` in this order."""
        if mean is None or largest is None or not self._is_on:
            return
        first_mean = self.first_step[0] if self.first_step is not None else None
        mean_bound, largest_bound = bounds_of(self._dtype, self._max_mismatch, first_mean)
        causes = _CAUSES_FROM_THE_START if self.first_step is None else _CAUSES_LATER
        # Written so that NaN, which compares as False, is a fault.
        if not (mean <= mean_bound and largest <= largest_bound):
            raise MismatchError(
                f"step {step}: engine and policy differ by {mean:.3g} nats a token on the tokens "
                f"just sampled, at most by {largest:.3g}; the bounds are {mean_bound:.3g} and "
                f"{largest_bound:.3g}. Likely, in this order: {causes}"
            )
        tilt, error = self._tilt(tilt_sums)
        tilt_bound = _BOUNDS[self._dtype].tilt
        if self._max_mismatch is None and abs(tilt) > max(tilt_bound, _SIGMAS * error):
            # If the temperatures differ, logprobs differ by about tilt * (logprob + entropy).
            temperature_ratio = 1 / (1 + tilt) if tilt > -1 else math.inf
            raise MismatchError(
                f"step {step}: engine and policy differ by {mean:.3g} nats a token on the tokens "
                f"just sampled, but not as rounding does: by {tilt:+.3g} * (logprob + entropy), "
                f"and the bound is {tilt_bound:.3g}. A temperature that is {temperature_ratio:.3g} "
                "times as high in the policy as in the engine has this effect. Likely, in this "
                f"order: {causes}"
            )
        usual_mean = _BOUNDS[self._dtype].usual_mean
        if self._max_mismatch is None and self.first_step is None and mean > usual_mean:
            _log.warning(
                "step %d: engine and policy differ by %.3g nats a token, more than the %.3g that "
                "most models round by; the run stops at %.3g. Likely, in this order: %s",
                step,
                mean,
                usual_mean,
                mean_bound,
                causes,
            )
        self.first_step = self.first_step or (mean, largest)

    def _tilt(self, sums: Sequence[float] | None) -> tuple[float, float]:
        """Adds a step's sums to those of the steps before, and returns (tilt, its standard error).

        The tilt is the slope of d over a (see mismatch_sums). A step weighs 0.8 times as much as
        the one after it."""
        if sums is not None and all(map(math.isfinite, sums)):
            self._tilt_sums = [
                0.8 * total + new for total, new in zip(self._tilt_sums, sums, strict=True)
            ]
        products, squares, squared_products = self._tilt_sums
        if not squares:
            return 0.0, 0.0
        return products / squares, math.sqrt(squared_products) / squares
