"""Engine and policy must give the sampled tokens the same logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class MismatchError(RuntimeError):
    """Engine and policy give the tokens just sampled logprobs that rounding does not explain."""

    says_all = True  # in the report of a failure


# Nats by compute dtype: most of the first step's mean; least and most of later means; most of the largest; most tilt.
_BOUNDS = {"float32": (1e-4, 1e-4, 1e-4, 0.05, 1e-4), "bfloat16": (0.05, 0.03, 0.1, 15.0, 0.015)}
_SIGMAS = 6.0  # of its standard error, by which a tilt must be off 0

_CAUSES_FROM_THE_START = (
    "the policy does not compute this model as the engine does; the temperatures differ; the engine does not hold the "
    "policy's weights; or this model's rounding is that large (then set proofs.max_mismatch)"
)
_CAUSES_LATER = (
    "the engine answered from old weights or old cached prefixes (proofs.every_steps: 1 tells which tensor); rollouts "
    "are scored with other tokens than were sampled; or rounding has grown as the policy changed (then set "
    "proofs.max_mismatch)"
)


def bounds_of(
    dtype: str, max_mismatch: float | None, first_mean: float | None
) -> tuple[float, float]:
    """Of a step's mean and largest |policy - engine|; `first_mean`: that of the run's first step, None at that step."""
    if max_mismatch is not None:
        return max_mismatch, math.inf
    most_first, least, most, largest, _ = _BOUNDS[dtype]
    return most_first if first_mean is None else min(max(4 * first_mean, least), most), largest


class LogprobCheck:
    """Stops a run whose engine and policy differ by more than rounding, in nats a sampled token. On rank 0.

    The bounds follow the number format; what a first step measures is no scale, for it may be wrong itself. In float32
    rounding makes about 1e-6, 1e-5 in deep models: 1e-4 is a fault, such as a temperature off by 2 in 10,000. In
    bfloat16 it makes 0.005 to 0.03, and grows as a policy does: the first mean may be 0.05, later ones four times the
    first, at least 0.03 and at most 0.1. Stale prefixes make about 0.3, stale weights 1.

    Below that the *tilt* tells rounding from a fault: the slope of (policy - engine) over (logprob + entropy), which is
    0 on average. Rounding has none (at most 6e-4 where the mean is 0.011 to 0.016, 0.004 where it is 0.07); a
    temperature off by 5 % has 0.05, at a mean of 0.04 that could be rounding. It counts with six standard errors, over
    the last steps together where one has few tokens, since rounding of few tokens tilts by chance. The logprob is the
    mean of both sides': with that of one, its own rounding would be on both axes.

    The largest is for the few completions that a mean hides. In bfloat16 a few nats are no fault: logits of 50 are
    rounded by 0.1, a layer may amplify that, and a month has 1e10 tokens. But 15 nats, a probability wrong by a factor
    of 3 million, come from tokens scored in another place or after another prefix. A NaN is a breach: an update whose
    loss it entered was skipped, so that here it can only be a logprob of the engine that the loss does not use.
    """

    def __init__(self, dtype: str, max_mismatch: float | None) -> None:
        """`max_mismatch`, where set, bounds the mean of every step, and nothing else is bounded."""
        self._dtype, self._max_mismatch, self._most_tilt = dtype, max_mismatch, _BOUNDS[dtype][-1]
        self.measured: tuple[float, float] | None = None  # mean and largest of the first step
        self._tilt_sums = [0.0, 0.0, 0.0]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds so that the next steps are judged as they would have been; known on rank 0."""
        return {"mismatch_scale": self.measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; nothing where it is empty."""
        if state.get("mismatch_scale") is not None:
            self.measured = tuple(state["mismatch_scale"])

    def check(
        self,
        step: int,
        mean: float | None,
        largest: float | None,
        tilt_sums: Sequence[float] | None = None,
    ) -> None:
        """Judge a step by |policy - engine| over all ranks' tokens; None: it has no tokens. `tilt_sums` are those of
        `losses.TILT_SUMS`. Raises MismatchError."""
        if mean is None or largest is None:
            return
        first_mean = self.measured[0] if self.measured is not None else None
        mean_bound, largest_bound = bounds_of(self._dtype, self._max_mismatch, first_mean)
        causes = _CAUSES_FROM_THE_START if self.measured is None else _CAUSES_LATER
        if not (mean <= mean_bound and largest <= largest_bound):
            raise MismatchError(
                f"step {step}: engine and policy differ by {mean:.3g} nats a token on the tokens just sampled, at most "
                f"by {largest:.3g}; the bounds are {mean_bound:.3g} and {largest_bound:.3g}. Likely, in this order: "
                + causes
            )
        tilt, error = self._tilt(tilt_sums)
        if self._max_mismatch is None and abs(tilt) > max(self._most_tilt, _SIGMAS * error):
            raise MismatchError(
                f"step {step}: engine and policy differ by {mean:.3g} nats a token on the tokens just sampled, and not "
                f"as rounding does: by {tilt:+.3g} of (logprob + entropy), the bound is {self._most_tilt:.3g}; such is "
                f"a temperature that is {1 / (1 + tilt) if tilt > -1 else math.inf:.3g} times as high in the policy as "
                f"in the engine. Likely, in this order: {causes}"
            )
        self.measured = self.measured or (mean, largest)

    def _tilt(self, sums: Sequence[float] | None) -> tuple[float, float]:
        """The slope over this step and, with falling weights, those before it; its standard error."""
        if sums is not None and all(map(math.isfinite, sums)):
            self._tilt_sums = [
                0.8 * old + new for old, new in zip(self._tilt_sums, sums, strict=True)
            ]
        products, squares, squared_products = self._tilt_sums
        return (
            (products / squares, math.sqrt(squared_products) / squares) if squares else (0.0, 0.0)
        )
