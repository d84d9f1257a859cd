"""Teachers behind vLLM servers: each context that the policy trains on is asked of its teacher's server, which says the
logprobs of its tokens, before the update."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from grpo_spmd.checks.teacher_server import check_server, open_server
from grpo_spmd.config.schema import Config, RewardConfig, TeacherConfig
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import StopCheck
from grpo_spmd.model.divergence import (
    MIN_LOGPROB,
    TeacherDivergence,
    TokenIndices,
    TopTeacher,
    WholeTeacher,
)
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.gradient_check import CheckResult
from grpo_spmd.proofs.update_check import SignalProofs, UpdateCheckSettings
from grpo_spmd.records import Decision, MicroBatch, Prompt, RolloutBatch
from grpo_spmd.rewards.pool.call_limits import CallLimits
from grpo_spmd.rewards.remote.client import Place, PromptLogprobs
from grpo_spmd.rewards.remote.server_calls import ServerCalls
from grpo_spmd.rewards.trl import FailedCallError, RewardError
from grpo_spmd.signals.teacher import Ask, Teacher, TeacherCheck, taught_row, teacher_requests

_log = logging.getLogger("grpo_spmd")
_LOOK_S = 0.5  # between two looks whether the run has to stop
_UNKNOWN = float(
    np.finfo(np.float32).eps
)  # a probability that what is left of 1 cannot tell from none


Said = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Of n tokens: the ids of the K likeliest [n, K] and their logprobs with that of all others [n, K + 1]; where none were
asked for [n, 0], and the tokens' own [n, 1]. All contexts of a step are held as these."""


@dataclass(frozen=True)
class Question:
    """One context of a rollout, as its teacher is shown it."""

    rollout_id: int
    token_ids: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.int64]
    """[n] The places in it of the tokens that the policy sampled there."""
    places: npt.NDArray[np.int64]
    """[n] Those of the same tokens among all of the row."""


class ServedTeacher(Teacher):
    """The servers of a run, as one Signal. A rollout of which one has said nothing is taught nothing."""

    def __init__(
        self,
        config: TeacherConfig,
        servers: Mapping[str, PromptLogprobs],
        policy: Policy,
        prompt_at: Callable[[int], Prompt] | None = None,
        ask_of: Callable[[Prompt], Ask] | None = None,
        *,
        ranks: tuple[int, int] = (0, 1),
        max_error_frac: float = 1.0,
    ) -> None:
        """As Teacher. `ranks`: this one of how many, which share the limit of requests; `max_error_frac`: the share of
        a step's rollouts without an answer from which on the run stops."""
        super().__init__(config, {}, policy, prompt_at, ask_of)
        self.servers, self._max_error_frac = dict(servers), max_error_frac
        limit = RewardConfig(
            url="",
            timeout_s=config.timeout_s,
            max_concurrent=config.max_concurrent,
            retries=config.retries,
        )
        self._limits = CallLimits([limit] * len(self.servers), config.timeout_s, *ranks)
        self.unanswered: set[int] = set()  # rollouts of this rank's rows, of the last step

    @property
    def top_k(self) -> int:
        return self.config.top_k if self.config.loss == "topk" else 0

    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Collective. As Teacher's. Raises RewardError on all ranks where too many rollouts have no answer."""
        asked = self.asked(decision)
        of_rows = [
            {name: self._questions(row, asked, name) for name in self.servers}
            for row in batch.micro_batches
        ]
        numbered = [
            (number, question)
            for of_row in of_rows
            for number, questions in enumerate(of_row.values())
            for question in questions
        ]
        servers = [*self.servers.values()]
        calls = ServerCalls(
            self._limits,
            [(n, partial(self._ask, servers[n], question)) for n, question in numbered],
        )
        while any_rank(calls.go_on(_LOOK_S)):
            stop_check(False)
        self.unanswered = {numbered[job][1].rollout_id for job in calls.failed}
        decision = self._counted(
            decision, calls, len({question.rollout_id for _, question in numbered})
        )
        said = iter([calls.found.get(job) for job in range(len(numbered))])
        for row, of_row in zip(batch.micro_batches, of_rows, strict=True):
            self._teach(
                row,
                {name: [(q, next(said)) for q in questions] for name, questions in of_row.items()},
            )
        return decision

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        return SignalProofs([ServerCheck(self)], self._synthetic(settings))

    def _questions(
        self, row: MicroBatch, asked: Mapping[int, Ask] | None, name: str
    ) -> list[Question]:
        own, places = (row, None) if asked is None else taught_row(row, asked, name)
        return [*_contexts(own, None if places is None else places.cpu().numpy())]

    def _ask(self, server: PromptLogprobs, question: Question, limit_s: float) -> Said:
        """In a thread. What the update needs of the answer, of each sampled token's place."""
        said = server.ask(question.token_ids.tolist(), self.top_k, limit_s)
        own = [
            said[place - 1] for place in question.predicted.tolist()
        ]  # of the first token nothing is said
        if any(token_id >= self._num_tokens for place in own for token_id, _ in place.likeliest):
            raise FailedCallError("finds a token likely that the policy does not have")
        return said_of(own, self.top_k, self._num_tokens)

    def _counted(self, decision: Decision, calls: ServerCalls, num_asked: int) -> Decision:
        """Collective. With the metrics. Raises RewardError as attach."""
        first = calls.failed[min(calls.failed)] if calls.failed else None
        mine = {
            "asked": num_asked,
            "unanswered": len(self.unanswered),
            "first": first,
            "again": calls.num_again,
        }
        found = on_rank0(
            partial(_count, max_error_frac=self._max_error_frac), mine | {"seconds": calls.seconds}
        )
        if decision.rank0_decision is None:
            return decision
        of_all = dataclasses.replace(
            decision.rank0_decision, metrics=decision.rank0_decision.metrics | found
        )
        return dataclasses.replace(decision, rank0_decision=of_all)

    def _teach(
        self, row: MicroBatch, said: Mapping[str, Sequence[tuple[Question, Said | None]]]
    ) -> None:
        answered, device = torch.zeros_like(row.loss_mask), row.input_ids.device
        parts, names = (
            list[tuple[TokenIndices | None, Tensor | WholeTeacher | TopTeacher]](),
            dict[str, Tensor](),
        )
        for name, answers in said.items():
            whole = [
                (question, known)
                for question, known in answers
                if question.rollout_id not in self.unanswered
            ]
            if len(self.servers) > 1:
                names[name] = _marked(row, [question.places for question, _ in answers])
            if whole:
                of_tokens = torch.from_numpy(
                    np.concatenate([question.places for question, _ in whole])
                ).to(device)
                answered = answered.index_fill(0, of_tokens, True)
                parts.append(
                    (
                        of_tokens,
                        _as_tensors([known for _, known in whole if known is not None], device),
                    )
                )
        row.teacher_signal = self._teacher_signal(row, parts, names)
        if self.unanswered & {*row.rollout_ids}:
            row.teacher_signal = dataclasses.replace(row.teacher_signal, answered_mask=answered)


