"""Fingerprints of rows, the probe, the logprob check's bounds, and what the check of the data lets
pass."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_spmd.config.schema import (
    AdvantageConfig,
    DataConfig,
    EnvironmentConfig,
    LossConfig,
    RolloutConfig,
)
from grpo_spmd.distributed.reductions import Sum
from grpo_spmd.engine.weight_map import TensorPart, fused_rows
from grpo_spmd.engine.weight_proof import _coefficients, matches, row_fingerprints
from grpo_spmd.learn.losses import TILT_SUMS, mismatch_sums
from grpo_spmd.proofs.batch_check import BatchCheck, check_data, check_stop_ids
from grpo_spmd.proofs.gradient_check import GradientCheck
from grpo_spmd.proofs.logprob_check import LogprobCheck, MismatchError
from grpo_spmd.proofs.plain import LossTerm
from grpo_spmd.proofs.synthetic import CheckResult
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts

DTYPES = [torch.float32, torch.bfloat16]


def test_hash_of_a_row_by_hand() -> None:
    matrix = torch.tensor([[1.0, -2.5, 0.0, 3.0], [0.1, 7.0, -0.0, 1e-30]])
    coefficients = torch.tensor([3, -5, (1 << 62) + 1, 7])
    for dtype, bits_of in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        bits = matrix.to(dtype).view(bits_of).tolist()
        for num_slices in (1, 2):
            width = 4 // num_slices
            expected = [
                [
                    sum(
                        b * c
                        for b, c in zip(
                            row[i : i + width], coefficients.tolist()[i : i + width], strict=True
                        )
                    )
                    % 2**64
                    for i in range(0, 4, width)
                ]
                for row in bits
            ]
            result = row_fingerprints(matrix, coefficients, num_slices, dtype).tolist()
            assert [[value % 2**64 for value in row] for row in result] == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_or_moved_column_changes_the_hash_of_its_row_alone(
    dtype: torch.dtype,
) -> None:
    matrix = torch.randn(210, 500).to(dtype)  # more than one chunk
    coefficients = _coefficients(500, by_probe=False, dtype=dtype, step=0)
    assert (coefficients % 2 == 1).all()
    clean = row_fingerprints(matrix, coefficients, 1, dtype)
    faults: list[Tensor] = []
    for bit in range(dtype.itemsize * 8):
        flipped = matrix.clone()
        words = flipped.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
        words[200, 77] ^= -(1 << bit) if bit == dtype.itemsize * 8 - 1 else 1 << bit
        faults.append(flipped)
    negated, swapped, shifted = matrix.clone(), matrix.clone(), matrix.clone()
    negated[200, 10:12] *= -1
    swapped[200, 10:12] = matrix[200, 10:12].flip(0)
    shifted[200] = matrix[200].roll(1)
    for fault in [*faults, negated, swapped, shifted]:
        changed = row_fingerprints(fault, coefficients, 1, dtype) != clean
        assert changed.nonzero().tolist() == [[200, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outliers", [False, True])
def test_probe_is_quiet_about_rounding_and_sees_one_optimizer_step(
    dtype: torch.dtype, outliers: bool
) -> None:
    """torch's own matrix product stands for the engine's; a change of the size of `lr` for a first
    Adam step's."""
    generator = torch.Generator().manual_seed(1)
    policy = 0.02 * torch.randn(1000, 2048, generator=generator)
    if outliers:
        policy[:, ::500] *= 10
    for step in range(2):
        probe = _coefficients(2048, by_probe=True, dtype=dtype, step=step)
        expected = row_fingerprints(policy, probe, 1, dtype)[:, 0]
        retained = policy.to(dtype)
        same = matches(torch.nn.functional.linear(probe, retained), expected, probe, dtype)
        assert same.all()
        swap = retained.clone()
        swap[:, [5, 6]] = retained[:, [6, 5]]
        assert not matches(torch.nn.functional.linear(probe, swap), expected, probe, dtype).all()
    for lr in (1e-5, 1e-6) if dtype == torch.float32 else (1e-3, 1e-5, 1e-6):
        stale = policy + lr * torch.randn(policy.shape, generator=generator).sign()
        same = matches(torch.nn.functional.linear(probe, stale.to(dtype)), expected, probe, dtype)
        assert not same.all(), lr
    assert not matches(torch.full((1000,), math.nan), expected, probe, dtype).any()


