"""The same rollouts give the same loss, gradient and parameters however the work is split, and
those of plain
transformers in fp32."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, LossConfig
from grpo_spmd.records import Completion, RolloutGroup
from tests.support.dumps import scored
from tests.support.models import make_model, write_config
from tests.support.nightly import selected_values
from tests.support.ranks import run_worker
from tests.support.workers.shared_update import SHARED_SETTINGS, shared_groups
from tests.support.workers.update import (
    COMPILED_AT,
    GROUP_SIZE,
    NUM_GROUPS,
    REPLICATED,
    SETTINGS,
    SPLITS,
    UNSCORED,
    VARIANTS,
    fixed_groups,
    fixed_reward,
    with_setting,
)

Results = dict[tuple[str, str], dict[str, Any]]

# Adam's first step is lr * g / (|g| + eps): where |g| is near eps, rounding of g decides the step.
# Weights move by at
# most lr.
SECTIONS: dict[str, Any] = {
    "data": {"max_prompt_tokens": 9},
    "rollout": {
        "num_prompts_per_step": NUM_GROUPS,
        "group_size": GROUP_SIZE,
        "max_completion_tokens": 28,
        "temperature": 0.8,
    },
    "training": {"num_mini_batches": 1, "max_tokens_per_micro_batch": 100},
    "optimizer": {"lr": 1e-5, "max_grad_norm": 0.5},
    "loss": {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.02},
}
WORLD_SIZES = (1, 2, 3, 4)
ONE_ROW, FEW_ROWS, UNPACKED = SPLITS
SEVERAL_STEPS = "two epochs, two mini-batches"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("partition")
    make_model(folder / "model", "qwen3", tied=True)
    make_model(folder / "reference", "qwen3", tied=True, seed=1)
    return folder


@pytest.fixture(scope="module")
def config_file(folder: Path) -> Path:
    return write_config(folder, folder / "model", **SECTIONS)


@pytest.fixture(scope="module")
def by_ranks(folder: Path, config_file: Path, request: pytest.FixtureRequest) -> dict[int, Results]:
    """All splits of the selected settings; of 1 and 2 ranks, at which all tests look, one split of
    the others."""
    cases: dict[int, list[str]] = {
        num_ranks: ["as configured", SEVERAL_STEPS]
        for num_ranks in (1, 2, *selected_values(request, "num_ranks"))
    }
    for num_ranks, setting in selected_values(request, "case"):
        if setting not in cases.setdefault(num_ranks, []):
            cases[num_ranks].append(setting)
    result = {}
    for num_ranks, settings in cases.items():
        out = folder / f"ranks_{num_ranks}.pt"
        files = str(config_file), str(folder / "reference"), str(out)
        run_worker(num_ranks, "update", *files, *settings)
        result[num_ranks] = torch.load(out, weights_only=True)
    return result


def test_the_splits_really_differ(by_ranks: dict[int, Results]) -> None:
    rows = {key: result["rows"] for key, result in by_ranks[1].items()}
    assert rows["as configured", ONE_ROW] == 1
    assert 1 < rows["as configured", FEW_ROWS] < 12
    assert rows["as configured", UNPACKED] == NUM_GROUPS * GROUP_SIZE
    assert by_ranks[2]["as configured", FEW_ROWS]["rows"] > 1


def test_the_settings_really_bind(by_ranks: dict[int, Results]) -> None:
    """A setting that clips nothing, caps nothing and masks nothing would show nothing."""
    result = {setting: by_ranks[1][setting, ONE_ROW] for setting in SETTINGS}
    for setting in ("clip", "gspo, sequence", "cispo, constant", SEVERAL_STEPS):
        assert 0.1 < result[setting]["clip_frac"] < 0.99, setting
    for setting in ("as configured", "sequence_tis", "icepop"):
        assert 0.1 < result[setting]["capped_frac"] < 0.9, setting
    for setting in ("kl in reward", "reinforce_pp"):
        assert abs(result[setting]["metrics"]["reward/kl_penalty_mean"]) > 0.1
    assert (
        result["mask_truncated"]["loss_tokens"]
        == result["as configured"]["loss_tokens"] - GROUP_SIZE * 28
    )
    assert [result[setting]["updates"] for setting in ("as configured", SEVERAL_STEPS)] == [1, 4]
    assert len({result[setting]["loss"] for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize(
    "case",
    [(num_ranks, setting) for num_ranks in WORLD_SIZES for setting in SETTINGS],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_loss_gradient_and_parameters_do_not_depend_on_the_split(
    by_ranks: dict[int, Results], case: tuple[int, str]
) -> None:
    """Ranks, micro-batches, packing, who sampled what, recomputation, compilation. After the first
    of several optimizer steps the weights differ by rounding, and Adam, which divides by the
    gradient's size, hands that on at about ten times the size: 1e-5 there, else 1e-6.
    """
    num_ranks, setting = case
    reference = by_ranks[1][setting, ONE_ROW]
    actual = {split: result for (of, split), result in by_ranks[num_ranks].items() if of == setting}
    replicated = num_ranks % 2 == 0 and setting in ("as configured", SEVERAL_STEPS)
    variants = len(VARIANTS) - (num_ranks != COMPILED_AT) if setting == "as configured" else 0
    assert len(actual) == len(SPLITS) - (num_ranks == 3) + variants + replicated
    assert (REPLICATED in actual) == replicated
    compare_updates(actual, reference, setting)


def compare_updates(
    updates: dict[str, dict[str, Any]], reference: dict[str, Any], setting: str
) -> None:
    """Asserts that each update, by split, is that of `reference`."""
    bound = 1e-5 if setting == SEVERAL_STEPS else 1e-6
    for split, result in updates.items():
        for exact in ("loss_tokens", "updates", "mismatch_tokens"):
            assert result[exact] == reference[exact], split
        for name in ("loss", "grad_norm"):
            assert result[name] == pytest.approx(reference[name], rel=bound), split
        for name in ("clip_frac", "correction", "capped_frac", "mismatch_kl"):
            assert result[name] == pytest.approx(reference[name], rel=1e-5), split
        assert result["advantages"] == pytest.approx(reference["advantages"], rel=1e-5, abs=1e-6)
        assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-5)
        for name, expected in reference["parameters"].items():
            assert relative_difference(result["parameters"][name], expected) < bound, (split, name)
        # Tensor by tensor, sums of float32 products in another order differ by a few 1e-7.
        for gradients, expected_gradients in zip(
            result["gradients"], reference["gradients"], strict=True
        ):
            for name, expected in expected_gradients.items():
                assert relative_difference(gradients[name], expected) < 5 * bound, (split, name)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "glm4_moe",
        *(pytest.param(n, marks=pytest.mark.nightly) for n in ("qwen2_moe", "mixtral", "olmoe")),
    ],
)
def test_the_update_of_experts_does_not_depend_on_the_split(tmp_path: Path, family: str) -> None:
    """On 1, 2 and 3 ranks, of 6 experts, some of which get no token of a row."""
    tied = family == "qwen3_moe"
    for name, seed in (("model", 0), ("reference", 1)):
        make_model(tmp_path / name, family, tied=tied, seed=seed)
    config = write_config(tmp_path, tmp_path / "model", **SECTIONS)
    settings = ("as configured", SEVERAL_STEPS)
    results: dict[int, Results] = {}
    for num_ranks in (1, 2, 3):
        out = tmp_path / f"ranks_{num_ranks}.pt"
        files = str(config), str(tmp_path / "reference"), str(out)
        run_worker(num_ranks, "update", *files, *settings)
        results[num_ranks] = torch.load(out, weights_only=True)
    for num_ranks, by_setting in results.items():
        for setting in settings:
            updates = {split: r for (of, split), r in by_setting.items() if of == setting}
            assert len(updates) >= 2
            assert (REPLICATED in updates) == (num_ranks == 2)
            compare_updates(updates, results[1][setting, ONE_ROW], setting)


@pytest.mark.parametrize(
    "num_ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 3))]
)
def test_the_update_does_not_depend_on_shared_prefixes(
    folder: Path, config_file: Path, tmp_path: Path, num_ranks: int
) -> None:
    """Ragged, with a group of truncated completions, a prompt that two groups have, and forked
    episodes: beside rows that share nothing and beside plain transformers."""
    out = tmp_path / "shared.pt"
    run_worker(num_ranks, "shared_update", str(config_file), str(folder / "reference"), str(out))
    results = torch.load(out, weights_only=True)
    for setting in SHARED_SETTINGS:
        plain_rows = results[setting, False]
        assert plain_rows["forwarded_frac"] == 1.0
        shared = results[setting, True]
        assert shared["shared_rows"] > 0
        assert shared["forwarded_frac"] < 0.7
        compare_updates({"shared": shared}, plain_rows, setting)
        config = with_setting(load_config(config_file), setting)
        plain = plain_update(config, folder / "reference", shared_groups())
        assert shared["loss_tokens"] == plain["loss_tokens"]
        bound = 1e-4 if setting == SEVERAL_STEPS else 1e-5
        assert shared["loss"] == pytest.approx(plain["loss"], rel=bound)
        for gradients, expected in zip(shared["gradients"], plain["gradients"], strict=True):
            for name, gradient in expected.items():
                assert relative_difference(gradients[name], gradient) < bound, name


def test_layers_are_compiled_once_for_all_lengths(by_ranks: dict[int, Results]) -> None:
    """Before and after attention, with and without gradients, whatever the number of layers and of
    lengths."""
    graphs = {
        variant: by_ranks[COMPILED_AT]["as configured", variant]["graphs"] for variant in VARIANTS
    }
    assert graphs["activations recomputed but for products"] == 0
    assert by_ranks[COMPILED_AT]["as configured", FEW_ROWS]["rows"] > 1
    assert 0 < graphs["compiled"] <= 10


def test_mismatch_is_measured_once_and_on_the_policy_that_sampled(
    by_ranks: dict[int, Results],
) -> None:
    """Over two epochs and two mini-batches every token is measured once, with the logprobs from
    before the first
    step."""
    several, single = by_ranks[1][SEVERAL_STEPS, ONE_ROW], by_ranks[1]["as configured", ONE_ROW]
    assert several["loss_tokens"] == 2 * single["loss_tokens"] == 2 * several["mismatch_tokens"]
    assert several["mismatch_kl"] == pytest.approx(single["mismatch_kl"], rel=1e-6)
    assert several["mismatch_histogram"] == pytest.approx(single["mismatch_histogram"], abs=1.0)
    assert sum(several["mismatch_histogram"]) == single["mismatch_tokens"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_loss_gradient_and_parameters_equal_plain_transformers(
    by_ranks: dict[int, Results], folder: Path, config_file: Path, setting: str
) -> None:
    result, plain = (
        by_ranks[2][setting, FEW_ROWS],
        plain_update(with_setting(load_config(config_file), setting), folder / "reference"),
    )
    bound = 1e-4 if setting == SEVERAL_STEPS else 1e-5
    assert result["loss_tokens"] == plain["loss_tokens"]
    assert result["loss"] == pytest.approx(plain["loss"], rel=bound)
    assert result["grad_norm"] == pytest.approx(plain["grad_norm"], rel=bound)
    for gradients, expected_gradients in zip(result["gradients"], plain["gradients"], strict=True):
        for name, expected in expected_gradients.items():
            assert relative_difference(gradients[name], expected) < bound, name
    for name, expected in plain["parameters"].items():
        assert relative_difference(result["parameters"][name], expected) < (
            1e-5 if setting == SEVERAL_STEPS else 1e-6
        ), name


def test_the_update_moves_every_parameter(by_ranks: dict[int, Results], folder: Path) -> None:
    start = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    ).state_dict()
    for name, parameter in by_ranks[2]["as configured", FEW_ROWS]["parameters"].items():
        assert not torch.equal(parameter, start[name]), name


@pytest.fixture(scope="module")
def plain_scores(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Difference and entropy of each completion of `fixed_groups`, by plain transformers before any
    update."""
    model = load_plain(folder / "model")
    result = []
    for group in fixed_groups():
        for completion in group.completions:
            with torch.no_grad():
                log_p, entropy = score_plain(
                    model, group.prompt.token_ids, completion.token_ids, 0.8
                )
            result.append((log_p - torch.tensor(completion.logprobs, dtype=torch.float64), entropy))
    return result


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_scores_of_tokens_are_those_of_plain_transformers_however_the_work_is_split(
    by_ranks: dict[int, Results],
    plain_scores: list[tuple[torch.Tensor, torch.Tensor]],
    num_ranks: int,
) -> None:
    """Of the policy before the first update, whatever the loss is made of, to float16; means to
    float32."""
    unscored = UNSCORED[0] * GROUP_SIZE + UNSCORED[1]
    for (setting, split), result in by_ranks[num_ranks].items():
        lines = scored(result["scores"])
        assert [line["rollout_id"] for line in lines] == list(range(NUM_GROUPS * GROUP_SIZE)), (
            setting,
            split,
        )
        for line, (difference, entropy) in zip(lines, plain_scores, strict=True):
            assert line["difference"] == pytest.approx(difference.tolist(), rel=5e-4, abs=1e-5), (
                setting,
                split,
            )
            assert line["entropy"] == pytest.approx(entropy.tolist(), rel=5e-4, abs=1e-5), (
                setting,
                split,
            )
            assert line["difference_mean"] == pytest.approx(
                difference.abs().mean().item(), rel=1e-5, abs=1e-6
            )
            assert line["difference_max"] == pytest.approx(
                difference.abs().max().item(), rel=1e-5, abs=1e-6
            )
            slot, size = line["rollout_id"] // GROUP_SIZE, len(difference)
            masked = line["rollout_id"] == unscored or (setting == "mask_truncated" and slot == 2)
            assert line.get("loss_mask") == ([0] * size if masked else None), (setting, split)
            assert "advantages" not in line  # a rollout's tokens have one


