"""Teachers behind vLLM servers, which are asked for the logprobs of the policy's tokens before each
update.

A *context* is one token sequence that the policy trains on; a rollout has one or several. A
*question* is one request to a server about one context. An *answer* is the server's logprobs for
the context's sampled tokens. A rollout with a context that got no answer gets no teacher signal.
The last part of the file is the running check.
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
from grpo_spmd.learn.sampled_step import SampledStep, seconds_percentiles
from grpo_spmd.learn.step_messages import revise_decision
from grpo_spmd.learn.update import StopCheck
from grpo_spmd.model.logprobs import MIN_LOGPROB, TeacherDivergence, TokenIndices, TopTeacher
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.synthetic import CheckResult, UpdateCheckSettings
from grpo_spmd.records import Decision, MicroBatch, Prompt, RolloutBatch
from grpo_spmd.rewards.client import PositionLogprobs, PromptLogprobs, ServerCalls
from grpo_spmd.rewards.pool.call_limits import CallLimits
from grpo_spmd.rewards.trl import FailedCallError, RewardError
from grpo_spmd.signals.teacher import (
    RequestFor,
    Teacher,
    TeacherCheck,
    TeacherScores,
    make_request_for,
    teacher_contexts,
    token_mask,
)

_log = logging.getLogger("grpo_spmd")
# Seconds between two checks of whether the run has to stop, while requests are running.
_STOP_CHECK_S = 0.5
# 1 minus a sum of float32 probabilities has about this error, so a smaller rest cannot be told from
# 0, whose logprob would be infinite.
_MIN_REST = float(np.finfo(np.float32).eps)


class Answer(NamedTuple):
    """A server's logprobs for the n sampled tokens of a context.

    They are arrays, which take little memory: the answers of a whole step are there together."""

    ids: npt.NDArray[np.int32]
    """[n, K] The K most probable tokens. K is 0 if only the sampled tokens were asked for."""
    logprobs: npt.NDArray[np.float32]
    """[n, K + 1] The logprobs of these tokens, then the logprob of all other tokens together. With
    K = 0, [n, 1]: the logprobs of the sampled tokens."""


class _Question(NamedTuple):
    """A context about which a server is asked."""

    row: MicroBatch
    """The micro-batch that holds the context."""
    server: int
    """The index of the server among the run's servers."""
    context: RowContext
    """The context as the teacher sees it."""


class ServedTeacher(Teacher):
    """The signal of a run's teachers behind servers; one object stands for all of them."""

    def __init__(
        self,
        config: TeacherConfig,
        servers: Mapping[str, PromptLogprobs],
        policy: Policy,
        prompt_at: Callable[[int], Prompt] | None = None,
        request_for: RequestFor | None = None,
        *,
        ranks: tuple[int, int] = (0, 1),
        max_error_frac: float = 1.0,
    ) -> None:
        """`ranks` is (this rank, number of ranks), which share the limit of concurrent requests.
        The run stops if the fraction `max_error_frac` or more of a step's rollouts have no answer.
        """
        super().__init__(config, {}, policy, prompt_at, request_for)
        self.servers = dict(servers)
        self._max_error_frac = max_error_frac
        # CallLimits reads the limits of one server from a RewardConfig.
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
        """How many of the most probable tokens a server is asked for at each position. 0: only the
        sampled tokens' logprobs."""
        return self.config.top_k if self.config.loss == "topk" else 0

    def attach(
        self,
        batch: RolloutBatch,
        decision: Decision,
        stop_check: StopCheck,
        sampled: SampledStep | None = None,
    ) -> Decision:
        """Collective. Asks the servers and writes a TeacherSignal into every micro-batch.

        Returns the decision with metrics. `sampled` is only needed with teacher.prompt_template.
        Raises RewardError on all ranks if too many rollouts have no answer."""
        requests = self.requests(decision, sampled)
        # There is one request for each context.
        questions = [
            _Question(row, number, context)
            for row in batch.micro_batches
            for number, name in enumerate(self.servers)
            for context in teacher_contexts(row, requests, name)
        ]
        servers = [*self.servers.values()]
        calls = ServerCalls(
            self._limits,
            [(q.server, partial(self._ask, servers[q.server], q.context)) for q in questions],
        )
        while any_rank(calls.run_for(_STOP_CHECK_S)):
            stop_check(False)
        # A rollout with one failed context has no answer, even if its other contexts have one.
        self.unanswered = {questions[job].context.rollout_id for job in calls.errors}
        # This rank's counts. _count_answers may raise, on all ranks, before anything is attached.
        local = {
            "asked": len({question.context.rollout_id for question in questions}),
            "unanswered": len(self.unanswered),
            "errors": [calls.errors[job] for job in sorted(calls.errors)[:1]],
            "retries": calls.num_retries,
            "seconds": calls.seconds,
        }
        metrics = on_rank0(partial(_count_answers, max_error_frac=self._max_error_frac), local)
        for row in batch.micro_batches:
            scored: list[tuple[TokenIndices | None, TeacherScores]] = []
            for number in range(len(servers)):
                answered = [
                    (question.context.tokens, calls.answers[job])
                    for job, question in enumerate(questions)
                    if question.row is row
                    and question.server == number
                    and question.context.rollout_id not in self.unanswered
                ]
                if answered:
                    device = row.input_ids.device
                    tokens = torch.from_numpy(np.concatenate([t for t, _ in answered])).to(device)
                    scored.append((tokens, _as_tensors([answer for _, answer in answered], device)))
            row.teacher_signal = self._make_signal(row, scored, requests)
            if self.unanswered & {*row.rollout_ids}:
                is_answered = [i not in self.unanswered for i in row.rollout_ids]
                row.teacher_signal = dataclasses.replace(
                    row.teacher_signal, answered_mask=token_mask(row, is_answered)
                )
        return self.count_prompts(revise_decision(decision, metrics), requests)

    def check(self, settings: UpdateCheckSettings) -> TeacherCheck:
        """Returns the running check of this signal."""
        return ServerCheck(self, settings)

    def _ask(self, server: PromptLogprobs, question: RowContext, limit_s: float) -> Answer:
        """Returns the server's answer about a context's sampled tokens. Runs in a thread. Raises
        FailedCallError if the server sends none within `limit_s` seconds, or one that cannot be
        used."""
        # The request ends with the last sampled token.
        token_ids = question.token_ids[: question.sampled_at[-1] + 1].tolist()
        answers = server.ask(token_ids, self.top_k, limit_s)
        # `answers` begins with the second token: a server has no logprob for the first.
        sampled = [answers[position - 1] for position in question.sampled_at.tolist()]
        # An id beyond the policy's vocabulary would be an index error on the device later.
        if any(
            token_id >= self._vocabulary_size
            for token in sampled
            for token_id, _ in token.likeliest
        ):
            raise FailedCallError("sent logprobs of a token that is not in the policy's vocabulary")
        return compact_answer(sampled, self.top_k, self._vocabulary_size)


