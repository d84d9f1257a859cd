"""TRL's side of `trl_loss`: its own trainers on the batch of a folder. Runs in .venv-trl and
imports nothing of grpo_spmd.

    .venv-trl/bin/python -m benchmarks.agreement.trl_loss_worker FOLDER

Only generation is replaced, by the completions of the batch. Tokenising, padding, old and reference
logprobs, importance sampling ratios, advantages, the split into micro-batches and the loss are
TRL's code as it stands. Writes FOLDER/trl/N.safetensors for each variant N.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file, save_file
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # type: ignore[import-not-found]
from trl.rewards import get_soft_overlong_punishment  # type: ignore[import-not-found]


class _GRPO(GRPOTrainer):  # type: ignore[misc]
    batch: dict[str, Any]

    def _generate_single_turn(self, *_: Any) -> Any:
        return self.batch["completion_ids"], self.batch["rollout_logprobs"]


class _RLOO(RLOOTrainer):  # type: ignore[misc]
    batch: dict[str, Any]

    def _generate_single_turn(self, *_: Any) -> Any:
        return self.batch["completion_ids"]


def main() -> None:
    folder = Path(sys.argv[1])
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(
        logging.ERROR
    )  # its remarks on unknown rewards, which are there on purpose
    batch = json.loads((folder / "batch.json").read_text())
    weights = {
        name: load_file(folder / name / "model.safetensors") for name in ("policy", "old", "ref")
    }
    (folder / "trl").mkdir()
    for number, variant in enumerate(json.loads((folder / "variants.json").read_text())):
        save_file(run(folder, batch, weights, variant), folder / "trl" / f"{number}.safetensors")


def run(
    folder: Path,
    batch: dict[str, Any],
    weights: dict[str, dict[str, torch.Tensor]],
    variant: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """One generation batch and its backward passes: loss, advantages, and the gradient of every
    parameter."""
    num_parts = variant["num_parts"]
    kind, trainer_kind = (
        (GRPOConfig, _GRPO) if variant["trainer"] == "GRPO" else (RLOOConfig, _RLOO)
    )
    arguments = kind(
        output_dir=str(folder / "output"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        temperature=batch["temperature"],
        num_generations=batch["group_size"],
        max_completion_length=batch["max_completion_tokens"],
        per_device_train_batch_size=len(batch["completion_ids"]) // num_parts,
        gradient_accumulation_steps=num_parts,
        num_iterations=1
        if variant["on_policy"]
        else 2,  # above 1 it takes old logprobs when it generates
        **variant["arguments"],
    )
    rewards = [lambda **_: variant["rewards"]]
    if variant["overlong_reward"]:
        rewards.append(get_soft_overlong_punishment(*variant["overlong_reward"]))
    trainer = trainer_kind(
        model=str(folder / "policy"),
        args=arguments,
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict({"prompt": batch["prompts"]}),
    )
    trainer.batch = batch
    trainer.use_vllm = variant[
        "engine"
    ]  # set only now: there is no engine, but its logprobs are in the batch
    trainer.current_gradient_accumulation_steps = num_parts  # as Trainer.train sets it
    model = trainer.model.train()
    if trainer.ref_model is not None:
        _fill(trainer.ref_model, weights["ref"])

    loss = torch.zeros(())
    inputs = [{"prompt": prompt} for prompt in batch["prompts"]]
    for piece in range(num_parts):
        trainer._step = piece
        if piece == 0 and not variant["on_policy"]:
            _fill(model, weights["old"])
        prepared = trainer._prepare_inputs(
            inputs
        )  # the first call generates and scores, the others take what it kept
        if piece == 0:
            _fill(model, weights["policy"])
        fraction = trainer.compute_loss(model, prepared)
        fraction.backward()
        loss += fraction.detach()
    gradients = {f"gradient/{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss,
        "advantages": torch.tensor(list(trainer._logs["advantages"])),
        **gradients,
    }


@torch.no_grad()
def _fill(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[name])


if __name__ == "__main__":
    main()
