"""Teachers: frozen models that score the policy's own rollouts token by token before each update
(on-policy distillation, Agarwal et al. 2024).

A teacher scores the same micro-batches ("rows") as the policy, or the same completions after a
prompt of its own. Depending on `teacher.loss`, its scores are logprobs of the sampled tokens
("sampled"), distributions over the vocabulary ("full"), or distributions over the K most probable
tokens and one more outcome for all other tokens together ("topk"). The teacher's softmax is taken
over the policy's vocabulary only: the lm_head of a teacher of the same family may have further
rows, which are padding. The last part of the file is the running check.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_spmd.checks.signals import check_vocabulary, teacher_data
from grpo_spmd.config.schema import POLICY, Config, TeacherConfig
from grpo_spmd.data.rows import PromptRow, columns_of, fill_columns, read_rows
from grpo_spmd.data.tokens import build_prompts, tokenize_batch
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.assemble import episode_rollout, pack_rollouts
from grpo_spmd.learn.contexts import RowContext, row_contexts
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.step_messages import revise_decision
from grpo_spmd.learn.update import StopCheck
from grpo_spmd.model.logprobs import (
    TeacherDivergence,
    TokenIndices,
    TopTeacher,
    WholeTeacher,
    top_outcomes,
)
from grpo_spmd.model.lora import adapters_at_zero, adapters_off
from grpo_spmd.model.offload import OffloadableModel, copy_to_device
from grpo_spmd.model.policy import DTYPES, Policy, Term, build_policy
from grpo_spmd.model.sharding import gather_rows, reshard
from grpo_spmd.proofs.gradient_check import bound_by_noise, join_ranks
from grpo_spmd.proofs.plain import use_float32, use_plain_attention
from grpo_spmd.proofs.schedule import rows_to_check
from grpo_spmd.proofs.synthetic import CheckResult, UpdateCheckSettings
from grpo_spmd.records import (
    Decision,
    Fields,
    Message,
    MicroBatch,
    Prompt,
    RolloutBatch,
    Segment,
    TeacherSignal,
)

# A teacher's scores of n tokens: their logprobs [n], or a distribution for each of them.
TeacherScores = Tensor | WholeTeacher | TopTeacher


@dataclass(frozen=True)
class TeacherModel:
    """One teacher whose model runs in the trainer's processes, sharded like the policy."""

    model: Policy
    is_base: bool = False
    """True if `model` is the policy and the teacher is its base: scoring turns the adapters off."""
    is_own: bool = True
    """False if the model is also the policy or the reference."""

    def score(self, row: MicroBatch, term: Term) -> Any:
        """Collective. Returns `term(hidden, head)`, where `hidden` [C, D] are the teacher's hidden
        states in the row and `head` [V, D] is its lm_head.

        A teacher with experts (MoE) chooses its own, and does not replay the engine's choices
        ("routes"), since it may be another model.
        """
        row = dataclasses.replace(row, routes=None)
        with adapters_off(self.model.model) if self.is_base else nullcontext():
            return self.model(row, term, only_term=True)[0]


@dataclass(frozen=True)
class TeacherRequest:
    """Which teacher scores the rollouts of a prompt, and which prompt that teacher sees."""

    teacher: str
    """The teacher's name; empty if the run has only one teacher."""
    prompt_ids: list[int] | None = None
    """None: the policy's own prompt."""


# A function of a Prompt and of the columns that rewards wrote about one of its completions.
RequestFor = Callable[[Prompt, Fields], TeacherRequest]
# Requests by rollout id. None: a single teacher scores all rollouts with the policy's own prompts.
Requests = Mapping[int, TeacherRequest] | None


