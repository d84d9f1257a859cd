"""A critic says and learns the same however the work is split, and what plain transformers, a plain
loop and torch's
AdamW make of the same rollouts; what it is given is looked at while it trains."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from tests.ranks.test_partition import SECTIONS, relative_difference
from tests.support.models import make_model, write_config
from tests.support.nightly import selected_values
from tests.support.ranks import run_worker
from tests.support.workers.critic import REPLICATED, SETTINGS, SPLITS, WAITED, changed
from tests.support.workers.update import GROUP_SIZE, fixed_groups, fixed_reward

Results = dict[tuple[str, str], dict[str, Any]]
RANKS = (2, 1)  # in this order: the job of one reads a checkpoint of two
ONE_ROW = next(iter(SPLITS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The critic's files are those of one of transformers' classifiers, whose head has a bias
    too."""
    folder = tmp_path_factory.mktemp("critic")
    make_model(folder / "model", "qwen3", tied=True)
    make_model(folder / "reference", "qwen3", tied=True, seed=1)
    kind = transformers.AutoModelForSequenceClassification
    file = (
        make_model(folder / "critic", "qwen3", tied=False, seed=2, kind=kind, num_labels=1)
        / "model.safetensors"
    )
    draw = torch.Generator().manual_seed(3)
    head = {
        "score.weight": torch.randn(1, 64, generator=draw) / 8,
        "score.bias": torch.randn(1, generator=draw),
    }
    save_file(load_file(file) | head, file, {"format": "pt"})
    return folder


def with_critic(folder: Path, **keys: Any) -> Path:
    """A config of `folder`/model with gae and these keys of its critic."""
    critic = {"lam": 0.9, "lam_policy": 0.7, "gamma": 0.99, "clip_value": 0.1, **keys}
    advantage = {"estimator": "gae", "normalize_std": "batch"}
    return write_config(folder, folder / "model", **SECTIONS, critic=critic, advantage=advantage)


@pytest.fixture(scope="module")
def config_file(folder: Path) -> Path:
    return with_critic(folder, path=str(folder / "critic"), lr=1e-5)


@pytest.fixture(scope="module")
def outputs(folder: Path, config_file: Path, request: pytest.FixtureRequest) -> dict[int, str]:
    """By number of ranks, what the worker prints."""
    result = {}
    for num_ranks in RANKS:
        out = folder / f"ranks_{num_ranks}.pt"
        files = str(config_file), str(folder / "reference"), str(out)
        planted = ["faults"] * (num_ranks in selected_values(request, "planted_at"))
        result[num_ranks] = run_worker(num_ranks, "critic", *files, *planted)
    return result


@pytest.fixture(scope="module")
def by_ranks(folder: Path, outputs: dict[int, str]) -> dict[int, Results]:
    return {
        num_ranks: torch.load(folder / f"ranks_{num_ranks}.pt", weights_only=True)
        for num_ranks in outputs
    }


