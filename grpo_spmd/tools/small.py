"""GRPO in one page, from the parts of this package, for taking apart: the demo's model learns countdown.

    python -m grpo_spmd.demo && python -m grpo_spmd.small [NUM_STEPS]
    torchrun --standalone --nproc-per-node 2 -m grpo_spmd.small

Each rank samples its own prompts with its own vLLM and trains on them. grpo_spmd.train adds a checked config, rewards
that may hang, rollouts dealt to ranks by cost, several updates a rollout, a reference model, evaluation, metrics,
checkpoints, preemption.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_spmd.config.schema import LossConfig, ModelConfig, OptimizerConfig, RolloutConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.learn.advantages import compute_advantages
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.losses import LossInputs, aggregation_weights, policy_loss
from grpo_spmd.model.hf_files import load_tokenizer, stop_token_ids
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import Policy, build_policy
from grpo_spmd.records import Completion, MicroBatch, Rollout, rollout_seed
from grpo_spmd.rewards.verifiers import countdown

MODEL = ModelConfig(path=".demo/model", dtype="float32")
TASKS = Path(".demo/train.jsonl")  # {"prompt": "3,8=24:", "nums": [3, 8], "target": 24}
LONGEST = 16  # tokens of a prompt and its completion
ROLLOUT = RolloutConfig(num_prompts_per_step=32, group_size=8, max_completion_tokens=8)
LOSS, OPTIMIZER = LossConfig(rollout_correction="none"), OptimizerConfig(lr=1e-3, weight_decay=0.0)


def train(num_steps: int) -> None:
    """Collective. One line a step: mean reward, loss, and the largest |policy - engine| of a token's logprob."""
    session = start_session()
    tokenizer = load_tokenizer(MODEL.path)
    tasks = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
    # The engine first: it measures the GPU's free memory, then sleeps and leaves it to the policy.
    engine = RolloutEngine(MODEL, ROLLOUT, LONGEST, session, stop_token_ids(MODEL.path, tokenizer))
    policy = build_policy(MODEL, ROLLOUT.temperature, session, longest=LONGEST)
    optimizer, _ = build_optimizer(policy, OPTIMIZER)
    weight_sync = WeightSync(policy, engine, ROLLOUT.sync_bucket_bytes(session.device.type))
    for step in range(1, num_steps + 1):
        weight_sync.sync(step)  # shards -> full tensors -> vLLM
        places = random.Random(step).sample(
            range(len(tasks)), ROLLOUT.num_prompts_per_step
        )  # alike on all ranks
        own = places[session.rank :: session.world_size]
        prompts = [tokenizer(tasks[place]["prompt"]).input_ids for place in own]
        completions = sample(engine, own, prompts, step)
        engine.sleep()
        rewards = score([tasks[place] for place in own], completions, tokenizer)
        batch = assemble(prompts, completions, rewards, session.device)
        loss, mismatch = update(policy, optimizer, batch)
        on_rank0(_print_line, [step, rewards.mean().item(), loss, mismatch])
    engine.shutdown()
    end_session()


def sample(
    engine: RolloutEngine, places: list[int], prompts: list[list[int]], step: int
) -> list[Completion]:
    """G completions for each prompt; the seed of each is a function of its place, whichever rank samples it."""
    prompts_at, numbers = list(zip(places, prompts, strict=True)), range(ROLLOUT.group_size)
    requests = [
        Request(prompt, rollout_seed(0, step, at, number))
        for at, prompt in prompts_at
        for number in numbers
    ]
    return engine.generate(requests, step)


def score(tasks: list[dict[str, Any]], completions: list[Completion], tokenizer: Any) -> Tensor:
    """Rewards [P, G]: 1 for an equation that uses both numbers and reaches the target, else 0."""
    texts = [
        tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        for completion in completions
    ]
    nums, targets = (
        [task[name] for task in tasks for _ in range(ROLLOUT.group_size)]
        for name in ("nums", "target")
    )
    return torch.tensor(countdown(texts, nums, targets, answer_tag=None)).view(
        -1, ROLLOUT.group_size
    )


def assemble(
    prompts: list[list[int]], completions: list[Completion], rewards: Tensor, device: torch.device
) -> MicroBatch:
    """All of this rank's rollouts in one row, each with its advantage: reward minus its group's mean, over its std."""
    advantages, _ = compute_advantages(rewards, "grpo", "group")
    rollouts = [
        Rollout(
            number,
            advantage,
            True,
            prompts[number // ROLLOUT.group_size],
            sampled.token_ids,
            sampled.logprobs,
        )
        for number, (sampled, advantage) in enumerate(
            zip(completions, advantages.flatten().tolist(), strict=True)
        )
    ]
    return pack_rollouts(rollouts, device)


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: MicroBatch
) -> tuple[float, float]:
    """Collective. One optimizer step. Returns this rank's share of the loss, and its largest |policy - engine|."""
    mask, sequences = batch.loss_mask, batch.sequence_index
    # FSDP sums gradients: with a mean over its own tokens, a rank of few tokens would count as much as one of many.
    counts = [int(mask.sum()), len(batch.rollout_ids)]
    num_tokens, num_sequences = on_rank0(
        lambda rows: [sum(column) for column in zip(*rows, strict=True)], counts
    )
    longest = ROLLOUT.max_completion_tokens
    weights = aggregation_weights(
        LOSS.aggregation, mask, sequences, num_tokens, num_sequences, longest
    )
    logprobs, entropy = policy(batch)
    old_logprobs = (
        logprobs.detach()
    )  # one update a rollout: the old policy is this one, and every ratio is 1
    inputs = LossInputs(
        logprobs, entropy, old_logprobs, None, batch.advantages, mask, sequences, weights
    )
    loss, _ = policy_loss(inputs, LOSS)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIMIZER.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item(), (old_logprobs - batch.rollout_logprobs).abs().max().item()


def _print_line(of_ranks: list[list[float]]) -> None:
    steps, rewards, losses, mismatches = zip(*of_ranks, strict=True)
    reward = sum(rewards) / len(rewards)
    print(
        f"step {steps[0]}  reward {reward:.3f}  loss {sum(losses):+.4f}  mismatch {max(mismatches):.0e}",
        flush=True,
    )


if __name__ == "__main__":
    with exit_with_outcome():
        train(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
