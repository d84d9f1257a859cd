"""GAE, whitening and the value loss by numbers worked by hand, by plain loops, and by the formulas
of verl; what a
critic's config refuses; that without one nothing of it is imported."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

from grpo_spmd.checks.explain import side_model_rows
from grpo_spmd.checks.memory import extra_passes, idle_keys, size_text
from grpo_spmd.checks.signals import check_critic_model, side_models
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.advantages import (
    compute_advantages,
    explained_variance,
    gae_advantages,
    length_lambda,
    token_rewards,
    value_loss,
    whitening,
)
from grpo_spmd.model.policy import Policy
from grpo_spmd.observe.console import alarms
from grpo_spmd.records import Completion, Episode, Turn
from grpo_spmd.signals.critic import (
    _place_rewards,
    lambda_returns,
)
from grpo_spmd.signals.opening import Signals, open_signals
from grpo_spmd.tools.plan.dry_run import Peaks
from grpo_spmd.tools.plan.phases import with_value_head
from tests.support.models import make_model, write_config

LENGTHS = np.array([5, 1, 8, 3])


def _made_up(seed: int = 0) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=LENGTHS.sum()), draw.normal(size=LENGTHS.sum())


def test_three_tokens_by_hand() -> None:
    """delta = [0.9 * 0.6 - 0.5, 0.9 * 0.7 - 0.6, 1 - 0.7] = [0.04, 0.03, 0.3], and 0.9 * 0.5 = 0.45
    of what follows."""
    result = gae_advantages(
        np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.7]), np.array([3]), 0.9, 0.5
    )
    assert result == pytest.approx([0.04 + 0.45 * (0.03 + 0.45 * 0.3), 0.03 + 0.45 * 0.3, 0.3])


def test_sequences_side_by_side_are_those_alone_and_a_plain_sum() -> None:
    rewards, values = _made_up()
    lam = np.array([0.9, 0.5, 0.0, 1.0])
    result, initial = gae_advantages(rewards, values, LENGTHS, 0.97, lam), 0
    for n, of in zip(LENGTHS, lam, strict=True):
        r, v = rewards[initial : initial + n], np.append(values[initial : initial + n], 0.0)
        delta = r + 0.97 * v[1:] - v[:-1]
        plain = [
            math.fsum((0.97 * of) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)
        ]
        assert result[initial : initial + n] == pytest.approx(plain)
        initial += n
    # Sequences without a token, which have a lambda as well, change no bit.
    lengths, lams = np.insert(LENGTHS, [0, 2, 4], 0), np.insert(lam, [0, 2, 4], 0.3)
    assert (gae_advantages(rewards, values, lengths, 0.97, lams) == result).all()


def test_the_ends_of_lambda() -> None:
    """1: the reward to go less the value; 0: one step's error."""
    rewards, values = _made_up(1)
    n = LENGTHS[0]
    full, step = (gae_advantages(rewards, values, LENGTHS, 1.0, lam)[:n] for lam in (1.0, 0.0))
    assert full == pytest.approx(rewards[:n][::-1].cumsum()[::-1] - values[:n])
    assert step == pytest.approx(rewards[:n] + np.append(values[1:n], 0.0) - values[:n])


def test_advantages_and_returns_are_those_of_verl() -> None:
    """`compute_gae_advantage_return` of verl's core_algos.py, with which TinyZero trains: over rows
    that are padded on
    the right, from the last column back; returns are advantages plus values; then whitened over the
    mask."""
    rewards, values = _made_up(2)
    index = np.repeat(np.arange(4), LENGTHS)
    r, v, mask = (torch.zeros(4, 8, dtype=torch.float64) for _ in range(3))
    position = np.concatenate([np.arange(n) for n in LENGTHS])
    r[index, position], v[index, position], mask[index, position] = (
        torch.tensor(rewards),
        torch.tensor(values),
        1.0,
    )
    gamma, lam, final, columns = 0.98, 0.95, torch.zeros(4, dtype=torch.float64), []
    for t in range(7, -1, -1):
        following = v[:, t + 1] if t < 7 else 0.0
        final = r[:, t] + gamma * following - v[:, t] + gamma * lam * final
        columns.append(final)
    advantages = torch.stack(columns[::-1], 1)
    returns = advantages + v
    mean = (advantages * mask).sum() / mask.sum()
    variance = (
        ((advantages - mean).square() * mask).sum() / mask.sum() * (mask.sum() / (mask.sum() - 1))
    )
    whitened = (advantages - mean) * torch.rsqrt(variance + 1e-8)

    result = gae_advantages(rewards, values, LENGTHS, gamma, lam)
    assert result + values == pytest.approx(returns[index, position].numpy())
    center, factor = whitening(float(len(result)), float(result.sum()), float((result**2).sum()))
    assert (result - center) * factor == pytest.approx(whitened[index, position].numpy())