def _contexts(row: MicroBatch, places: npt.NDArray[np.int64] | None) -> Iterator[Question]:
    """Of each sequence of a row in which the policy sampled something, up to the last such token. `places` [C]: of its
    tokens in another row."""
    if not row.rollout_ids:
        return
    ids, predict, index = (
        x.cpu().numpy() for x in (row.input_ids, row.predict_index, row.sequence_index)
    )
    bounds = np.cumsum([0, *row.sequence_lengths])
    sequences = np.searchsorted(bounds, predict, side="right") - 1
    for number in np.unique(sequences).tolist():
        own = np.flatnonzero(sequences == number)
        predicted = predict[own] + 1 - bounds[number]
        token_ids = ids[bounds[number] : bounds[number] + predicted[-1] + 1]
        yield Question(
            row.rollout_ids[index[own[0]]],
            token_ids,
            predicted,
            own if places is None else places[own],
        )


def _marked(row: MicroBatch, places: Sequence[npt.NDArray[np.int64]]) -> Tensor:
    marks = np.zeros(len(row.loss_mask), np.bool_)
    marks[np.concatenate([np.zeros(0, np.int64), *places])] = True
    return torch.from_numpy(marks).to(row.loss_mask.device)


def said_of(places: Sequence[Place], top_k: int, num_tokens: int) -> Said:
    """Numbers of a few bytes: what JSON is read into takes ten times as much."""
    if not top_k:
        return np.zeros((len(places), 0), np.int32), np.array(
            [[place.logprob] for place in places], np.float32
        )
    ids = np.array([[token_id for token_id, _ in place.likeliest] for place in places], np.int32)
    logprobs = ([value for _, value in place.likeliest] for place in places)
    return ids, np.array([[*known, rest_of(known, num_tokens)] for known in logprobs], np.float32)


def _as_tensors(said: Sequence[Said], device: torch.device) -> Tensor | TopTeacher:
    ids, logprobs = (
        torch.from_numpy(np.concatenate(each)).to(device) for each in zip(*said, strict=True)
    )
    return TopTeacher(ids.long(), logprobs) if ids.shape[1] else logprobs.flatten()


def rest_of(known: Sequence[float], num_tokens: int) -> float:
    """Logprob of all tokens together but those whose logprobs are known."""
    if len(known) >= num_tokens:
        return MIN_LOGPROB
    return math.log(max(1 - math.fsum(map(math.exp, known)), _UNKNOWN))


