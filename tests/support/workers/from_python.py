"""What a notebook is to grpo_spmd.run: one process whose main thread has a running event loop,
whose output goes to an object without a descriptor, and which goes on whatever becomes of a run.

    python -m tests.support.workers.from_python FOLDER SNIPPET_FILE

FOLDER holds config.yaml and becomes the working folder. The last line printed is a JSON object of
what was found."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpo_spmd

Found = dict[str, Any]


class Output(io.TextIOBase):
    """As ipykernel's."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def surroundings() -> Found:
    """What a run must leave as it was."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGURG)
    log = logging.getLogger("grpo_spmd")
    return {
        "signals": [
            getattr(signal.getsignal(number), "func", signal.getsignal(number))
            for number in signals
        ],
        "environment": {
            name: value for name, value in os.environ.items() if name in ("RANK", "MASTER_PORT")
        },
        "log": [str(log.handlers), log.level, log.propagate],
        "streams": [type(sys.stdout).__name__, type(sys.stderr).__name__],
        "threads": [
            thread.name for thread in threading.enumerate() if thread.name in ("doctor", "terminal")
        ],
    }


def children() -> int:
    """Processes of this one that run: the nurseries of reward pools."""
    tasks = Path("/proc/self/task").iterdir()
    pids = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return sum("grpo_spmd" in Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)


def resident_mib() -> float:
    gc.collect()
    return (
        int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / (1 << 20)
    )


def raised(kind: type[BaseException], *args: Any, **kwargs: Any) -> str:
    try:
        grpo_spmd.run(*args, **kwargs)
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def interrupt_at(metrics: Path, *, times: int) -> None:
    """Ctrl-C, once the run has made a step."""

    def press() -> None:
        while not (metrics.exists() and metrics.read_text()):
            time.sleep(0.02)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    threading.Thread(target=press, daemon=True).start()


async def main(snippet: str) -> Found:
    result: Found = {"before": surroundings()}

    def of_completion(completions: list[str], **_: Any) -> list[float]:
        return [len(text) / 10 for text in completions]

    def unusable(completions: list[str], missing_column: str, **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    result["refused"] = [
        raised(grpo_spmd.ConfigError, "config.yaml", [unusable], run_dir="refused"),
        raised(
            grpo_spmd.ConfigError,
            "config.yaml",
            [of_completion],
            run_dir="refused",
            optimizer={"learning_rate": 1},
        ),
        raised(grpo_spmd.ConfigError, "config.yaml", [len.__self__], run_dir="refused"),  # type: ignore[attr-defined]
    ]
    result["torch_after_refusals"] = "torch" in sys.modules

    cell: Found = {"__name__": "__main__"}
    exec(compile(snippet, "<cell>", "exec"), cell)
    result["snippet"] = result_of(cell["result"])
    result["rss_mib"] = [resident_mib()]

    fraction = 0.5
    second = grpo_spmd.run(
        "config.yaml",
        [(lambda completions, target, **_: [fraction * len(text) for text in completions], 0.5), of_completion],  # noqa: E501
        run_dir="other", rollout={"group_size": 3}, model={"lora": {"rank": 2}}, seed=4,
    )  # fmt: skip
    result["other"] = result_of(second)
    result["rss_mib"].append(resident_mib())

    def fails(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        assert trainer_state.global_step < 1, "no second step"
        return [float(len(text)) for text in completions]

    result["failed"] = raised(RuntimeError, "config.yaml", [fails], run_dir="failed")
    result["after_failure"] = surroundings()
    result["rss_mib"].append(resident_mib())

    long: Found = {"run_dir": "interrupted", "checkpoint": {"resume": "auto", "every_steps": 0}}
    interrupt_at(Path("interrupted/metrics.jsonl"), times=1)
    result["interrupted"] = result_of(
        grpo_spmd.run("config.yaml", [of_completion], **long, training={"num_steps": 500})
    )
    done = result["interrupted"]["num_steps"]
    again = grpo_spmd.run("config.yaml", [of_completion], **long, training={"num_steps": done + 1})
    result["gone_on"] = result_of(again)

    interrupt_at(Path("twice/metrics.jsonl"), times=2)
    training = {"num_steps": 500}
    result["twice"] = raised(
        KeyboardInterrupt, "config.yaml", [of_completion], run_dir="twice", training=training
    )
    result["rss_mib"].append(resident_mib())
    result["after"], result["children"] = surroundings(), children()
    return result


def result_of(result: grpo_spmd.RunResult) -> Found:
    return {
        "run_dir": str(result.run_dir),
        "num_steps": result.num_steps,
        "is_preempted": result.is_preempted,
        "steps": [line["step"] for line in result.metrics],
    }


if __name__ == "__main__":
    program = Path(sys.argv[2]).read_text(encoding="utf-8")
    os.chdir(sys.argv[1])
    terminal, sys.stdout = sys.stdout, Output()
    outcome = asyncio.run(main(program))
    print(json.dumps({**outcome, "shown": sys.stdout.text}, default=str), file=terminal)
