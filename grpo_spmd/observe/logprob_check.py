"""Engine and policy must give the sampled tokens the same logprobs."""

from __future__ import annotations

import math
from typing import Any


class MismatchError(RuntimeError):
    """Engine and policy give the tokens just sampled logprobs that rounding does not explain."""


# Nats by compute dtype. Bound of the first step's mean; least and most for later means; least and most for the largest.
_BOUNDS = {"float32": (1e-2, 1e-4, 5e-2, 0.05, 1.0), "bfloat16": (0.05, 0.02, 0.2, 15.0, 15.0)}

_CAUSES_FROM_THE_START = (
    "the policy does not compute this model as the engine does; the temperatures differ; the engine does not hold the "
    "policy's weights; or this model's rounding is that large (then set proofs.max_mismatch)"
)
_CAUSES_LATER = (
    "the engine answered from old weights or old cached prefixes (proofs.every_steps: 1 tells which tensor); rollouts "
    "are scored with other tokens than were sampled; or rounding has grown as the policy changed (then set "
    "proofs.max_mismatch)"
)


class LogprobCheck:
    """Stops a run whose engine and policy differ by more than rounding, in nats a sampled token. On rank 0.

    The first step sets the scale: ten times its mean and ten times its largest bound those of later steps, within
    limits by dtype. It has a limit of its own, for what is wrong from the start is no rounding. Rounding makes about
    1e-6 in float32 and 0.005 to 0.02 in bfloat16; a temperature of 0.7 on one side makes 0.1 and more, stale prefixes
    about 0.3, stale weights 1.

    The largest is for the few completions that a mean hides. In bfloat16 a few nats are no fault: logits of 50 are
    rounded by 0.1, a layer may amplify that, and a month has 1e10 tokens. But 15 nats, a probability wrong by a factor
    of 3 million, come from tokens scored in another place or after another prefix. A NaN is a breach: an update whose
    loss it entered was skipped, so that here it can only be a logprob of the engine that the loss does not use.
    """

    def __init__(self, dtype: str, max_mismatch: float | None) -> None:
        """`max_mismatch`, where set, bounds the mean of every step, and nothing else is bounded."""
        self._first_mean, self._least_mean, self._most_mean, self._least_max, self._most_max = _BOUNDS[dtype]
        self._max_mismatch = max_mismatch
        self.measured: tuple[float, float] | None = None  # mean and largest of the first step

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds so that the next steps are judged as they would have been; known on rank 0."""
        return {"mismatch_scale": self.measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; nothing where it is empty."""
        if state.get("mismatch_scale") is not None:
            self.measured = tuple(state["mismatch_scale"])

    def check(self, step: int, mean: float | None, largest: float | None) -> None:
        """Judge a step by |policy - engine| over all ranks' tokens; None: it has no tokens. Raises MismatchError."""
        if mean is None or largest is None:
            return
        mean_bound, largest_bound = self._bounds()
        if mean <= mean_bound and largest <= largest_bound:
            self.measured = self.measured or (mean, largest)
            return
        raise MismatchError(
            f"step {step}: engine and policy differ by {mean:.3g} nats a token on the tokens just sampled, at most by "
            f"{largest:.3g}; the bounds are {mean_bound:.3g} and {largest_bound:.3g}. Likely, in this order: "
            + (_CAUSES_FROM_THE_START if self.measured is None else _CAUSES_LATER)
        )

    def _bounds(self) -> tuple[float, float]:
        if self._max_mismatch is not None:
            return self._max_mismatch, math.inf
        if self.measured is None:
            return self._first_mean, self._most_max
        mean, largest = (10 * measured for measured in self.measured)
        return min(max(mean, self._least_mean), self._most_mean), min(max(largest, self._least_max), self._most_max)