def test_whitening_makes_nothing_of_nothing() -> None:
    assert whitening(0.0, 0.0, 0.0) == (0.0, 1.0)
    assert whitening(1.0, 3.0, 9.0) == (3.0, 1.0)
    mean, factor = whitening(4.0, 2.0, 1.0)
    assert mean == 0.5
    assert factor == pytest.approx(1e4)  # all alike: the rounding of zeros stays small


def test_lambda_of_a_length() -> None:
    assert length_lambda(np.array([1, 20, 40, 400]), 0.05) == pytest.approx([0.0, 0.0, 0.5, 0.95])


def test_explained_variance() -> None:
    returns, values = np.array([0.0, 1.0, 1.0, 0.0]), np.array([0.5, 0.5, 1.0, 0.0])
    errors = returns - values
    sums = tuple((x.sum(), (x**2).sum()) for x in (returns, errors))
    assert explained_variance(4.0, *sums) == pytest.approx(1 - errors.var() / returns.var())
    assert explained_variance(4.0, (4.0, 4.0), (0.0, 0.0)) is None
    assert explained_variance(0.0, (0.0, 0.0), (0.0, 0.0)) is None


def test_the_value_loss_and_where_it_has_a_gradient() -> None:
    """Old values 0, bound 0.2. What came too far towards its target is held; what ran away from it
    is not."""
    values = torch.tensor([0.1, 0.5, -0.5, float("nan")], requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    loss, clipped = value_loss(values, torch.zeros(4), torch.full((4,), 1.0), mask, 0.2)
    assert float(loss.detach()) == pytest.approx(0.5 * (0.9**2 + 0.8**2 + 1.5**2))
    assert int(clipped) == 1
    loss.backward()
    assert isinstance(values.grad, Tensor)
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5, 0.0])
    free, none = value_loss(values.detach(), torch.zeros(4), torch.full((4,), 1.0), mask, None)
    assert float(free) == pytest.approx(0.5 * (0.9**2 + 0.5**2 + 1.5**2))
    assert int(none) == 0


def test_rewards_stand_at_tokens() -> None:
    turns = Turn(2, "stop", 0.25), Turn(0, "stop", 5.0), Turn(3, "stop", None)
    episode = Episode("ok", (), turns, [], {}, [])
    completion = Completion([1, 2, 3, 4, 5], [0.0] * 5, "stop", episode)
    assert token_rewards(1.0, completion, False).tolist() == [0, 0, 0, 0, 1.0]
    assert token_rewards(1.0, completion, True).tolist() == [0, 0.25, 0, 0, 0.75]
    assert token_rewards(1.0, Completion([], [], "stop"), True).tolist() == []


def test_before_the_critic_advantages_are_rewards() -> None:
    rewards = torch.tensor([[1.0, float("nan")], [0.5, 0.5]])
    result, has_none = compute_advantages(rewards, "gae", "batch")
    assert result.tolist() == [[1.0, 0.0], [0.5, 0.5]]
    assert has_none.tolist() == [True, True]


def test_a_warm_up_is_no_alarm() -> None:
    metrics: dict[str, float | None] = {
        "step": 1,
        "optim/updates": 0.0,
        "optim/skipped_updates": 0.0,
    }
    assert [name for name, _ in alarms(metrics)] == ["update"]
    assert not [name for name, _ in alarms(metrics | {"critic/loss": 0.1})]