class Teacher:
    """The signal of a run's teachers; one object stands for all of them."""

    def __init__(
        self,
        config: TeacherConfig,
        models: Mapping[str, TeacherModel],
        policy: Policy,
        prompt_at: Callable[[int], Prompt] | None = None,
        request_for: RequestFor | None = None,
    ) -> None:
        """`prompt_at` returns the prompt at a position of the prompt stream. Without `request_for`
        there is a single teacher, which sees the policy's prompts."""
        self.config = config
        self.models = dict(models)
        self.policy = policy
        self._prompt_at = prompt_at
        self._request_for = request_for
        self._vocabulary_size: int = policy.model.get_output_embeddings().weight.shape[0]

    @property
    def offloadable_models(self) -> Sequence[OffloadableModel]:
        """The teachers' models that nothing else in the run uses; they have no optimizer (None)."""
        return [(teacher.model, None) for teacher in self.models.values() if teacher.is_own]

    @torch.no_grad()
    def attach(
        self,
        batch: RolloutBatch,
        decision: Decision,
        stop_check: StopCheck,
        sampled: SampledStep | None = None,
    ) -> Decision:
        """Collective. Writes a TeacherSignal into every micro-batch. For each micro-batch every
        teacher makes one forward pass, over the rollouts that it has to score.

        `stop_check` is called before each pass, and may end the step by raising. `sampled` is only
        needed with teacher.prompt_template, for the columns that rewards wrote.
        """
        requests = self.requests(decision, sampled)
        # The whole lm_head of a teacher is gathered once per step, not once per row.
        needs_heads = self.config.loss == "full"
        heads = {
            name: _gather_head(teacher.model)[: self._vocabulary_size] if needs_heads else None
            for name, teacher in self.models.items()
        }
        for row in batch.micro_batches:
            scored: list[tuple[TokenIndices | None, TeacherScores]] = []
            for name, teacher in self.models.items():
                stop_check(False)
                if requests is None:
                    scored.append((None, self._score(teacher, row, heads[name])))
                    continue
                teacher_row, tokens = select_teacher_row(row, requests, name)
                # The pass is collective, so a rank makes it even without a rollout to score.
                scores = self._score(teacher, teacher_row, heads[name])
                if len(tokens):
                    scored.append((tokens, scores))
            # A row gets a signal even if no teacher scored anything in it.
            row.teacher_signal = self._make_signal(row, scored, requests)
        # If a teacher is the policy or its base, its passes left the policy's parameters gathered.
        reshard(self.policy)
        return self.count_prompts(decision, requests)

    def update(self, batch: RolloutBatch) -> Reductions:
        """Does nothing, because a teacher does not train. Returns no metrics."""
        return {}

    def check(self, settings: UpdateCheckSettings) -> TeacherCheck:
        """Returns the running check of this signal."""
        return TeacherCheck(self, settings)

    def requests(self, decision: Decision, sampled: SampledStep | None) -> Requests:
        """Collective. Returns the requests for the rollouts of all ranks, by rollout id.

        None: a single teacher scores all rollouts with the policy's own prompts."""
        if self._request_for is None or self._prompt_at is None:
            return None
        if self.config.prompt_template is not None:
            # Only the rank that sampled a completion knows what rewards wrote about it.
            assert sampled is not None, "teacher.prompt_template needs what rewards wrote"
            requests = [
                (i, request.teacher, request.prompt_ids)
                for i, request in self.local_requests(sampled, decision)
            ]
            return {i: TeacherRequest(*fields) for i, *fields in join_ranks(requests)}
        step = decision.rank0_decision
        # Only rank 0 knows all groups' positions in the prompt stream, in the order of their slots
        # (their places in the step). Every rank can look up the prompt at a position, so only the
        # positions are sent.
        positions = on_rank0(lambda _: [] if step is None else step.positions.tolist(), None)
        group_size = decision.num_rollouts // max(len(positions), 1)
        return {
            slot * group_size + sample: request
            for slot, position in enumerate(positions)
            for request in [self._request_for(self._prompt_at(position), {})]
            for sample in range(group_size)
        }

    def local_requests(
        self, sampled: SampledStep, decision: Decision
    ) -> Iterator[tuple[int, TeacherRequest]]:
        """Yields (rollout id, request) for each completion that this rank sampled and some rank
        trains on, made from its prompt and from what rewards wrote about it."""
        if self._request_for is None:
            return
        # The number of completions in the groups before; `notes` counts completions over groups.
        num_earlier = 0
        for group in sampled.groups:
            for number, rollout_id in enumerate(decision.rollout_ids(group), num_earlier):
                extra = sampled.scored.notes.get(number, {}).get("extra", {})
                written = {name: value for log in extra.values() for name, value in log.items()}
                yield rollout_id, self._request_for(group.prompt, written)
            num_earlier += len(group.completions)

    def count_prompts(self, decision: Decision, requests: Requests) -> Decision:
        """Returns the decision with the metric teacher/prompted_frac added on rank 0: the fraction
        of rollouts for which teacher.prompt_template made a prompt."""
        if self.config.prompt_template is None or not requests:
            return decision
        num_prompts = sum(request.prompt_ids is not None for request in requests.values())
        return revise_decision(decision, {"teacher/prompted_frac": num_prompts / len(requests)})

    def _score(self, teacher: TeacherModel, row: MicroBatch, head: Tensor | None) -> TeacherScores:
        """Collective. Returns a teacher's scores of the row. `head` is its whole lm_head if
        teacher.loss is full, else None."""
        logits = teacher.model.logits
        size = self._vocabulary_size
        if self.config.loss == "sampled":
            logprobs: Tensor = teacher.score(
                row, lambda hidden, head: logits.score(hidden, head[:size], row.target_ids)[0]
            )
            return logprobs
        # full: keep the hidden states, which take less memory than logits of the whole vocabulary.
        # The update computes the divergence from them, chunk by chunk.
        if head is not None:
            hidden = teacher.score(row, lambda hidden, _: hidden)
            return WholeTeacher(hidden, head, logits.temperature, logits.softcap)
        top = partial(
            top_outcomes,
            k=self.config.top_k,
            temperature=logits.temperature,
            chunk=logits.chunk,
            softcap=logits.softcap,
        )
        return TopTeacher(*teacher.score(row, lambda hidden, head: top(hidden, head[:size])))

    def _make_signal(
        self,
        row: MicroBatch,
        scored: Sequence[tuple[TokenIndices | None, TeacherScores]],
        requests: Requests,
    ) -> TeacherSignal:
        """Returns a row's signal made from `scored`.

        `scored` has a pair for each teacher that scored tokens of the row: the indices of these
        among the row's completion tokens (None: all of them), and the teacher's scores of them."""
        signal = TeacherSignal(self.config.coef)
        if requests is not None and len(self.config.names) > 1:
            for name in self.config.names:
                is_asked = [requests[i].teacher == name for i in row.rollout_ids]
                signal.masks_by_teacher[name] = token_mask(row, is_asked)
        if self.config.loss != "sampled":
            parts: Any = scored
            divergence = TeacherDivergence(parts, self.config.beta, self.policy.logits)
            return dataclasses.replace(signal, divergence=divergence)
        logprobs = torch.zeros_like(row.rollout_logprobs)
        for tokens, scores in scored:
            assert isinstance(scores, Tensor)
            logprobs = scores if tokens is None else logprobs.index_copy(0, tokens, scores)
        return dataclasses.replace(signal, logprobs=logprobs)


