"""Makes a run folder as a run of many steps leaves it, and tells what a page of it costs.

python -m benchmarks.speed.report_worker FOLDER STEPS ROLLOUTS      an empty folder; rollouts a
step, of 740 tokens

The dumps are of 50 different steps; of a longer run they are the same files again, under further
names. Texts are words of this repository's papers in a random order, which compress worse than what
a model writes; the tokenizer is made from them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.ranks import tell
from grpo_spmd.observe.rollout_record import RolloutRecord, to_line
from grpo_spmd.observe.run_folder import dump_path

_DIFFERENT, _GROUP, _POOL, _TOKENS = 50, 8, 1_000, 740
_PHASES = ("weight_sync", "eval", "rollout", "reward", "logprobs", "update", "checkpoint")


def main() -> None:
    folder, num_steps, num_rollouts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    make_run(folder, num_steps, num_rollouts)
    out = folder / "report.html"
    old, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    line = [sys.executable, "-m", "grpo_spmd.report", str(folder), "--out", str(out)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    peak_kib = _peak_kib(process)
    seconds, new = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, line)
    page = out.read_bytes()
    figures = {
        "seconds": seconds,
        "cpu_s": new.ru_utime + new.ru_stime - old.ru_utime - old.ru_stime,
        "peak_mib": peak_kib / 1024,
        "mb": len(page) / 1e6,
        "steps_there": len(re.findall(rb'data-chunk="0/', page)),
    }
    tell(figures)


def _peak_kib(process: subprocess.Popen[bytes]) -> int:
    """Resident memory of the process and its children at its most, until it ends. What the kernel
    counts as a child's
    peak has this process's own in it, from before the child was another program."""
    peak = 0
    while process.poll() is None:
        used = 0
        with suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            for pid in (process.pid, *children):
                with suppress(OSError, IndexError):
                    used += int(
                        Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]
                    )
        peak = max(peak, used)
        time.sleep(0.02)
    return peak


