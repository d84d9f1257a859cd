"""The loss of one micro-batch, against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_spmd.loss import kl_estimate, mismatch_sums, policy_loss


def _loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    ref: Tensor | None = None,
    entropy: Tensor | None = None,
    mask: Tensor | None = None,
    num_loss_tokens: int | None = None,
    **settings: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask
    defaults: dict[str, Any] = {
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "kl_coef": 0.0,
        "kl_estimator": "k3",
        "entropy_coef": 0.0,
    }
    return policy_loss(
        logprobs,
        torch.zeros_like(logprobs) if entropy is None else entropy,
        old,
        ref,
        advantages,
        mask,
        num_loss_tokens=int(mask.sum()) if num_loss_tokens is None else num_loss_tokens,
        **{**defaults, **settings},
    )


def _at_ratio(ratio: float, advantage: float) -> tuple[Tensor, Tensor]:
    """The loss of one token and its gradient with respect to the logprob."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, sums = _loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return torch.stack([loss.detach(), gradient[0]]), sums["clipped"]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # -min(A r, A clip(r, 0.8, 1.28)); where the clipped branch wins, the gradient is 0, else -A r
        (1.5, 1.0, -1.28, 0.0, 1),  # a good token that has become likely enough
        (0.5, 1.0, -0.5, -0.5, 0),  # a good token that has become unlikely: pulled back, not clipped
        (1.5, -1.0, 1.5, 1.5, 0),  # a bad token that has become likely: pushed down, not clipped
        (0.5, -1.0, 0.8, 0.0, 1),  # a bad token that has become unlikely enough
        (1.2, 1.0, -1.2, -1.2, 0),  # between the bounds, on both sides of 1
        (0.9, -2.0, 1.8, 1.8, 0),
    ],
)
def test_clip_is_pessimistic_on_both_sides(ratio: float, advantage: float, loss: float, gradient: float, clipped: int) -> None:
    got, was_clipped = _at_ratio(ratio, advantage)
    torch.testing.assert_close(got, torch.tensor([loss, gradient], dtype=torch.float64))
    assert int(was_clipped) == clipped


def test_two_clip_bounds_are_not_mixed_up() -> None:
    old = torch.zeros(2)
    logprobs, advantages = torch.tensor([math.log(3.0), math.log(0.1)]), torch.tensor([1.0, -1.0])
    # upper bound 1 + 0.5 for the first, lower bound 1 - 0.1 for the second: (-1.5 + 0.9) / 2
    loss, _ = _loss(logprobs, old, advantages, clip_ratio_low=0.1, clip_ratio_high=0.5)
    assert float(loss) == pytest.approx(-0.3)


def test_gradient_at_ratio_one_is_reinforce() -> None:
    logprobs = torch.tensor([-0.3, -2.0, -0.01, -5.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    loss, _ = _loss(logprobs, logprobs.detach(), advantages)
    # REINFORCE: -(1/4) sum A log p, whose gradient is -A/4
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], -advantages / 4)


def test_loss_is_a_token_mean_over_the_given_denominator() -> None:
    logprobs = torch.tensor([-1.0, -1.0])
    loss, _ = _loss(logprobs, logprobs, torch.tensor([1.0, 3.0]), num_loss_tokens=10)
    assert float(loss) == pytest.approx(-(1.0 + 3.0) / 10)