def token_mask(row: MicroBatch, by_rollout: Sequence[bool]) -> Tensor:
    """Returns a bool mask [C] of a row's C completion tokens: each token has its rollout's value.

    `by_rollout` has one value for each of `row.rollout_ids`."""
    # A row without rollouts has one token, a placeholder that nobody sampled.
    index = row.sequence_index
    return copy_to_device(torch.tensor([*by_rollout] or [False]), index.device)[index]


def teacher_contexts(row: MicroBatch, requests: Requests, name: str) -> list[RowContext]:
    """Returns the contexts of a row that the teacher `name` scores, with the teacher's own prompt
    in place of the policy's. Waits for the device.

    `requests` is None if a single teacher scores all rollouts with the policy's prompts."""
    contexts = row_contexts(row)
    if requests is None:
        return contexts
    return [
        _with_prompt(context, requests[context.rollout_id].prompt_ids)
        for context in contexts
        if requests[context.rollout_id].teacher == name
    ]


def _with_prompt(context: RowContext, prompt_ids: list[int] | None) -> RowContext:
    """Returns a context that has `prompt_ids` and then the sampled tokens of `context`; if
    `prompt_ids` is None, `context` itself."""
    if prompt_ids is None:
        return context
    completion_ids = context.token_ids[context.sampled_at]
    return dataclasses.replace(
        context,
        token_ids=np.concatenate([np.array(prompt_ids, np.int64), completion_ids]),
        sampled_at=len(prompt_ids) + np.arange(len(completion_ids)),
    )


