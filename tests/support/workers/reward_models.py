"""Worker: reward models score made-up rollouts on this many ranks, and the running check sees
planted faults.

    python -m tests.support.workers.reward_models FOLDER OUT.json
FOLDER has policy/ and the models' folders. Rank 0 writes {case: [status, score] of each rollout, by
its number}, and under "seen" what the check said of each fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_spmd.config.schema import ModelConfig, RewardConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.model.config_json import load_tokenizer
from grpo_spmd.model.reward_model_files import read_reward_model
from grpo_spmd.model.values import RewardModel, build_reward_model
from grpo_spmd.proofs.reward_model_check import RewardModelCheck
from grpo_spmd.records import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.scorers import Scorers
from grpo_spmd.rollout import reward_models
from grpo_spmd.rollout.reward_models import ModelReward, RewardTexts
from tests.support.reward_texts import GROUP_SIZE, groups_of

FAMILIES = ("qwen2", "qwen3", "llama", "mistral", "gemma2")
BUDGETS = (96, 150, 4096)
# case: family, kind of prompts, settings of the entry
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    family: (family, "text", {}) for family in FAMILIES
} | {
    "chat": ("qwen3-chat", "chat", {}),
    "episodes": ("qwen3-chat", "episodes", {}),
    "template": ("qwen3-chat", "chat", {"template": "other.jinja"}),
    "label": ("qwen3-labels", "text", {"label": "help"}),
    "other tokenizer": ("qwen3-chat", "text", {}),
    "too long": ("qwen3", "text", {"max_tokens": 20}),
    "cut": ("qwen3", "text", {"max_tokens": 20, "on_long": "drop_start"}),
}


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    session = start_session()
    tokenizer = load_tokenizer(str(folder / "policy"))
    built: dict[str, RewardModel] = {}
    result: dict[str, Any] = {}

    def scorer(
        case: str, budget: int, dtype: Any = "float32"
    ) -> tuple[Callable[..., Any], list[RolloutGroup]]:
        family, kind, settings = CASES[case]
        settings = {
            key: str(folder / value) if key == "template" else value
            for key, value in settings.items()
        }
        entry = RewardConfig(model=str(folder / family), **settings)
        files = read_reward_model(0, entry, folder / family, budget)
        model = build_reward_model(
            files, ModelConfig(path=str(folder / "policy"), dtype=dtype), session
        )
        built[case] = model
        reward = ModelReward(case, model, RewardTexts(files, tokenizer), budget)
        check = RewardModelCheck(files, model, tokenizer, dtype=dtype)
        # The first rank has few groups, and the last of several none at all.
        groups = groups_of(kind, tokenizer)
        dealt = [groups[:2], groups[2:]][session.rank] if session.world_size > 1 else groups
        dealt = dealt if case != "llama" else groups[: 10 * (session.rank == 0)]

        def score(is_checked: bool = True) -> dict[int, list[Any]]:
            def decode(groups: Sequence[RolloutGroup]) -> ScoredRollouts:
                ids = [c.token_ids for group in groups for c in group.completions]
                texts = tokenizer.batch_decode(ids, skip_special_tokens=True) if ids else []
                return ScoredRollouts(texts=texts, reward_inputs=[{} for _ in texts])

            def by_model(groups: Sequence[RolloutGroup], decoded: ScoredRollouts) -> ScoredRollouts:
                return reward.score(groups, decoded.texts, check if is_checked else None)

            scorers: list[Any] = [SimpleNamespace(score=by_model)]
            scored = Scorers(decode, {case: 1.0}, scorers)(dealt)
            numbers = [
                group.slot * GROUP_SIZE + n
                for group in dealt
                for n in range(len(group.completions))
            ]
            empty: list[Any] = []
            statuses, values = scored.statuses.get(case, empty), scored.by_name.get(case, empty)
            item = zip(numbers, statuses, values, strict=True)
            local = {number: [status, value] for number, status, value in item}
            everything: dict[str, Any] = on_rank0(
                lambda pieces: {n: v for piece in pieces for n, v in piece.items()}, local
            )
            return {int(number): value for number, value in everything.items()}

        return score, dealt

    for case in CASES:
        for budget in BUDGETS if case == "qwen3" else BUDGETS[-1:]:
            score, _ = scorer(case, budget)
            result[f"{case}/{budget}" if budget != BUDGETS[-1] else case] = score()
    result["seen"] = {fault: _said(plant, scorer, "float32") for fault, plant in FAULTS.items()}
    result["seen in bfloat16"] = {
        fault: _said(plant, scorer, "bfloat16") for fault, plant in FAULTS.items()
    }
    for family in FAMILIES:
        result[f"{family} in bfloat16"] = scorer(family, BUDGETS[-1], "bfloat16")[0]()
    result["not parked"] = _forward_while_parked(built["episodes"])
    if session.is_rank0:
        out.write_text(json.dumps(result))
    end_session()


def _said(
    plant: Callable[[], tuple[str, Callable[[], None]]], scorer: Callable[..., Any], dtype: str
) -> str:
    case, undo = plant()
    try:
        scorer(case, BUDGETS[-1], dtype)[0]()
    except Rank0Error as error:
        return str(error)
    finally:
        undo()
    return "nothing"


def _generation_prompt() -> tuple[str, Callable[[], None]]:
    """The text ends with an opened turn of the assistant."""
    real = RewardTexts._encode

    def opened(self: RewardTexts, *of: Any) -> list[int]:
        return [*real(self, *of), *self.tokenizer("<|assistant|>")["input_ids"]]

    return "chat", _replaced(RewardTexts, "_encode", opened)


def _own_template_kept() -> tuple[str, Callable[[], None]]:
    """`template` of the entry is not used."""
    real = RewardTexts.__init__

    def without(self: RewardTexts, files: Any, tokenizer: Any) -> None:
        import dataclasses

        real(self, dataclasses.replace(files, template=None), tokenizer)

    return "template", _replaced(RewardTexts, "__init__", without)


def _swapped() -> tuple[str, Callable[[], None]]:
    """A rank's scores come back for others of its texts."""
    real = reward_models.score_over_ranks

    def swapped(*of: Any) -> list[float]:
        scores = real(*of)
        return scores[1:] + scores[:1]

    return "qwen2", _replaced(reward_models, "score_over_ranks", swapped)


