"""TRL's side of `step_vs_trl`: its GRPOTrainer with colocated vLLM, timed. Runs in .venv-trl and
imports nothing of grpo_spmd.

    .venv-trl/bin/python -m benchmarks.speed.step_vs_trl_worker FOLDER NAME

FOLDER/NAME.json holds the settings: `task`, `micro_batch`, `arguments` (of GRPOConfig, over those
below), `replay` (rollouts to train on, by step; empty: its own), `engine_dtype` (null: vLLM's
choice) and `environment` (a class of episodes_environment.py, with which generation is timed with
all its turns and tools; null: none). Standard input gives the turns: each line is a number of steps
to make. Each step writes a line of JSON to FOLDER/NAME.jsonl; it starts when the turn does, or when
the step before it has ended.

Everything is TRL's own but for:
- the weight sync. TRL calls the engine model's `load_weights` tensor by tensor, which fails on
  vLLM's CPU back end ('Parameter' object has no attribute 'weight_loader'); here the same tensors
  go through one call of the worker's `reload_weights`. A tied lm_head would need another repair;
  the model has none.
- arguments of the engine that TRL does not pass on: enforce_eager, and the size and blocks of the
  KV cache, as on our
side; and, where `engine_dtype` is given, its number format. By itself vLLM takes a float32 model in
bfloat16, which is another policy than the one that is trained.
- timers around the phases.
On a GPU (benchmarks/gpu_day/trl.py) only the timers are ours.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]
from trl.generation import vllm_generation  # type: ignore[import-not-found]

from benchmarks.speed import episodes_environment
from benchmarks.speed.step_vs_trl_reward import even_tokens

_ENGINE = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 28}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    transformers.utils.logging.disable_progress_bar()
    settings = json.loads((folder / f"{name}.json").read_text())
    task, replay, environment = settings["task"], settings["replay"], settings["environment"]
    pieces = task["num_prompts"] * task["group_size"] // settings["micro_batch"]
    arguments = GRPOConfig(
        **{
            "output_dir": str(folder / f"{name}_output"),
            "use_cpu": True,
            "bf16": False,
            "model_init_kwargs": {"dtype": "float32"},
            "gradient_checkpointing": False,
            "report_to": [],
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "max_steps": task["num_steps"],
            "per_device_train_batch_size": settings["micro_batch"],
            "gradient_accumulation_steps": pieces,
            "num_generations": task["group_size"],
            "max_completion_length": task["max_completion_tokens"],
            "temperature": 1.0,
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": task["max_prompt_tokens"] + task["max_completion_tokens"],
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 2.0,
            "loss_type": "dapo",
            "epsilon_high": 0.28,
            "delta": 3.0,
            "learning_rate": task["lr"],
            "lr_scheduler_type": "constant",
            "weight_decay": 0.01,
            "adam_beta2": 0.95,
            "max_grad_norm": 1.0,
            **settings["arguments"],
        }
    )
    if torch.cuda.is_available():
        vllm_generation.LLM = partial(vllm_generation.LLM, trust_remote_code=False)
    else:
        dtype = {"dtype": settings["engine_dtype"]} if settings["engine_dtype"] else {}
        vllm_generation.LLM = partial(
            vllm_generation.LLM, trust_remote_code=False, **_ENGINE, **dtype
        )
        vllm_generation.VLLMGeneration.sync_weights = _sync_weights
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]

    def replayed(_: Any, trainer: GRPOTrainer) -> dict[str, Any]:
        rollouts = replay[trainer.state.global_step]
        return {key: [r[ours] for r in rollouts] for key, ours in _REPLAYED.items()}

    trainer = GRPOTrainer(
        model=str(folder / "model"),
        args=arguments,
        reward_funcs=even_tokens,
        train_dataset=Dataset.from_list(rows),
        rollout_func=replayed if replay else None,
        environment_factory=getattr(episodes_environment, environment) if environment else None,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    steps = _Steps(trainer, folder / f"{name}.jsonl")
    trainer.add_callback(steps)
    trainer.train()


# The keys of a rollout_func's output, and ours in a rollout dump.
_REPLAYED = {
    "prompt_ids": "prompt_ids",
    "completion_ids": "completion_ids",
    "logprobs": "rollout_logprobs",
}


def _sync_weights(self: Any) -> None:
    self.llm.collective_rpc(
        "reload_weights", kwargs={"weights_iterator": self._iter_named_params()}
    )
    assert self.llm.reset_prefix_cache()


class _Steps(transformers.TrainerCallback):  # type: ignore[misc]
    """Makes the steps of a turn, then waits for the next; times the phases and writes each step
    down."""

    def __init__(self, trainer: GRPOTrainer, path: Path) -> None:
        self._trainer, self._file, self._left = trainer, path.open("w"), 0
        self._seconds: dict[str, float] = defaultdict(float)
        self._loss = 0.0
        self._prepared = 0.0  # when the rollouts were there, the rest of the step is the update
        engine = trainer.vllm_generation
        if trainer.environment_factories is None:
            engine.generate = self._timed("generation", engine.generate)
        else:  # all turns, and the tools between them; the sync is in it, and taken off below
            trainer._generate = self._timed("generation", trainer._generate)
        engine.sync_weights = self._timed("sync", engine.sync_weights)
        trainer._calculate_rewards = self._timed("reward", trainer._calculate_rewards)
        score, prepare, loss = (
            trainer._get_per_token_logps_and_entropies,
            trainer._generate_and_score_completions,
            trainer._compute_loss,
        )

        def scored(*args: Any, **kwargs: Any) -> Any:
            return (
                score(*args, **kwargs)
                if torch.is_grad_enabled()
                else self._timed("logprobs", score)(*args, **kwargs)
            )

        def prepared(*args: Any) -> Any:
            out = prepare(*args)
            self._prepared = time.perf_counter()
            return out

        def summed(*args: Any) -> Any:
            out = loss(*args)
            self._loss += float(out.detach())
            return out

        (
            trainer._get_per_token_logps_and_entropies,
            trainer._generate_and_score_completions,
            trainer._compute_loss,
        ) = (
            scored,
            prepared,
            summed,
        )

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._wait_for_turn()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._seconds["update"] = time.perf_counter() - self._prepared

    def on_step_end(self, *_: Any, **__: Any) -> None:
        # It logs only after this: what it logs is in _metrics by now.
        metrics = {
            name: values[-1] for name, values in self._trainer._metrics["train"].items() if values
        }
        self._seconds["step"] = time.perf_counter() - self._start
        if self._trainer.environment_factories is not None:
            self._seconds["generation"] -= self._seconds["sync"]
        # of the policy and the engine that sampled
        record = {
            **{f"{name}_s": seconds for name, seconds in self._seconds.items()},
            "loss": self._loss,
            "reward_mean": metrics["reward"],
            "tokens_mean": metrics["completions/mean_length"],
            "logprob_difference": metrics["sampling/sampling_logp_difference/mean"],
            "advantages": list(self._trainer._logs["advantages"]),
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self._seconds.clear()
        self._loss = 0.0
        self._left -= 1
        self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        if self._left == 0:
            line = sys.stdin.readline()
            if not line:  # no further turn
                raise SystemExit
            self._left = int(line)
        self._start = time.perf_counter()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - start

        return timed


if __name__ == "__main__":
    main()
