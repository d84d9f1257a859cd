"""Run folders of a few lines, as a run leaves them, written without the package."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAUNCH = {
    "launch": 1,
    "start": "2026-01-02T03:04:05.000Z",
    "end": "2026-01-02T03:14:05.000Z",
    "outcome": "done",
}
LAUNCH |= {
    "why": None,
    "first_step": 1,
    "last_step": None,
    "world_size": 2,
    "devices": {"cpu": 2},
    "host": "h",
}


def metrics_of(step: int, **rest: Any) -> dict[str, Any]:
    """A step's line: the reward rises by a hundredth a step."""
    line = {
        "step": step,
        "reward/mean": step / 100,
        "reward/std": 0.5,
        "reward/right/mean": step / 100,
    }
    line |= {
        "reward/zero_std_groups_frac": 0.25,
        "completion/tokens_mean": 40.0 + step,
        "completion/tokens_max": 64,
    }
    line |= {
        "completion/truncated_frac": 0.125,
        "loss/entropy": 2.0 / step,
        "loss/kl": 0.0,
        "loss/total": 0.01,
    }
    line |= {
        "optim/grad_norm": 0.5,
        "optim/updates": 1,
        "optim/skipped_updates": 0,
        "time/unix_s": 1.7e9 + step,
    }
    line |= {
        "weight_sync/mismatch_kl": 1e-9,
        "weight_sync/mismatch_abs_mean": 1e-6,
        "rollout/tokens_per_s": 1234.5,
    }
    line |= {
        "time/step_s": 4.0,
        "time/rollout_s": 2.0,
        "time/update_s": 1.0,
        "memory/update/peak_gib": 3.5,
    }
    return line | rest


def rollout_of(
    position: int, sample: int, reward: float | None, completion: str = "yes", **rest: Any
) -> Any:
    """A line of a dump, of three tokens."""
    line: dict[str, Any] = {
        "rollout_id": 2 * position + sample,
        "row": 10 + position,
        "position": position,
        "sample": sample,
    }
    line |= {
        "prompt": f"question {position}",
        "columns": {"answer": "yes"},
        "completion": completion,
    }
    line |= {
        "reward": reward,
        "rewards": {"right": reward},
        "statuses": {"right": "ok" if reward is not None else "error"},
    }
    line |= {
        "advantage": None if reward is None else reward - 0.5 if abs(reward) < 10 else reward,
        "finish_reason": "stop",
        "prompt_ids": [1, 2],
    }
    line |= {
        "completion_ids": [3, 4, 0],
        "rollout_logprobs": base64.b64encode(struct.pack("<3f", -1, -2, 0)).decode(),
    }
    return line | rest


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def write_run(
    folder: Path,
    metrics: Sequence[Any] = (),
    rollouts: dict[int, Sequence[Any]] | None = None,
    launch: dict[str, Any] | None = None,
    config: str = "model:\n  path: tiny\n  dtype: float32\ntraining:\n  num_steps: 20\n",
) -> Path:
    """A run of these lines, that has ended unless `launch` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    write_lines(folder / "launches.jsonl", [LAUNCH | (launch or {})])
    write_lines(folder / "metrics.jsonl", metrics)
    for step, lines in (rollouts or {}).items():
        write_lines(folder / "rollouts" / f"step_{step:06d}.jsonl", lines)
    return folder


def _f16(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}e", *values)).decode()


def write_scored_run(folder: Path) -> Path:
    """Of float32, with two rollouts at step 8, "ab" and an end: the first is apart on "b" by 0.5
    nats, and on its end
    by 0.001; the second nowhere."""
    run = write_run(
        folder, [metrics_of(8)], {8: [rollout_of(0, 0, 0.0, "ab"), rollout_of(0, 1, 1.0, "ab")]}
    )
    scores: list[dict[str, Any]] = [{"rollout_id": n, "entropy": _f16(1, 1, 1)} for n in (0, 1)]
    scores[0] |= {
        "difference": _f16(0, -0.5, 0.001),
        "difference_mean": 0.167,
        "difference_max": 0.5,
    }
    scores[1] |= {"difference": _f16(0, 0, 0), "difference_mean": 0.0, "difference_max": 0.0}
    write_lines(run / "token_scores" / "step_000008.jsonl", scores)
    tokens = {"a": 3, "b": 4, "<end>": 0}
    (run / "tokenizer.json").write_text(
        json.dumps(
            {
                "model": {"vocab": tokens},
                "decoder": {"type": "ByteLevel"},
                "added_tokens": [{"id": 0, "content": "<end>", "special": True}],
            }
        )
    )
    return run
