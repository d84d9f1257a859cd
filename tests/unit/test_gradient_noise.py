"""How the update check judges differences in bfloat16: by what the number format itself rounds."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch.distributed.fsdp import FSDPModule

from benchmarks.agreement.trained_weights import Case, make_case
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import ModelConfig, ProofConfig, RewardConfig
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.config_json import load_tokenizer
from grpo_spmd.model.policy import Policy, build_policy
from grpo_spmd.model.reward_model_files import read_reward_model
from grpo_spmd.model.sharding import reshard
from grpo_spmd.model.values import PolicyValues, build_reward_model
from grpo_spmd.proofs import gradient_check, reward_model_check, synthetic
from grpo_spmd.proofs.gradient_check import WHOLE, GradientCheck, SignalProofs
from grpo_spmd.proofs.logprob_check import LogprobCheck, MismatchError
from grpo_spmd.proofs.plain import use_float32, use_plain_attention
from grpo_spmd.proofs.reward_model_check import RewardModelCheck, ScoredCompletion
from grpo_spmd.proofs.schedule import weakened_proofs
from grpo_spmd.proofs.synthetic import CheckResult
from grpo_spmd.proofs.update_check import UpdateCheck
from grpo_spmd.records import MicroBatch, RolloutBatch, TeacherSignal
from grpo_spmd.signals.teacher import Teacher, TeacherCheck, TeacherModel
from grpo_spmd.signals.value_proofs import ValueTargets, random_head
from tests.support.learn import check_settings_of
from tests.support.models import make_model, write_config
from tests.support.workers.update import fixed_groups


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


def exact_policy(config: ModelConfig, session: Session) -> Policy:
    """The model in float32, with the weights that it has in bfloat16."""
    exact = build_policy(dataclasses.replace(config, dtype="float32"), 1.0, session)
    with torch.no_grad():
        for parameter in exact.parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.copy_(local.bfloat16().float())
    return exact


@pytest.mark.parametrize("recomputed", [False, True])
def test_float32_arithmetic_over_the_same_weights(
    tmp_path: Path, session: Session, recomputed: bool
) -> None:
    """Beside a float32 model whose weights are those of bfloat16: logits and gradients. Afterwards
    the policy computes as before, to the bit."""
    folder = make_model(tmp_path / "model", "qwen2", tied=False)
    config = ModelConfig(path=str(folder), dtype="bfloat16", activation_checkpointing=recomputed)
    rounded = build_policy(config, 1.0, session)
    exact = exact_policy(config, session)
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
    assert "the gradient of a, relative to its norm, is off by 0.25 (bound 0.2)" in caplog.text
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


class Rounding:
    """A Qwen2 in bfloat16 with a key bias of 605, as Qwen2.5-7B has, and a trainer whose kernels
    round half as much: both are further apart than the bound of the number format."""

    def __init__(self, folder: Path, session: Session) -> None:
        make_case(folder / "model", Case(2, key_bias_norm=605))
        self.config = load_config(
            write_config(folder, folder / "model"),
            ["model.dtype=bfloat16", f"teacher.path={folder / 'model'}", "teacher.loss=sampled"],
        )
        self.folder = folder
        self.session = session
        self.settings = check_settings_of(self.config, frozenset())
        self.rounded = build_policy(self.config.model, 1.0, session)
        self.exact = exact_policy(self.config.model, session)
        self.groups = fixed_groups()

    def reference_errors(self, change: Any) -> list[str]:
        """What the check says where the reference's logprobs [C] are changed."""
        nobody = cast(Any, None)
        check = GradientCheck(self.rounded, nobody, self.settings, SignalProofs())
        # As `run` sets it where logits are small.
        check.score_bound = self.settings.score_bound
        result = CheckResult()
        check.compare_reference(
            result,
            cast(Any, lambda row: (change(self.logprobs(row)), None)),
            self.rounded,
            self.groups,
            self.session.device,
        )
        return result.errors

    @torch.no_grad()
    def logprobs(self, row: MicroBatch) -> torch.Tensor:
        """The trainer's logprobs [C]."""
        mean: torch.Tensor = (self.exact(row)[0] + self.rounded(row)[0]) / 2
        return mean

    def teacher_errors(self, change: Any) -> list[str]:
        """What the check says where the teacher's logprobs [C] are changed."""
        teacher = Teacher(self.config.teacher, {"": TeacherModel(self.rounded)}, self.rounded)
        rollouts = synthetic.short_rollouts(self.groups)
        rows = [pack_rollouts(pair, self.session.device) for pair in (rollouts[:3], rollouts[3:])]
        for row in rows:
            logprobs = change(self.logprobs(row))
            row.teacher_signal = TeacherSignal(self.config.teacher.coef, logprobs)
        batch = RolloutBatch([rows], [1], [1])
        nobody = cast(Any, None)
        return TeacherCheck(teacher, self.settings)(nobody, batch, nobody).errors

    def value_errors(self, change: Any) -> list[str]:
        """What the check says where the values [C] of a head on the policy's layers are changed."""
        rollouts = synthetic.short_rollouts(self.groups)
        row = pack_rollouts(rollouts, self.session.device)
        models = [PolicyValues(policy, self.session) for policy in (self.rounded, self.exact)]
        critic = cast(Any, SimpleNamespace(model=models[0]))
        targets = ValueTargets(critic, self.config.critic)
        result = CheckResult()
        with targets.random_head(), random_head(models[1].head):
            with torch.no_grad():
                targets.set_targets(row, change((models[0](row) + models[1](row)) / 2))
            with use_plain_attention(self.rounded.model):
                gradient_check._plain_scores(self.rounded, rollouts, 1.0, self.session.device)
                targets.plain_term(result, rollouts, 9, self.settings.score_bound)
        return result.errors

    def score(self, change: Any) -> None:
        """Runs the check of a reward model whose scores [n] are changed."""
        folder = self.folder / "scores"
        kind = transformers.AutoModelForSequenceClassification
        torch.manual_seed(1)
        exact = kind.from_pretrained(self.folder / "model", num_labels=1, dtype=torch.float32)
        with torch.no_grad():
            exact.score.weight.mul_(2.0)
            for parameter in exact.parameters():
                parameter.copy_(parameter.bfloat16())
        exact.save_pretrained(folder)
        tokenizer = load_tokenizer(str(self.folder / "model"))
        tokenizer.save_pretrained(folder)
        files = read_reward_model(0, RewardConfig(model=str(folder)), folder, 512)
        model = build_reward_model(files, self.config.model, self.session)
        completions = [(g.prompt, c) for g in self.groups for c in g.completions]
        texts = [torch.tensor([[*p.token_ids, *c.token_ids]]) for p, c in completions]
        with torch.no_grad():
            scores = change(torch.cat([exact(input_ids=text).logits[:, 0] for text in texts]))
        scored = [
            ScoredCompletion(prompt, completion, float(score), "ok")
            for (prompt, completion), score in zip(completions, scores, strict=True)
        ]
        RewardModelCheck(files, model, tokenizer, dtype="bfloat16").run("scores", scored)


