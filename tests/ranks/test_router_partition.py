"""An update that replays routes gives the same loss, gradient and parameters however the work is
split, and those of plain transformers, whose routers are written out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from grpo_spmd.learn.advantages import compute_advantages
from grpo_spmd.learn.contexts import completion_contexts
from tests.support.models import make_model, write_config
from tests.support.ranks import run_worker
from tests.support.workers.routed_update import NUM_EXPERTS, NUM_LAYERS, SEVERAL, routed_groups
from tests.support.workers.update import GROUP_SIZE, NUM_GROUPS, SPLITS, fixed_reward

KL, ENTROPY, BALANCE, TEMPERATURE, RATE = 0.1, 0.02, 0.3, 0.8, 1e-5
SECTIONS: dict[str, Any] = {
    "data": {"max_prompt_tokens": 9},
    "rollout": {
        "num_prompts_per_step": NUM_GROUPS,
        "group_size": GROUP_SIZE,
        "max_completion_tokens": 28,
        "temperature": TEMPERATURE,
    },
    "training": {"num_mini_batches": 1, "max_tokens_per_micro_batch": 100},
    "optimizer": {"lr": RATE, "max_grad_norm": 1e9, "weight_decay": 0.0},
    "loss": {
        "kl_coef": KL,
        "kl_estimator": "k2",
        "entropy_coef": ENTROPY,
        "rollout_correction": "none",
        "router_aux_coef": BALANCE,
    },
}
Results = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    make_model(folder / "model", "qwen3_moe", tied=True)
    make_model(folder / "reference", "qwen3_moe", tied=True, seed=1)
    write_config(folder, folder / "model", **SECTIONS)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, Results]:
    loaded = {}
    for num_ranks in (1, 2):
        out = folder / f"ranks_{num_ranks}.pt"
        files = (folder / "config.yaml", folder / "reference", out)
        run_worker(num_ranks, "routed_update", *map(str, files))
        loaded[num_ranks] = torch.load(out, weights_only=True)
    return loaded


def test_loss_gradient_and_parameters_do_not_depend_on_the_split(
    results: dict[int, Results],
) -> None:
    """Ranks, replicas, micro-batches, recomputation, several steps; random routes, the policy's
    own, none. Episodes with forks are among the rollouts. Adam divides by the gradient's size, and
    hands rounding on from one step to the next at ten times the size."""
    first = next(iter(SPLITS))
    num_compared = 0
    for splits in results.values():
        for (kind, split), result in splits.items():
            expected = results[1][kind, first]
            num_compared += 1
            bound = 1e-5 if kind == SEVERAL else 1e-6
            assert result["updates"] == (4 if kind == SEVERAL else 1)
            for name in ("loss", "grad_norm", "router_aux"):
                assert result[name] == pytest.approx(expected[name], rel=bound), (kind, split)
            for name, tensor in expected["parameters"].items():
                assert difference(result["parameters"][name], tensor) < bound, (kind, split)
            for gradients, wanted in zip(result["gradients"], expected["gradients"], strict=True):
                for name, tensor in wanted.items():
                    assert difference(gradients[name], tensor) < 5 * bound, (kind, split, name)
    # Three splits of four kinds, and two variants, on one and two ranks; replicas.
    assert num_compared == 2 * (12 + 2) + 1
    values = [results[1][kind, first]["loss"] for kind in ("random", "none")]
    assert abs(values[0] - values[1]) > 1e-4


@pytest.mark.nightly
def test_compiled_layers_replay_too(folder: Path, results: dict[int, Results]) -> None:
    out = folder / "compiled.pt"
    files = (folder / "config.yaml", folder / "reference", out)
    run_worker(1, "routed_update", *map(str, files), "compiled", timeout_s=900)
    [(_, compiled)] = torch.load(out, weights_only=True).items()
    expected = results[1]["random", next(iter(SPLITS))]
    assert compiled["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for name, tensor in expected["gradients"][0].items():
        assert difference(compiled["gradients"][0][name], tensor) < 5e-6, name


def test_equal_routes_change_nothing(results: dict[int, Results]) -> None:
    """Beyond the last digits: an expert computes its tokens together, and the last token of a
    sequence, which predicts nothing, has other routes."""
    for splits in results.values():
        for split in SPLITS:
            equal, without = (splits[kind, split] for kind in ("equal", "none"))
            assert equal["loss"] == pytest.approx(without["loss"], rel=1e-6)
            for name, tensor in without["gradients"][0].items():
                assert difference(equal["gradients"][0][name], tensor) < 5e-6, (split, name)


def test_replay_equals_plain_transformers(results: dict[int, Results], folder: Path) -> None:
    model, reference = (load_plain(folder / name) for name in ("model", "reference"))
    sequences: list[dict[str, Any]] = []
    for group in routed_groups("random"):
        rewards = [fixed_reward(group.slot, sample) for sample in range(GROUP_SIZE)]
        tensor = torch.tensor([[float("nan") if r is None else r for r in rewards]])
        advantages = compute_advantages(tensor, "grpo", "group")[0][0].tolist()
        for completion, reward, advantage in zip(
            group.completions, rewards, advantages, strict=True
        ):
            for context in completion_contexts(group.prompt.token_ids, completion):
                sequences.append({"context": context, "reward": reward, "advantage": advantage})
    num_tokens = sum(int(s["context"].sampled.sum()) for s in sequences if s["reward"] is not None)
    # The engine has read all tokens of a sequence but its last.
    routes = torch.cat([torch.from_numpy(s["context"].routes).long() for s in sequences])
    num_read = len(routes)
    taken = torch.nn.functional.one_hot(routes, NUM_EXPERTS).double().sum((0, 2)) / num_read
    total = torch.zeros((), dtype=torch.float64)
    probabilities = [torch.zeros(NUM_EXPERTS, dtype=torch.float64) for _ in range(NUM_LAYERS)]
    for sequence in sequences:
        log_p, entropy, router_logits = score(model, sequence["context"])
        for layer, logits in enumerate(router_logits):
            probabilities[layer] = probabilities[layer] + logits[:-1].double().softmax(-1).sum(0)
        if sequence["reward"] is None:
            continue
        with torch.no_grad():
            log_r, _, _ = score(reference, sequence["context"])
        ratio = (log_p - log_p.detach()).exp()
        per_token = -sequence["advantage"] * ratio + KL * 0.5 * (log_p - log_r) ** 2
        total = total + (per_token - ENTROPY * entropy).sum() / num_tokens
    balance = sum(
        (
            NUM_EXPERTS * (taken[layer] * probabilities[layer] / num_read).sum()
            for layer in range(NUM_LAYERS)
        ),
        torch.zeros(()),
    )
    balance = BALANCE * balance / NUM_LAYERS
    (total + balance).backward()
    for split in SPLITS:
        result = results[2]["random", split]
        assert result["loss"] == pytest.approx(total.item(), rel=1e-5)
        assert result["router_aux"] == pytest.approx(balance.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert difference(result["gradients"][0][name], parameter.grad) < 1e-5, (split, name)


def difference(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).norm().detach() / expected.norm().detach())


def load_plain(path: Path) -> Any:
    """Plain transformers, whose routers take what stands in `routes` and say their logits."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model.routes, model.said = None, []
    for layer, block in enumerate(model.model.layers):
        gate = block.mlp.gate

        def forward(hidden: Tensor, gate: Any = gate, layer: int = layer) -> Any:
            logits = hidden @ gate.weight.T
            chosen = model.routes[:, layer]
            weights = logits.exp().gather(-1, chosen) / logits.exp().sum(-1, keepdim=True)
            model.said.append(logits)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = forward
    return model


def score(model: Any, context: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Logprobs and entropies of the sampled tokens of one sequence, and its routers' logits."""
    ids = torch.from_numpy(context.token_ids).long()
    routes = torch.from_numpy(context.routes).long()
    # Nothing depends on the experts of the last token.
    model.routes, model.said = torch.cat([routes, routes[:1]]), []
    positions = torch.from_numpy(context.sampled).nonzero()[:, 0]
    logits = model(ids[None]).logits[0].double() / TEMPERATURE
    log_p = logits[positions - 1].log_softmax(-1)
    chosen = log_p.gather(-1, ids[positions][:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1), model.said
