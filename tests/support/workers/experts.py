"""Worker: a mixture of experts' gradient beside plain transformers, and faults of its sync that the
proof must see.

python -m tests.support.workers.experts CONFIG
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_proof import prove_weights
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.families.build import constants
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.records import Rollout, SyncStats
from tests.support.full_tensors import gather_full_tensors, load_full_tensors

LENGTHS = (12, 21, 9, 30)
PROMPT = 5


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session()
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    policy = build_policy(config.model, config.rollout.temperature, session)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32
    )
    worst = gradient_difference(policy, plain, session.rank, session.world_size)
    WeightSync(policy, engine, 1 << 20).sync(1)
    num_faults = faults_are_seen(policy, engine)
    print(f"rank {session.rank} gradient {worst:.2e}, {num_faults} faults seen", flush=True)
    assert worst < 2e-6, worst
    engine.shutdown()
    end_session()


def gradient_difference(policy: Policy, plain: Any, rank: int, num_ranks: int) -> float:
    """The largest difference from plain transformers, sequence by sequence, of any tensor's
    gradient, relative to its largest value."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in LENGTHS]
    rollouts = [
        Rollout(0, 1.0, True, ids[:PROMPT], ids[PROMPT:], [0.0] * (len(ids) - PROMPT))
        for ids in sequences[rank::num_ranks]
    ]
    logprobs, _ = policy(pack_rollouts(rollouts, torch.device("cpu")))
    (-logprobs.sum()).backward()
    temperature = policy.logits.temperature
    for ids in sequences:
        logits = plain(torch.tensor([ids])).logits[0, PROMPT - 1 : -1] / temperature
        targets = torch.tensor(ids[PROMPT:])
        logits.log_softmax(-1).gather(-1, targets[:, None]).sum().neg().backward()
    expected = dict(plain.named_parameters())
    worst = 0.0
    for name, parameter in hf_named_parameters(policy):
        assert isinstance(parameter.grad, DTensor)
        gradient, reference = parameter.grad.full_tensor(), expected[name].grad
        assert reference is not None
        worst = max(worst, float((gradient - reference).abs().max() / reference.abs().max()))
    policy.zero_grad()
    return worst


def faults_are_seen(policy: Policy, engine: RolloutEngine) -> int:
    """The engine is given wrong experts of the last layer, each time one fault; returns how
    many."""
    clean = dict(gather_full_tensors(policy, engine.dtype, 1 << 20, SyncStats()))
    clean |= constants(policy.model)
    names = {leaf: next(n for n in reversed(clean) if n.endswith(leaf)) for leaf in _LEAVES}
    faults = list(FAULTS)
    if constants(policy.model):
        names |= {"bias": next(iter(constants(policy.model)))}
        faults += [("bias", one_bias_moved)]
    for leaf, change in faults:
        name = names[leaf]
        load_full_tensors(policy, engine, {**clean, name: change(clean[name].clone())})
        try:
            prove_weights(policy, engine, 1)
        except Rank0Error as error:
            seen = name if leaf == "bias" else names["down_proj"]
            assert seen in str(error), error  # noqa: PT017
            assert "in 1 of" in str(error), error  # noqa: PT017
        else:
            raise AssertionError(f"was not seen: {change.__name__}")
        load_full_tensors(policy, engine, clean)
        prove_weights(policy, engine, 1)
    return len(faults)


_LEAVES = "gate_up_proj", "down_proj"


def gate_and_up_swapped(gate_up: Tensor) -> Tensor:
    """Of one expert."""
    gate, up = gate_up[1].clone().chunk(2)
    gate_up[1] = torch.cat([up, gate])
    return gate_up


def two_experts_exchanged(matrices: Tensor) -> Tensor:
    return matrices[[0, 2, 1, *range(3, len(matrices))]]


def one_row_moved(matrices: Tensor) -> Tensor:
    """By a step of the size that an optimizer makes in a few updates."""
    matrices[-1, -1] *= 1.001
    return matrices


def one_bias_moved(bias: Tensor) -> Tensor:
    """By the last bit of float32."""
    bias[-1] = torch.nextafter(bias[-1], bias.new_tensor(torch.inf))
    return bias


FAULTS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("gate_up_proj", gate_and_up_swapped),
    ("gate_up_proj", two_experts_exchanged),
    ("gate_up_proj", one_row_moved),
    ("down_proj", two_experts_exchanged),
    ("down_proj", one_row_moved),
]


if __name__ == "__main__":
    with exit_with_outcome():
        main()
