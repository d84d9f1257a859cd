"""The loss of one micro-batch, against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.learn.losses import (
    LossInputs,
    aggregation_weights,
    kl_estimate,
    mismatch_sums,
    policy_loss,
    ratio_percentiles,
    rollout_correction,
)

POLICIES, AGGREGATIONS, CORRECTIONS = (
    ("clip", "gspo", "cispo"),
    ("token", "sequence", "constant"),
    ("token_tis", "sequence_tis", "icepop"),
)


def _loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    *,
    ref: Tensor | None = None,
    entropy: Tensor | None = None,
    mask: Tensor | None = None,
    sequences: Tensor | None = None,
    correction: Tensor | None = None,
    aggregation: str = "token",
    num_loss_tokens: int | None = None,
    num_loss_sequences: int = 1,
    max_completion_tokens: int = 10,
    **settings: Any,
) -> tuple[Tensor, Reductions]:
    """The loss of one micro-batch; without `sequences` it is one sequence, and without counts it is
    the whole
    mini-batch."""
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask
    sequences = torch.zeros(len(logprobs), dtype=torch.int64) if sequences is None else sequences
    num_loss_tokens = int(mask.sum()) if num_loss_tokens is None else num_loss_tokens
    denominators = num_loss_tokens, num_loss_sequences, max_completion_tokens
    inputs = LossInputs(
        logprobs,
        torch.zeros_like(logprobs) if entropy is None else entropy,
        old,
        ref,
        advantages,
        mask,
        sequences,
        aggregation_weights(aggregation, mask, sequences, *denominators),
        correction,
    )
    return policy_loss(inputs, LossConfig(**{"dual_clip": None, **settings}))


def _fields(sums: Reductions) -> dict[str, Tensor]:
    return {
        f"{name} {field}": value
        for name, item in sums.items()
        for field, value in vars(item).items()
    }


def _at_ratio(ratio: float, advantage: float, **settings: Any) -> tuple[Tensor, Tensor]:
    """The loss of one token, whose logprob was -1, and its gradient with respect to the logprob."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    loss, sums = _loss(logprobs, old, torch.tensor([advantage], dtype=torch.float64), **settings)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return torch.stack([loss.detach(), gradient[0]]), sums["loss/clip_frac"].value


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # -min(A r, A clip(r, 0.8, 1.28)); where the clipped branch wins, the gradient is 0, else -A
        # r
        (1.5, 1.0, -1.28, 0.0, 1),  # a good token that has become likely enough
        (
            0.5,
            1.0,
            -0.5,
            -0.5,
            0,
        ),  # a good token that has become unlikely: pulled back, not clipped
        (1.5, -1.0, 1.5, 1.5, 0),  # a bad token that has become likely: pushed down, not clipped
        (0.5, -1.0, 0.8, 0.0, 1),  # a bad token that has become unlikely enough
        (1.2, 1.0, -1.2, -1.2, 0),  # between the bounds, on both sides of 1
        (0.9, -2.0, 1.8, 1.8, 0),
    ],
)
def test_clip_is_pessimistic_on_both_sides(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    got, was_clipped = _at_ratio(ratio, advantage)
    torch.testing.assert_close(got, torch.tensor([loss, gradient], dtype=torch.float64))
    assert int(was_clipped) == clipped


def test_two_clip_bounds_are_not_mixed_up() -> None:
    old = torch.zeros(2)
    logprobs, advantages = torch.tensor([math.log(3.0), math.log(0.1)]), torch.tensor([1.0, -1.0])
    # upper bound 1 + 0.5 for the first, lower bound 1 - 0.1 for the second: (-1.5 + 0.9) / 2
    loss, _ = _loss(logprobs, old, advantages, clip_ratio_low=0.1, clip_ratio_high=0.5)
    assert float(loss) == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("dual_clip", "ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # where A < 0: min(max(-A r, -A clip(r, 0.8, 1.28)), 3 (-A))
        (3.0, 2.0, -1.0, 2.0, 2.0, 0),  # below the bound
        (3.0, 5.0, -1.0, 3.0, 0.0, 1),  # beyond it: the term no longer grows, and pushes no more
        (3.0, 5.0, -2.0, 6.0, 0.0, 1),
        (3.0, 0.5, -1.0, 0.8, 0.0, 1),  # the lower clip is as it was
        (3.0, 5.0, 1.0, -1.28, 0.0, 1),  # a good token never meets it
        (3.0, 1.2, 1.0, -1.2, -1.2, 0),
        (None, 5.0, -1.0, 5.0, 5.0, 0),
    ],
)
def test_dual_clip_bounds_bad_tokens_alone(
    dual_clip: float | None,
    ratio: float,
    advantage: float,
    loss: float,
    gradient: float,
    clipped: int,
) -> None:
    for policy in ("clip", "gspo"):
        got, was_clipped = _at_ratio(ratio, advantage, dual_clip=dual_clip, policy=policy)
        torch.testing.assert_close(got, torch.tensor([loss, gradient], dtype=torch.float64))
        assert int(was_clipped) == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        # -A clip(r, 0.8, 1.28) log p, the factor a constant: the gradient is -A clip(r) also where
        # it clips; log p =
        # log r - 1
        (1.5, 2.0, -2.56 * (0.4054651 - 1), -2.56, 1),
        (0.5, 2.0, -1.6 * (-0.6931472 - 1), -1.6, 1),
        (1.5, -1.0, 1.28 * (0.4054651 - 1), 1.28, 1),
        (1.2, -1.0, 1.2 * (0.1823216 - 1), 1.2, 0),
    ],
)
def test_cispo_weighs_the_logprob_by_a_clipped_constant(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    got, was_clipped = _at_ratio(ratio, advantage, policy="cispo")
    torch.testing.assert_close(got, torch.tensor([loss, gradient], dtype=torch.float64))
    assert int(was_clipped) == clipped


def test_gspo_by_hand() -> None:
    # sequence 0: ratios 3 and 0.4033333, whose geometric mean is sqrt(1.21) = 1.1: within the
    # bounds, though both
    # tokens are not. sequence 1: the one token's ratio is 1.5, clipped to 1.28. Loss: -(1.1 + 1.28)
    # / 2. Gradient:
    # sequence 0's tokens share its slope, -1.1 / 2 sequences / 2 tokens.
    old = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    logprobs = (
        old + torch.tensor([3.0, 1.21 / 3, 1.5], dtype=torch.float64).log()
    ).requires_grad_()
    loss, sums = _loss(
        logprobs,
        old,
        torch.ones(3, dtype=torch.float64),
        sequences=torch.tensor([0, 0, 1]),
        policy="gspo",
        aggregation="sequence",
        num_loss_sequences=2,
    )
    assert float(loss.detach()) == pytest.approx(-1.19)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-0.275, -0.275, 0.0], dtype=torch.float64))
    assert float(sums["loss/clip_frac"].value) == pytest.approx(1 / 3)


