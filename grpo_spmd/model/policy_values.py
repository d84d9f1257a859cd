"""A critic on the policy's own layers: a head of one number a token over its last hidden states."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.distributed.session import Session
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import shard_over_ranks
from grpo_spmd.records import MicroBatch

_log = logging.getLogger("grpo_spmd")


class PolicyValues(nn.Module):
    """The head, float32 and zero at first, and the policy below it, whose parameters are not its own."""

    def __init__(self, policy: Policy, session: Session) -> None:
        """Collective."""
        super().__init__()
        self._policy = (policy,)  # in a tuple nn.Module does not find it
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1, device=session.device)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()
        # Gathered again by each pass: a pass without a backward pass would leave it gathered, and stale behind a step.
        shard_over_ranks(self.head, (), session.mesh, torch.float32, reshard_root=True)
        _log.info("critic: a value head on the policy's own layers, %d parameters, of zeros", width + 1)

    @property
    def policy(self) -> Policy:
        return self._policy[0]

    @property
    def backbone(self) -> Any:
        return self.policy.model.get_decoder()

    def term(self, hidden: Tensor, _: Tensor) -> Tensor:
        """Collective. Values, float32 [C], of hidden states [C, D] of the policy: a Term of its forward pass."""
        values: Tensor = self.head(hidden.float())[:, 0].clone()
        return values

    def forward(self, batch: MicroBatch) -> Tensor:
        """Collective. Values [C] of the states before `batch.target_ids`, with a gradient for the head alone."""
        with torch.no_grad():
            (hidden,) = self.policy(batch, lambda hidden, _: hidden, only_term=True)
        return self.term(hidden, hidden)

    def plain_values(self, token_ids: Tensor) -> Tensor:
        """Collective. Values [S, L] of rows of one sequence each, by HF's own forward pass: for proofs/."""
        with plain_states(self.policy) as states:
            self.policy.plain_logits(token_ids, torch.zeros(1, dtype=torch.int64, device=token_ids.device))
        values: Tensor = self.head(states[0].float())[..., 0].clone()
        return values

    def reshard(self) -> None:
        cast(FSDPModule, self.policy).reshard()


@contextmanager
def plain_states(policy: Policy) -> Iterator[list[Tensor]]:
    """What the decoder gives to the lm_head [S, L, D] in each of the passes within."""
    states: list[Tensor] = []
    handle = policy.model.get_decoder().register_forward_hook(lambda *a: states.append(a[-1].last_hidden_state))
    try:
        yield states
    finally:
        handle.remove()