def _count(parts: list[dict[str, Any]], max_error_frac: float) -> dict[str, float | None]:
    """The metrics, of what all ranks say. Raises RewardError."""
    num_asked, unanswered = (
        sum(part["asked"] for part in parts),
        sum(part["unanswered"] for part in parts),
    )
    seconds = [each for part in parts for each in part["seconds"]]
    if unanswered:
        first = next(part["first"] for part in parts if part["first"] is not None)
        what = f"teacher.url: {unanswered} of {num_asked} rollouts have no answer"
        if (share := unanswered / num_asked) >= max_error_frac:
            rule = f"{share:.3g} is not under reward_pool.max_error_frac={max_error_frac:g}"
            raise RewardError(f"{what}: {rule}. The first: the server {first}")
        _log.warning("%s, and are taught nothing; the first: the server %s", what, first)
    return {
        "teacher/unanswered_frac": unanswered / max(num_asked, 1),
        "teacher/retries": sum(part["again"] for part in parts),
        **{
            f"teacher/call_s_p{p}": float(np.percentile(seconds, p)) if seconds else None
            for p in (50, 95)
        },
    }


_BOUND = 0.1  # nats on average: nobody here knows the server's number format, or with whom it batches a request
_MOST_S = 30.0


class ServerCheck(TeacherCheck):
    def __init__(self, teacher: ServedTeacher) -> None:
        super().__init__(teacher, 1.0, "float32")
        self._served, self._bound, self._rounding = teacher, _BOUND, 0.0

    def __call__(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, *_: object
    ) -> CheckResult:
        """Collective. As TeacherCheck's, and who is taught."""
        found = super().__call__(sampled, batch, decision)
        if not all(
            _says_who_is_taught(row, self._served.unanswered) for row in batch.micro_batches
        ):
            found.errors.append(
                "a rollout without an answer of its teacher's server is taught, or one that has it is not"
            )
        return found

    def _sources(self) -> Mapping[str, Any]:
        return self._served.servers

    def _was_taught(self, rollout_id: int) -> bool:
        return rollout_id not in self._served.unanswered

    def _logits(self, source: Any, ids: Tensor, where: Tensor) -> Tensor | None:
        """As TeacherCheck's. Not collective."""
        server: PromptLogprobs = source
        if not where.any():  # no rollout
            return None
        asked, num_tokens = (
            ids.tolist(),
            self._served.policy.model.get_output_embeddings().weight.shape[0],
        )
        try:
            said = server.ask(
                asked, self._served.top_k, min(self._served.config.timeout_s, _MOST_S)
            )
        except FailedCallError:
            return None
        logits = torch.empty(len(where), num_tokens)
        for number, place in enumerate(where.tolist()):
            known = {**dict(said[place].likeliest), asked[place + 1]: said[place].logprob}
            # What is not known of the others is as good as any: only what they have together is compared.
            others = max(num_tokens - len(known), 1)
            rest = rest_of([*known.values()], num_tokens)
            logits[number] = rest - torch.tensor(float(others)).log()
            logits[number, list(known)] = torch.tensor(list(known.values()))
        return logits.to(ids.device)


def _says_who_is_taught(row: MicroBatch, unanswered: set[int]) -> bool:
    """Whether what is attached to the tokens says that those of these rollouts, and no others, are taught nothing."""
    signal, silent = (
        row.teacher_signal,
        [place for place, i in enumerate(row.rollout_ids) if i in unanswered],
    )
    if signal is None or not row.rollout_ids:
        return True
    taught = ~torch.isin(row.sequence_index, row.sequence_index.new_tensor(silent))
    said = [torch.ones_like(taught) if signal.answered_mask is None else signal.answered_mask]
    if isinstance(signal.divergence, TeacherDivergence):
        of_term = torch.zeros_like(taught)
        for places, _ in signal.divergence.parts:
            of_term[slice(None) if places is None else places] = True
        said.append(of_term)
    return all(bool((each == taught).all()) for each in said)


def open_served_teacher(
    config: Config,
    policy: Policy,
    session: Session,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> ServedTeacher:
    """Collective. Connects to the servers of teacher.url. Raises ConfigError if one is not fit."""
    models = on_rank0(
        lambda _: {name: check_server(config, name) for name in config.teacher.urls}, None
    )
    servers = {name: open_server(config, name, model) for name, model in models.items()}
    return ServedTeacher(
        config.teacher,
        servers,
        policy,
        prompt_at,
        teacher_requests(config, tokenizer),
        ranks=(session.rank, session.world_size),
        max_error_frac=config.reward_pool.max_error_frac,
    )
