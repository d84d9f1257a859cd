"""Run folders as a run leaves them, made by hand: for those who read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from grpo_spmd.observe.rollout_record import RolloutRecord, to_line
from grpo_spmd.observe.run_folder import node_stem, step_stem

GROUP = 4
LAUNCH = {
    "launch": 1,
    "start": "2026-01-01T00:00:00.000Z",
    "outcome": "done",
    "first_step": 1,
    "last_step": 80,
}


def healthy(num_steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of metrics of a run that learns: figures with the noise that they have, a curve
    each."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(1, num_steps + 1):
        rise, noise = step / num_steps, rng.normal(0, 1, 12)
        lines.append(
            {
                "step": step,
                "reward/mean": 0.3 + 0.4 * rise + 0.02 * noise[0],
                "reward/std": 0.45,
                "reward/zero_std_groups_frac": 0.2 + 0.2 * rise + 0.03 * noise[1],
                "reward/math/error_frac": 0.0,
                "reward/math/timeout_frac": 0.0,
                "completion/tokens_mean": 500 * (1 + 0.5 * rise) + 15 * noise[2],
                "completion/truncated_frac": 0.05 + abs(0.01 * noise[3]),
                "loss/entropy": 0.6 - 0.3 * rise + 0.01 * noise[4],
                "optim/grad_norm": abs(0.3 + 0.1 * noise[5]),
                "optim/updates": 1.0,
                "optim/skipped_updates": 0.0,
                "weight_sync/mismatch_abs_mean": 0.002 + abs(0.0003 * noise[6]),
                "weight_sync/mismatch_abs_max": 0.5 + abs(0.1 * noise[7]),
                "weight_sync/proof_s": 0.1 if step % 50 < 2 else 0.0,
                "memory/rollout/allocated_gib": 40 + 0.1 * noise[8],
                "memory/sleep/left_gib": 3 + 0.05 * noise[9],
                "rollout/tail_waste_frac": 0.1 + abs(0.05 * noise[10]),
                "time/step_s": 60.0,
                "time/unix_s": 1.7e9 + 60 * step,
            }
        )
    return lines


def make_run(
    folder: Path,
    metrics: Iterable[dict[str, Any]],
    launch: dict[str, Any] | None = LAUNCH,
    config: str = "",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    default = (
        "model:\n  path: m\n  dtype: bfloat16\ntraining:\n  num_steps: 80\nreward_pool:\n  "
        "max_error_frac: 0.3\n"
    )
    (folder / "config.yaml").write_text(config or f"run_dir: {folder}\n{default}")
    if launch is not None:
        (folder / "launches.jsonl").write_text(json.dumps(launch) + "\n")
    return folder


def record(step: int, position: int, sample: int, text: str, **values: Any) -> RolloutRecord:
    """A rollout of bytes, a token each; its reward is whatever `values` say."""
    ids = [*text.encode("utf-8", "surrogatepass")]
    expected_names = {
        "rollout_id": position * GROUP + sample,
        "row": position % 5,
        "position": (step - 1) * 100 + position,
        "sample": sample,
        "prompt": [{"role": "user", "content": f"question {position % 5}"}],
        "columns": {"answer": str(position % 5)},
        "completion": text,
        "reward": 0.0,
        "rewards": {"math": 0.0},
        "statuses": {"math": "ok"},
        "advantage": 0.0,
        "finish_reason": "stop",
        "prompt_ids": [1, 2, 3],
        "completion_ids": ids,
        "rollout_logprobs": [-0.125 * (location % 7) for location in range(len(ids))],
    }
    return RolloutRecord(**(expected_names | values))  # type: ignore[arg-type]


def dump(folder: Path, step: int, records: Iterable[RolloutRecord], node: int = 0) -> Path:
    (folder / "rollouts").mkdir(exist_ok=True)
    path = folder / "rollouts" / f"{node_stem(step_stem(step), node)}.jsonl"
    path.write_bytes(b"".join(to_line(single) + b"\n" for single in records))
    return path


def step_of(
    step: int, num_groups: int = 4, text: Callable[[int, int], str] | None = None
) -> list[RolloutRecord]:
    """Groups of GROUP rollouts whose rewards and texts differ."""
    rng = np.random.default_rng(step)
    result = []
    for position in range(num_groups):
        for sample in range(GROUP):
            reward = round(float(rng.random()), 3)
            message = (
                text(position, sample)
                if text is not None
                else f"answer {position}.{sample} of step {step}"
            )
            values = {
                "reward": reward,
                "rewards": {"math": reward},
                "advantage": round(reward - 0.5, 6),
            }
            result.append(record(step, position, sample, message, **values))
    return result


def byte_tokenizer(folder: Path) -> None:
    """tokenizer.json whose tokens are bytes, by their number."""
    from tokenizers import Tokenizer, decoders, models

    # GPT-2's alphabet: printable bytes are their own letters, the others follow U+0100 in order.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(0x100 + number): byte for number, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
