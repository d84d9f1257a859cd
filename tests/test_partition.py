"""The same rollouts give the same loss, gradient and parameters however the work is split, and those of plain transformers in fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_spmd.config import Config, load_config
from tests.models import make_model, write_config
from tests.ranks import run_worker
from tests.workers.update import GROUP_SIZE, NUM_GROUPS, fixed_groups, fixed_reward

Results = dict[str, dict[str, Any]]

# Adam's first step is lr * g / (|g| + eps): where |g| is near eps, rounding of g decides the step. Weights move by at most lr.
SECTIONS: dict[str, Any] = {
    "data": {"max_prompt_tokens": 9},
    "rollout": {"num_prompts_per_step": NUM_GROUPS, "group_size": GROUP_SIZE, "max_completion_tokens": 28, "temperature": 0.8},
    "training": {"num_mini_batches": 1, "max_tokens_per_micro_batch": 100},
    "optimizer": {"lr": 1e-5, "max_grad_norm": 0.5},
    "loss": {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.02},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partition")
    make_model(folder / "model", "qwen3", tied=True)
    return folder


@pytest.fixture(scope="module")
def config_file(folder: Path) -> Path:
    return write_config(folder, folder / "model", **SECTIONS)


@pytest.fixture(scope="module")
def by_ranks(folder: Path, config_file: Path) -> dict[int, Results]:
    found = {}
    for num_ranks in (1, 2, 3):
        out = folder / f"ranks_{num_ranks}.pt"
        run_worker(num_ranks, "update", str(config_file), str(out))
        found[num_ranks] = torch.load(out, weights_only=True)
    return found


@pytest.fixture(scope="module")
def plain(config_file: Path) -> dict[str, Any]:
    return plain_update(load_config(config_file))


def test_the_splits_really_differ(by_ranks: dict[int, Results]) -> None:
    assert by_ranks[1]["one row"]["rows"] == 1
    assert by_ranks[1]["one by one"]["rows"] > 12
    assert by_ranks[2]["a few rows"]["rows"] > 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("split", ["one row", "a few rows", "one by one", "activations recomputed, small logit chunks"])
def test_loss_gradient_and_parameters_do_not_depend_on_the_split(by_ranks: dict[int, Results], num_ranks: int, split: str) -> None:
    reference, result = by_ranks[1]["one row"], by_ranks[num_ranks][split]
    assert result["loss_tokens"] == reference["loss_tokens"]
    assert result["loss"] == pytest.approx(reference["loss"], rel=1e-6)
    assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-6)
    for name, expected in reference["parameters"].items():
        assert relative_difference(result["parameters"][name], expected) < 1e-6, name


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_mini_batches_do_not_depend_on_the_number_of_ranks(by_ranks: dict[int, Results], num_ranks: int) -> None:
    """Two optimizer steps, the second with old logprobs from before the first and with ratios other than 1."""
    reference, result = by_ranks[1]["two mini-batches"], by_ranks[num_ranks]["two mini-batches"]
    assert result["loss"] == pytest.approx(reference["loss"], rel=1e-5)
    assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-5)
    for name, expected in reference["parameters"].items():
        assert relative_difference(result["parameters"][name], expected) < 1e-6, name
        assert not torch.equal(expected, by_ranks[1]["one row"]["parameters"][name])


def test_loss_and_gradient_equal_plain_transformers(by_ranks: dict[int, Results], plain: dict[str, Any]) -> None:
    result = by_ranks[2]["a few rows"]
    assert result["loss_tokens"] == plain["loss_tokens"]
    assert result["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert result["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    for name, expected in plain["parameters"].items():
        assert relative_difference(result["parameters"][name], expected) < 1e-6, name


def test_the_update_moves_every_parameter(by_ranks: dict[int, Results], folder: Path) -> None:
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    for name, parameter in by_ranks[2]["a few rows"]["parameters"].items():
        assert not torch.equal(parameter, start[name]), name


def relative_difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm().detach() / expected.norm().detach())


def plain_update(config: Config) -> dict[str, Any]:
    """GRPO written out anew: plain transformers, one sequence at a time, autograd and torch's AdamW; float64 but for the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, attn_implementation="eager")
    terms, num_tokens = [], 0
    for group in fixed_groups():
        rewards = [fixed_reward(group.slot, sample) for sample in range(GROUP_SIZE)]
        known = [r for r in rewards if r is not None]
        mean = sum(known) / len(known)
        std = math.sqrt(sum((r - mean) ** 2 for r in known) / (len(known) - 1))
        for reward, completion in zip(rewards, group.completions, strict=True):
            if reward is None:
                continue
            advantage = (reward - mean) / std
            num_prompt = len(group.prompt.token_ids)
            ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
            logits = model(ids).logits[0, num_prompt - 1 : -1].double() / config.rollout.temperature
            log_p = logits.log_softmax(-1)
            chosen = log_p.gather(-1, ids[0, num_prompt:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            ratio = (chosen - chosen.detach()).exp()
            kl = 0.5 * (chosen.detach() - chosen).square()  # the reference is the model itself, before the step
            terms.append((-advantage * ratio + config.loss.kl_coef * kl - config.loss.entropy_coef * entropy).sum())
            num_tokens += len(completion.token_ids)
    loss = torch.stack(terms).sum() / num_tokens
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
    decay = [p for p in model.parameters() if p.ndim > 1]
    flat = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": config.optimizer.weight_decay}, {"params": flat, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=config.optimizer.betas).step()
    return {
        "loss": loss.item(),
        "loss_tokens": num_tokens,
        "grad_norm": float(grad_norm),
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
    }