def _earlier_token() -> tuple[str, Callable[[], None]]:
    """The head reads the token before the last one."""
    real = RewardModel._scored_position
    return "qwen3", _replaced(
        RewardModel, "_scored_position", lambda self, text: real(self, text) - 1
    )


def _other_label() -> tuple[str, Callable[[], None]]:
    """The head's row is another label's."""
    real = RewardModel.forward

    def other(self: RewardModel, row: Any) -> Any:
        retained = self._label
        self._label = 0
        try:
            return real(self, row)
        finally:
            self._label = retained

    return "label", _replaced(RewardModel, "forward", other)


def _too_long_scored() -> tuple[str, Callable[[], None]]:
    """A text over max_tokens is cut where it should have no score."""
    real = RewardTexts.ids_of

    def cut(self: RewardTexts, *of: Any) -> list[int] | None:
        return real(self, *of) or self._encode(*of)[-5:]

    return "too long", _replaced(RewardTexts, "ids_of", cut)


def _replaced(owner: Any, name: str, new: Any) -> Callable[[], None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    return lambda: setattr(owner, name, old)


FAULTS: dict[str, Callable[[], tuple[str, Callable[[], None]]]] = {
    "generation prompt": _generation_prompt,
    "template not used": _own_template_kept,
    "scores swapped": _swapped,
    "earlier token": _earlier_token,
    "other label": _other_label,
    "too long, scored": _too_long_scored,
}


def _forward_while_parked(model: RewardModel) -> str:
    try:
        model(model.row_of([[1, 2]]))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def plain_scores(folder: Path, ids: Sequence[Sequence[int]], label: int) -> list[float]:
    """By transformers from the folder, text by text."""
    import torch
    import transformers

    method: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
    }  # its sdpa forgets Gemma 2's cap
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, **method).eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([list(of)])).logits[0, label]) for of in ids]


if __name__ == "__main__":
    with exit_with_outcome():
        main()
