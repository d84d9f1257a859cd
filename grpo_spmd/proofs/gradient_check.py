"""Loss and gradient of a few made-up micro-batches, by the trainer and by a plain recomputation.

Plain is HF's own forward pass with its eager attention, a row a sequence, full logits, log_softmax in float32, and
plain_loss.py. Old, reference and engine logprobs are set apart from the policy's by known steps, so that ratios fall on
both sides of every bound: with the true ones, at a first update, nothing is ever clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.contexts import contexts_of, shorten_segments
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.families.build import decoder_layers
from grpo_spmd.model.policy import DTYPES, Policy, Scores
from grpo_spmd.model.sharding import first_row, is_first_replica
from grpo_spmd.proofs.plain_loss import PlainSequence, plain_terms
from grpo_spmd.records import MicroBatch, Rollout, RolloutGroup

Term = tuple[Tensor, float]  # of the loss, with the sum of its parts' sizes
_NUM_SEQUENCES, _PROMPT_TOKENS, _COMPLETION_TOKENS = (
    6,
    16,
    12,
)  # of a rank, at most: it shall cost next to nothing
_NUM_SKETCHES = 8
_MOST = 5.0  # log ratios stay far below 20, beyond which the loss takes none: bounds of 1e9 are there to be none
# By compute dtype: mean |logprob| and entropy, nats; a term of the loss, of the size of what it sums; a tensor's
# gradient, of its norm; its sum over ranks. Measured on models of 2 and 24 layers: 6e-7, 2e-8, 1.4e-6, 2e-7 in float32,
# 0.013, 2e-8, 0.026, 0.002 in bfloat16.
_BOUNDS = {"float32": (1e-4, 1e-4, 1e-3, 1e-4), "bfloat16": (0.05, 1e-4, 0.2, 0.05)}


@dataclass
class CheckResult:
    """What one check found on this rank."""

    errors: list[str] = field(default_factory=list)
    """One sentence for each difference that is too large."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The largest difference of each kind."""

    def check_difference(self, what: str, key: str, difference: float, bound: float) -> None:
        """Records a difference, and an error if it is above `bound` or NaN."""
        self.metrics[key] = max(self.metrics.get(key, 0.0), difference)
        if not difference <= bound:
            self.errors.append(f"{what} is off by {difference:.3g} (bound {bound:.3g})")


class SyntheticTeacher(Protocol):
    """A teacher of the synthetic rows, whose term in the loss is also written out plainly."""

    coef: float

    @property
    def is_sampled(self) -> bool:
        """True if it gives logprobs of the sampled tokens, False if it gives distributions."""
        ...

    def teach(self, row: MicroBatch) -> None:
        """Attach its signal to a row."""
        ...

    def divergence(self, log_p: Tensor) -> Tensor:
        """Returns the divergence [n], float64, of the policy's logprobs [n, V] of all rows, with its graph."""
        ...


class SyntheticValues(Protocol):
    """Value targets of the synthetic rows, for a critic whose head learns in the policy's update."""

    bound: float

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The head's parameters."""
        ...

    def random_head(self) -> AbstractContextManager[None]:
        """Within it the head, which may be zero, adds a fixed random product."""
        ...

    def set_targets(self, row: MicroBatch, values: Tensor) -> None:
        """Give a row old values and returns at known distances from the trainer's values [C]."""
        ...

    def plain_loss(
        self, rollouts: Sequence[Rollout], counts: Tensor, num_tokens: int
    ) -> tuple[Tensor, float, float]:
        """Collective. Returns the value loss [] with its graph, the sum of its terms' sizes, and how far the trainer's
        values are off, relative to their size. `counts` [n] marks the tokens of the rollouts that count."""
        ...

    def check_head_gradient(self, found: CheckResult, bound: float) -> None:
        """Collective. Compares the head's gradient with the plain one, and drops it."""
        ...


