"""One rank of benchmarks.speed.prompts: the start of a run as far as its prompts go. Arguments: the
folder with
config.yaml, and how to start."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.support.ranks import tell
from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.config.load import load_config
from grpo_spmd.data import cache
from grpo_spmd.data.prompts import PromptStream
from grpo_spmd.data.tokens import build_prompts, digests_of
from grpo_spmd.model.config_json import load_tokenizer

_ENCODED = 10_000  # texts that encode_s is measured with


class _Peak:
    """The most anonymous memory, looked at 50 times a second."""

    def __init__(self) -> None:
        self.base_kib = self.most_kib = _anonymous_kib()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.most_kib = max(self.most_kib, _anonymous_kib())
            time.sleep(0.02)


def _anonymous_kib() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def main() -> None:
    folder, start = Path(sys.argv[1]), sys.argv[2]
    config = load_config(folder / "config.yaml", [])
    tokenizer = load_tokenizer(config.model.path)
    tokenizer("warm")
    if start == "in memory":
        cache.SMALL = 1 << 60
    peak, began, times = _Peak(), time.perf_counter(), [time.process_time()]
    inputs = check_inputs(config, num_ranks=int(os.environ["WORLD_SIZE"]))
    times.append(time.process_time())
    prompts = build_prompts(
        inputs.rows, tokenizer, config.data, config.rollout.num_prompts_per_step
    )
    digests_of(prompts, with_tokens=False)
    times.append(time.process_time())
    PromptStream(prompts, config.seed, config.data.shuffle).take(
        config.rollout.num_prompts_per_step
    )
    times.append(time.process_time())
    figures = {
        "rank_cpu_s": times[-1] - times[0],
        "wall_s": time.perf_counter() - began,
        "check_s": times[1] - times[0],
        "tokens_s": times[2] - times[1],
        "anon_mib": (peak.most_kib - peak.base_kib) / 1024,
        "after_mib": (_anonymous_kib() - peak.base_kib) / 1024,
        "encode_s": 0.0,
    }
    some = prompts[:_ENCODED]
    figures["tokens"] = sum(len(prompt.token_ids) for prompt in some) / len(some)
    if os.environ["LOCAL_RANK"] == "0":
        texts = [_text(prompt.text, tokenizer) for prompt in some]
        old = time.process_time()
        for initial in range(0, len(texts), 1024):
            tokenizer.backend_tokenizer.encode_batch_fast(texts[initial : initial + 1024])
        figures["encode_s"] = (time.process_time() - old) / len(texts) * len(prompts)
    tell(figures)


def _text(prompt: Any, tokenizer: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


if __name__ == "__main__":
    main()