def test_rows_of_a_fused_parameter_by_hand() -> None:
    # Four query heads and one KV head of 8 rows over two ranks, seen by the second: query heads 2
    # and 3, and the KV
    # head once more.
    layout = [(16, 32, 1), (8, 8, 0), (8, 8, 0)]
    assert fused_rows(["q", "k", "v"], layout) == (
        TensorPart("q", 32, 16, 0, 16),
        TensorPart("k", 8, 0, 16, 8),
        TensorPart("v", 8, 0, 24, 8),
    )
    # The same from a checkpoint in which q, k and v lie below each other in one tensor.
    assert fused_rows(["qkv"], layout) == tuple(
        TensorPart("qkv", 48, *position) for position in [(16, 0, 16), (32, 16, 8), (40, 24, 8)]
    )


@pytest.mark.parametrize(
    ("dtype", "initial", "fine", "faulty"),
    [
        # float32: 1e-4 and 0.05 nats, whatever the first step made of it.
        ("float32", (1e-6, 1e-5), [(9e-5, 0.04)], [(1.1e-4, 1e-5), (1e-6, 0.06)]),
        ("float32", (9e-5, 0.04), [(9e-5, 0.04)], [(1.1e-4, 1e-5), (1e-6, 0.06)]),
        # bfloat16: four times the first mean, at least 0.03 and at most 0.1.
        ("bfloat16", (0.001, 0.2), [(0.029, 14.0)], [(0.031, 0.2), (0.001, 16.0)]),
        ("bfloat16", (0.02, 2.0), [(0.079, 9.0)], [(0.081, 2.0), (0.01, 16.0)]),
        ("bfloat16", (0.049, 5.0), [(0.099, 9.0)], [(0.101, 5.0), (0.04, 16.0)]),
    ],
)
def test_the_logprob_checks_bounds_follow_the_number_format(
    dtype: str,
    initial: tuple[float, float],
    fine: list[tuple[float, float]],
    faulty: list[tuple[float, float]],
) -> None:
    logprob_check = LogprobCheck(dtype, None)
    with pytest.raises(MismatchError, match="differ by nan nats"):
        logprob_check.check(0, math.nan, math.nan)
    logprob_check.check(0, None, None)
    logprob_check.check(1, *initial)
    for figures in fine:
        logprob_check.check(2, *figures)
    for figures in faulty:
        with pytest.raises(
            MismatchError, match=rf"step 3: engine and policy differ by {figures[0]:.3g} nats"
        ):
            logprob_check.check(3, *figures)
    for figures in fine:  # later steps do not widen what the first one set
        logprob_check.check(4, *figures)


@pytest.mark.parametrize(
    # 7.0e-3: the policy's temperature x 1.01, by which the first step once set the scale
    ("dtype", "mean", "largest"),
    [
        ("float32", 7.0e-3, 0.05),
        ("float32", 1.1e-4, 1e-3),
        ("float32", 1e-6, 0.06),
        ("bfloat16", 0.11, 1.0),
    ],
)
def test_the_logprob_check_does_not_take_a_fault_of_the_first_step_for_rounding(
    dtype: str, mean: float, largest: float
) -> None:
    with pytest.raises(
        MismatchError,
        match="the policy does not compute this model as the engine does; the temperatures differ",
    ):
        LogprobCheck(dtype, None).check(0, mean, largest)


