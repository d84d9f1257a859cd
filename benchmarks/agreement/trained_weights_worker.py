"""One rank of the trained_weights benchmark: the command itself, where each check of the update
measures bfloat16's noise, and rank 0 prints what it compared. No bound changes by that.

python -m benchmarks.agreement.trained_weights_worker --config CONFIG [section.key=value ...]
"""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

from grpo_spmd import train


def main() -> None:
    train.prepare_torch()
    from grpo_spmd.proofs.gradient_check import WHOLE, GradientCheck
    from grpo_spmd.proofs.synthetic import CheckResult

    measure_noise = GradientCheck._measure_noise
    judge = GradientCheck._judge_gradients
    score_noise = [0.0]

    def measured(check: GradientCheck, *args: Any, **kwargs: Any) -> Any:
        result = measure_noise(check, *args, **kwargs)
        score_noise[0] = result[0]
        return result

    def judged(
        check: GradientCheck,
        result: CheckResult,
        relative: dict[str, float],
        noise: dict[str, float],
    ) -> None:
        bounds = check._bounds_of_gradients(noise)
        worst = max(relative, key=lambda name: relative[name] / bounds[name])
        line = {
            "scores": result.metrics.get("logprobs", 0.0),
            "score noise": score_noise[0],
            "gradient": relative[worst],
            "gradient noise": noise[worst],
            "bound": bounds[worst],
            "excess": relative[worst] / bounds[worst],
            "whole": relative[WHOLE],
            # Of tensors that the format's own bound would not let pass by itself.
            "ratio": max(
                (relative[name] / noise[name] for name in noise if relative[name] > 0.1),
                default=0.0,
            ),
        }
        print(f"noise: {json.dumps(line)}", flush=True)
        judge(check, result, relative, noise)

    with (
        patch.object(GradientCheck, "_is_beyond_bounds", lambda *_: True),
        patch.object(GradientCheck, "_measure_noise", measured),
        patch.object(GradientCheck, "_judge_gradients", judged),
    ):
        train.main()


if __name__ == "__main__":
    main()