def select_teacher_row(
    row: MicroBatch, requests: Mapping[int, TeacherRequest], name: str
) -> tuple[MicroBatch, TokenIndices]:
    """Returns (teacher's row, tokens) for the completions in `row` that the teacher `name` scores.

    The teacher's row holds these completions after the teacher's prompts. `tokens` [n] are the
    indices of its n completion tokens among the completion tokens of `row`. If the teacher scores
    nothing, its row has two tokens outside the loss mask. Waits for the device."""
    rollouts = []
    # Each context becomes a rollout: a teacher need not know which contexts are one rollout.
    contexts = teacher_contexts(row, requests, name)
    for context in contexts:
        is_sampled = np.isin(np.arange(len(context.token_ids)), context.sampled_at)
        segment = Segment(context.token_ids.astype(np.int32), is_sampled)
        logprobs = [0.0] * len(context.tokens)
        rollouts.append(episode_rollout(context.rollout_id, 0.0, True, [segment], logprobs))
    # pack_rollouts keeps the order of the contexts, so the scores are in the order of `tokens`.
    tokens = np.concatenate([np.zeros(0, np.int64), *(context.tokens for context in contexts)])
    device = row.input_ids.device
    teacher_row = pack_rollouts(rollouts, device, shares_prefixes=row.tree is not None)
    return teacher_row, copy_to_device(torch.from_numpy(tokens), device)


def _gather_head(policy: Policy) -> Tensor:
    """Collective. Returns a copy of the whole lm_head [V, D] of a sharded model, in its compute
    dtype. If the model is the policy, the updates of the step do not change the copy."""
    weight = policy.model.get_output_embeddings().weight
    # Trained weights are stored in float32, whatever the compute dtype.
    return gather_rows([(weight, weight.to_local().to(policy.compute_dtype))])[0]


