"""Teachers behind vLLM servers: before each update the servers are asked for the logprobs of the
policy's tokens.

A question is one context (a sequence that the policy trains on) and is one request to a server; an
answer is the server's logprobs for the context's sampled tokens. A rollout without an answer gets
no teacher signal. The last part of the file is the running check.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.checks.signals import check_server, open_server
from grpo_spmd.config.schema import Config, RewardConfig, TeacherConfig
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.contexts import RowContext
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import StopCheck
from grpo_spmd.model.logprobs import MIN_LOGPROB, TeacherDivergence, TokenIndices, TopTeacher
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.gradient_check import (
    CheckResult,
    SignalProofs,
    UpdateCheckSettings,
)
from grpo_spmd.records import Decision, MicroBatch, Prompt, RolloutBatch
from grpo_spmd.rewards.pool.call_limits import CallLimits
from grpo_spmd.rewards.remote.client import PositionLogprobs, PromptLogprobs, ServerCalls
from grpo_spmd.rewards.trl import FailedCallError, RewardError
from grpo_spmd.signals.teacher import (
    Teacher,
    TeacherCheck,
    TeacherRequest,
    TeacherScores,
    make_request_for,
    teacher_contexts,
)

_log = logging.getLogger("grpo_spmd")
# Seconds between two checks whether the run has to stop, while requests are running.
_STOP_CHECK_S = 0.5
# 1 minus a sum of float32 probabilities cannot tell smaller ones from 0.
_MIN_REST = float(np.finfo(np.float32).eps)


class Answer(NamedTuple):
    """A server's logprobs for n tokens, in a compact form: the answers of a whole step are held at
    once."""

    ids: npt.NDArray[np.int32]
    """[n, K] The K most probable tokens. [n, 0] if only the sampled tokens were asked for."""
    logprobs: npt.NDArray[np.float32]
    """[n, K + 1] Their logprobs, and last that of all other tokens together. [n, 1] with K = 0: the
    logprobs of the sampled tokens."""


class ServedTeacher(Teacher):
    """All teacher servers of a run together are one signal."""

    def __init__(
        self,
        config: TeacherConfig,
        servers: Mapping[str, PromptLogprobs],
        policy: Policy,
        prompt_at: Callable[[int], Prompt] | None = None,
        request_for: Callable[[Prompt], TeacherRequest] | None = None,
        *,
        ranks: tuple[int, int] = (0, 1),
        max_error_frac: float = 1.0,
    ) -> None:
        """`ranks` is (this rank, number of ranks): ranks share the limit of requests. The run stops
        if `max_error_frac` of a step's rollouts have no answer."""
        super().__init__(config, {}, policy, prompt_at, request_for)
        self.servers = dict(servers)
        self._max_error_frac = max_error_frac
        # The limits of reward servers hold for teachers too: concurrency, retries, pauses.
        limit = RewardConfig(
            url="",
            timeout_s=config.timeout_s,
            max_concurrent=config.max_concurrent,
            retries=config.retries,
        )
        self._limits = CallLimits([limit] * len(self.servers), config.timeout_s, *ranks)
        # Ids of the rollouts without an answer, in this rank's rows of the last step.
        self.unanswered: set[int] = set()

    @property
    def top_k(self) -> int:
        """The number of most probable tokens to ask for. 0: only the sampled tokens."""
        return self.config.top_k if self.config.loss == "topk" else 0

    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Collective. Asks the servers and writes a TeacherSignal into every micro-batch. Raises
        RewardError on all ranks if too many rollouts have no answer."""
        requests = self.requests(decision)
        questions = [
            {name: teacher_contexts(row, requests, name) for name in self.servers}
            for row in batch.micro_batches
        ]
        numbered = [
            (number, question)
            for row_questions in questions
            for number, name in enumerate(self.servers)
            for question in row_questions[name]
        ]
        # One job per context. The number of its server selects the limit.
        servers = [*self.servers.values()]
        calls = ServerCalls(
            self._limits,
            [(n, partial(self._ask, servers[n], question)) for n, question in numbered],
        )
        while any_rank(calls.run_for(_STOP_CHECK_S)):
            stop_check(False)
        # A rollout whose context failed has no answer, also if its other contexts have one.
        self.unanswered = {numbered[job][1].rollout_id for job in calls.errors}
        num_asked = len({question.rollout_id for _, question in numbered})
        # Raises on all ranks alike, before anything is attached.
        decision = self._add_metrics(decision, calls, num_asked)
        answers = iter([calls.answers.get(job) for job in range(len(numbered))])
        for row, row_questions in zip(batch.micro_batches, questions, strict=True):
            answered = {
                name: [(question, next(answers)) for question in row_questions_of_name]
                for name, row_questions_of_name in row_questions.items()
            }
            self._attach_answers(row, answered)
        return decision

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        """Returns the running check of this signal."""
        return SignalProofs([ServerCheck(self)], self._random_teacher(settings))

    def _ask(self, server: PromptLogprobs, question: RowContext, limit_s: float) -> Answer:
        """Returns the server's answer about the sampled tokens. Runs in a thread. Raises
        FailedCallError if there is none within `limit_s` seconds, or it cannot be used."""
        # Nothing after the last sampled token is asked for.
        token_ids = question.token_ids[: question.sampled_at[-1] + 1].tolist()
        answers = server.ask(token_ids, self.top_k, limit_s)
        # The server says nothing about the first token.
        sampled = [answers[position - 1] for position in question.sampled_at.tolist()]
        # Such an id would be an index error on the device, far from its cause.
        if any(
            token_id >= self._vocabulary_size
            for token in sampled
            for token_id, _ in token.likeliest
        ):
            raise FailedCallError("finds a token likely that the policy does not have")
        return compact_answer(sampled, self.top_k, self._vocabulary_size)

    def _add_metrics(self, decision: Decision, calls: ServerCalls, num_asked: int) -> Decision:
        """Collective. Returns the decision with the servers' metrics. Raises RewardError as
        `attach`."""
        local = {
            "asked": num_asked,
            "unanswered": len(self.unanswered),
            "first_error": calls.errors[min(calls.errors)] if calls.errors else None,
            "retries": calls.num_retries,
            "seconds": calls.seconds,
        }
        metrics = on_rank0(partial(_count_answers, max_error_frac=self._max_error_frac), local)
        step = decision.rank0_decision
        if step is None:
            return decision
        step = dataclasses.replace(step, metrics=step.metrics | metrics)
        return dataclasses.replace(decision, rank0_decision=step)

    def _attach_answers(
        self, row: MicroBatch, answers: Mapping[str, Sequence[tuple[RowContext, Answer | None]]]
    ) -> None:
        """Writes the servers' answers into a row. If one context of an episode has no answer, the
        whole episode counts as unanswered."""
        answered_mask = torch.zeros_like(row.loss_mask)
        scores: list[tuple[TokenIndices | None, TeacherScores]] = []
        masks: dict[str, Tensor] = {}
        for name, pairs in answers.items():
            answered = [
                (question.tokens, answer)
                for question, answer in pairs
                if question.rollout_id not in self.unanswered and answer is not None
            ]
            # Masks are for metrics by teacher; they include rollouts without an answer.
            if len(self.servers) > 1:
                masks[name] = _mask_of(row, [question.tokens for question, _ in pairs])
            if answered:
                device = row.input_ids.device
                tokens = torch.from_numpy(np.concatenate([t for t, _ in answered])).to(device)
                answered_mask = answered_mask.index_fill(0, tokens, True)
                scores.append((tokens, _as_tensors([answer for _, answer in answered], device)))
        row.teacher_signal = self._make_signal(row, scores, masks)
        if self.unanswered & {*row.rollout_ids}:
            row.teacher_signal = dataclasses.replace(
                row.teacher_signal, answered_mask=answered_mask
            )


def _mask_of(row: MicroBatch, tokens: Sequence[npt.NDArray[np.int64]]) -> Tensor:
    """Returns a mask [C] of the row's completion tokens with these indices."""
    mask = np.zeros(len(row.loss_mask), np.bool_)
    mask[np.concatenate([np.zeros(0, np.int64), *tokens])] = True
    return torch.from_numpy(mask).to(row.loss_mask.device)


