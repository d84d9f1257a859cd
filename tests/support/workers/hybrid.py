"""Worker: logprobs and gradients of a hybrid model's packed rows, beside plain transformers,
sequence by sequence; with activations kept, recomputed, and recomputed but for products.

python -m tests.support.workers.hybrid CONFIG
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.records import Rollout

# A gated delta net works in chunks of 64 tokens; neighbours of equal length share a call.
LENGTHS = (70, 33, 33, 9, 129, 64)
PROMPT = 5
# Their gradients pass through exp(-exp(A_log) * softplus(dt_bias + ...)) of each token.
STATE_PARAMETERS = ("A_log", "dt_bias")


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session(config.model.num_replicas)
    for kept in (False, True, "selective"):
        model = replace(config.model, activation_checkpointing=kept)
        policy = build_policy(model, config.rollout.temperature, session)
        plain = transformers.AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
        logprobs, others, states = differences(policy, plain, session.rank, session.world_size)
        print(f"rank {session.rank} {logprobs:.1e} nats, gradients {others:.1e}, {states:.1e}")
        assert logprobs < 1e-5, logprobs
        assert others < 5e-5, others
        assert states < 5e-4, states
    end_session()


def differences(
    policy: Policy, plain: Any, rank: int, num_ranks: int
) -> tuple[float, float, float]:
    """Returns the largest differences: of a logprob, of the gradients relative to each tensor's
    largest, and those of the state parameters."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in LENGTHS]
    weights = [torch.randn(n - PROMPT, generator=generator) for n in LENGTHS]
    rollouts = [
        Rollout(number, 1.0, True, ids[:PROMPT], ids[PROMPT:], [0.0] * (len(ids) - PROMPT))
        for number, ids in enumerate(sequences)
    ]
    batch = pack_rollouts(rollouts[rank::num_ranks], torch.device("cpu"))
    actual, _ = policy(batch)
    temperature = policy.logits.temperature
    expected = []
    for ids in sequences:
        logits = plain(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 : -1]
        targets = torch.tensor(ids[PROMPT:])
        expected.append((logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0])
    sum((a * b).sum() for a, b in zip(expected, weights, strict=True)).backward()
    local = list(zip(expected, weights, strict=True))[rank::num_ranks]
    (actual * torch.cat([weight for _, weight in local])).sum().backward()
    logprobs = float((actual - torch.cat([values for values, _ in local])).detach().abs().max())
    reference = dict(plain.named_parameters())
    worst = {True: 0.0, False: 0.0}
    for name, parameter in hf_named_parameters(policy):
        assert isinstance(parameter.grad, DTensor)
        gradient, exact = parameter.grad.full_tensor(), reference[name].grad
        assert exact is not None
        is_state = name.endswith(STATE_PARAMETERS)
        difference = float((gradient - exact).abs().max() / exact.abs().max())
        worst[is_state] = max(worst[is_state], difference)
    return logprobs, worst[False], worst[True]


if __name__ == "__main__":
    with exit_with_outcome():
        main()