class GradientCheck:
    def __init__(
        self,
        policy: Policy,
        updater: PolicyUpdater,
        loss: LossConfig,
        temperature: float,
        longest: int,
        dtype: str,
        make_teacher: Callable[[], SyntheticTeacher] | None = None,
        values: SyntheticValues | None = None,
    ) -> None:
        """`temperature`: what the engine samples at. `longest`: denominator of `loss.aggregation: constant`. `make_teacher`
        makes one that teaches the made-up rows as the run's does; `values`: for a critic on the policy's layers."""
        self._make_teacher, self._values = make_teacher, values
        self._policy, self._updater, self._loss = policy, updater, loss
        self._temperature, self._longest = temperature, longest
        self._bounds, self._rounding = _BOUNDS[dtype], torch.finfo(DTYPES[dtype]).eps / 2
        self.score_bound, self._term_bound, self._gradient_bound, self._reduction_bound = (
            self._bounds
        )

    def run(
        self, groups: Sequence[RolloutGroup], device: torch.device, *, accumulates: bool
    ) -> CheckResult:
        """Collective. Compare on this rank's own rollouts; a rank without any takes part with tokens that count
        nothing. Leaves no gradient behind. What is wrong on all ranks alike is found on rank 0. `accumulates`: over two
        micro-batches, not one, which costs a pass more."""
        with self._values.random_head() if self._values is not None else nullcontext():
            return self._run(groups, device, accumulates)

    def _run(
        self, groups: Sequence[RolloutGroup], device: torch.device, accumulates: bool
    ) -> CheckResult:
        found, policy, rollouts = CheckResult(), self._policy, _short_rollouts(groups)
        self._look_for_strays(found)
        rows = [rollouts[:3], rollouts[3:]] if accumulates else [rollouts]
        scores: list[Scores] = []
        given: list[dict[str, Tensor]] = []
        apart: list[Tensor] = []  # from a made-up teacher

        def give(_: nn.Module, inputs: tuple[MicroBatch], output: tuple[Tensor, ...]) -> None:
            """Of this very pass: one without gradients is rounded otherwise in a compiled model."""
            batch, row, first = inputs[0], rows[len(scores)], sum(map(len, rows[: len(scores)]))
            scores.append((output[0].detach(), output[1].detach()))
            given.append(self._given(row, first, _joined(scores[-1:], [row])[0]))
            apart.extend(output[2 : len(output) - (self._values is not None)] if row else ())
            if self._values is not None:
                self._values.set_targets(batch, output[-1])
            if row:
                batch.rollout_logprobs.copy_(given[-1]["engine"])  # the updater holds it already
                batch.old_logprobs = given[-1]["old"].float()
                batch.ref_logprobs = given[-1]["ref"].float() if self._loss.kl_coef else None
                if batch.teacher_signal is not None and batch.teacher_signal.logprobs is not None:
                    batch.teacher_signal.logprobs.copy_(given[-1]["ref"])
            elif self._loss.kl_coef:
                batch.ref_logprobs = batch.rollout_logprobs

        denominators = _denominators(rollouts)
        handle = policy.register_forward_hook(give)
        batches = [pack_rollouts(row, device) for row in rows]
        if (
            teacher := self._make_teacher() if self._make_teacher is not None else None
        ) is not None:
            for batch in batches:
                teacher.teach(batch)
        sums, _ = self._updater.accumulate(batches, *denominators, is_synced=True)
        handle.remove()
        base, base_entropy = _joined(scores, rows)
        squares, sketch = self._squares(), _Sketch(policy)
        with eager_attention(policy.model), sketch.watching():
            before = sketch.of_gradient()
            kept: list[Tensor] = []
            logprobs, entropy, touch, largest = _plain_scores(
                policy, rollouts, self._temperature, device, kept
            )
            self._widen(largest)
            if rollouts:
                self._compare(found, "the logprob of a token", base - logprobs.detach())
                self._compare(found, "the entropy at a token", base_entropy - entropy.detach())
            # Values of the trainer's, to which bounds are set, with the plain gradient: else rounding would clip here
            # what it does not clip there.
            p, h = (
                plain + (value - plain).detach()
                for plain, value in ((logprobs, base), (entropy, base_entropy))
            )
            columns = {"p": p, "h": h}
            for name in ("old", "engine", "ref"):
                columns[name] = torch.cat([part[name] for part in given]).float().double()
            if teacher is not None and rollouts:
                columns |= self._taught(found, teacher, columns, kept, apart)
            coef = teacher.coef if teacher is not None else 0.0
            terms = plain_terms(
                self._sequences(rollouts, columns), self._loss, *denominators, self._longest, coef
            )
            if self._values is not None:
                terms |= self._valued(found, self._values, terms["loss"], rollouts, denominators[0])
            (
                -terms["loss"][0] - touch
            ).backward()  # what is left in the gradients is the difference
        for name, (value, size) in terms.items():
            if rollouts and name in sums and (name != "kl" or self._loss.kl_coef):
                off = abs(float(sums[name].value) - float(value.detach())) / max(size, 1e-12)
                bound = (
                    self._term_bound if name != "entropy" else math.inf
                )  # that has been compared above
                found.check_difference(
                    f"the term {name!r} of the loss, of the size of what it sums,",
                    "loss",
                    off,
                    bound,
                )
        self._judge_gradients(found, squares, self._squares())
        reduced = [
            a - b for a, b in zip(before, sketch.of_gradient(), strict=True)
        ]  # of the plain backward pass
        self._judge_reduction(found, reduced, sketch.of_tokens)
        self._updater.optimizer.zero_grad(set_to_none=True)
        if self._values is not None:
            self._values.check_head_gradient(found, self._gradient_bound)
        # A policy that is not finite is for the update to say, which is skipped then.
        return CheckResult() if any_rank(not bool(logprobs.isfinite().all())) else found

    def _look_for_strays(self, found: CheckResult) -> None:
        named = [
            *self._policy.named_parameters(),
            *(self._values.named_parameters() if self._values is not None else ()),
        ]
        if stray := [name for name, p in named if p.grad is not None]:
            found.errors.append(f"a gradient was left from the last update: that of {stray[0]}")

    @staticmethod
    def _valued(
        found: CheckResult,
        values: SyntheticValues,
        loss: Term,
        rollouts: Sequence[Rollout],
        num_tokens: int,
    ) -> dict[str, Term]:
        """Collective. The loss with the value loss in it."""
        counts = torch.from_numpy(
            np.concatenate([np.zeros(0, np.bool_), *(r.loss_mask for r in rollouts)])
        )
        term, size, off = values.plain_loss(rollouts, counts, num_tokens)
        found.check_difference(
            "the value of a token, of the values' size,", "values", off, values.bound
        )
        return {"loss": (loss[0] + term, loss[1] + size), "value": (term, size)}

    def _sequences(
        self, rollouts: Sequence[Rollout], columns: dict[str, Tensor]
    ) -> list[PlainSequence]:
        parts = _parts(columns, [len(r.completion_ids) for r in rollouts])
        return [
            PlainSequence(
                cast(float, r.advantages), torch.from_numpy(np.asarray(r.loss_mask)), part["p"], part["h"],
                part["old"], part["engine"], part["ref"] if self._loss.kl_coef else None,
                part.get("taken"), part.get("divergence"),
            )
            for r, part in zip(rollouts, parts, strict=True)
        ]  # fmt: skip

    def _taught(
        self,
        found: CheckResult,
        teacher: SyntheticTeacher,
        columns: dict[str, Tensor],
        log_p: Sequence[Tensor],
        apart: Sequence[Tensor],
    ) -> dict[str, Tensor]:
        """What a made-up teacher takes off advantages, or the divergence from it: the trainer's value, `apart`, with
        the plain gradient, by the plain logprobs `log_p` [n, V]."""
        if teacher.is_sampled:
            return {"taken": teacher.coef * (columns["old"] - columns["ref"])}
        plain, value = (
            teacher.divergence(torch.cat([*log_p])),
            torch.cat([*apart]).detach().double(),
        )
        self._compare(found, "the divergence from a teacher at a token", value - plain.detach())
        return {"divergence": plain + (value - plain).detach()}

    def plain_logprobs(
        self, policy: Policy, groups: Sequence[RolloutGroup], device: torch.device
    ) -> Tensor:
        """Collective. Of the tokens that `run` looks at, by another policy; no gradient."""
        with eager_attention(policy.model), torch.no_grad():
            logprobs, _ = _plain_scores(policy, _short_rollouts(groups), self._temperature, device)[
                :2
            ]
        cast(FSDPModule, policy).reshard()
        return logprobs

    def trainer_logprobs(
        self, score: Any, groups: Sequence[RolloutGroup], device: torch.device
    ) -> Tensor:
        """Collective. The same by `score`, what the trainer scores micro-batches with."""
        rollouts = _short_rollouts(groups)
        with torch.no_grad():
            logprobs, _ = score(pack_rollouts(rollouts, device))
        cast(FSDPModule, self._policy).reshard()
        return cast(Tensor, logprobs).double() if rollouts else torch.zeros(0, dtype=torch.float64)

    def _widen(self, largest: float) -> None:
        """Logits of size `largest`, divided by the temperature, are rounded by more than those of small models."""
        least, _, gradient, _ = self._bounds
        self.score_bound = max(least, largest * self._rounding)
        self._gradient_bound = max(gradient, min(0.5, gradient * self.score_bound / least))

    def _compare(self, found: CheckResult, what: str, differences: Tensor) -> None:
        found.check_difference(
            f"{what}, in nats on average,",
            "logprobs",
            float(differences.abs().mean()),
            self.score_bound,
        )

    def _given(self, rollouts: Sequence[Rollout], first: int, base: Tensor) -> dict[str, Tensor]:
        """Old, engine and reference logprobs [tokens], at known distances from `base`. `first`: how many precede."""
        loss, old, engine, ref = self._loss, [], [], []
        low = math.log(max(1 - loss.clip_ratio_low, 0.3))
        high, dual = (
            min(math.log(1 + loss.clip_ratio_high), _MOST),
            min(math.log(loss.dual_clip or 4.0), _MOST),
        )
        ratios = [0.0, high / 2, high + 0.3, low / 2, low - 0.3, max(high, dual) + 0.3]
        cap = min(math.log(loss.rollout_correction_cap), _MOST)
        factors = [0.0, 0.5 * cap, cap + 0.3, -0.5 * cap, -cap - 0.3]
        for number, rollout in enumerate(rollouts, first):
            n = len(rollout.completion_ids)
            # Rollouts are good and bad by turns; the k-th of either begins at another place of the list.
            places = [(2 * (number // 2) + t) % len(ratios) for t in range(n)]
            if (
                loss.policy == "gspo"
            ):  # one ratio a sequence: at the bound there is no room for a step inside
                places = [[2, 4, 5][number // 2]] * n
            old += [ratios[place] for place in places]
            if loss.rollout_correction == "sequence_tis":
                engine += [factors[number % len(factors)] / n] * n
            else:
                engine += [factors[(number + t) % len(factors)] for t in range(n)]
            ref += [[-0.4, 0.3, 0.7][(number + t) % 3] for t in range(n)]
        steps = (
            torch.tensor(each, dtype=torch.float64, device=base.device)
            for each in (old, engine, ref)
        )
        of_old, of_engine, of_ref = steps
        if loss.old_logprobs == "engine":
            of_engine = torch.zeros_like(of_engine)
        return {"old": base - of_old, "engine": base - of_old - of_engine, "ref": base + of_ref}

    def _squares(self) -> dict[str, float]:
        """By name of what trains: the sum of squares of this rank's rows of its gradient, but for copies."""
        trained = [(name, p) for name, p in self._policy.named_parameters() if p.requires_grad]
        norms = {
            name: _norm(p)
            for name, p in trained
            if p.grad is not None and is_first_replica(cast(DTensor, p))
        }
        values = torch.stack([*norms.values()]).double().square().tolist() if norms else []
        return dict.fromkeys((name for name, _ in trained), 0.0) | dict(
            zip(norms, values, strict=True)
        )

    def _judge_gradients(
        self, found: CheckResult, of_trainer: dict[str, float], left: dict[str, float]
    ) -> None:
        """Collective. Tensor by tensor, each beside its own norm and a hundredth of the whole gradient's."""

        def judge(parts: list[list[list[float]]]) -> list[float]:
            norms, differences = (
                [math.sqrt(sum(of_ranks)) for of_ranks in zip(*each, strict=True)]
                for each in zip(*parts, strict=True)
            )
            whole = math.sqrt(sum(n * n for n in norms))
            return [d / (n + 0.01 * whole + 1e-30) for d, n in zip(differences, norms, strict=True)]

        names = list(of_trainer)
        pair = [list(of_trainer.values()), list(left.values())]
        shares = on_rank0(judge, pair)
        worst = max(
            range(len(names)), key=lambda i: shares[i] if math.isfinite(shares[i]) else math.inf
        )
        what = f"the gradient of {names[worst]}, of its norm,"
        found.check_difference(what, "gradient", shares[worst], self._gradient_bound)

    def _judge_reduction(
        self, found: CheckResult, reduced: list[float], of_tokens: list[float]
    ) -> None:
        """Collective. FSDP's sum over ranks beside a sum of ours."""

        def judge(parts: list[list[list[float]]]) -> float:
            reduced, plain = (
                [sum(each) for each in zip(*of, strict=True)] for of in zip(*parts, strict=True)
            )
            size = math.sqrt(sum(x * x for x in plain))
            off = math.sqrt(sum((a - b) ** 2 for a, b in zip(reduced, plain, strict=True)))
            return off / size if size else 0.0

        what = "the sum over ranks of a gradient, of its norm,"
        found.check_difference(
            what, "reduction", on_rank0(judge, [reduced, of_tokens]), self._reduction_bound
        )


class _Sketch:
    """Products of the gradient of one linear layer with random vectors from both sides: as FSDP has summed it, and from
    what goes through the layer on this rank, with which FSDP has nothing to do."""

    def __init__(self, policy: Policy) -> None:
        layers = (m for m in decoder_layers(policy.model).modules() if isinstance(m, nn.Linear))
        self._layer = next((m for m in layers if m.weight.requires_grad), None)
        self.of_tokens = [0.0] * _NUM_SKETCHES
        if self._layer is not None:
            draw = torch.Generator().manual_seed(0)
            device = self._layer.weight.device
            shape = self._layer.weight.shape  # the whole one's: it is a DTensor
            self._left, self._right = (
                torch.randn(_NUM_SKETCHES, n, generator=draw).to(device, torch.float64)
                for n in shape
            )

    def of_gradient(self) -> list[float]:
        """From this rank's rows."""
        weight = cast(DTensor, self._layer.weight) if self._layer is not None else None
        if weight is None or weight.grad is None or not is_first_replica(weight):
            return [0.0] * _NUM_SKETCHES
        rows, first = weight.grad._local_tensor.double(), first_row(weight)  # type: ignore[attr-defined]
        values: list[float] = (
            (self._left[:, first : first + len(rows)] * (rows @ self._right.T).T).sum(1).tolist()
        )
        return values

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it forward and backward passes add to `of_tokens`."""

        def forward(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2).double() @ self._right.T

            def backward(grad: Tensor) -> None:
                parts = ((grad.flatten(0, -2).double() @ self._left.T) * x).sum(0).tolist()
                # less the loss: the pass goes down it
                self.of_tokens = [old - new for old, new in zip(self.of_tokens, parts, strict=True)]

            if output.requires_grad:
                output.register_hook(backward)

        handle = self._layer.register_forward_hook(forward) if self._layer is not None else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()


def _denominators(rollouts: Sequence[Rollout]) -> tuple[int, int]:
    """Collective. Tokens and sequences that count, over all ranks."""
    counts = [
        [int(np.sum(r.loss_mask)) for r in rollouts],
        [int(np.any(r.loss_mask)) for r in rollouts],
    ]
    tokens, sequences = on_rank0(
        lambda of: [sum(map(sum, column)) for column in zip(*of, strict=True)], counts
    )
    return max(tokens, 1), max(sequences, 1)


def _norm(parameter: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(cast(DTensor, parameter.grad)._local_tensor)
    return norm


def _joined(scores: Sequence[Scores], rows: Sequence[Sequence[Rollout]]) -> list[Tensor]:
    """Logprobs and entropies of all rows together, float64. A row without a rollout has a token that is none."""
    kept = [
        [score if row else score[:0] for score in pair]
        for pair, row in zip(scores, rows, strict=True)
    ]
    return [torch.cat(parts).double() for parts in zip(*kept, strict=True)]


def _plain_scores(
    policy: Policy,
    rollouts: Sequence[Rollout],
    temperature: float,
    device: torch.device,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Collective. Logprobs and entropies [tokens], float64, a 0 that hangs on the whole model, and the size of a row's
    largest logit. Rows, of which a rollout of several contexts has several, are filled up on the right: what comes
    later is not seen. `kept` gets the logprobs of all tokens [n, V]."""
    contexts = [
        c for r in rollouts for c in contexts_of(r.prompt_ids, r.completion_ids, r.segments)
    ]
    ids = [context.token_ids.tolist() for context in contexts] or [[0, 0]]
    longest = max(map(len, ids))
    row = torch.tensor([[*each, *[0] * (longest - len(each))] for each in ids], device=device)
    logits = policy.plain_logits(row).float() / temperature
    touch = (logits.sum() * 0.0).double()
    logprobs, entropy = [], []
    for number, context in enumerate(contexts):
        places = torch.from_numpy(np.flatnonzero(context.sampled)).to(device)
        log_p = logits[number, places - 1].log_softmax(-1)
        if kept is not None and len(places):
            kept.append(log_p)
        targets = row[number, places]
        logprobs.append(log_p.gather(-1, targets[:, None])[:, 0].double())
        entropy.append(-(log_p.exp() * log_p).sum(-1).double())
    nothing = touch[None][:0]
    largest = float(logits.detach().abs().amax(-1).mean())
    return torch.cat([nothing, *logprobs]), torch.cat([nothing, *entropy]), touch, largest


@contextmanager
def eager_attention(model: Any) -> Iterator[None]:
    """Within it HF's own eager attention, with its own mask, and nothing compiled; also for a backward pass, which may
    run layers again."""
    configs = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }.values()
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = "eager"
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def _short_rollouts(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """Up to 6 short ones of this rank's rollouts, good and bad by turns, one token of each third left out."""
    pairs = [
        (g.prompt.token_ids, c)
        for g in groups[:_NUM_SEQUENCES]
        for c in g.completions
        if c.token_ids
    ]
    step = max(1, len(pairs) // _NUM_SEQUENCES)
    rollouts = []
    for number, (prompt, completion) in enumerate(pairs[::step][:_NUM_SEQUENCES]):
        segments = (
            shorten_segments(completion.episode.segments, _PROMPT_TOKENS, _COMPLETION_TOKENS)
            if completion.episode
            else ()
        )
        ids = completion.token_ids[:_COMPLETION_TOKENS]
        if segments:
            ids = [
                token
                for segment in segments
                for token in segment.token_ids[segment.sampled].tolist()
            ]
        mask = np.ones(len(ids), np.bool_)
        if number % 3 == 1 and len(ids) > 1:
            mask[len(ids) // 2] = False
        advantage = (0.7 + 0.1 * number) * (1 if number % 2 == 0 else -1)
        start = [
            *prompt[:1],
            *prompt[1:][1 - _PROMPT_TOKENS :],
        ]  # without its first token a model may make no sense
        rollouts.append(Rollout(number, advantage, mask, start, ids, [0.0] * len(ids), segments))
    return rollouts


def _parts(columns: dict[str, Tensor], lengths: Sequence[int]) -> list[dict[str, Tensor]]:
    """Columns [tokens] cut into pieces of these lengths."""
    split = {name: column.split(list(lengths)) for name, column in columns.items()}
    return [{name: pieces[i] for name, pieces in split.items()} for i in range(len(lengths))]