def test_masked_token_does_not_count() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    loss, sums = _loss(
        logprobs, logprobs, torch.tensor([1.0, 100.0, 3.0]), mask=torch.tensor([True, False, True]), entropy=torch.tensor([0.5, 9.0, 0.25])
    )
    assert float(loss) == pytest.approx(-2.0)
    assert float(sums["policy"]) == pytest.approx(-4.0)
    assert float(sums["entropy"]) == pytest.approx(0.75)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("field", ["logprobs", "old", "ref", "advantages", "entropy"])
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
def test_garbage_in_masked_places_harms_neither_loss_nor_gradient(poison: float, field: str, kl_estimator: str) -> None:
    mask = torch.tensor([True, False, True])

    def run(poisoned: str | None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        parts: dict[str, Any] = {
            "logprobs": torch.tensor([-0.5, -1.0, -2.0]),
            "old": torch.tensor([-0.6, -1.0, -1.9]),
            "ref": torch.tensor([-0.7, -1.0, -2.2]),
            "advantages": torch.tensor([1.0, 1.0, -1.0]),
            "entropy": torch.tensor([0.1, 0.2, 0.3]),
        }
        if poisoned:
            parts[poisoned][1] = poison
        logprobs = parts.pop("logprobs").requires_grad_()
        loss, sums = _loss(logprobs, mask=mask, kl_coef=0.1, kl_estimator=kl_estimator, entropy_coef=0.01, **parts)
        return loss.detach(), torch.autograd.grad(loss, logprobs)[0], sums

    clean, dirty = run(None), run(field)
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    assert float(clean[1][1]) == 0.0


def test_micro_batch_with_nothing_that_counts_has_zero_loss_and_gradient() -> None:
    logprobs = torch.tensor([math.nan, -1.0], requires_grad=True)
    loss, _ = _loss(logprobs, torch.zeros(2), torch.ones(2), mask=torch.zeros(2, dtype=torch.bool), num_loss_tokens=0)
    assert float(loss.detach()) == 0.0
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 7], [0, 11, 1]])
def test_micro_batch_size_does_not_change_gradient(sizes: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        return torch.randn(12, generator=generator, dtype=torch.float64)

    values, old, ref, advantages, entropy = some(), some(), some(), some(), some().abs()
    mask = torch.arange(12) % 5 != 0
    settings: dict[str, Any] = {"kl_coef": 0.3, "entropy_coef": 0.2, "num_loss_tokens": int(mask.sum())}
    whole = values.clone().requires_grad_()
    expected, _ = _loss(whole, old, advantages, ref=ref, entropy=entropy, mask=mask, **settings)
    expected.backward()

    logprobs = values.clone().requires_grad_()
    total, start = 0.0, 0
    for size in sizes:
        at = slice(start, start + size)
        loss, _ = _loss(logprobs[at], old[at], advantages[at], ref=ref[at], entropy=entropy[at], mask=mask[at], **settings)
        loss.backward()
        total, start = total + float(loss.detach()), start + size
    torch.testing.assert_close(logprobs.grad, whole.grad)
    assert total == pytest.approx(float(expected.detach()))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # p = 1/2, r = 1/4: log(p/r) = log 2 = 0.6931472. k1: that. k2: half its square. k3: r/p - 1 - log(r/p) = -1/2 + log 2.
    [("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472)],
)
def test_kl_estimators_by_hand(estimator: str, expected: float) -> None:
    kl = kl_estimate(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), estimator)
    assert float(kl) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimator_is_unbiased(estimator: str) -> None:
    # KL(p || r) over three tokens, summed exactly: p log(p/r)
    p, r = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((p * (p / r).log()).sum())
    assert float((p * kl_estimate(p.log(), r.log(), estimator)).sum()) == pytest.approx(exact)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_estimator_is_never_negative(estimator: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = -torch.rand(100, generator=generator), -torch.rand(100, generator=generator)
    assert float(kl_estimate(logprobs, ref, estimator).min()) >= 0.0


def test_k1_is_negative_where_the_reference_is_surer() -> None:
    assert float(kl_estimate(torch.tensor([-2.0]), torch.tensor([-1.0]), "k1")) == -1.0


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    # by d log p at p = 1/2, r = 1/4: k1: 1. k2: log(p/r) = 0.6931472. k3: -r/p + 1 = 1/2.
    [("k1", 1.0), ("k2", 0.6931472), ("k3", 0.5)],
)
def test_kl_gradients_by_hand(estimator: str, gradient: float) -> None:
    logprobs = torch.tensor([math.log(0.5)], requires_grad=True)
    (got,) = torch.autograd.grad(kl_estimate(logprobs, torch.tensor([math.log(0.25)]), estimator).sum(), logprobs)
    assert float(got) == pytest.approx(gradient, rel=1e-5)


def test_kl_enters_the_loss_with_its_coefficient() -> None:
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    loss, sums = _loss(logprobs, logprobs, torch.tensor([0.0]), ref=ref, kl_coef=0.5, kl_estimator="k1")
    assert float(loss) == pytest.approx(0.5 * 0.6931472)
    assert float(sums["kl"]) == pytest.approx(0.6931472)


def test_entropy_bonus_lowers_the_loss() -> None:
    logprobs = torch.tensor([-1.0, -1.0])
    loss, _ = _loss(logprobs, logprobs, torch.zeros(2), entropy=torch.tensor([1.0, 3.0]), entropy_coef=0.1)
    assert float(loss) == pytest.approx(-0.1 * 4.0 / 2)


def test_metric_sums_carry_no_graph() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    _, sums = _loss(logprobs, logprobs.detach(), torch.ones(1), ref=torch.tensor([-2.0]), entropy=-logprobs, kl_coef=1.0)
    assert not any(value.requires_grad for value in sums.values())


def test_mismatch_kl_by_hand() -> None:
    # policy 1/2, engine 1/4: d = log 2, expm1(d) - d = 1 - 0.6931472; the masked token does not count
    sums = mismatch_sums(torch.tensor([math.log(0.5), -1.0]), torch.tensor([math.log(0.25), -9.0]), torch.tensor([True, False]))
    assert float(sums["mismatch_kl"]) == pytest.approx(0.3068528, rel=1e-5)
    assert float(sums["max:mismatch_abs"]) == pytest.approx(0.6931472)


def test_mismatch_kl_does_not_cancel() -> None:
    sums = mismatch_sums(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]), torch.tensor([True, True]))
    # d = +1 and -1: (e - 2) + (1/e)
    assert float(sums["mismatch_kl"]) == pytest.approx(math.e - 2 + 1 / math.e, rel=1e-6)


def test_tiny_mismatch_keeps_its_digits() -> None:
    # half of d squared for a small d; float32 would give 0 or a rounding error of the size of d
    engine = torch.tensor([-1.0], dtype=torch.float32)
    policy = engine + 2.0**-23
    assert float(mismatch_sums(policy, engine, torch.tensor([True]))["mismatch_kl"]) == pytest.approx(0.5 * 2.0**-46, rel=1e-4, abs=0.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_mismatch_ignores_garbage_in_masked_places(poison: float) -> None:
    sums = mismatch_sums(torch.tensor([-1.0, poison]), torch.tensor([-1.0, poison]), torch.tensor([True, False]))
    assert (float(sums["mismatch_kl"]), float(sums["max:mismatch_abs"])) == (0.0, 0.0)


def test_a_ratio_beyond_float_range_gives_a_finite_loss_and_gradient() -> None:
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    old = torch.tensor([-500.0, -1.0])
    loss, _ = policy_loss(
        logprobs,
        torch.zeros(2),
        old,
        None,
        torch.tensor([-1.0, 1.0]),
        torch.tensor([True, True]),
        num_loss_tokens=2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        kl_coef=0.0,
        kl_estimator="k3",
        entropy_coef=0.0,
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
