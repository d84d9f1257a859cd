"""A critic on the policy's own layers says, learns and teaches the layers the same however the work
is split, and what
plain transformers with a head and torch's autograd make of the same rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from tests.ranks.test_critic import plain_sequences, with_critic
from tests.ranks.test_partition import relative_difference
from tests.support.models import make_model
from tests.support.ranks import run_worker
from tests.support.workers.policy_critic import (
    ADAPTERS,
    REPLICATED,
    SETTINGS,
    SPLITS,
    WARMED_UP,
    changed,
    full_head,
)
from tests.support.workers.update import fixed_groups

Results = dict[tuple[str, str], dict[str, Any]]
RANKS = (2, 1)
ONE_ROW = next(iter(SPLITS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy_critic")
    make_model(folder / "model", "qwen3", tied=True)
    make_model(folder / "reference", "qwen3", tied=True, seed=1)
    return folder


@pytest.fixture(scope="module")
def config_file(folder: Path) -> Path:
    return with_critic(folder, path="policy", lr=1e-3, coef=0.3)


@pytest.fixture(scope="module")
def by_ranks(folder: Path, config_file: Path) -> dict[int, Results]:
    result = {}
    for num_ranks in RANKS:
        out = folder / f"ranks_{num_ranks}.pt"
        output = run_worker(
            num_ranks, "policy_critic", str(config_file), str(folder / "reference"), str(out)
        )
        assert output.count("9 faults seen") == (2 if num_ranks == 2 else 0), output
        result[num_ranks] = torch.load(out, weights_only=True)
    return result


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_it_says_and_teaches_does_not_depend_on_the_split(
    by_ranks: dict[int, Results], setting: str
) -> None:
    """Ranks, rows, replicas, who sampled what. Adam hands on the rounding of a first step at about
    ten times the
    size."""
    reference = by_ranks[1][setting, ONE_ROW]
    assert len({by_ranks[1][setting, split]["rows"] for split in SPLITS}) == 2
    bound = 1e-5 if setting == "several steps" else 1e-6
    splits = (*SPLITS, REPLICATED)
    actual = [
        r
        for of in by_ranks.values()
        for (s, split), r in of.items()
        if s == setting and split in splits
    ]
    assert len(actual) == 4 + (setting == "several steps")
    for result in actual:
        for name in ("old_values", "returns", "advantages"):
            for i, expected in reference[name].items():
                assert result[name][i] == pytest.approx(expected, rel=1e-5, abs=1e-5), (name, i)
        for name in ("sums", "metrics"):
            assert result[name] == pytest.approx(reference[name], rel=2e-5, abs=1e-5), name
        assert result["value"] == pytest.approx(reference["value"], rel=1e-5)
        assert abs(result["loss"] - result["policy"]) > 0.01
        assert (
            len(result["gradients"])
            == len(reference["gradients"])
            == 2 * result["sums"]["optim/updates"]
        )
        for single, second in zip(result["gradients"][:2], reference["gradients"][:2], strict=True):
            for name, gradient in second.items():
                assert relative_difference(single[name], gradient) < 1e-6, name
        for name, parameter in reference["parameters"].items():
            assert relative_difference(result["parameters"][name], parameter) < bound, name


@pytest.mark.parametrize("split", [ADAPTERS, WARMED_UP])
def test_adapters_and_a_warm_up_on_two_ranks_are_those_on_one(
    by_ranks: dict[int, Results], split: str
) -> None:
    single, two = (by_ranks[n]["several steps", split] for n in (1, 2))
    for name, parameter in single["parameters"].items():
        assert relative_difference(two["parameters"][name], parameter) < 1e-5, name
    critic_values = [
        {name: value for name, value in item["sums"].items() if "critic/" in name}
        for item in (two, single)
    ]
    assert critic_values[0] == pytest.approx(critic_values[1], rel=2e-5, abs=1e-5)
    layers = [
        name
        for step_values in two["gradients"]
        for name in step_values
        if not name.startswith("head.")
    ]
    assert bool(layers) == (
        split == ADAPTERS
    )  # in a warm-up the head has gradients, and nothing else
    assert all("lora" in name for name in layers)
    head = {name: two["parameters"][f"head.{name}"] for name in ("weight", "bias")}
    assert not any(torch.equal(value, full_head()[name]) for name, value in head.items())


@pytest.mark.parametrize("setting", ["as configured", "several steps"])
def test_one_backward_pass_has_both_losses(
    by_ranks: dict[int, Results], config_file: Path, folder: Path, setting: str
) -> None:
    """Loss and each gradient of the first optimizer step are those of transformers with a head, by
    autograd alone:
    policy + coef * value, as TRL's PPO with a value head has it."""
    result = by_ranks[2][setting, ONE_ROW]
    plain = plain_update(changed(load_config(config_file), setting), folder)
    for name in ("old_values", "returns", "advantages"):
        for i, expected in plain[name].items():
            assert result[name][i] == pytest.approx(expected, rel=1e-4, abs=2e-5), (name, i)
    actual = result["gradients"][0] | result["gradients"][1]
    assert actual.keys() == plain["gradients"].keys()
    for name, gradient in plain["gradients"].items():
        assert relative_difference(actual[name], gradient) < 1e-5, name
    if setting == "as configured":  # one optimizer step: nothing else is in these
        assert result["value"] == pytest.approx(plain["value"], rel=1e-5)
        assert result["sums"]["critic/loss"] == pytest.approx(plain["value"] / 0.3, rel=1e-5)
        assert result["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert result["sums"]["critic/grad_norm"] == pytest.approx(plain["head_norm"], rel=1e-5)
        assert result["sums"]["optim/grad_norm"] == pytest.approx(plain["norm"], rel=1e-5)
    without = plain_update(changed(load_config(config_file), setting), folder, value_coef=0.0)
    separate = [
        relative_difference(actual[n], g)
        for n, g in without["gradients"].items()
        if not n.startswith("head.")
    ]
    assert min(separate) > 1e-2  # the value loss is heard in every tensor of the layers


def plain_update(config: Config, folder: Path, value_coef: float = 0.3) -> dict[str, Any]:
    """The first optimizer step, written out: one sequence at a time, full logits, autograd,
    gradients clipped."""
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder / n, dtype=torch.float32, attn_implementation="eager"
        )
        for n in ("model", "reference")
    )
    head = torch.nn.Linear(64, 1)
    head.load_state_dict(full_head())

    def values_of(prompt: list[int], completion: list[int]) -> Tensor:
        hidden = policy.model(torch.tensor([prompt + completion])).last_hidden_state[
            0, len(prompt) - 1 : -1
        ]
        result: Tensor = head(hidden)[:, 0]
        return result

    sequences = [
        s for g in fixed_groups() for s in plain_sequences(config, g, values_of, policy, reference)
    ]
    counted = torch.tensor(
        [a for s in sequences if s["counts"] for a in s["raw"]], dtype=torch.float64
    )
    mean, deviation = counted.mean(), (counted.var() + 1e-8).sqrt()
    used = [
        s
        for s in sequences
        if s["counts"] and s["slot"] * config.training.num_mini_batches // 6 == 0
    ]
    num_tokens = sum(len(s["old"]) for s in used)
    total, values_values, clip = torch.zeros((), dtype=torch.float64), 0.0, config.critic.clip_value
    assert clip is not None
    for s in used:
        ids, n = torch.tensor([s["prompt"] + s["completion"]]), len(s["completion"])
        targets = ids[0, -n:, None]
        log_p, ref = (
            (m(ids).logits[0, -n - 1 : -1].double() / config.rollout.temperature).log_softmax(-1)
            for m in (policy, reference)
        )
        p, r = log_p.gather(-1, targets)[:, 0], ref.gather(-1, targets)[:, 0].detach()
        advantages = (torch.tensor(s["raw"], dtype=torch.float64) - mean) / deviation
        entropy = -(log_p.exp() * log_p).sum(-1)
        correction = _correction(config, s, p.detach())
        local = -(advantages * (p - p.detach()).exp() * correction).sum()
        local = (
            local
            + config.loss.kl_coef * ((p - r) ** 2 / 2).sum()
            - config.loss.entropy_coef * entropy.sum()
        )
        v = values_of(s["prompt"], s["completion"]).double()
        old, target = (torch.tensor(s[k], dtype=torch.float64) for k in ("old", "returns"))
        bounded = torch.minimum(torch.maximum(v, old - clip), old + clip)
        error = 0.5 * torch.maximum((v - target) ** 2, (bounded - target) ** 2).sum() * value_coef
        total, values_values = (
            total + (local + error) / num_tokens,
            values_values + float(error.detach()) / num_tokens,
        )
    total.backward()
    named = dict(policy.named_parameters()) | {
        f"head.{name}": p for name, p in head.named_parameters()
    }
    norms = [
        torch.nn.utils.clip_grad_norm_(m.parameters(), config.optimizer.max_grad_norm)
        for m in (policy, head)
    ]
    return {
        "old_values": {s["id"]: s["old"] for s in sequences},
        "returns": {s["id"]: s["returns"] for s in sequences},
        "advantages": {
            s["id"]: [float((a - mean) / deviation * s["counts"]) for a in s["raw"]]
            for s in sequences
        },
        "loss": float(total.detach()),
        "value": values_values,
        "gradients": {name: p.grad for name, p in named.items() if p.grad is not None},
        "norm": float(norms[0]),
        "head_norm": float(norms[1]),
    }


def _correction(config: Config, sequence: dict[str, Any], p: Tensor) -> Tensor:
    """token_tis, against the made-up logprobs of the engine."""
    assert config.loss.rollout_correction == "token_tis"
    sample = sequence["id"] % 4
    engine = fixed_groups()[sequence["slot"]].completions[sample].logprobs
    return (
        (p - torch.tensor(engine, dtype=torch.float64))
        .exp()
        .clamp(max=config.loss.rollout_correction_cap)
    )