def open_model_teacher(
    config: Config,
    policy: Policy,
    session: Session,
    reference: object,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> Teacher:
    """Collective. Builds the teachers of teacher.path.

    A teacher takes no memory of its own if its path is `policy`, or if it is the start model
    (model.path) and the run already holds that: as the policy's base with LoRA, or as the reference
    model. Raises ConfigError.
    """
    models: dict[str, TeacherModel] = {}
    for name, path in config.teacher.paths.items():
        if path == POLICY:
            models[name] = TeacherModel(policy, is_own=False)
            continue
        is_start = path == config.model.path
        if is_start and policy.lora.rank:
            models[name] = TeacherModel(policy, is_base=True, is_own=False)
        elif is_start and isinstance(reference, Policy):
            models[name] = TeacherModel(reference, is_own=False)
        else:
            model = build_policy(
                dataclasses.replace(config.model, path=path),
                config.rollout.temperature,
                session,
                trainable=False,
                max_rollout_tokens=policy.max_rollout_tokens,
                role=f"teacher {name}".strip(),
            )
            models[name] = TeacherModel(model)
            key = f"teacher.path.{name}" if name else "teacher.path"
            # After build_policy, which has the better error for a folder that holds no model.
            check_vocabulary(config.model.path, path, key)
    return Teacher(
        config.teacher,
        models,
        policy,
        prompt_at=prompt_at,
        request_for=make_request_for(config, tokenizer),
    )


def make_request_for(config: Config, tokenizer: Any) -> RequestFor | None:
    """Returns a function that makes a prompt's TeacherRequest, or None if there is a single teacher
    that sees the policy's prompts."""
    has_one = "" in config.teacher.names
    if has_one and not config.teacher.sees_other_prompt:
        return None
    template = config.teacher.prompt_template
    data = teacher_data(config)
    # The teacher's prompts, by row of the data file; with `teacher_data` no row is dropped.
    prompts = None if data is None else build_prompts(read_rows(data), tokenizer, data, 1)

    def request_for(prompt: Prompt, written: Fields) -> TeacherRequest:
        """Returns the request for one completion of `prompt`.

        `written` has the columns that rewards wrote about the completion."""
        name = "" if has_one else str(prompt.columns["teacher"])
        token_ids = None if prompts is None else prompts[prompt.row].token_ids
        filled = None if template is None else fill_prompt(template, prompt, written)
        if filled is not None:
            row = PromptRow(filled, {}, "teacher.prompt_template")
            token_ids = tokenize_batch([row], tokenizer)[0].tolist()
            # The model may have no positions for a longer prompt, so the policy's own is used.
            if not 0 < len(token_ids) <= config.data.max_prompt_tokens:
                token_ids = None
        return TeacherRequest(name, token_ids)

    return request_for


def fill_prompt(template: str, prompt: Prompt, written: Fields) -> str | list[Message] | None:
    """Returns the prompt with its text replaced by the filled-in template, or None if a column of
    the template has no value. Of a chat the last message's text is replaced.

    `written` has the columns that rewards wrote about the completion."""
    messages = [{"content": prompt.text}] if isinstance(prompt.text, str) else prompt.text
    last_message = messages[-1]
    text = last_message.get("content")
    columns = prompt.columns | written | {"prompt": text if isinstance(text, str) else None}
    if any(columns.get(name) is None for name in columns_of(template)):
        return None
    filled = fill_columns(template, lambda name: str(columns[name]))
    if isinstance(prompt.text, str):
        return filled
    return [*messages[:-1], last_message | {"content": filled}]


# The running check compares the signal of some tokens with a plain forward pass of the teacher over
# one rollout alone. It also compares the requests with those that the sampling ranks would make.

# The largest number of rollouts of a row that are compared for each teacher.
_NUM_ROLLOUTS = 3
# The largest number of tokens of a rollout that are compared.
_NUM_TOKENS = 12
# The memory of plain attention grows with the square of the number of tokens before the compared
# ones. Rollouts with _LONG or more such tokens are not compared, except the shortest if a teacher
# has only such ones; rollouts with _TOO_LONG or more are never compared.
_LONG, _TOO_LONG = 2048, 8192
# A sequence of which no token is compared.
_PLACEHOLDER = RowContext(-1, np.zeros(2, np.int64), np.ones(1, np.int64), np.zeros(0, np.int64))


class TeacherCheck:
    """The running check of the teachers' signal: micro-batches against plain forward passes."""

    def __init__(self, teacher: Teacher, settings: UpdateCheckSettings) -> None:
        """Sets the bound of differences in nats, which large logits may widen in a check."""
        self._teacher = teacher
        self._temperature = settings.rollout.temperature
        self._bound = settings.score_bound
        self._rounding = torch.finfo(DTYPES[settings.dtype]).eps / 2

    @torch.no_grad()
    def __call__(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, *_: object
    ) -> CheckResult:
        """Collective. Compares the signal of some tokens in this rank's first, second and last
        row."""
        result = CheckResult()
        requests = self._teacher.requests(decision, sampled)
        if requests is not None:
            self._check_requests(result, sampled, decision, requests)
        if not all(self._is_complete(row.teacher_signal) for row in batch.micro_batches):
            result.errors.append(
                "a micro-batch has no teacher signal, or one of another kind than the config's"
            )
        # The costliest row comes first, and up to _NUM_ROLLOUTS of its rollouts are compared. Of
        # the later rows only one rollout each is compared. They share one mean, since the mean
        # over a few tokens varies much by rounding.
        costliest, *later_rows = rows_to_check(batch.micro_batches)
        for rows, num_rollouts in (([costliest], _NUM_ROLLOUTS), (later_rows, 1)):
            compare_rows = partial(self._compare_rows, rows, requests, num_rollouts)
            difference = compare_rows(of_noise=False)
            bound = bound_by_noise(self._bound, difference, partial(compare_rows, of_noise=True))
            result.check_difference(
                "a teacher's logprob of a token that the update is given, in nats on average,",
                "teacher",
                difference,
                bound,
            )
        reshard(self._teacher.policy)
        return result

    def _compare_rows(
        self,
        rows: Sequence[MicroBatch],
        requests: Requests,
        num_rollouts: int,
        *,
        of_noise: bool,
    ) -> float:
        """Collective. Returns the mean of the differences from `_compare`, 0 if there are none.

        In each row up to `num_rollouts` rollouts of each teacher are compared."""
        differences = [torch.zeros(0, dtype=torch.float64)]
        for row, (name, source) in product(rows, self._sources().items()):
            chosen = self._choose(
                c
                for c in _first_contexts(row, requests)
                if requests is None or requests[c.rollout_id].teacher == name
            )
            # The passes are collective, so every rank makes `num_rollouts` of them.
            chosen += [_PLACEHOLDER] * (num_rollouts - len(chosen))
            for context in chosen[:num_rollouts]:
                differences.append(self._compare(source, row, context, of_noise=of_noise))
        joined = torch.cat(differences)
        return float(joined.mean()) if len(joined) else 0.0

    def _is_complete(self, signal: TeacherSignal | None) -> bool:
        """Returns True if a row has a signal of the kind and weight that the config asks for."""
        if signal is None or signal.coef != self._teacher.config.coef:
            return False
        return (signal.logprobs is not None) == (self._teacher.config.loss == "sampled")

    def _sources(self) -> Mapping[str, Any]:
        """Returns the models or servers with which the check recomputes scores, by the teachers'
        names."""
        return self._teacher.models

    def _has_signal(self, rollout_id: int) -> bool:
        """Returns False if the teacher gave the rollout no scores."""
        return True

    def _choose(self, contexts: Iterable[RowContext]) -> list[RowContext]:
        """Returns the contexts to compare: at most _NUM_ROLLOUTS, spread over short and long ones.

        `contexts` has one context of each rollout that a teacher scores."""
        # These are sorted by the number of tokens before the first sampled one.
        candidates = sorted(
            (c for c in contexts if c.sampled_at[0] < _TOO_LONG and self._has_signal(c.rollout_id)),
            key=lambda context: int(context.sampled_at[0]),
        )
        short = [c for c in candidates if c.sampled_at[0] < _LONG] or candidates[:1]
        return short[:: max(len(short) // _NUM_ROLLOUTS, 1)][:_NUM_ROLLOUTS]

    def _logits(self, source: Any, token_ids: Tensor, predict_index: Tensor) -> Tensor | None:
        """Collective. Returns the teacher's logits [n, V] at the positions `predict_index` [n] of
        the sequence `token_ids` [T], or None if the teacher gives none.

        `source` is the teacher's entry in `_sources`."""
        teacher: TeacherModel = source
        with (
            use_plain_attention(teacher.model.model),
            adapters_at_zero(teacher.model) if teacher.is_base else nullcontext(),
        ):
            logits: Tensor = teacher.model.plain_logits(token_ids[None], predict_index)[0].float()
        size = self._teacher.policy.model.get_output_embeddings().weight.shape[0]
        return logits[:, :size] / self._temperature

    def _check_requests(
        self,
        result: CheckResult,
        sampled: SampledStep,
        decision: Decision,
        requests: Mapping[int, TeacherRequest],
    ) -> None:
        """Collective. Compares the requests that scored the rollouts with those that the ranks
        which sampled the rollouts make from their own prompts."""
        local = [(i, _digest(r)) for i, r in self._teacher.local_requests(sampled, decision)]
        digests = dict(join_ranks(local))
        mismatched = [i for i, request in requests.items() if digests.get(i) != _digest(request)]
        if mismatched:
            result.errors.append(
                f"rollouts {mismatched[:5]} go to another teacher, or with another prompt, "
                "than their rows say"
            )

    def _compare(
        self, source: Any, row: MicroBatch, context: RowContext, *, of_noise: bool
    ) -> Tensor:
        """Collective. Returns the absolute differences [n] of logprobs at some tokens of a context.

        The row's signal is compared with a plain pass of the teacher `source`. With `of_noise` a
        plain pass in the model's dtype is compared with one in float32 instead."""
        # The pass is over the context up to the last token that is compared.
        is_near = context.sampled_at <= max(context.sampled_at[0], _LONG - 1)
        sampled_at = context.sampled_at[is_near][:_NUM_TOKENS]
        new = row.input_ids.new_tensor
        token_ids = new(context.token_ids[: sampled_at[-1] + 1])
        tokens, predict_index = new(context.tokens[: len(sampled_at)]), new(sampled_at - 1)
        logits = exact = self._logits(source, token_ids, predict_index)
        if of_noise:
            with use_float32(source.model):
                exact = self._logits(source, token_ids, predict_index)
        if not len(tokens) or row.teacher_signal is None or logits is None or exact is None:
            return torch.zeros(0, dtype=torch.float64)
        targets = row.target_ids[tokens]
        if of_noise:
            return _rounding(row.teacher_signal, logits, exact, targets)
        # A number format rounds large logits by more, so they widen the bound.
        self._bound = max(self._bound, float(logits.abs().amax(-1).mean()) * self._rounding)
        return _differences(row.teacher_signal, logits, tokens, targets)


def _rounding(signal: TeacherSignal, logits: Tensor, exact: Tensor, targets: Tensor) -> Tensor:
    """Returns the absolute differences [n] of logprobs between `logits` and `exact` [n, V], the
    same logits in float32 arithmetic.

    For a signal of logprobs they are those of the `targets` [n]; for a signal of distributions the
    mean over all tokens of the vocabulary, weighted by their probability."""
    log_p = logits.log_softmax(-1)
    differences = (log_p - exact.log_softmax(-1)).abs().double().cpu()
    if signal.logprobs is None:
        return (log_p.exp().cpu() * differences).sum(-1)
    return differences.gather(-1, targets[:, None].cpu())[:, 0]


def _first_contexts(row: MicroBatch, requests: Requests) -> list[RowContext]:
    """Returns the first context of each rollout of a row, with the teacher's own prompt if it has
    one."""
    contexts: dict[int, RowContext] = {}
    for context in row_contexts(row):
        contexts.setdefault(context.rollout_id, context)
    for i, context in contexts.items():
        prompt_ids = None if requests is None else requests[i].prompt_ids
        # The teacher's own prompt takes the place of everything before the first sampled token.
        if prompt_ids is not None:
            first = context.sampled_at[0]
            contexts[i] = dataclasses.replace(
                context,
                token_ids=np.concatenate([prompt_ids, context.token_ids[first:]]),
                sampled_at=context.sampled_at - first + len(prompt_ids),
            )
    return list(contexts.values())


def _differences(signal: TeacherSignal, logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the absolute differences of logprobs between the signal at `tokens` [n] and the plain
    `logits` [n, V].

    For a signal of logprobs they are those of the `targets` [n]. For a signal of distributions each
    is a mean over the outcomes, weighted by their probability; a token that two teachers scored has
    two differences."""
    if signal.logprobs is not None:
        plain = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return (signal.logprobs[tokens] - plain).abs().double().cpu()
    taught = signal.divergence
    assert isinstance(taught, TeacherDivergence)
    differences = []
    for scored_tokens, scores in taught.parts:
        for number, token in enumerate(tokens.tolist()):
            log_p = logits[number : number + 1].log_softmax(-1)
            indices = [token]
            if scored_tokens is not None:
                indices = torch.nonzero(scored_tokens == token)[:, 0].tolist()
            for index in indices:
                rows = slice(index, index + 1)
                plain = scores.outcomes(log_p, rows)
                difference = (plain - scores.logprobs_of(rows)).abs()
                differences.append(float((plain.exp() * difference).sum()))
    # If no teacher scored any of the tokens, the signal is wrong: the difference is infinite.
    return torch.tensor(differences or [math.inf], dtype=torch.float64)


def _digest(request: TeacherRequest) -> int:
    """Returns a checksum of a request; ranks exchange it instead of the whole prompt."""
    return zlib.crc32(repr((request.teacher, request.prompt_ids)).encode())