def compact_answer(tokens: Sequence[PositionLogprobs], top_k: int, vocabulary_size: int) -> Answer:
    """Returns a server's logprobs of `tokens` as an Answer. The Python objects into which JSON is
    parsed take ten times as much memory."""
    # With top_k 0 the rows of `ids` are empty: an Answer about sampled tokens alone has no ids.
    ids = [[token_id for token_id, _ in token.likeliest[:top_k]] for token in tokens]
    logprobs = [[token.logprob] for token in tokens]
    if top_k:
        likeliest = [[value for _, value in token.likeliest] for token in tokens]
        logprobs = [[*values, rest_logprob(values, vocabulary_size)] for values in likeliest]
    return Answer(np.array(ids, np.int32), np.array(logprobs, np.float32))


def _as_tensors(answers: Sequence[Answer], device: torch.device) -> Tensor | TopTeacher:
    """Returns the concatenated answers on the device: logprobs [n] of the sampled tokens, or
    distributions over the most probable tokens."""
    ids, logprobs = (
        torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*answers, strict=True)
    )
    return TopTeacher(ids.long(), logprobs) if ids.shape[1] else logprobs.flatten()


def rest_logprob(logprobs: Sequence[float], vocabulary_size: int) -> float:
    """Returns the logprob of all tokens together that are not among those with these `logprobs`."""
    # If all tokens are given, the rest is empty.
    if len(logprobs) >= vocabulary_size:
        return MIN_LOGPROB
    return math.log(max(1 - math.fsum(map(math.exp, logprobs)), _MIN_REST))


def _count_answers(
    rank_counts: list[dict[str, Any]], max_error_frac: float
) -> dict[str, float | None]:
    """Returns the metrics of all ranks' requests. Runs on rank 0. Raises RewardError if the
    fraction of rollouts without an answer is `max_error_frac` or more."""
    num_asked = sum(counts["asked"] for counts in rank_counts)
    num_unanswered = sum(counts["unanswered"] for counts in rank_counts)
    unanswered_frac = num_unanswered / max(num_asked, 1)
    if num_unanswered:
        error = next(error for counts in rank_counts for error in counts["errors"])
        problem = f"teacher.url: {num_unanswered} of {num_asked} rollouts have no answer"
        if unanswered_frac >= max_error_frac:
            raise RewardError.about(
                f"the teacher's server {error}",
                f"{problem}: {unanswered_frac:.3g} is not under reward_pool.max_error_frac="
                f"{max_error_frac:g}",
            )
        _log.warning("%s, and are taught nothing; the first: the server %s", problem, error)
    seconds = [value for counts in rank_counts for value in counts["seconds"]]
    return {
        "teacher/unanswered_frac": unanswered_frac,
        "teacher/retries": sum(counts["retries"] for counts in rank_counts),
        **seconds_percentiles("teacher/call_s", seconds),
    }