def relative_difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm().detach() / expected.norm().detach())


def load_plain(path: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def score_plain(
    of: Any, prompt: list[int], completion: list[int], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of a completion's tokens, and entropies."""
    ids = prompt + completion
    return score_at(of, ids, list(range(len(prompt), len(ids))), temperature)


def score_at(
    of: Any, token_ids: list[int], positions: list[int], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the tokens at these positions of one sequence, and entropies."""
    ids = torch.tensor([token_ids])
    at = torch.tensor(positions)
    log_p = (of(ids).logits[0, at - 1].double() / temperature).log_softmax(-1)
    return log_p.gather(-1, ids[0, at, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_contexts(
    group: RolloutGroup, completion: Completion
) -> list[tuple[list[int], list[int]]]:
    """(token ids, positions of the sampled ones) of each sequence of a completion."""
    prompt = group.prompt.token_ids
    if completion.episode is None:
        ids = prompt + completion.token_ids
        return [(ids, list(range(len(prompt), len(ids))))]
    return [
        (segment.token_ids.tolist(), segment.sampled.nonzero()[0].tolist())
        for segment in completion.episode.segments
    ]


def plain_update(
    config: Config, reference_model: Path, groups_of_step: Sequence[RolloutGroup] | None = None
) -> dict[str, Any]:
    """GRPO and its relatives written out anew: plain transformers, one sequence at a time, each
    loss as its paper has
    it, autograd through all of it, and torch's AdamW; float64 but for the models."""
    loss_config, max_length = config.loss, config.rollout.max_completion_tokens

    model, reference = load_plain(config.model.path), load_plain(reference_model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    flat = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decay, "weight_decay": config.optimizer.weight_decay},
        {"params": flat, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=config.optimizer.betas)

    def scores(
        of: Any, contexts: list[tuple[list[int], list[int]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = [
            score_at(of, ids, positions, config.rollout.temperature) for ids, positions in contexts
        ]
        return torch.cat([log_p for log_p, _ in pieces]), torch.cat([h for _, h in pieces])

    def kl(log_p: torch.Tensor, log_r: torch.Tensor) -> torch.Tensor:
        less = log_r - log_p
        return {"k1": -less, "k2": 0.5 * less**2, "k3": less.exp() - 1 - less}[
            loss_config.kl_estimator
        ]

    sequences: list[dict[str, Any]] = []
    for group in groups_of_step or fixed_groups():
        for sample, completion in enumerate(group.completions):
            contexts = plain_contexts(group, completion)
            with torch.no_grad():
                old, _ = scores(model, contexts)
                ref, _ = scores(reference, contexts)
            engine = torch.tensor(completion.logprobs, dtype=torch.float64)
            reward = fixed_reward(group.slot, sample)
            if reward is not None and config.advantage.overlong_buffer_tokens:
                buffer = config.advantage.overlong_buffer_tokens
                over = min(max(len(completion.token_ids) - (max_length - buffer), 0), buffer)
                reward -= config.advantage.overlong_penalty * over / buffer
            if reward is not None and loss_config.kl_in == "reward":
                reward -= loss_config.kl_coef * float(kl(old, ref).sum())
            truncated = completion.finish_reason == "length"
            sequences.append(
                {
                    "slot": group.slot,
                    "contexts": contexts,
                    "completion": completion.token_ids,
                    "old": engine if loss_config.old_logprobs == "engine" else old,
                    "factor": correction(loss_config, (old - engine).exp()),
                    "ref": ref,
                    "reward": reward,
                    "counts": reward is not None and not (truncated and loss_config.mask_truncated),
                }
            )
    add_advantages(sequences, config)

    losses, norms, all_gradients, num_tokens = [], [], [], 0
    size = NUM_GROUPS // config.training.num_mini_batches
    for _ in range(config.training.num_epochs):
        for initial in range(0, NUM_GROUPS, size):
            used = [s for s in sequences if initial <= s["slot"] < initial + size and s["counts"]]
            tokens = sum(len(s["completion"]) for s in used)
            total = torch.zeros((), dtype=torch.float64)
            for s in used:
                log_p, entropy = scores(model, s["contexts"])
                term = policy_terms(loss_config, log_p, s["old"], s["advantage"]) * s["factor"]
                term = term - loss_config.entropy_coef * entropy
                if loss_config.kl_in == "loss":
                    term = term + loss_config.kl_coef * kl(log_p, s["ref"])
                if loss_config.aggregation == "token":
                    total = total + term.sum() / tokens
                elif loss_config.aggregation == "sequence":
                    total = total + term.mean() / len(used)
                else:
                    total = total + term.sum() / (len(used) * max_length)
            optimizer.zero_grad()
            total.backward()
            norms.append(
                float(
                    torch.nn.utils.clip_grad_norm_(
                        model.parameters(), config.optimizer.max_grad_norm
                    )
                )
            )
            all_gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            losses.append(total.item())
            num_tokens += tokens
    return {
        "loss": sum(losses) / len(losses),
        "loss_tokens": num_tokens,
        "grad_norm": max(norms),
        "gradients": all_gradients,
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
    }


def correction(config: LossConfig, ratio: torch.Tensor) -> torch.Tensor:
    """The weight of each token of one sequence, `ratio` being p(policy) / p(engine) of its
    tokens."""
    cap = config.rollout_correction_cap
    if config.rollout_correction == "none":
        return torch.ones_like(ratio)
    if config.rollout_correction == "token_tis":
        return torch.tensor([min(float(r), cap) for r in ratio], dtype=torch.float64)
    if config.rollout_correction == "sequence_tis":
        return torch.full_like(ratio, min(math.prod(ratio.tolist()), cap))
    return torch.tensor(
        [float(r) if 1 / cap <= r <= cap else 0.0 for r in ratio], dtype=torch.float64
    )


def policy_terms(
    config: LossConfig, log_p: torch.Tensor, old: torch.Tensor, advantage: float
) -> torch.Tensor:
    """The policy's term of each token of one sequence."""
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    if config.policy == "cispo":
        return -advantage * (log_p - old).exp().clamp(low, high).detach() * log_p
    ratio = (log_p - old).exp()
    if config.policy == "gspo":
        ratio = (log_p - old).mean().exp().expand(len(log_p))
    objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if config.dual_clip is not None and advantage < 0:
        objective = torch.maximum(
            objective, torch.full_like(objective, config.dual_clip * advantage)
        )
    return -objective


def add_advantages(sequences: list[dict[str, Any]], config: Config) -> None:
    expected_names = [s["reward"] for s in sequences if s["reward"] is not None]
    for slot in range(NUM_GROUPS):
        group = [s for s in sequences if s["slot"] == slot and s["reward"] is not None]
        rewards = [s["reward"] for s in group]
        for s in group:
            rest = [r["reward"] for r in group if r is not s]
            estimator, normalize = config.advantage.estimator, config.advantage.normalize_std
            if estimator == "reinforce_pp":
                s["advantage"] = (s["reward"] - statistics.mean(expected_names)) / statistics.stdev(
                    expected_names
                )
            elif estimator == "max_rl":
                s["advantage"] = s["reward"] / statistics.mean(rewards) - 1
            elif estimator == "rloo":
                s["advantage"] = s["reward"] - statistics.mean(rest)
            else:
                divisor = {
                    "group": statistics.stdev(rewards),
                    "batch": statistics.stdev(expected_names),
                    "none": 1.0,
                }[normalize]
                s["advantage"] = (s["reward"] - statistics.mean(rewards)) / (
                    1.0 if estimator == "dr_grpo" else divisor
                )