def compact_answer(tokens: Sequence[PositionLogprobs], top_k: int, vocabulary_size: int) -> Answer:
    """Returns the answer in a few bytes per token. What JSON is parsed into takes ten times as
    much."""
    if not top_k:
        logprobs = np.array([[token.logprob] for token in tokens], np.float32)
        return Answer(np.zeros((len(tokens), 0), np.int32), logprobs)
    ids = np.array([[token_id for token_id, _ in token.likeliest] for token in tokens], np.int32)
    likeliest = [[value for _, value in token.likeliest] for token in tokens]
    rows = [[*values, rest_logprob(values, vocabulary_size)] for values in likeliest]
    return Answer(ids, np.array(rows, np.float32))


def _as_tensors(answers: Sequence[Answer], device: torch.device) -> Tensor | TopTeacher:
    """Returns the answers, one after the other, on the device: logprobs [n] of the sampled tokens,
    or distributions."""
    ids, logprobs = (
        torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*answers, strict=True)
    )
    return TopTeacher(ids.long(), logprobs) if ids.shape[1] else logprobs.flatten()


def rest_logprob(logprobs: Sequence[float], vocabulary_size: int) -> float:
    """Returns the logprob of all other tokens together, if `logprobs` are those of some tokens."""
    # Then there is no other token.
    if len(logprobs) >= vocabulary_size:
        return MIN_LOGPROB
    return math.log(max(1 - math.fsum(map(math.exp, logprobs)), _MIN_REST))