GAE = {
    "advantage": {"estimator": "gae", "normalize_std": "batch"},
    "critic": {"path": "some/critic"},
}


def _refusal(tmp_path: Path, **sections: Any) -> str:
    tree = {
        "run_dir": "x",
        "model": {"path": "m"},
        "data": {"train": "x.jsonl"},
        "rewards": [{"name": "exact"}],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**tree, **GAE, **sections}), encoding="utf-8")
    try:
        load_config(path)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path) == ""
    assert "gae needs a critic; set critic.path" in _refusal(tmp_path, critic={})
    assert "critic.path is c and advantage.estimator is grpo" in _refusal(
        tmp_path, critic={"path": "c"}, advantage={}
    )
    assert _refusal(tmp_path, critic={"path": "policy"}) == ""
    assert "critic.coef" in _refusal(tmp_path, critic={"path": "policy", "coef": 0})
    assert "set it to batch" in _refusal(tmp_path, advantage={"estimator": "gae"})
    assert "critic.warmup_steps (5) must be < training.num_steps (5)" in _refusal(
        tmp_path, critic={"path": "c", "warmup_steps": 5}, training={"num_steps": 5}
    )
    assert "environment.discount is 0.5" in _refusal(
        tmp_path, environment={"gym": "x.py:Y", "discount": 0.5}
    )
    assert "critic.lam_policy" in _refusal(tmp_path, critic={"path": "c", "lam_policy": "long"})
    assert "critic.lam_policy" in _refusal(tmp_path, critic={"path": "c", "lam_policy": 1.5})
    assert "no reward has a weight" in _refusal(tmp_path, rewards=[{"name": "exact", "weight": 0}])
    assert "critic.path is empty" in _refusal(
        tmp_path, critic={"path": " "}, advantage=GAE["advantage"]
    )


def test_what_its_folder_tells_before_torch(tmp_path: Path) -> None:
    """No folder, none of a model, fewer tokens, several labels, quantised weights."""
    make_model(tmp_path / "model", "qwen3", tied=False)
    kind = transformers.AutoModelForSequenceClassification
    make_model(tmp_path / "classifier", "qwen3", tied=False, kind=kind, num_labels=1)
    make_model(tmp_path / "of_two", "qwen3", tied=False, kind=kind, id2label={0: "bad", 1: "good"})
    make_model(tmp_path / "other", "qwen3", tied=False, vocab_size=90)
    (tmp_path / "empty").mkdir()
    make_model(tmp_path / "quantised", "qwen3", tied=False)
    quantised_values = tmp_path / "quantised/config.json"
    quantised_values.write_text(
        json.dumps(json.loads(quantised_values.read_text()) | {"quantization_config": {"bits": 4}})
    )
    sections = {"advantage": {"estimator": "gae", "normalize_std": "batch"}}

    def said(name: str) -> str:
        sections["critic"] = {"path": str(tmp_path / name)}
        try:
            check_critic_model(
                load_config(write_config(tmp_path, tmp_path / "model", **sections), [])
            )
        except ConfigError as error:
            return str(error)
        return ""

    assert said("model") == ""
    assert said("classifier") == ""
    assert said("of_two").startswith(
        f"critic.path: {tmp_path}/of_two distinguishes 2 labels (score.weight: "
        "{'0': 'bad', '1': 'good'})"
    )
    assert said("none").startswith("critic.path: there is no folder")
    assert said("empty").endswith(
        "config.json: No such file or directory; a model's folder has one: save_pretrained or "
        "`hf download` wrote it"
    )
    assert said("other").endswith(
        f"knows 90 tokens, and {tmp_path}/model 97; take a critic of the policy's family"
    )
    assert said("quantised").startswith(f"critic.path: {tmp_path}/quantised ")


