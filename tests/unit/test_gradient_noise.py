"""How the update check judges differences in bfloat16: by what the number format itself rounds."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import ModelConfig, ProofConfig
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.model.policy import build_policy
from grpo_spmd.model.sharding import reshard
from grpo_spmd.proofs import gradient_check
from grpo_spmd.proofs.gradient_check import WHOLE, CheckResult, GradientCheck, SignalProofs
from grpo_spmd.proofs.logprob_check import LogprobCheck, MismatchError
from grpo_spmd.proofs.plain_forward import use_float32, use_plain_attention
from grpo_spmd.proofs.switches import weakened_proofs
from grpo_spmd.proofs.update_check import UpdateCheck
from tests.support.learn import check_settings_of
from tests.support.models import make_model, write_config


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


@pytest.mark.parametrize("recomputed", [False, True])
def test_float32_arithmetic_over_the_same_weights(
    tmp_path: Path, session: Session, recomputed: bool
) -> None:
    """Beside a float32 model whose weights are those of bfloat16: logits and gradients. Afterwards
    the policy computes as before, to the bit."""
    folder = make_model(tmp_path / "model", "qwen2", tied=False)
    config = ModelConfig(path=str(folder), dtype="bfloat16", activation_checkpointing=recomputed)
    rounded = build_policy(config, 1.0, session)
    exact = build_policy(dataclasses.replace(config, dtype="float32"), 1.0, session)
    with torch.no_grad():
        for parameter in exact.parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.copy_(local.bfloat16().float())
    ids = torch.arange(1, 49).reshape(2, 24)
    with torch.no_grad(), use_plain_attention(rounded.model):
        logits_before = rounded.plain_logits(ids)
    reshard(rounded)
    with use_plain_attention(rounded.model), use_float32(rounded):
        logits = rounded.plain_logits(ids)
        assert logits.dtype == torch.float32
        logits.square().mean().backward()
    with use_plain_attention(exact.model):
        exact_logits = exact.plain_logits(ids)
        exact_logits.square().mean().backward()
    assert torch.allclose(logits, exact_logits, rtol=1e-4, atol=1e-5)
    for (name, parameter), other in zip(
        rounded.named_parameters(), exact.parameters(), strict=True
    ):
        assert parameter.grad is not None
        assert other.grad is not None
        # The gradient by a bfloat16 weight is rounded once.
        gradient, expected = (x.grad.full_tensor() for x in (parameter, other))  # type: ignore[union-attr]
        assert (gradient - expected).norm() < 0.01 * expected.norm() + 1e-9, name
    for policy in (rounded, exact):
        policy.zero_grad(set_to_none=True)
        assert isinstance(policy, FSDPModule)
        reshard(policy)
    with torch.no_grad(), use_plain_attention(rounded.model):
        assert torch.equal(rounded.plain_logits(ids), logits_before)
    reshard(rounded)


def judged(relative: dict[str, float], noise: dict[str, float], *, rounded: bool) -> CheckResult:
    """The verdict on differences of gradients, by tensor."""
    check = object.__new__(GradientCheck)
    check._gradient_bound = 0.2
    check._is_rounded = rounded
    result = CheckResult()
    check._judge_gradients(result, relative, noise)
    return result


def test_one_lone_tensor_slightly_above_its_bound_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    quiet = {"a": 0.0, "b": 0.0, WHOLE: 0.0}
    with caplog.at_level(logging.WARNING, logger="grpo_spmd"):
        assert not judged({"a": 0.25, "b": 0.1, WHOLE: 0.15}, quiet, rounded=True).errors
    assert "the gradient of a, of its norm, is off by 0.25 (bound 0.2)" in caplog.text
    # In float32, two tensors, far above, or the whole gradient: an error.
    assert judged({"a": 0.25, "b": 0.1, WHOLE: 0.15}, quiet, rounded=False).errors
    assert judged({"a": 0.25, "b": 0.21, WHOLE: 0.15}, quiet, rounded=True).errors
    assert judged({"a": 0.45, "b": 0.1, WHOLE: 0.15}, quiet, rounded=True).errors
    assert judged({"a": 0.25, "b": 0.1, WHOLE: 0.21}, quiet, rounded=True).errors
    assert judged({"a": float("nan"), "b": 0.1, WHOLE: 0.1}, quiet, rounded=True).errors


def test_noise_widens_a_bound_and_never_hides_a_wrong_sign() -> None:
    loud = {"a": 0.3, "b": 0.3, WHOLE: 0.3}
    assert not judged({"a": 0.5, "b": 0.5, WHOLE: 0.5}, loud, rounded=True).errors
    deaf = {"a": 5.0, "b": 5.0, WHOLE: 5.0}
    assert judged({"a": 2.0, "b": 2.0, WHOLE: 2.0}, deaf, rounded=True).errors
    assert gradient_check._MAX_GRADIENT_BOUND < 1.0  # a gradient that is missing has 1
    # Nor does it hide that one tensor's gradient is missing, however little it is of the whole.
    assert judged({"a": 0.99, "b": 0.1, WHOLE: 0.1}, deaf, rounded=True).errors


def test_a_factor_that_would_hide_a_missing_gradient_is_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "model")
    for factor in (0.5, 3.1, 1000):
        with pytest.raises(ConfigError, match=r"proofs\.bound_factor"):
            load_config(config, [f"proofs.bound_factor={factor}"])
    bounds = gradient_check._BOUNDS
    assert all(3 * of_format.gradient < 1.0 for of_format in bounds.values())


def test_a_switch_that_is_off_is_said() -> None:
    names = [field.name for field in dataclasses.fields(ProofConfig) if field.type == "bool"]
    assert names == ["weights", "logprobs", "update", "signals"]
    for name in names:
        (sentence,) = weakened_proofs({f"proofs.{name}": False, "proofs.bound_factor": 1.0})
        assert sentence.startswith(f"proofs.{name} is false: no")
    (sentence,) = weakened_proofs({"proofs.bound_factor": 2.5})
    assert sentence.startswith("proofs.bound_factor is 2.5: ")
    assert not [*weakened_proofs({})]


def test_the_logprob_check_can_be_switched_off() -> None:
    LogprobCheck("float32", None, is_on=False).check(1, mean=9.0, largest=99.0)
    with pytest.raises(MismatchError):
        LogprobCheck("float32", None).check(1, mean=9.0, largest=99.0)


def test_the_check_can_be_relaxed_or_switched_off(tmp_path: Path) -> None:
    """proofs.bound_factor and proofs.update; the report says so."""
    config = load_config(write_config(tmp_path, tmp_path / "model"), ["model.dtype=bfloat16"])
    settings = check_settings_of(config, frozenset())
    policy = cast(Any, None)
    plain, relaxed = (
        GradientCheck(
            policy, policy, dataclasses.replace(settings, bound_factor=factor), SignalProofs()
        )
        for factor in (1.0, 3.0)
    )
    assert relaxed._gradient_bound == pytest.approx(3 * plain._gradient_bound)
    assert relaxed.score_bound == pytest.approx(3 * plain.score_bound)
    # The same function on the same row rounds alike: neither noise nor the key widens that bound.
    for check in (plain, relaxed):
        check._widen_bounds(mean_max_logit=1.0)
        check.score_bound = 0.3
        assert check.repeated_score_bound == pytest.approx(0.005)
    off = object.__new__(UpdateCheck)
    off._settings = dataclasses.replace(settings, is_on=False)
    # Whatever it would look at is not touched.
    nothing = cast(Any, None)
    off.run_if_due(1, nothing, nothing, nothing)
    assert off.metrics() == {"proofs/update_check_s": 0.0}
