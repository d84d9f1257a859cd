"""The data of `trl_loss`: three tiny models and a ragged batch of rollouts that both sides read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from benchmarks.support.models import make_model
from grpo_spmd.demo.making import model_config

MAX_COMPLETION = 24
UNKNOWN = 5  # the rollout without a reward, where there is one
_GROUP_SIZE = 4
_MAX_PROMPT = 9
_TEMPERATURE = 0.8
_EOS = 0
_CHARACTERS = "0123456789+-*,=:"  # ids 1 to 16 of the demo's tokenizer


@dataclass(frozen=True)
class Batch:
    """What both sides read, in the order of rollouts, whole groups one after another."""

    prompts: list[str]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    rollout_logprobs: list[list[float]]
    rewards: list[float]
    group_size: int = _GROUP_SIZE
    max_completion_tokens: int = MAX_COMPLETION
    temperature: float = _TEMPERATURE

    @property
    def truncated(self) -> list[bool]:
        return [ids[-1] != _EOS for ids in self.completion_ids]

    def rewards_of(self, kind: str) -> list[float | None]:
        if kind == "one_unknown":
            return [None if i == UNKNOWN else reward for i, reward in enumerate(self.rewards)]
        return [reward * (1000 if kind == "times_1000" else 1) for reward in self.rewards]


def make(folder: Path) -> Batch:
    """The models policy, old and ref, a tokenizer, and the batch, from seeds of our own: the same
    on every machine and
    version."""
    for number, name in enumerate(("policy", "old", "ref")):
        _make_model(folder / name, seed=number)
    generator = torch.Generator().manual_seed(11)

    def ids(length: int) -> list[int]:
        return torch.randint(1, len(_CHARACTERS) + 1, (length,), generator=generator).tolist()

    prompt_ids, completion_ids = [], []
    for length in (3, _MAX_PROMPT, 1, 6, 2, 8):  # six groups
        prompt = ids(length)
        for _ in range(_GROUP_SIZE):
            prompt_ids.append(prompt)
            length_c = int(torch.randint(2, MAX_COMPLETION - 2, (), generator=generator))
            completion_ids.append([*ids(length_c - 1), _EOS])
    completion_ids[2] = ids(MAX_COMPLETION)  # cut off
    completion_ids[9] = ids(MAX_COMPLETION)
    completion_ids[12] = [_EOS]  # nothing but its end
    rewards = [round(float(x), 3) for x in torch.rand(len(completion_ids), generator=generator)]
    old = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "old", dtype=torch.float32, trust_remote_code=False
    )
    rollout_logprobs = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        with torch.no_grad():
            logits = old(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = (
            (logits / _TEMPERATURE)
            .log_softmax(-1)
            .gather(-1, torch.tensor(completion)[:, None])[:, 0]
        )
        # an engine far from the policy, so that caps bind
        noise = 0.4 * torch.randn(len(completion), generator=generator)
        rollout_logprobs.append((logprobs + noise).clamp(max=-1e-3).tolist())
    batch = Batch(
        ["".join(_CHARACTERS[i - 1] for i in p) for p in prompt_ids],
        prompt_ids,
        completion_ids,
        rollout_logprobs,
        rewards,
    )
    (folder / "batch.json").write_text(json.dumps(asdict(batch)))
    return batch


def _make_model(folder: Path, seed: int) -> None:
    """Seed 0 is the policy, 1 a neighbour of it, others strangers."""
    generator = torch.Generator().manual_seed(0 if seed == 1 else seed)
    nearby = torch.Generator().manual_seed(100)

    def change(model: torch.nn.Module) -> None:
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(
                float(parameter.ndim == 1) + 0.1 * torch.randn(parameter.shape, generator=generator)
            )
            if seed == 1:
                parameter.add_(0.015 * torch.randn(parameter.shape, generator=nearby))

    make_model(folder, model_config(intermediate_size=96), change=change)