def test_rewards_of_the_check_by_token() -> None:
    """With and without rewards of single turns, and of a completion without a token."""
    turns = Turn(2, "stop", 0.25), Turn(0, "stop", 5.0), Turn(3, "stop", None)
    completion = Completion(
        [1, 2, 3, 4, 5], [0.0] * 5, "stop", Episode("ok", (), turns, [], {}, [])
    )
    rewards = {
        4: _place_rewards(completion, 1.0, True),
        5: _place_rewards(completion, 2.0, False),
        6: _place_rewards(Completion([], [], ""), 1, True),
    }
    assert rewards[5] == (5, [(4, 2.0)])
    assert rewards[4] == (5, [(1, 0.25), (4, 0.75)])
    assert rewards[6] == (0, [])


def test_returns_of_the_check_are_those_of_gae() -> None:
    """Of 5, 1, 8 and 3 tokens."""
    rewards, values = _made_up(3)
    lam = np.array([0.9, 0.5, 0.0, 1.0])
    expected = gae_advantages(rewards, values, LENGTHS, 0.97, lam) + values
    ends = LENGTHS.cumsum()[:-1]
    pieces = (np.split(column, ends) for column in (rewards, values))
    result = [lambda_returns(r, v, 0.97, x) for r, v, x in zip(*pieces, lam, strict=True)]
    assert np.concatenate(result) == pytest.approx(expected)


def test_the_policy_is_frozen_in_the_steps_of_the_warm_up() -> None:
    critic: Any = SimpleNamespace(warmup_steps=2)
    assert [Signals(critic=critic).freezes_policy(step) for step in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    assert not Signals().freezes_policy(1)


def test_a_warm_up_without_a_critic_holds_no_policy(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3", tied=False)
    config = load_config(write_config(tmp_path, tmp_path / "model", critic={"warmup_steps": 1}), [])
    assert not open_signals(config, cast(Policy, None), cast(Session, None)).freezes_policy(1)


def test_explain_counts_it(tmp_path: Path) -> None:
    """12 bytes a parameter of a shard, none of the lm_head's."""
    make_model(tmp_path / "model", "qwen3", tied=False)
    sections = {
        "advantage": {"estimator": "gae", "normalize_std": "batch"},
        "critic": {"path": str(tmp_path / "model")},
    }
    config = load_config(write_config(tmp_path, tmp_path / "model", **sections), [])
    shapes = [p.shape for n, p in _tensors(tmp_path / "model") if n != "lm_head.weight"]
    shard = sum(-(-shape[0] // 2) * math.prod(shape[1:]) for shape in shapes)
    retained, copied, gradients = side_model_rows(config, 2)
    assert (retained[1], copied[1], gradients[1]) == (
        size_text(12 * shard),
        size_text(12 * shard),
        size_text(4 * shard),
    )


def test_explain_counts_the_head_alone(tmp_path: Path) -> None:
    """12 bytes for each of 64 weights and a bias; a pass for the values, and none of its own."""
    make_model(tmp_path / "model", "qwen3", tied=False)
    sections = {"advantage": GAE["advantage"], "critic": {"path": "policy"}}
    config = load_config(write_config(tmp_path, tmp_path / "model", **sections), [])
    check_critic_model(config)
    assert [row[:2] for row in side_model_rows(config, 2)] == [
        ("value head and its optimizer", size_text(12 * 65))
    ]
    assert extra_passes(config) == (0, 0, 1, 0)
    assert side_models(config) == []
    peaks = Peaks(Counter(logits=1), Counter(logits=2))
    head = 16 * 65 + 4 * 64 * 12
    result = with_value_head(peaks, config, 64, ((8, 4), (8, 8)))
    assert (result.scoring, result.update) == (
        Counter(logits=1, **{"value head": head}),
        Counter(logits=2, **{"value head": head}),
    )
    assert list(idle_keys(config, {"critic.coef": "config.yaml"})) == []
    local = load_config(
        write_config(tmp_path, tmp_path / "model", **{**sections, "critic": {"path": "x/y"}}), []
    )
    assert list(idle_keys(local, {"critic.coef": "config.yaml"})) == [
        "critic.coef does nothing: critic.path is x/y"
    ]
    assert with_value_head(peaks, local, 64, ((8, 4),)) is peaks


def _tensors(folder: Path) -> list[tuple[str, Tensor]]:
    return [pair for file in folder.glob("*.safetensors") for pair in load_file(file).items()]
