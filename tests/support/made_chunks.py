"""Chunks of a report's page for made-up runs: what `grpo_spmd.tools.report.build` is given, without
a run.

Numbers are of a seed; texts are pieces of words, so that pieces, ids and completions agree as a
run's do.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_spmd.tools.report.build import write_page

Chunks = Iterator[tuple[str, bytes]]
PHASES = ("weight_sync", "rollout", "reward", "logprobs", "update", "checkpoint")
_WORDS = [
    "the",
    "sum",
    "of",
    "is",
    "so",
    "we",
    "need",
    "to",
    "find",
    "each",
    "number",
    "and",
    "then",
    "check",
    "that",
    "it",
    "fits",
    "first",
    "second",
    "left",
    "over",
    "total",
    "apples",
]
# What a policy may write, or a data row hold, and no page may obey.
HOSTILE = {
    "script": "<script>window.owned = 1</script><img src=x onerror='window.owned = 2'>",
    "end of script": "</script><script>window.owned = 3</script><!-- <script>",
    "escapes": "\x1b[31mred\x1b[0m\x1b]0;title\x07 \x08\x7f \x9b31m",
    "right to left": "safe \u202e gnp.exe \u2066 isolated \u2069 \u200f end",
    "long": "x" * 100_000,
    "halves": "high \ud800 low \udc00 pair \U0001f600",
    "zero": "a\0b",
    "invisible": "a\u200bb\ufeffc\U000e0041d\u2028e",
    "marks": "Z" + "\u0300\u0301\u0302" * 300,
    "markup": "&lt;b&gt; &amp; <b>bold</b> javascript:alert(1) {{title}} ${1+1}",
}


def to_json(value: Any) -> bytes:
    """As the page's data is written: ASCII, without NaN."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode(
        "ascii"
    )