def test_a_first_step_between_most_models_and_any_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Models of 28 and 64 layers with weights like trained ones have 0.058 and 0.078
    (trained_weights); most have 0.03."""
    for mean, words in ((0.04, ""), (0.078, "differ by 0.078 nats a token, more than the 0.05")):
        caplog.clear()
        logprob_check = LogprobCheck("bfloat16", None)
        for step in (1, 2):
            logprob_check.check(step, mean, 1.0)
        assert len(caplog.records) == bool(words)
        assert words in caplog.text
    LogprobCheck("bfloat16", 0.09).check(1, 0.08, 1.0)
    assert len(caplog.records) == 1


def test_a_scale_from_an_older_checkpoint_widens_nothing() -> None:
    """One that a wrong first step set, when it was still believed."""
    logprob_check = LogprobCheck("float32", None)
    logprob_check.restore({"mismatch_scale": [7e-3, 0.5]})
    with pytest.raises(MismatchError, match=r"the bounds are 0\.0001 and 0\.05"):
        logprob_check.check(1, 7e-3, 0.05)


def _engine_and_policy(
    num_tokens: int, temperature: float, noise: float
) -> tuple[list[float], float]:
    """Sums of the tilt, and mean |difference|, of tokens that the engine samples at 1 and the
    policy scores at
    `temperature`; logits of either side have rounding of `noise` nats."""
    generator = torch.Generator().manual_seed(num_tokens)

    def rounded(logits: Tensor) -> Tensor:
        return (logits + noise * torch.randn(logits.shape, generator=generator)).double()

    logits = 1.2 * torch.randn(num_tokens, 40, generator=generator)
    engine_values, policy_values = (
        rounded(logits).log_softmax(-1),
        (rounded(logits) / temperature).log_softmax(-1),
    )
    tokens = torch.multinomial(engine_values.exp(), 1, generator=generator)
    engine, policy = engine_values.gather(1, tokens)[:, 0], policy_values.gather(1, tokens)[:, 0]
    entropy = -(policy_values.exp() * policy_values).sum(-1)
    sums = mismatch_sums(policy, engine, torch.ones(num_tokens, dtype=torch.bool), entropy)
    return [float(sums[name].value) for name in TILT_SUMS], float((policy - engine).abs().mean())


@pytest.mark.parametrize("num_tokens", [200, 5000])
@pytest.mark.parametrize("temperature", [0.95, 1.03, 1.05])
def test_a_temperature_that_hides_in_bfloat16s_rounding_is_seen_by_its_tilt(
    temperature: float, num_tokens: int
) -> None:
    sums, mean = _engine_and_policy(num_tokens, temperature, noise=0.01)
    assert mean < 0.05  # by its size alone it would pass
    with pytest.raises(MismatchError, match=r"not as rounding does: .* the temperatures differ"):
        LogprobCheck("bfloat16", None).check(0, mean, 0.5, sums)


@pytest.mark.parametrize("noise", [0.003, 0.02, 0.05])
def test_rounding_has_no_tilt(noise: float) -> None:
    """Of 5 tokens a step, of 200, of 3,000."""
    for num_tokens in (5, 200, 3000):
        logprob_check = LogprobCheck("bfloat16", None)
        for step in range(20):
            sums, _ = _engine_and_policy(num_tokens + step, 1.0, noise)
            logprob_check.check(step, 0.02, 0.5, sums)


def test_a_bound_from_the_config_replaces_what_is_measured() -> None:
    logprob_check = LogprobCheck("float32", 0.5)
    for step in range(2):
        logprob_check.check(step, 0.4, 9.0)
    with pytest.raises(MismatchError, match=r"differ by 0\.6 nats .* the bounds are 0\.5"):
        logprob_check.check(2, 0.6, 1.0)


class _Tokenizer:
    """Writes the day into chat prompts, as Llama 3.2's template does."""

    chat_template = "{{ strftime_now('%d') }}"
    eos_token_id = 7
    day = 1

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        return [self.day, *self.encode(messages[0]["content"])]

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(map(chr, token_ids))


