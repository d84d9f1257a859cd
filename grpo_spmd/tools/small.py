"""GRPO on one page, built from this package's parts: the demo's model learns countdown.

    python -m grpo_spmd.demo && python -m grpo_spmd.small [NUM_STEPS]
    torchrun --standalone --nproc-per-node 2 -m grpo_spmd.tools.small

Each rank samples its own prompts with its own vLLM and trains on them. grpo_spmd.train adds a
checked config, time limits for rewards, rollouts that are distributed to ranks by cost, several
updates per rollout, a reference model, evaluation, metrics, checkpoints and preemption.
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
from grpo_spmd.model.config_json import load_tokenizer, stop_token_ids
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import Policy, build_policy
from grpo_spmd.records import Completion, MicroBatch, Rollout, rollout_seed
from grpo_spmd.rewards.verifiers import countdown

# The demo's model and tasks, which `python -m grpo_spmd.demo` makes.
MODEL = ModelConfig(path=".demo/model", dtype="float32")
# A line is {"prompt": "3,8=24:", "nums": [3, 8], "target": 24}.
TASKS = Path(".demo/train.jsonl")
# The most tokens of a prompt and its completion together.
MAX_TOKENS = 16
ROLLOUT = RolloutConfig(num_prompts_per_step=32, group_size=8, max_completion_tokens=8)
LOSS = LossConfig(rollout_correction="none")
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.0)


def train(num_steps: int) -> None:
    """Collective. Trains, and prints one line for each step.

    The line has the mean reward, the loss, and the mismatch: the largest |policy - engine| of a
    sampled token's logprobs. All three are over all ranks.
    """
    session = start_session()
    tokenizer = load_tokenizer(MODEL.path)
    tasks = [json.loads(line) for line in TASKS.read_text(encoding="utf-8").splitlines()]
    # The engine starts first: it measures the GPU's free memory, then sleeps and frees the memory
    # for the policy.
    stop_ids = stop_token_ids(MODEL.path, tokenizer)
    engine = RolloutEngine(MODEL, ROLLOUT, MAX_TOKENS, session, stop_ids)
    policy = build_policy(MODEL, ROLLOUT.temperature, session, max_rollout_tokens=MAX_TOKENS)
    optimizer, _ = build_optimizer(policy, OPTIMIZER)
    weight_sync = WeightSync(policy, engine, ROLLOUT.sync_bucket_bytes(session.device.type))
    for step in range(1, num_steps + 1):
        # All-gathers the policy's shards and copies the full tensors into vLLM's layers.
        weight_sync.sync(step)
        # All ranks draw the same tasks, and of n ranks each takes every n-th of them.
        drawn = random.Random(step).sample(range(len(tasks)), ROLLOUT.num_prompts_per_step)
        task_ids = drawn[session.rank :: session.world_size]
        local_tasks = [tasks[task_id] for task_id in task_ids]
        prompts = [tokenizer(task["prompt"]).input_ids for task in local_tasks]
        completions = sample(engine, task_ids, prompts, step)
        engine.sleep()
        rewards = score(local_tasks, completions, tokenizer)
        batch = assemble(prompts, completions, rewards, session.device)
        loss, mismatch = update(policy, optimizer, batch)
        on_rank0(_print_line, [step, rewards.mean().item(), loss, mismatch])
    engine.shutdown()
    end_session()


def sample(
    engine: RolloutEngine, task_ids: list[int], prompts: list[list[int]], step: int
) -> list[Completion]:
    """Returns G completions for each prompt, where G is the group size.

    The seed of a completion depends on its task, and not on the rank that samples it.
    """
    requests = [
        Request(prompt, rollout_seed(0, step, task_id, number))
        for task_id, prompt in zip(task_ids, prompts, strict=True)
        for number in range(ROLLOUT.group_size)
    ]
    return engine.generate(requests, step)


def score(tasks: list[dict[str, Any]], completions: list[Completion], tokenizer: Any) -> Tensor:
    """Returns rewards [P, G] for P tasks with G completions each.

    The reward is 1 for an equation that uses both numbers and reaches the target, else 0.
    """
    texts = [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
    # The task of each completion.
    rows = [task for task in tasks for _ in range(ROLLOUT.group_size)]
    nums = [row["nums"] for row in rows]
    targets = [row["target"] for row in rows]
    # None: the whole completion is the answer, without a tag around it.
    rewards = torch.tensor(countdown(texts, nums, targets, answer_tag=None))
    return rewards.view(-1, ROLLOUT.group_size)


def assemble(
    prompts: list[list[int]], completions: list[Completion], rewards: Tensor, device: torch.device
) -> MicroBatch:
    """Returns this rank's rollouts with their advantages, packed into one row of tokens.

    The policy computes a row in one pass without padding. The advantage is the reward minus the
    group's mean, divided by the group's standard deviation."""
    advantages, _ = compute_advantages(rewards, "grpo", "group")
    rollouts = [
        Rollout(
            rollout_id=number,
            advantages=advantage,
            loss_mask=True,
            prompt_ids=prompts[number // ROLLOUT.group_size],
            completion_ids=completion.token_ids,
            rollout_logprobs=completion.logprobs,
        )
        for number, (completion, advantage) in enumerate(
            zip(completions, advantages.flatten().tolist(), strict=True)
        )
    ]
    return pack_rollouts(rollouts, device)


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: MicroBatch
) -> tuple[float, float]:
    """Collective. Makes one optimizer step.

    Returns this rank's part of the loss (the parts add up to the loss), and the largest
    |policy - engine| of the logprobs of its tokens.
    """
    mask = batch.loss_mask
    # FSDP sums the ranks' gradients, so each rank divides by the counts of all ranks. With the mean
    # over its own tokens, a rank with few tokens would count as much as one with many.
    # This rank's counts; on_rank0 calls the function with the counts of all ranks on rank 0, and
    # returns the result on each rank.
    counts = [int(mask.sum()), len(batch.rollout_ids)]
    num_tokens, num_sequences = on_rank0(
        lambda rows: [sum(column) for column in zip(*rows, strict=True)], counts
    )
    weights = aggregation_weights(
        LOSS.aggregation,
        mask,
        batch.sequence_index,
        num_loss_tokens=num_tokens,
        num_loss_sequences=num_sequences,
        max_completion_tokens=ROLLOUT.max_completion_tokens,
    )
    logprobs, entropy = policy(batch)
    # With one update per rollout the old policy is the present one, and every ratio is 1.
    old_logprobs = logprobs.detach()
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=old_logprobs,
        ref_logprobs=None,
        advantages=batch.advantages,
        loss_mask=mask,
        sequence_index=batch.sequence_index,
        weights=weights,
    )
    loss, _ = policy_loss(inputs, LOSS)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIMIZER.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item(), (old_logprobs - batch.rollout_logprobs).abs().max().item()


def _print_line(rows: list[list[float]]) -> None:
    """Prints the line of a step.

    Only rank 0 calls it, with a row [step, reward, loss, mismatch] of each rank."""
    steps, rewards, losses, mismatches = zip(*rows, strict=True)
    line = f"step {steps[0]}  reward {sum(rewards) / len(rewards):.3f}  "
    line += f"loss {sum(losses):+.4f}  mismatch {max(mismatches):.0e}"
    print(line, flush=True)


if __name__ == "__main__":
    with exit_with_outcome():
        train(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