class MadeRun:
    """One made-up run of `num_steps` steps, `groups` prompts a step, `group_size` samples of
    each."""

    def __init__(
        self,
        seed: int = 0,
        *,
        name: str = "demo",
        num_steps: int = 40,
        groups: int = 8,
        group_size: int = 8,
        num_tokens: int = 60,
        keep: int = 24,
        state: str = "done",
        ranks: int = 4,
        texts: dict[str, str] | None = None,
        is_episode: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.name, self.state, self.num_steps, self.ranks, self.seed = (
            name,
            state,
            num_steps,
            ranks,
            seed,
        )
        self.groups, self.group_size, self.num_tokens, self.keep = (
            groups,
            group_size,
            num_tokens,
            keep,
        )
        self.texts, self.is_episode = texts or {}, is_episode
        self.made_steps = range(
            1, (num_steps if state == "done" else max(1, num_steps * 5 // 8)) + 1
        )

    # ---- main

    def main(self) -> dict[str, Any]:
        self.random = random.Random(self.seed)  # the same, however often it is asked for
        steps = list(self.made_steps)
        failed = self.state == "failed"
        reason = {
            "done": f"all {self.num_steps} steps",
            "failed": "rank 1 raised in update: RuntimeError: out of memory",
            "killed": "it left no word of its end; the last step that is whole is above",
        }.get(self.state, "")
        report = (
            "rank 1 of 4 failed in update:\n  RuntimeError: CUDA out of memory\nranks 0, 2, "
            "3 waited in update\n"
        )
        return {
            "name": self.name,
            "subject": "tiny on sums.jsonl",
            "folder": f"/data/runs/{self.name}",
            "state": self.state,
            "why": reason,
            "num_steps": self.num_steps,
            "last_step": steps[-1],
            "reports": {"failure.txt": report} if failed else {},
            "findings": self._findings(),
            "checks": self._checks(),
            "steps": steps,
            "metrics": self._metrics(steps),
            "evaluations": self._evaluations(steps),
            "timeline": self._timeline(steps),
            "prompts": self._prompts(steps),
            "prompts_total": 400,
            "prompt_kinds": {"never": 60, "always": 90, "better": 180, "worse": 20, "mixed": 50},
            "config": [
                ["run_dir", f"runs/{self.name}", "command line"],
                ["rollout.group_size", self.group_size, "demo.yaml"],
                ["optimizer.lr", 1e-3 if self.seed else 1e-6, "demo.yaml"],
                ["loss.kl_coef", 0.0, None],
            ],
            "launches": [
                {
                    "launch": 1,
                    "start": "2026-11-22T10:00:00.000Z",
                    "end": "2026-11-22T10:09:00.000Z",
                    "outcome": self.state,
                    "why": reason,
                    "world_size": self.ranks,
                    "hosts": {"node-1": self.ranks},
                    "devices": {"NVIDIA H100 80GB HBM3": self.ranks},
                    "command": ["train.py", "--config", "configs/demo.yaml"],
                    "git": {"grpo_spmd": {"commit": "3bebe38", "dirty": False}},
                }
            ],
            "versions": {"python": "3.11.2", "torch": "2.13.0", "vllm": "0.32.0"},
            "rollouts": {
                "steps": steps,
                "shown": self.keep * len(steps),
                "total": self.groups * self.group_size * len(steps),
                "note": "Of each step the best, the worst and the failed are here with their "
                "text, and others evenly.",
            },
        }

    def _findings(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = [
            {
                "level": "warning",
                "title": "more groups are all alike",
                "text": "0.62 of the groups had no spread of rewards in the last 10 steps; they "
                "teach nothing.",
                "step": self.made_steps[-1] // 2 + 1,
                "metric": "reward/zero_std_groups_frac",
            },
            {
                "level": "ok",
                "title": "lengths are steady",
                "text": "Completions have 58 tokens in the mean, 57 at the first step.",
                "step": None,
                "metric": "completion/tokens_mean",
            },
        ]
        if self.state == "failed":
            result.insert(
                0,
                {
                    "level": "bad",
                    "title": "memory grew",
                    "text": "The peak of update rose from 60.2 to 79.1 GiB.",
                    "step": self.made_steps[-1],
                    "metric": "memory/update/peak_gib",
                },
            )
        return result

    def _checks(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "engine holds the policy's weights",
                "level": "ok",
                "value": "25 of 25 tensors",
                "bound": "",
                "text": "by bytes, at steps 1 and 51",
            },
            {
                "name": "logprob check",
                "level": "ok",
                "value": "0.0121",
                "bound": "0.05",
                "text": "the largest mean |policy - engine| of a step, nats",
            },
            {
                "name": "errors of rewards",
                "level": "warning",
                "value": "0.22",
                "bound": "0.3",
                "text": "share of completions that no reward could be had for",
            },
        ]

    def _metrics(self, steps: list[int]) -> dict[str, list[float | None]]:
        jitter, final = self.random.gauss, max(steps)
        rise = [
            1 / (1 + math.exp(-8 * (step / max(8, final) - 0.4 + 0.05 * self.seed)))
            for step in steps
        ]
        metrics: dict[str, list[float | None]] = {
            "reward/mean": [0.25 + 0.65 * up + jitter(0, 0.02) for up in rise],
            "reward/std": [0.45 - 0.3 * up + jitter(0, 0.01) for up in rise],
            "reward/correct/mean": [0.2 + 0.7 * up + jitter(0, 0.02) for up in rise],
            "reward/format/mean": [min(1.0, 0.5 + 0.5 * up + jitter(0, 0.01)) for up in rise],
            "reward/constructor/mean": [0.1 for _ in rise],
            "reward/zero_std_groups_frac": [
                max(0.0, 0.1 + 0.5 * up + jitter(0, 0.02)) for up in rise
            ],
            "completion/tokens_mean": [57 + 4 * up + jitter(0, 1) for up in rise],
            "completion/tokens_p95": [80 + 9 * up + jitter(0, 2) for up in rise],
            "completion/truncated_frac": [max(0.0, 0.03 + jitter(0, 0.01)) for _ in rise],
            "loss/entropy": [1.4 - up + jitter(0, 0.02) for up in rise],
            "loss/kl": [0.02 * up for up in rise],
            "loss/clip_frac": [max(0.0, 0.01 + jitter(0, 0.004)) for _ in rise],
            "optim/grad_norm": [
                math.exp(jitter(-1, 0.3)) * (30 if step % 97 == 50 else 1) for step in steps
            ],
            "reward/unscored_frac": [0 for _ in rise],
            "reward/nothing/mean": [0 for _ in rise],
            "optim/lr": [1e-6 * min(1, step / 10) for step in steps],
            "weight_sync/mismatch_kl": [abs(jitter(2e-4, 3e-5)) for _ in rise],
            "weight_sync/mismatch_abs_mean": [abs(jitter(8e-3, 1e-3)) for _ in rise],
            "weight_sync/mismatch_abs_max": [abs(jitter(0.21, 0.05)) for _ in rise],
            "rollout/tokens_per_s": [abs(jitter(52_000, 2_000)) for _ in rise],
            "rollout/tail_waste_frac": [abs(jitter(0.12, 0.03)) for _ in rise],
            "time/step_s": [abs(jitter(61, 2)) for _ in rise],
            "time/wall_s": [61.0 * step + 40 for step in steps],
            "custom/thing": [jitter(0, 1) for _ in rise],
        }
        for phase, fraction in zip(PHASES, (1.2, 34.0, 2.5, 6.0, 16.0, 0.4), strict=True):
            metrics[f"time/{phase}_s"] = [abs(jitter(fraction, fraction / 20)) for _ in rise]
            metrics[f"memory/{phase}/peak_gib"] = [30 + fraction + 0.01 * step for step in steps]
        metrics["loss/kl"][len(steps) // 2] = None
        return {
            name: [None if v is None else float(f"{v:.6g}") for v in values]
            for name, values in metrics.items()
        }

    def _evaluations(self, steps: list[int]) -> dict[str, Any]:
        at = [0, *steps[9::10]]
        return {
            "steps": at,
            "metrics": {
                "eval/heldout/mean": [0.3 + 0.5 * i / max(1, len(at) - 1) for i in range(len(at))],
                "eval/heldout/pass_at_4": [
                    0.55 + 0.3 * i / max(1, len(at) - 1) for i in range(len(at))
                ],
            },
        }

    def _timeline(self, steps: list[int]) -> dict[str, Any]:
        retained = steps[:: max(1, len(steps) // 200)]
        return {"steps": retained, "spans": [self._spans(step) for step in retained]}

    def _spans(self, step: int) -> dict[str, Any]:
        ranks = []
        for _ in range(self.ranks):
            at, spans = 0.0, []
            busy = 34.0 - abs(self.random.gauss(0, 5))
            for phase, length in zip(PHASES, (1.2, 34.5, 2.5, 6.0, 16.0, 0.4), strict=True):
                generated = round(busy, 3) if phase == "rollout" else None
                spans.append(
                    [phase, round(at, 3), round(at + length, 3), round(30 + length, 2), generated]
                )
                at += length + abs(self.random.gauss(0, 0.2))
            ranks.append(spans)
        return {
            "step": step,
            "unix_s": 1.79e9 + 61 * step,
            "world_size": self.ranks,
            "ranks": list(range(self.ranks)),
            "spans": ranks,
        }

    def _prompts(self, steps: list[int]) -> list[dict[str, Any]]:
        created = []
        for row, kind in enumerate(
            ["never"] * 4 + ["worse"] * 3 + ["better"] * 6 + ["mixed"] * 2 + ["always"] * 3
        ):
            seen = steps[row % 3 :: 5] or steps[:1]
            means = [
                {
                    "never": 0.0,
                    "always": 1.0,
                    "better": i / len(seen),
                    "worse": 1 - i / len(seen),
                    "mixed": 0.5,
                }[kind]
                for i in range(len(seen))
            ]
            created.append(
                {
                    "row": row,
                    "prompt": self._prompt(row),
                    "columns": {"answer": str(7 * row)},
                    "steps": seen,
                    "means": means,
                    "kind": kind,
                }
            )
        return created

    def _prompt(self, row: int) -> str:
        return self.texts.get(
            "prompt",
            f"Row {row}: Ann has {row + 3} apples and gives away {row + 1}. How many apples are "
            "left?",
        )

    # ---- a step's chunk

    def step(self, step: int) -> dict[str, Any]:
        draw = random.Random(self.seed * 1_000_003 + step)
        rows = [(step * self.groups + group) % 18 for group in range(self.groups)]
        names = (
            "position",
            "sample",
            "row",
            "reward",
            "advantage",
            "tokens",
            "finish",
            "status",
            "mismatch",
            "shown",
            "prompt",
        )
        table: dict[str, list[Any]] = {name: [] for name in names}
        rollouts: list[dict[str, Any]] = []
        total = self.groups * self.group_size
        wanted = {i * total // self.keep for i in range(self.keep)} | set(range(self.group_size))
        hostile = list(self.texts.items())
        for i in range(total):
            group, sample = divmod(i, self.group_size)
            text = hostile[i % len(hostile)][1] if hostile else None
            rollout = self._rollout(draw, step * self.groups + group, sample, rows[group], text)
            is_failed = draw.random() < 0.02
            is_shown = i in wanted or is_failed
            for name, value in (
                *(("position", rollout["position"]), ("sample", sample), ("row", rows[group])),
                ("reward", None if is_failed else rollout["reward"]),
                *(("advantage", rollout["advantage"]), ("tokens", len(rollout["tokens"]["ids"]))),
                *(
                    ("finish", int(rollout["finish_reason"] == "length")),
                    ("status", int(is_failed)),
                ),
                ("mismatch", max(map(abs, rollout["tokens"]["difference"]), default=None)),
                *(("shown", len(rollouts) if is_shown else -1), ("prompt", group)),
            ):
                table[name].append(value)
            if is_shown:
                rollouts.append(
                    {
                        **rollout,
                        "why": "failed"
                        if is_failed
                        else "group"
                        if i < self.group_size
                        else "sampled",
                        "reward": table["reward"][-1],
                    }
                )
        return {
            "step": step,
            "table": table,
            "status_names": ["ok", "error"],
            "prompts": [self._prompt(row) for row in rows],
            "rollouts": rollouts,
        }

    def _rollout(
        self, draw: random.Random, position: int, sample: int, row: int, text: str | None
    ) -> dict[str, Any]:
        if text is None:
            same = random.Random(position)
            count = draw.randint(self.num_tokens // 2, self.num_tokens)
            shared = draw.randint(2, 6)  # the samples of a group begin alike
            pieces = [(same if i < shared else draw).choice(_WORDS) + " " for i in range(count)]
        else:
            pieces = [text[i : i + 7] for i in range(0, min(len(text), 21), 7)] + (
                [text[21:]] if text[21:] else []
            )
        logprob = [round(-draw.expovariate(1.5), 3) for _ in pieces]
        reward = draw.choice([0.0, 0.25, 0.5, 1.0])
        single: dict[str, Any] = {
            "position": position,
            "sample": sample,
            "completion": "".join(pieces),
            "cut": 0,
            "reward": reward,
            "rewards": {"correct": reward, "format": 0.5, "constructor": None},
            "statuses": {"correct": "ok", "format": "ok", "constructor": "not_applicable"},
            "advantage": round(draw.gauss(0, 1), 4),
            "finish_reason": draw.choice(["stop"] * 9 + ["length"]),
            "columns": {"answer": str(row * 7), "source": self.texts.get("column", "made up")},
            "extra": {"correct": {"parsed": "12"}},
            "tokens": {
                "pieces": pieces,
                "ids": [hash_of(piece) for piece in pieces],
                "logprob": logprob,
                "difference": [float(f"{draw.gauss(0, 0.01):.3g}") for _ in pieces],
                "entropy": [round(abs(draw.gauss(0.8, 0.5)), 3) for _ in pieces],
                "advantage": None,
                "mask": None,
            },
        }
        if self.is_episode:
            single |= _as_episode(single["tokens"]["pieces"])
            single["tokens"]["mask"] = [int(i % 9 != 4) for i in range(len(pieces))]
        return single


def _as_episode(pieces: list[str]) -> dict[str, Any]:
    half = len(pieces) // 2
    call = {"name": "search", "arguments": {"query": "apples"}}
    return {
        "status": "ok",
        "messages": [
            {"role": "assistant", "content": "".join(pieces[:half]), "tool_calls": [call]},
            {"role": "tool", "content": "3 apples"},
            {"role": "assistant", "content": "".join(pieces[half:])},
        ],
        "turns": [
            {
                "sampled": True,
                "pieces": pieces[:half],
                "segment": 0,
                "reward": 0.25,
                "num_tokens": half,
            },
            {
                "sampled": False,
                "pieces": ["<tool>", "3 apples", "</tool>"],
                "segment": 0,
                "reward": None,
                "num_tokens": 3,
            },
            {
                "sampled": True,
                "pieces": pieces[half:],
                "segment": 1,
                "reward": None,
                "num_tokens": len(pieces) - half,
            },
        ],
        "environment": {"rewards": {"solved": 1.0}, "calls_s": [0.12], "error": None},
    }


def hash_of(piece: str) -> int:
    """A token's id: alike for alike pieces, in every process."""
    return sum((i + 1) * ord(character) for i, character in enumerate(piece[:40])) % 50_000


def chunks_of(*runs: MadeRun) -> Chunks:
    mains = [run.main() for run in runs]
    configs = [{key: value for key, value, _ in main["config"]} for main in mains]
    keys = sorted({key for config in configs for key in config})
    differences = [[key, *(config.get(key) for config in configs)] for key in keys]
    differences = [row for row in differences if len({json.dumps(value) for value in row[1:]}) > 1]
    yield (
        "main",
        to_json(
            {
                "format": 1,
                "made_unix_s": 1.79e9,
                "version": "0.1",
                "runs": mains,
                "differences": differences,
            }
        ),
    )
    for number, run in enumerate(runs):
        for step in run.made_steps:
            yield f"{number}/{step}", to_json(run.step(step))


def made_page(out: Path, *runs: MadeRun) -> Path:
    write_page(out, ", ".join(run.name for run in runs), chunks_of(*runs))
    return out


def hostile_run() -> MadeRun:
    """Every text that others write is one of HOSTILE, or all of them."""
    everything = "\n".join(HOSTILE.values())
    run = MadeRun(
        name=HOSTILE["script"],
        num_steps=3,
        groups=4,
        state="failed",
        texts={**HOSTILE, "prompt": everything, "column": everything},
    )
    original = run.main

    def main() -> dict[str, Any]:
        created = original()
        for name in ("script", "right to left", "long", "halves", "zero"):
            created["metrics"][f"reward/{HOSTILE[name][:300]}/mean"] = [
                0.5 for _ in created["steps"]
            ]
        created["metrics"]["__proto__"] = [1.0 for _ in created["steps"]]
        created["why"] = created["folder"] = everything
        created["reports"] = {"failure.txt": everything, "hang.txt": HOSTILE["escapes"]}
        created["findings"] = [
            {"level": "bad", "title": text, "text": text, "step": 1, "metric": text[:200]}
            for text in HOSTILE.values()
        ]
        created["checks"] = [
            {"name": text, "level": "ok", "value": text, "bound": text, "text": text}
            for text in HOSTILE.values()
        ]
        created["config"] = [[name, text, text] for name, text in HOSTILE.items()]
        created["launches"] = [
            {
                "launch": 1,
                "command": list(HOSTILE.values()),
                "why": everything,
                "hosts": {everything: 1},
            }
        ]
        created["versions"] = {text[:100]: text for text in HOSTILE.values()}
        created["rollouts"]["note"] = everything
        return created

    run.main = main  # type: ignore[method-assign]
    return run