def test_the_check_of_the_data_stops_no_run_over_a_new_day_or_a_moved_file(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    messages = [{"role": "user", "content": "ab"}]
    source.write_text(
        json.dumps({"prompt": messages, "n": 1}) + "\n" + json.dumps({"prompt": "cd", "n": 2})
    )
    completion = Completion([65], [0.0], "length")
    message = {
        "prompts": messages,
        "completions": [{"role": "assistant", "content": "A"}],
        "completion_ids": [65],
    }
    inputs = [
        {"n": 1, **message},
        {"n": 2, "prompts": "cd", "completions": "A", "completion_ids": [65]},
    ]
    prompts = Prompt(0, 0, [2, 97, 98], messages, {"n": 1}), Prompt(1, 1, [99, 100], "cd", {"n": 2})
    groups = [RolloutGroup(slot, prompt, [completion]) for slot, prompt in enumerate(prompts)]
    data, scored = DataConfig(train=str(source)), ScoredRollouts(reward_inputs=inputs)
    assert check_data(groups, scored, _Tokenizer(), data).errors == []
    changed = [groups[0], RolloutGroup(1, Prompt(1, 1, [99], "cd", {"n": 2}), [completion])]
    assert "token ids" in check_data(changed, scored, _Tokenizer(), data).errors[0]
    source.unlink()
    assert check_data(changed, scored, _Tokenizer(), data).errors == []


@pytest.mark.parametrize(
    ("text", "reason", "error"),
    [
        ("ab.", "stop", ""),
        ("abcd", "length", ""),
        ("\x07", "stop", ""),  # the stop token
        ("ab", "stop", "that ends with 98 has finish_reason 'stop'"),
        ("abc.", "length", "that ends with 46 has finish_reason 'length'"),
        ("a.b.", "stop", "goes on after a token that ends it"),
        ("a.bc", "length", "goes on after a token that ends it"),
        # A letter that is not complete yet: vLLM has not looked at the text.
        (".\ufffdb.", "stop", "goes on after a token that ends it"),
        (".\ufffd.", "stop", ""),
        # A blank that some tokenizers drop in front of the first word.
        ("No", "stop", ""),
        ("Noab", "length", ""),
    ],
)
def test_a_turn_ends_at_its_first_stop_string(text: str, reason: str, error: str) -> None:
    rollout = RolloutConfig(stop=(".", " No"), max_completion_tokens=4)
    settings: Any = SimpleNamespace(
        rollout=rollout,
        advantage=AdvantageConfig(),
        loss=None,
        reward_weights=[],
        stop_ids=frozenset({7}),
        environment=EnvironmentConfig(),
    )
    check = BatchCheck(settings, _Tokenizer())
    result = CheckResult()
    check._check_turns(result, Completion([*map(ord, text)], [0.0] * len(text), reason))
    assert [error in line for line in result.errors] == [True] * bool(error), result.errors


def test_stop_tokens_are_read_from_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('\ufeff{"eos_token_id": [3, 4]}', "utf-8")
    assert check_stop_ids(tmp_path, _Tokenizer(), {3, 4, 7}).errors == []
    assert check_stop_ids(tmp_path, _Tokenizer(), {3, 7}).errors != []


@pytest.mark.parametrize("is_in_total", [False, True])
def test_a_total_without_the_value_loss_is_seen(is_in_total: bool) -> None:
    """Also where the trainer reports no value loss."""
    bounds = SimpleNamespace(term=1e-4)
    check: Any = SimpleNamespace(_loss=LossConfig(), score_bound=1e-4, _bounds=bounds)
    loss, balance, value = (LossTerm(torch.tensor(x), x) for x in (2.0, 0.25, 0.5))
    totals: Any = {
        "loss": Sum(2.25 + 0.5 * is_in_total),
        "router_aux": Sum(0.25),
    }
    result = CheckResult()
    terms = {"loss": loss, "router_aux": balance, "value": value}
    GradientCheck._compare_terms(check, result, totals, terms)
    expected = "the term 'loss' of the loss, relative to the sum of its |summands|, is off by 0.182"
    assert [error[: len(expected)] for error in result.errors] == [expected] * (not is_in_total)
