"""TRL's side of `trl_episodes`: its trainer on the episodes of a folder. Runs in .venv-trl and
imports nothing of grpo_spmd.

    .venv-trl/bin/python -m benchmarks.agreement.trl_episodes_worker FOLDER

Only the sampling of a turn is replaced, by the turns of episodes.json. Writes FOLDER/trl.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

WEIGHTS = {"right": 2.0, "prompt_digest": 0.5, "completion_digest": 0.25}
GROUP_SIZE = 8


class _Trainer(GRPOTrainer):  # type: ignore[misc]
    episodes: list[dict[str, Any]]
    num_turns = 0
    rewards: torch.Tensor

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
        """Returns the next turn of each episode that has one more."""
        sampled = [
            [turn["token_ids"] for turn in episode["turns"] if turn["sampled"]]
            for episode in self.episodes
        ]
        ids = [turns[self.num_turns] for turns in sampled if len(turns) > self.num_turns]
        assert len(ids) == len(prompt_ids), "TRL goes on with other episodes than we did"
        self.num_turns += 1
        return [list(turn) for turn in ids], None

    def _calculate_rewards(self, *arguments: Any) -> Any:
        self.rewards = super()._calculate_rewards(*arguments)
        return self.rewards


def main() -> None:
    folder = Path(sys.argv[1])
    transformers.utils.logging.disable_progress_bar()
    sys.path.insert(0, str(folder))
    import room  # type: ignore[import-not-found]

    episodes = json.loads((folder / "episodes.json").read_text())
    arguments = GRPOConfig(
        output_dir=str(folder / "output"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=len(episodes),
        max_completion_length=64,
        max_tool_calling_iterations=7,
        scale_rewards="none",
        reward_weights=[*WEIGHTS.values()],
    )
    trainer = _Trainer(
        model=str(folder / "tools/model"),
        args=arguments,
        reward_funcs=[getattr(room, name) for name in WEIGHTS],
        train_dataset=Dataset.from_list([episode["row"] for episode in episodes]),
        processing_class=transformers.AutoTokenizer.from_pretrained(
            folder / "tools/model", trust_remote_code=False
        ),
        environment_factory=room.Room,
    )
    trainer.episodes = episodes
    trainer.model.train()
    batch = trainer._generate_and_score_completions([episode["row"] for episode in episodes])
    names = [*WEIGHTS, "Room"]
    results = []
    for index in range(len(episodes)):
        length = int(batch["completion_mask"][index].sum())
        results.append(
            {
                "prompt_ids": batch["prompt_ids"][index][batch["prompt_mask"][index] > 0].tolist(),
                "completion_ids": batch["completion_ids"][index][:length].tolist(),
                "mask": batch["tool_mask"][index][:length].tolist(),
                "rewards": dict(zip(names, trainer.rewards[index].tolist(), strict=True)),
                "advantage": float(batch["advantages"][index]),
            }
        )
    (folder / "trl.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