@pytest.fixture(scope="module")
def rounding(tmp_path_factory: pytest.TempPathFactory, session: Session) -> Rounding:
    return Rounding(tmp_path_factory.mktemp("rounding"), session)


def test_what_bfloat16_rounds_is_no_alarm_of_a_signal_and_a_fault_is_one(
    rounding: Rounding,
) -> None:
    """The reference's and the teacher's logprobs and a critic's values: clean, those of other
    tokens, none, and those of a wrong head."""
    for errors in (rounding.reference_errors, rounding.teacher_errors, rounding.value_errors):
        assert not errors(lambda scores: scores)
        for fault in (lambda x: x.roll(1), torch.zeros_like, lambda x: -x):
            assert any("is off by" in text for text in errors(fault))


def test_what_bfloat16_rounds_is_no_alarm_of_a_reward_model_and_a_fault_is_one(
    rounding: Rounding,
) -> None:
    """Its scores: clean, those of other texts, and those of a wrong head."""
    rounding.score(lambda scores: scores)
    for fault in (lambda x: x.roll(1), lambda x: -x):
        with pytest.raises(Rank0Error, match="gives other scores than transformers does"):
            rounding.score(fault)


def test_without_noise_a_bound_is_that_of_the_format(rounding: Rounding) -> None:
    """The trainer's differences are beyond the bounds of the number format alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_check, "widen_by_noise", lambda bound, *_: bound)
        assert rounding.reference_errors(lambda x: x)
        assert rounding.teacher_errors(lambda x: x)
        assert rounding.value_errors(lambda x: x)
        patch.setattr(reward_model_check, "widen_by_noise", lambda bound, *_: bound)
        with pytest.raises(Rank0Error):
            rounding.score(lambda x: x)
