"""What the gradient check lets a teacher say of its made-up rows, and what that comes to when it is written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_spmd.config.schema import TeacherConfig
from grpo_spmd.model.divergence import TaughtBy, TopTeacher, WholeTeacher, top_outcomes
from grpo_spmd.model.policy import DTYPES, Policy
from grpo_spmd.records import Lesson, MicroBatch

_WIDTH = 8  # of its hidden states


class MadeUpTeacher:
    """Says of each sampled token what it is told to, or has a distribution of its own, drawn from a fixed seed."""

    def __init__(
        self, config: TeacherConfig, policy: Policy, temperature: float, dtype: str
    ) -> None:
        self._config, self._temperature, self._dtype = config, temperature, DTYPES[dtype]
        self.coef, self._draw = config.coef, torch.Generator().manual_seed(0)
        self._scaling = policy.temperature, policy.logprob_chunk_tokens, policy.softcap
        self._head = self._drawn(policy.model.get_output_embeddings().weight.shape[0])
        self._log_p: list[Tensor] = []  # of rows with a rollout
        self._ids: list[Tensor] = []

    @property
    def is_sampled(self) -> bool:
        return self._config.loss == "sampled"

    def teach(self, row: MicroBatch) -> None:
        if self.is_sampled:
            row.lesson = Lesson(self.coef, torch.zeros_like(row.rollout_logprobs))
            return
        hidden, head = (
            self._drawn(len(row.target_ids)).to(row.input_ids.device),
            self._head.to(row.input_ids.device),
        )
        said: WholeTeacher | TopTeacher = WholeTeacher(hidden, head, self._temperature, None)
        if self._config.loss == "topk":
            said = TopTeacher(
                *top_outcomes(hidden, head, self._config.top_k, *self._scaling_of_own())
            )
        row.lesson = Lesson(
            self.coef,
            terms=(TaughtBy([(None, said)], self._config.beta, self._scaling, len(head)),),
        )
        if row.rollout_ids:
            self._log_p.append((hidden @ head.T).double().div(self._temperature).log_softmax(-1))
            self._ids += [said.ids] if isinstance(said, TopTeacher) else []

    def divergence(self, log_p: Tensor) -> Tensor:
        """[n] float64, of the policy's logprobs [n, V] of all rows' tokens, by the formula and autograd alone."""
        s, t, beta = (
            log_p.double(),
            torch.cat([log_p[:0].double(), *self._log_p]),
            self._config.beta,
        )
        if self._ids:
            ids = torch.cat(self._ids)
            s, t = (torch.cat([x.gather(-1, ids), _of_others(x, ids)], -1) for x in (s, t))
        if beta == 0.0:
            return (t.exp() * (t - s)).sum(-1)
        if beta == 1.0:
            return (s.exp() * (s - t)).sum(-1)
        m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
        return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1)

    def _scaling_of_own(self) -> tuple[float, int, None]:
        return self._temperature, self._scaling[1], None

    def _drawn(self, rows: int) -> Tensor:
        return torch.randn(rows, _WIDTH, generator=self._draw).to(self._dtype)


def _of_others(log_p: Tensor, ids: Tensor) -> Tensor:
    return log_p.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