def open_served_teacher(
    config: Config,
    policy: Policy,
    session: Session,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> ServedTeacher:
    """Collective. Returns the teacher for the servers of teacher.url. Raises ConfigError if a
    server does not answer or cannot teach the policy."""
    # Only rank 0 asks for the models' names; all ranks get the same names or the same error.
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


# The largest allowed mean difference between two answers of a server, in nats. It is wide, since
# the server's dtype and its batching of requests are not known here.
_BOUND = 0.1
# A check waits for an answer at most this long, even if teacher.timeout_s is longer.
_MAX_CHECK_S = 30.0


class ServerCheck(TeacherCheck):
    """Asks the servers again about a few rollouts, and compares the new answers with the signal.
    Each request has one rollout, cut after the last compared token."""

    def __init__(self, teacher: ServedTeacher, settings: UpdateCheckSettings) -> None:
        """Sets a bound of differences for servers, which nothing widens."""
        super().__init__(teacher, settings)
        self._served = teacher
        self._bound = _BOUND
        self._rounding = 0.0

    def __call__(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, *_: object
    ) -> CheckResult:
        """Collective. Does what TeacherCheck does, and also checks that exactly the rollouts with
        an answer have a signal."""
        result = super().__call__(sampled, batch, decision)
        if not all(_has_right_mask(row, self._served.unanswered) for row in batch.micro_batches):
            result.errors.append(
                "a rollout without an answer of its teacher's server has a teacher signal, "
                "or one with an answer has none"
            )
        return result

    def _sources(self) -> Mapping[str, Any]:
        """Returns the clients of the servers, by the teachers' names."""
        return self._served.servers

    def _has_signal(self, rollout_id: int) -> bool:
        """Returns False if a server has not answered about the rollout."""
        return rollout_id not in self._served.unanswered

    def _compare(
        self, source: Any, row: MicroBatch, context: RowContext, *, of_noise: bool
    ) -> Tensor:
        """Collective. Returns the absolute differences [n] of logprobs between the signal and a new
        answer of the server `source`.

        With `of_noise` there are none: the bound of a server's differences is not widened."""
        # The server cannot be asked for another dtype, so its rounding cannot be measured.
        if of_noise:
            return torch.zeros(0, dtype=torch.float64)
        return super()._compare(source, row, context, of_noise=False)

    def _logits(self, source: Any, token_ids: Tensor, predict_index: Tensor) -> Tensor | None:
        """Asks a server about one sequence. Returns logits [n, V] made from its answer, or None.

        The arguments are those of TeacherCheck._logits; this method is not collective. The result
        is None if there is nothing to ask, or if the server sends no answer."""
        # This is how `_compare` calls it without a context: there is nothing to ask.
        if not predict_index.any():
            return None
        server: PromptLogprobs = source
        teacher = self._served
        ids = token_ids.tolist()
        vocabulary_size = teacher.policy.model.get_output_embeddings().weight.shape[0]
        try:
            limit_s = min(teacher.config.timeout_s, _MAX_CHECK_S)
            answers = server.ask(ids, teacher.top_k, limit_s)
        except FailedCallError:
            return None
        rows = []
        for position in predict_index.tolist():
            token = answers[position]
            logprobs = {**dict(token.likeliest), ids[position + 1]: token.logprob}
            # The probability of all other tokens is spread evenly over them. Any other way would
            # do, since they are compared only as a sum.
            num_others = max(vocabulary_size - len(logprobs), 1)
            rest = rest_logprob([*logprobs.values()], vocabulary_size) - math.log(num_others)
            rows.append([logprobs.get(i, rest) for i in range(vocabulary_size)])
        return torch.tensor(rows, device=token_ids.device)


def _has_right_mask(row: MicroBatch, unanswered: set[int]) -> bool:
    """Returns True if exactly the tokens of rollouts with an answer have a signal. `unanswered` are
    the ids of the rollouts without an answer."""
    signal = row.teacher_signal
    if signal is None or not row.rollout_ids:
        return True
    # `sequence_index` holds each token's rollout, as an index into `rollout_ids`.
    indices = [index for index, number in enumerate(row.rollout_ids) if number in unanswered]
    expected = ~torch.isin(row.sequence_index, row.sequence_index.new_tensor(indices))
    masks = [torch.ones_like(expected) if signal.answered_mask is None else signal.answered_mask]
    if isinstance(signal.divergence, TeacherDivergence):
        masks.append(torch.zeros_like(expected))
        for tokens, _ in signal.divergence.parts:
            masks[-1][slice(None) if tokens is None else tokens] = True
    return all(torch.equal(mask, expected) for mask in masks)