def make_run(folder: Path, num_steps: int, num_rollouts: int) -> None:
    """As `logging.rollouts_every_steps: 1` leaves it, with token scores and timeline."""
    rng = np.random.default_rng(0)
    for name in ("rollouts", "token_scores", "logs", "checkpoints"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(
        f"run_dir: {folder}\nmodel: {{path: m, dtype: bfloat16}}\nrollout: {{group_size: "
        f"{_GROUP}}}\n"
        f"training: {{num_steps: {num_steps}}}\n"
    )
    launch = {
        "launch": 1,
        "outcome": "done",
        "first_step": 1,
        "last_step": num_steps,
        "command": ["train.py"],
    }
    (folder / "launches.jsonl").write_text(json.dumps(launch) + "\n")
    pool = _completions(folder / "tokenizer.json", rng)
    for step in range(1, min(num_steps, _DIFFERENT) + 1):
        _dump_step(folder, step, num_rollouts, pool, rng)
    for step in range(_DIFFERENT + 1, num_steps + 1):
        for of in (dump_path, _scores_file):
            os.link(of(folder, (step - 1) % _DIFFERENT + 1), of(folder, step))
    with (
        (folder / "metrics.jsonl").open("w") as metrics,
        (folder / "timeline.jsonl").open("w") as timeline,
    ):
        for step in range(1, num_steps + 1):
            metrics.write(json.dumps(_metrics(step, num_steps, rng)) + "\n")
            spans = [
                [[name, i * 9.5, i * 9.5 + 9, 40.0, None] for i, name in enumerate(_PHASES)]
                for _ in range(8)
            ]
            line = {
                "step": step,
                "unix_s": 1e9,
                "world_size": 8,
                "ranks": [*range(8)],
                "spans": spans,
            }
            timeline.write(json.dumps(line) + "\n")


def _completions(tokenizer_path: Path, rng: np.random.Generator) -> list[tuple[str, list[int]]]:
    from tokenizers import ByteLevelBPETokenizer

    papers = [
        str(path) for path in Path(__file__).parents[2].glob("**/*.md") if ".venv" not in path.parts
    ]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(papers, vocab_size=8_000, show_progress=False)
    tokenizer.save(str(tokenizer_path))
    words = " ".join(Path(paper).read_text() for paper in papers).split(" ")
    result = []
    for length in rng.gamma(4.0, _TOKENS / 4.0, _POOL).astype(int):
        chosen = rng.integers(0, len(words), max(int(length), 1))
        encoded = tokenizer.encode(" ".join(words[i] for i in chosen))
        ids = encoded.ids[: max(int(length), 1)]
        result.append((tokenizer.decode(ids), ids))
    return result


def _dump_step(
    folder: Path,
    step: int,
    num_rollouts: int,
    pool: list[tuple[str, list[int]]],
    rng: np.random.Generator,
) -> None:
    lines, scores = [], []
    rewards = (rng.random((num_rollouts // _GROUP, _GROUP)) < 0.1 + 0.8 * step / _DIFFERENT).astype(
        float
    )
    spread = rewards.std(1, keepdims=True, ddof=1)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-6)
    for number in range(num_rollouts):
        position, sample = divmod(number, _GROUP)
        row = int((step * 31 + position * 7) % 500)
        text, ids = pool[int(rng.integers(len(pool)))]
        logprobs = -rng.exponential(0.4, len(ids)).astype(np.float32)
        reward = float(rewards[position, sample])
        record = RolloutRecord(
            rollout_id=number,
            row=row,
            position=(step - 1) * (num_rollouts // _GROUP) + position,
            sample=sample,
            prompt=[
                {"role": "user", "content": f"Question {row}: {pool[row % len(pool)][0][:300]}"}
            ],
            columns={"answer": str(row), "level": "middle"},
            completion=text,
            reward=reward,
            rewards={"math": reward, "format": 1.0},
            statuses={"math": "ok", "format": "ok" if rng.random() > 0.001 else "error"},
            advantage=float(advantages[position, sample]),
            finish_reason="length" if rng.random() < 0.05 else "stop",
            prompt_ids=rng.integers(0, 8_000, 128).tolist(),
            completion_ids=ids,
            rollout_logprobs=logprobs.tolist(),
            num_rollouts=num_rollouts,
        )
        lines.append(to_line(record) + b"\n")
        difference = (rng.normal(0, 0.01, len(ids)) * (rng.random(len(ids)) < 0.6)).astype(
            np.float16
        )
        entropy = rng.exponential(0.3, len(ids)).astype(np.float16)
        score: dict[str, Any] = {"rollout_id": number}
        score |= {"difference": _base64(difference), "entropy": _base64(entropy)}
        score |= {
            "difference_mean": float(abs(difference).mean()),
            "difference_max": float(abs(difference).max()),
        }
        scores.append(json.dumps(score).encode() + b"\n")
    dump_path(folder, step).write_bytes(b"".join(lines))
    _scores_file(folder, step).write_bytes(b"".join(scores))


def _scores_file(folder: Path, step: int) -> Path:
    return folder / "token_scores" / f"step_{step:06d}.jsonl"


def _base64(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _metrics(step: int, num_steps: int, rng: np.random.Generator) -> dict[str, float]:
    noise = rng.normal(0, 0.02, 8)
    rise = step / num_steps
    metrics = {
        "step": step,
        "reward/mean": 0.1 + 0.7 * rise + noise[0],
        "reward/std": 0.45,
        "loss/entropy": 0.5 - 0.2 * rise,
    }
    metrics |= {
        "completion/tokens_mean": 740 + 100 * rise,
        "completion/truncated_frac": 0.05 + abs(noise[1]) / 10,
    }
    metrics |= {
        "weight_sync/mismatch_abs_mean": 0.01,
        "weight_sync/mismatch_abs_max": 0.5,
        "optim/grad_norm": 0.3,
    }
    metrics |= {
        "optim/updates": 1.0,
        "optim/skipped_updates": 0.0,
        "time/step_s": 70.0,
        "reward/zero_std_groups_frac": 0.2,
    }
    metrics |= {f"time/{phase}_s": 9.0 + noise[2] for phase in _PHASES}
    metrics |= {
        f"memory/{phase}/{use}_gib": 40 + noise[3]
        for phase in _PHASES
        for use in ("peak", "allocated", "reserved", "driver_used", "other")
    }
    metrics |= {f"filler/{i}": float(value) for i, value in enumerate(rng.random(40))}
    return metrics | {"time/unix_s": 1e9 + step * 70.0}


if __name__ == "__main__":
    main()