@pytest.mark.parametrize("planted_at", RANKS)
def test_planted_faults_are_seen(outputs: dict[int, str], planted_at: int) -> None:
    assert outputs[planted_at].count("18 faults seen") == planted_at, outputs[planted_at]


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_it_says_and_learns_does_not_depend_on_the_split(
    by_ranks: dict[int, Results], setting: str
) -> None:
    """Ranks, rows, replicas, who sampled what, a wait in host memory."""
    reference = by_ranks[1][setting, ONE_ROW]
    rows = {by_ranks[1][setting, split]["rows"] for split in SPLITS}
    assert len(rows) == 2
    actual = [
        result
        for results in by_ranks.values()
        for (of, _), result in results.items()
        if of == setting
    ]
    assert len(actual) == 4 + 2 * (setting == "several steps")
    for result in actual:
        # Whitening divides by the advantages' deviation, which is below 1, and so enlarges the
        # rounding of the values: 1.2e-6 was seen on an Intel Xeon.
        for name, bound in (("old_values", 1e-6), ("returns", 1e-6), ("advantages", 4e-6)):
            assert result[name].keys() == reference[name].keys()
            for i, expected in reference[name].items():
                assert result[name][i] == pytest.approx(expected, rel=bound, abs=bound), (name, i)
        assert result["decision"] == pytest.approx(reference["decision"], rel=4e-6, abs=4e-6)
        for name in ("sums", "metrics"):
            assert result[name] == pytest.approx(reference[name], rel=1e-6, abs=1e-6), name
        for name, parameter in reference["parameters"].items():
            assert relative_difference(result["parameters"][name], parameter) < 1e-6, name
    assert {("several steps", REPLICATED), ("several steps", WAITED)} <= by_ranks[2].keys()


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "episodes"])
def test_it_is_plain_ppo(
    by_ranks: dict[int, Results], config_file: Path, folder: Path, setting: str
) -> None:
    result, plain = (
        by_ranks[2][setting, ONE_ROW],
        plain_ppo(changed(load_config(config_file), setting), folder),
    )
    for name in ("old_values", "returns", "advantages"):
        for i, expected in plain[name].items():
            assert result[name][i] == pytest.approx(expected, rel=1e-4, abs=2e-5), (name, i)
    assert result["metrics"]["critic/explained_variance"] == pytest.approx(
        plain["explained_variance"], rel=1e-3
    )
    for name in ("critic/loss", "critic/grad_norm"):
        assert result["sums"][name] == pytest.approx(plain[name], rel=1e-4), name
    assert result["sums"]["critic/clip_frac"] == pytest.approx(plain["critic/clip_frac"], abs=1e-9)
    for name, parameter in plain["parameters"].items():
        assert relative_difference(result["parameters"][name], parameter) < 1e-5, name
    if setting == "several steps":
        assert 0.02 < plain["critic/clip_frac"] < 0.98