def test_gspo_gradient_is_that_of_the_sequence_objective() -> None:
    """Against the objective as GSPO's paper writes it, one term a sequence, with autograd through
    the geometric
    mean."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1, 4, 2, 7, 3, 5]
    sequences = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    old = -3 * torch.rand(len(sequences), generator=generator, dtype=torch.float64)
    logprobs = (
        old + 0.5 * torch.randn(len(old), generator=generator, dtype=torch.float64)
    ).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 2.0, 0.5, -0.5, 1.5], dtype=torch.float64)
    settings: dict[str, Any] = {
        "policy": "gspo",
        "aggregation": "sequence",
        "num_loss_sequences": 6,
        "clip_ratio_high": 0.02,
    }
    loss, _ = _loss(logprobs, old, advantages[sequences], sequences=sequences, **settings)

    terms = []
    for i in range(6):
        s = (logprobs[sequences == i] - old[sequences == i]).mean().exp()
        terms.append(-torch.minimum(s * advantages[i], s.clamp(0.8, 1.02) * advantages[i]))
    expected = torch.stack(terms).mean()
    torch.testing.assert_close(loss, expected)
    gradient, expected_gradient = (
        torch.autograd.grad(loss, logprobs)[0],
        torch.autograd.grad(expected, logprobs)[0],
    )
    torch.testing.assert_close(gradient, expected_gradient)
    assert (
        0 < int((gradient == 0).sum()) < len(gradient)
    )  # some sequences are clipped, some are not


def test_gspo_keeps_the_digits_of_a_ratio_near_one() -> None:
    """GSPO clips at some 1e-4: a ratio rounded as the logprobs are, by 1e-6 where they are near
    -20, would differ from
    token to token."""
    old = torch.tensor([-17.123456, -0.3, -5.7, -12.3])
    logprobs = (old + torch.tensor([1e-4, 2e-4, 3e-4, 2e-4])).requires_grad_()
    loss, sums = _loss(
        logprobs,
        old,
        -torch.ones(4),
        policy="gspo",
        aggregation="sequence",
        clip_ratio_low=3e-4,
        clip_ratio_high=3e-4,
    )
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert len(set(gradient.tolist())) == 1
    assert float(loss.detach()) == pytest.approx(
        float((logprobs.detach() - old).double().mean().exp()), rel=1e-7
    )
    assert float(sums["loss/clip_frac"].value) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_gradient_at_ratio_one_is_reinforce(policy: str) -> None:
    logprobs = torch.tensor([-0.3, -2.0, -0.01, -5.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64)
    loss, _ = _loss(logprobs, logprobs.detach(), advantages, policy=policy)
    # REINFORCE: -(1/4) sum A log p, whose gradient is -A/4
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], -advantages / 4)


def test_loss_is_a_token_mean_over_the_given_denominator() -> None:
    logprobs = torch.tensor([-1.0, -1.0])
    loss, _ = _loss(logprobs, logprobs, torch.tensor([1.0, 3.0]), num_loss_tokens=10)
    assert float(loss) == pytest.approx(-(1.0 + 3.0) / 10)


@pytest.mark.parametrize(
    ("aggregation", "expected", "expected_of_many"),
    [
        # Sequence 0: advantage 1, three tokens that count. Sequence 1: advantage 3, one token. The
        # ratio is 1: a term
        # is -A. token: (3 * 1 + 3) / 4. sequence: (1 + 3) / 2. constant: (3 + 3) / (2 * 10). In a
        # mini-batch of 8
        # tokens in 5 sequences over all ranks: 6 / 8, (1 + 3) / 5, 6 / 50.
        ("token", -1.5, -0.75),
        ("sequence", -2.0, -0.8),
        ("constant", -0.3, -0.12),
    ],
)
def test_aggregation_by_hand(aggregation: str, expected: float, expected_of_many: float) -> None:
    logprobs, mask = torch.full((5,), -1.0), torch.tensor([True, True, False, True, True])
    for counts, value in (((4, 2), expected), ((8, 5), expected_of_many)):
        loss, sums = _loss(
            logprobs,
            logprobs,
            torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0]),
            mask=mask,
            sequences=torch.tensor([0, 0, 0, 0, 1]),
            entropy=torch.tensor([2.0, 2.0, 9.0, 2.0, 2.0]),
            aggregation=aggregation,
            num_loss_tokens=counts[0],
            num_loss_sequences=counts[1],
        )
        assert float(loss) == pytest.approx(value)
        assert float(sums["policy"].value) == pytest.approx(value)
    weights = aggregation_weights(
        aggregation,
        mask,
        torch.tensor([0, 0, 0, 0, 1]),
        num_loss_tokens=4,
        num_loss_sequences=2,
        max_completion_tokens=10,
    )
    assert (weights.dtype, float(weights[2])) == (torch.float64, 0.0)
    assert float(weights.sum()) == pytest.approx(
        {"token": 1.0, "sequence": 1.0, "constant": 4 / 20}[aggregation]
    )


def test_correction_weighs_the_policy_term_alone() -> None:
    logprobs = torch.tensor([math.log(0.5), math.log(0.5)], requires_grad=True)
    ref, entropy = torch.full((2,), math.log(0.25)), torch.tensor([1.0, 3.0])
    settings: dict[str, Any] = {
        "ref": ref,
        "entropy": entropy,
        "kl_coef": 0.5,
        "kl_estimator": "k1",
        "entropy_coef": 0.1,
    }
    loss, sums = _loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([1.0, -1.0]),
        correction=torch.tensor([2.0, 0.5]),
        **settings,
    )
    # policy: (-1 * 2 + 1 * 0.5) / 2 = -0.75; KL: log 2 for each token; entropy: 2 on average
    assert float(loss.detach()) == pytest.approx(-0.75 + 0.5 * 0.6931472 - 0.1 * 2.0)
    assert float(sums["policy"].value) == pytest.approx(-0.75)
    # by d log p: (-2 + 0.5 * 1) / 2 and (0.5 + 0.5 * 1) / 2
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], torch.tensor([-0.75, 0.5]))


def test_masked_token_does_not_count() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    loss, sums = _loss(
        logprobs,
        logprobs,
        torch.tensor([1.0, 100.0, 3.0]),
        mask=torch.tensor([True, False, True]),
        entropy=torch.tensor([0.5, 9.0, 0.25]),
    )
    assert float(loss) == pytest.approx(-2.0)
    assert float(sums["policy"].value) == pytest.approx(-2.0)
    assert float(sums["entropy"].value) == pytest.approx(0.375)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("field", ["logprobs", "old", "ref", "advantages", "entropy", "rollout"])
@pytest.mark.parametrize(
    ("policy", "aggregation", "correction", "kl_estimator"),
    [
        ("clip", "token", "token_tis", "k1"),
        ("clip", "sequence", "icepop", "k2"),
        ("gspo", "sequence", "sequence_tis", "k3"),
        ("gspo", "token", "token_tis", "k3"),
        ("cispo", "constant", "sequence_tis", "k2"),
    ],
)
def test_garbage_in_masked_places_harms_neither_loss_nor_gradient(
    poison: float, field: str, policy: str, aggregation: str, correction: str, kl_estimator: str
) -> None:
    # one masked token within a sequence that counts, and one sequence of which no token counts
    mask, sequences = torch.tensor([True, False, True, False]), torch.tensor([0, 0, 0, 1])

    def run(poisoned: str | None) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        pieces: dict[str, Any] = {
            "logprobs": torch.tensor([-0.5, -1.0, -2.0, -1.0]),
            "old": torch.tensor([-0.6, -1.0, -1.9, -1.0]),
            "ref": torch.tensor([-0.7, -1.0, -2.2, -1.0]),
            "advantages": torch.tensor([1.0, 1.0, -1.0, 1.0]),
            "entropy": torch.tensor([0.1, 0.2, 0.3, 0.4]),
            "rollout": torch.tensor([-0.4, -1.0, -2.1, -1.0]),
        }
        if poisoned:
            pieces[poisoned][[1, 3]] = poison
        logprobs, rollout = pieces.pop("logprobs").requires_grad_(), pieces.pop("rollout")
        factor = rollout_correction(correction, 1.05, pieces["old"], rollout, mask, sequences)
        if poisoned == "rollout":
            assert factor is not None
            factor = torch.where(mask, factor, poison)
        loss, sums = _loss(
            logprobs,
            mask=mask,
            sequences=sequences,
            correction=factor,
            policy=policy,
            dual_clip=3.0,
            aggregation=aggregation,
            kl_coef=0.1,
            kl_estimator=kl_estimator,
            entropy_coef=0.01,
            **pieces,
        )
        return (
            loss.detach(),
            torch.autograd.grad(loss, logprobs)[0],
            _fields(sums),
            _fields(mismatch_sums(pieces["old"], rollout, mask)),
        )

    clean, dirty = run(None), run(field)
    torch.testing.assert_close(dirty, clean, rtol=0, atol=0)
    assert (float(clean[1][1]), float(clean[1][3])) == (0.0, 0.0)


def test_micro_batch_with_nothing_that_counts_has_zero_loss_and_gradient() -> None:
    logprobs = torch.tensor([math.nan, -1.0], requires_grad=True)
    loss, _ = _loss(
        logprobs,
        torch.zeros(2),
        torch.ones(2),
        mask=torch.zeros(2, dtype=torch.bool),
        num_loss_tokens=0,
    )
    assert float(loss.detach()) == 0.0
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(
    policy: str, aggregation: str, correction: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4, 2, 5, 1]

    def some() -> Tensor:
        return torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    values, old, ref, rollout, advantages, entropy = (
        some(),
        some(),
        some(),
        some(),
        some(),
        some().abs(),
    )
    mask = torch.arange(16) % 5 != 0
    sequences = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    mask[sequences == 3] = False

    def run(groups: list[list[int]]) -> tuple[dict[str, Tensor], Tensor]:
        logprobs, total = (
            values.clone().requires_grad_(),
            {"loss": torch.zeros((), dtype=torch.float64)},
        )
        for group in groups:  # a micro-batch holds whole sequences and numbers them anew
            at = torch.cat(
                [torch.where(sequences == i)[0] for i in group]
                + [torch.zeros(0, dtype=torch.int64)]
            )
            index = torch.tensor([group.index(int(i)) for i in sequences[at]], dtype=torch.int64)
            loss, sums = _loss(
                logprobs[at],
                old[at],
                advantages[at],
                ref=ref[at],
                entropy=entropy[at],
                mask=mask[at],
                sequences=index,
                correction=rollout_correction(
                    correction, 1.5, old[at], rollout[at], mask[at], index
                ),
                policy=policy,
                dual_clip=3.0,
                aggregation=aggregation,
                num_loss_tokens=int(mask.sum()),
                num_loss_sequences=5,
                kl_coef=0.3,
                entropy_coef=0.2,
            )
            loss.backward()
            for name, value in (_fields(sums) | {"loss": loss.detach()}).items():
                total[name] = total.get(name, torch.zeros_like(value)) + value
        assert logprobs.grad is not None
        return total, logprobs.grad

    full = run([[0, 1, 2, 3, 4, 5]])
    for groups in (
        [[0], [1], [2], [3], [4], [5]],
        [[4, 1], [5, 0, 3], [2]],
        [[3], [], [5, 4, 2, 1, 0]],
    ):
        torch.testing.assert_close(run(groups), full)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # p = 1/2, r = 1/4: log(p/r) = log 2 = 0.6931472. k1: that. k2: half its square. k3: r/p - 1 -
    # log(r/p) = -1/2 + log
    # 2.
    [("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472)],
)
def test_kl_estimators_by_hand(estimator: str, expected: float) -> None:
    kl = kl_estimate(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), estimator)
    assert float(kl) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimator_is_unbiased(estimator: str) -> None:
    # KL(p || r) over three tokens, summed exactly: p log(p/r)
    p, r = (
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64),
    )
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
    (got,) = torch.autograd.grad(
        kl_estimate(logprobs, torch.tensor([math.log(0.25)]), estimator).sum(), logprobs
    )
    assert float(got) == pytest.approx(gradient, rel=1e-5)


def test_kl_enters_the_loss_with_its_coefficient() -> None:
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    loss, sums = _loss(
        logprobs, logprobs, torch.tensor([0.0]), ref=ref, kl_coef=0.5, kl_estimator="k1"
    )
    assert float(loss) == pytest.approx(0.5 * 0.6931472)
    assert float(sums["kl"].value) == pytest.approx(0.6931472)


def test_entropy_bonus_lowers_the_loss() -> None:
    logprobs = torch.tensor([-1.0, -1.0])
    loss, _ = _loss(
        logprobs, logprobs, torch.zeros(2), entropy=torch.tensor([1.0, 3.0]), entropy_coef=0.1
    )
    assert float(loss) == pytest.approx(-0.1 * 4.0 / 2)


def test_metric_sums_carry_no_graph() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    _, sums = _loss(
        logprobs,
        logprobs.detach(),
        torch.ones(1),
        ref=torch.tensor([-2.0]),
        entropy=-logprobs,
        kl_coef=1.0,
    )
    assert not any(value.requires_grad for value in _fields(sums).values())


def test_mismatch_kl_by_hand() -> None:
    # policy 1/2, engine 1/4: d = log 2, expm1(d) - d = 1 - 0.6931472; the masked token does not
    # count
    sums = mismatch_sums(
        torch.tensor([math.log(0.5), -1.0]),
        torch.tensor([math.log(0.25), -9.0]),
        torch.tensor([True, False]),
    )
    assert float(sums["weight_sync/mismatch_kl"].value) == pytest.approx(0.3068528, rel=1e-5)
    assert float(sums["weight_sync/mismatch_abs_max"].value) == pytest.approx(0.6931472)


def test_mismatch_kl_does_not_cancel() -> None:
    sums = mismatch_sums(
        torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]), torch.tensor([True, True])
    )
    # d = +1 and -1: the mean of e - 2 and 1/e
    assert float(sums["weight_sync/mismatch_kl"].value) == pytest.approx(
        (math.e - 2 + 1 / math.e) / 2, rel=1e-6
    )


def test_tiny_mismatch_keeps_its_digits() -> None:
    # half of d squared for a small d; float32 would give 0 or a rounding error of the size of d
    engine = torch.tensor([-1.0], dtype=torch.float32)
    policy = engine + 2.0**-23
    assert float(
        mismatch_sums(policy, engine, torch.tensor([True]))["weight_sync/mismatch_kl"].value
    ) == pytest.approx(0.5 * 2.0**-46, rel=1e-4, abs=0.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_mismatch_ignores_garbage_in_masked_places(poison: float) -> None:
    sums = mismatch_sums(
        torch.tensor([-1.0, poison]), torch.tensor([-1.0, poison]), torch.tensor([True, False])
    )
    assert [float(sums[f"weight_sync/mismatch_{name}"].value) for name in ("kl", "abs_max")] == [
        0.0,
        0.0,
    ]
    assert float(sums["mismatch_ratios"].value.sum()) == 1.0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_mismatch_of_a_token_that_is_not_finite_is_counted_and_does_not_raise(
    poison: float,
) -> None:
    sums = mismatch_sums(
        torch.tensor([-1.0, poison]), torch.tensor([-1.0, -1.0]), torch.tensor([True, True])
    )
    assert not math.isfinite(float(sums["weight_sync/mismatch_abs_mean"].value))
    assert float(sums["mismatch_ratios"].value.sum()) == 2.0


# p(policy) / p(engine) of five tokens in three sequences: products 1.5, 8 and 0.25
_RATIOS, _SEQUENCES = [3.0, 0.5, 4.0, 2.0, 0.25], [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("mode", "cap", "expected"),
    [
        ("token_tis", 2.5, [2.5, 0.5, 2.5, 2.0, 0.25]),
        ("token_tis", 2.0, [2.0, 0.5, 2.0, 2.0, 0.25]),  # 2.0 is at the cap: it stays
        (
            "sequence_tis",
            2.5,
            [1.5, 1.5, 2.5, 2.5, 0.25],
        ),  # the product of the sequence, the same for each of its tokens
        ("sequence_tis", 1.2, [1.2, 1.2, 1.2, 1.2, 0.25]),
        ("sequence_tis", 9.0, [1.5, 1.5, 8.0, 8.0, 0.25]),
        (
            "icepop",
            2.0,
            [0.0, 0.5, 0.0, 2.0, 0.0],
        ),  # at 1/cap and at cap a token stays, beyond it counts nothing
        ("icepop", 1.99, [0.0, 0.0, 0.0, 0.0, 0.0]),
        ("icepop", 3.5, [3.0, 0.5, 0.0, 2.0, 0.0]),
        ("icepop", 4.0, [3.0, 0.5, 4.0, 2.0, 0.25]),
    ],
)
def test_rollout_correction_by_hand(mode: str, cap: float, expected: list[float]) -> None:
    engine = torch.tensor([-1.0, -0.5, -2.0, -3.0, -0.25], dtype=torch.float64)
    log_ratios = torch.tensor(_RATIOS, dtype=torch.float64).log()
    # (-1 + log 2) - (-1) is not log 2 to the last bit: a ratio exactly at the cap needs the
    # engine's logprobs to be 0
    pairs = [(log_ratios.requires_grad_(), torch.zeros_like(engine))]
    if cap not in _RATIOS:
        pairs.append((engine + log_ratios, engine))
    for logprobs, rollout in pairs:
        got = rollout_correction(
            mode, cap, logprobs, rollout, torch.ones(5, dtype=torch.bool), torch.tensor(_SEQUENCES)
        )
        assert got is not None
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))
        assert not got.requires_grad


def test_masked_token_is_no_part_of_its_sequence_s_product() -> None:
    policy, engine = torch.tensor([math.log(3.0), 700.0, math.log(0.5)]), torch.zeros(3)
    got = rollout_correction(
        "sequence_tis",
        2.0,
        policy,
        engine,
        torch.tensor([True, False, True]),
        torch.tensor([0, 0, 0]),
    )
    assert got is not None
    torch.testing.assert_close(got[[0, 2]], torch.tensor([1.5, 1.5]))


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_long_sequence_s_correction_does_not_overflow(mode: str) -> None:
    got = rollout_correction(
        mode,
        2.0,
        torch.zeros(4000),
        torch.full((4000,), -5.0),
        torch.ones(4000, dtype=torch.bool),
        torch.zeros(4000, dtype=torch.int64),
    )
    assert got is not None
    assert torch.isfinite(got).all()
    assert set(got.tolist()) == {0.0 if mode == "icepop" else 2.0}


@pytest.mark.parametrize(("scale", "shift"), [(1e-4, 0.0), (0.02, 0.001), (0.5, -0.1), (3.0, 1.0)])
def test_ratio_percentiles_equal_numpy_within_a_bin(scale: float, shift: float) -> None:
    """A bin is 5 % wide beyond 1e-3 nats and 5e-5 nats wide below that; samples go through several
    ranks'
    histograms."""
    differences = (
        torch.randn(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scale
        + shift
    )
    histogram = sum(
        mismatch_sums(
            piece,
            torch.zeros(len(piece), dtype=torch.float64),
            torch.ones(len(piece), dtype=torch.bool),
        )["mismatch_ratios"].value
        for piece in differences.split([1, 1999, 3000])
    )
    assert isinstance(histogram, Tensor)
    percents = (1, 25, 50, 75, 99)
    got = ratio_percentiles(histogram.tolist(), percents)
    expected = np.percentile(differences.exp().numpy(), percents, method="inverted_cdf")
    for local, theirs in zip(got, expected.tolist(), strict=True):
        assert local is not None
        assert abs(math.log(local) - math.log(theirs)) <= 0.026 * abs(math.log(theirs)) + 2.6e-5
    assert got == sorted(got, key=lambda ratio: ratio or 0.0)
    assert ratio_percentiles([], (1, 50)) == [None, None]


def test_ratio_percentiles_of_identical_logprobs_are_one() -> None:
    logprobs = -torch.rand(9, generator=torch.Generator().manual_seed(0))
    sums = mismatch_sums(logprobs, logprobs, torch.ones(9, dtype=torch.bool))
    assert ratio_percentiles(sums["mismatch_ratios"].value.tolist(), (1, 50, 99)) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ratio_beyond_float_range_gives_a_finite_loss_and_gradient(policy: str) -> None:
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    loss, _ = _loss(
        logprobs,
        torch.tensor([-500.0, -1.0]),
        torch.tensor([-1.0, 1.0]),
        policy=policy,
        sequences=torch.tensor([0, 1]),
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