def _count_answers(
    rank_counts: list[dict[str, Any]], max_error_frac: float
) -> dict[str, float | None]:
    """Returns the metrics over all ranks. Runs on rank 0. Raises RewardError if the share of
    rollouts without an answer reaches `max_error_frac`."""
    num_asked = sum(counts["asked"] for counts in rank_counts)
    num_unanswered = sum(counts["unanswered"] for counts in rank_counts)
    if num_unanswered:
        error = next(
            counts["first_error"] for counts in rank_counts if counts["first_error"] is not None
        )
        problem = f"teacher.url: {num_unanswered} of {num_asked} rollouts have no answer"
        unanswered_frac = num_unanswered / num_asked
        if unanswered_frac >= max_error_frac:
            rule = (
                f"{unanswered_frac:.3g} is not under reward_pool.max_error_frac={max_error_frac:g}"
            )
            raise RewardError(f"{problem}: {rule}. The first: the server {error}")
        _log.warning("%s, and are taught nothing; the first: the server %s", problem, error)
    metrics: dict[str, float | None] = {
        "teacher/unanswered_frac": num_unanswered / max(num_asked, 1),
        "teacher/retries": sum(counts["retries"] for counts in rank_counts),
    }
    seconds = [value for counts in rank_counts for value in counts["seconds"]]
    for percent in (50, 95):
        value = float(np.percentile(seconds, percent)) if seconds else None
        metrics[f"teacher/call_s_p{percent}"] = value
    return metrics


def open_served_teacher(
    config: Config,
    policy: Policy,
    session: Session,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> ServedTeacher:
    """Collective. Connects to the servers of teacher.url. Raises ConfigError if one does not
    fit."""
    # One rank asks for the name of the model; all ranks get the same answer or the same error.
    models = on_rank0(
        lambda _: {name: check_server(config, name) for name in config.teacher.urls}, None
    )
    return ServedTeacher(
        config.teacher,
        {name: open_server(config, name, model) for name, model in models.items()},
        policy,
        prompt_at=prompt_at,
        request_for=make_request_for(config, tokenizer),
        ranks=(session.rank, session.world_size),
        max_error_frac=config.reward_pool.max_error_frac,
    )


# Mean difference in nats: the server's number format and its batches of requests are not known
# here.
_BOUND = 0.1
_MAX_CHECK_S = 30.0


class ServerCheck(TeacherCheck):
    """Asks again about a few rollouts, each alone and cut after the last compared token, and
    compares the signal."""

    def __init__(self, teacher: ServedTeacher) -> None:
        super().__init__(teacher, 1.0, "float32")
        self._served = teacher
        self._bound = _BOUND
        self._rounding = 0.0

    def __call__(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, *_: object
    ) -> CheckResult:
        """Collective. As TeacherCheck, and checks which rollouts get a signal."""
        result = super().__call__(sampled, batch, decision)
        if not all(_has_right_mask(row, self._served.unanswered) for row in batch.micro_batches):
            result.errors.append(
                "a rollout without an answer of its teacher's server is taught, "
                "or one that has it is not"
            )
        return result

    def _sources(self) -> Mapping[str, Any]:
        return self._served.servers

    def _has_signal(self, rollout_id: int) -> bool:
        return rollout_id not in self._served.unanswered

    def _logits(self, source: Any, token_ids: Tensor, predict_index: Tensor) -> Tensor | None:
        """Returns logits [n, V] from a server's answer, or None without one. Not collective."""
        # Without a rollout there is nothing to ask.
        if not predict_index.any():
            return None
        server: PromptLogprobs = source
        ids = token_ids.tolist()
        vocabulary_size = self._served.policy.model.get_output_embeddings().weight.shape[0]
        limit_s = min(self._served.config.timeout_s, _MAX_CHECK_S)
        try:
            answers = server.ask(ids, self._served.top_k, limit_s)
        except FailedCallError:
            return None
        logits = torch.empty(len(predict_index), vocabulary_size)
        for number, position in enumerate(predict_index.tolist()):
            token = answers[position]
            logprobs = {**dict(token.likeliest), ids[position + 1]: token.logprob}
            # The other tokens are compared only all together. So their probability may be spread
            # over them in any way.
            num_others = max(vocabulary_size - len(logprobs), 1)
            rest = rest_logprob([*logprobs.values()], vocabulary_size)
            logits[number] = rest - torch.tensor(float(num_others)).log()
            logits[number, list(logprobs)] = torch.tensor(list(logprobs.values()))
        return logits.to(token_ids.device)


def _has_right_mask(row: MicroBatch, unanswered: set[int]) -> bool:
    """Returns whether exactly the tokens of answered rollouts have a signal."""
    signal = row.teacher_signal
    if signal is None or not row.rollout_ids:
        return True
    # The device compares indices of rollouts, not their ids.
    silent = [index for index, rollout_id in enumerate(row.rollout_ids) if rollout_id in unanswered]
    expected = ~torch.isin(row.sequence_index, row.sequence_index.new_tensor(silent))
    mask = torch.ones_like(expected) if signal.answered_mask is None else signal.answered_mask
    masks = [mask]
    if isinstance(signal.divergence, TeacherDivergence):
        scored = torch.zeros_like(expected)
        for tokens, _ in signal.divergence.parts:
            scored[slice(None) if tokens is None else tokens] = True
        masks.append(scored)
    return all(bool((mask == expected).all()) for mask in masks)