def plain_ppo(config: Config, folder: Path) -> dict[str, Any]:
    """PPO's critic written out anew: transformers, one sequence at a time, loops, autograd and
    torch's AdamW."""
    pretrained = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "critic", dtype=torch.float32, attn_implementation="eager"
    )
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder / n, dtype=torch.float32, attn_implementation="eager"
        )
        for n in ("model", "reference")
    )
    head = torch.nn.Linear(64, 1)
    stored = load_file(folder / "critic" / "model.safetensors")
    head.load_state_dict({kind: stored[f"score.{kind}"] for kind in ("weight", "bias")})
    decoder_values = {
        f"backbone.{name}": parameter for name, parameter in pretrained.model.named_parameters()
    }
    parameters = decoder_values | {
        f"head.{name}": parameter for name, parameter in head.named_parameters()
    }
    groups = [
        {
            "params": [p for p in parameters.values() if p.ndim > 1],
            "weight_decay": config.optimizer.weight_decay,
        },
        {"params": [p for p in parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.critic.lr, betas=config.optimizer.betas)

    def values_of(prompt: list[int], completion: list[int]) -> Tensor:
        hidden = pretrained.model(torch.tensor([prompt + completion])).last_hidden_state[
            0, len(prompt) - 1 : -1
        ]
        result: Tensor = head(hidden)[:, 0]
        return result

    sequences = [
        s
        for group in fixed_groups()
        for s in plain_sequences(config, group, values_of, policy, reference)
    ]
    counted = [a for s in sequences if s["counts"] for a in s["raw"]]
    mean, deviation = 0.0, 1.0
    if config.advantage.normalize_std == "batch":
        mean = math.fsum(counted) / len(counted)
        deviation = math.sqrt(
            math.fsum((a - mean) ** 2 for a in counted) / (len(counted) - 1) + 1e-8
        )
    sizes, norms, clipped_of, num_tokens = 0.0, [], 0, 0
    batches = config.training.num_mini_batches
    for _ in range(config.training.num_epochs):
        for number in range(batches):
            used = [s for s in sequences if s["slot"] * batches // 6 == number and s["counts"]]
            tokens, total = sum(len(s["old"]) for s in used), torch.zeros(())
            for s in used:
                for v, old, target in zip(
                    values_of(s["prompt"], s["completion"]), s["old"], s["returns"], strict=True
                ):
                    error, clip = (v - target) ** 2, config.critic.clip_value
                    if clip is not None:
                        second = (old + (v - old).clamp(-clip, clip) - target) ** 2
                        clipped_of += bool(second > error)
                        error = second if second > error else error
                    total = total + 0.5 * error
            optimizer.zero_grad()
            (total / tokens).backward()
            norms.append(
                float(
                    torch.nn.utils.clip_grad_norm_(
                        parameters.values(), config.optimizer.max_grad_norm
                    )
                )
            )
            optimizer.step()
            sizes, num_tokens = sizes + float(total.detach()), num_tokens + tokens
    taught = torch.tensor(
        [r for s in sequences if s["counts"] for r in s["returns"]], dtype=torch.float64
    )
    errors = taught - torch.tensor(
        [v for s in sequences if s["counts"] for v in s["old"]], dtype=torch.float64
    )
    return {
        "old_values": {s["id"]: s["old"] for s in sequences},
        "returns": {s["id"]: s["returns"] for s in sequences},
        "advantages": {
            s["id"]: [(a - mean) / deviation * s["counts"] for a in s["raw"]] for s in sequences
        },
        "explained_variance": float(1 - errors.var() / taught.var()),
        "critic/loss": sizes / num_tokens,
        "critic/clip_frac": clipped_of / num_tokens,
        "critic/grad_norm": max(norms),
        "parameters": parameters,
    }


def plain_sequences(
    config: Config, group: Any, values_of: Any, policy: Any, reference: Any
) -> list[dict[str, Any]]:
    """Of each completion the values, raw advantages and returns, by the sums that define them."""
    result = []
    for sample, completion in enumerate(group.completions):
        prompt, ids = group.prompt.token_ids, completion.token_ids
        reward, n = fixed_reward(group.slot, sample), len(ids)
        with torch.no_grad():
            old = values_of(prompt, ids).double().tolist()
        rewards = [0.0] * (n - 1) + [reward or 0.0]
        if config.loss.kl_in == "reward":
            p, ref = (
                plain_logprobs(model, prompt, ids, config.rollout.temperature)
                for model in (policy, reference)
            )
            rewards = [
                r - config.loss.kl_coef * (a - b) ** 2 / 2
                for r, a, b in zip(rewards, p, ref, strict=True)
            ]
        critic = config.critic
        lam = critic.lam_policy
        if lam == "length":
            lam = max(0.0, 1 - 1 / (critic.length_alpha * n))
        deltas = [
            rewards[t] + critic.gamma * (old[t + 1] if t + 1 < n else 0.0) - old[t]
            for t in range(n)
        ]

        def gae(of: float, t: int, deltas: list[float] = deltas, n: int = n) -> float:
            return math.fsum((config.critic.gamma * of) ** (k - t) * deltas[k] for k in range(t, n))

        is_cut = config.loss.mask_truncated and completion.finish_reason == "length"
        result.append(
            {
                "id": group.slot * GROUP_SIZE + sample,
                "slot": group.slot,
                "prompt": prompt,
                "completion": ids,
                "counts": reward is not None and not is_cut,
                "old": old,
                "raw": [gae(float(lam), t) for t in range(n)],
                "returns": [gae(critic.lam, t) + old[t] for t in range(n)],
            }
        )
    return result


def plain_logprobs(
    model: Any, prompt: list[int], completion: list[int], temperature: float
) -> list[float]:
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        log_p = (model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
    result: list[float] = log_p.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return result
