"""The story: the order of the phases, nothing else.

torchrun --nproc-per-node 8 -m grpo_spmd.train --config x.yaml [section.key=value ...]
python -m grpo_spmd.train --config x.yaml [...]      one process: breakpoint() works in a reward, the loss and the sync
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from pathlib import Path

import yaml

from grpo_spmd.config import Config, ConfigError, config_to_dict, describe_keys, load_config_with_sources, refuse
from grpo_spmd.data import PromptStream, build_prompts
from grpo_spmd.explain import explain, read_model
from grpo_spmd.preflight import Inputs, check_inputs
from grpo_spmd.rewards.pool import RewardPool


def train(config: Config, inputs: Inputs) -> bool:
    """Collective. One whole run; True when it came to its end."""
    # Imported here, because --help and a config error should not wait seconds for torch and vllm.
    from grpo_spmd.assemble import SampledStep, assemble_batch, penalise_rewards_by_kl
    from grpo_spmd.batching import attention_cost_ratio
    from grpo_spmd.checkpoint import Checkpoints, find_start
    from grpo_spmd.distributed import end_session, start_session
    from grpo_spmd.evaluate import evaluate, evaluate_if_due
    from grpo_spmd.memory import HostOffload
    from grpo_spmd.metrics import MetricsLog, dump_if_refused, dump_rollouts_if_due, log_to_terminal, open_run_dir
    from grpo_spmd.policy import build_policy, build_reference, load_tokenizer, stop_token_ids
    from grpo_spmd.preemption import Preempted, Preemption
    from grpo_spmd.rollout import RolloutEngine, rollout_groups
    from grpo_spmd.rollout_buffer import open_rollout_buffer
    from grpo_spmd.update import PolicyUpdater, attach_logprobs
    from grpo_spmd.weight_sync import sync_weights

    tokenizer = load_tokenizer(config.model.path)
    prompts = build_prompts(inputs.rows, tokenizer, config)
    held_out = {name: build_prompts(rows, tokenizer, config, name) for name, rows in inputs.eval_rows.items()}
    stream = PromptStream(prompts, config.seed, config.data.shuffle)

    session = start_session(config.model.num_replicas, config.rollout.tensor_parallel_size, config.watchdog)
    preemption = Preemption(config)
    log_to_terminal(session)
    start = find_start(config, session, prompts)
    if start.is_over:
        end_session()
        return True
    log_file = Path(config.run_dir, "logs", f"rewards_rank_{session.rank}.log")
    rewards = RewardPool(config.rewards, config.reward_pool, log_file, columns=inputs.columns)
    score = preemption.guard(functools.partial(rewards.score, tokenizer=tokenizer))
    # The engine first: it measures the GPU's free memory, then sleeps and leaves it to the policy.
    engine = RolloutEngine(config, session, stop_token_ids(config.model.path, tokenizer), preemption.should_abort)
    policy = build_policy(config.model, config.rollout.temperature, session, seed=config.seed)
    reference = build_reference(config, session, policy)
    updater = PolicyUpdater(policy, config)
    offload = HostOffload(config.model.offload, policy, reference, updater.optimizer)
    checkpoints = Checkpoints(config, session, policy, updater, prompts)
    checkpoints.load(start)
    # Only now, when all that could still be refused has been tried: a refusal leaves nothing behind.
    num_dropped = inputs.num_rows - len(prompts) - sum(map(len, held_out.values()))
    open_run_dir(config, session, num_dropped, start)
    log = MetricsLog(config, session, policy.num_parameters, engine.pool_bytes, start.step)
    log.restore(start.trainer)
    stream.position = start.position
    buffer = open_rollout_buffer(config, session)
    cost_ratio = attention_cost_ratio(policy.num_parameters, policy.model.config)
    num_steps = config.training.num_steps

    try:
        for step in range(start.step, num_steps):
            begun = step, stream.position  # what a step that is given up leaves
            preemption.begin_step(checkpoints.time_to_save_s)
            with log.phase("weight_sync"):
                synced = sync_weights(policy, engine, step, config.rollout.weight_sync_bucket_mib, config.proofs.every_steps, offload)
            with log.phase("eval"):
                log.record(evaluate_if_due(held_out, engine, score, config, step))
            sampled = SampledStep(config, session, cost_ratio)
            while sampled.num_missing:  # once, unless dynamic sampling has to refill the step
                with log.phase("rollout"):
                    groups = rollout_groups(engine, stream.take(sampled.num_missing), config, step, buffer)
                with log.phase("reward"), dump_if_refused(config, step, sampled):
                    sampled.add(groups, score(groups, num_step_completions=sampled.num_completions))
            with log.phase("rollout"):
                log.record_largest(engine.sleep(offload.held_bytes))
                log.record_largest(offload.to_device())
            with log.phase("reward"), dump_if_refused(config, step, sampled):
                batch, decided = assemble_batch(sampled, config, session)
            with log.phase("logprobs"):
                attach_logprobs(policy, reference, batch, config)
                decided = penalise_rewards_by_kl(batch, decided, config)
            with log.phase("reward"):
                dump_rollouts_if_due(config, step, sampled, decided)
            preemption.check_before_update()  # the last moment at which the step can be given up
            with log.phase("update"):
                sums = updater.update(batch) | engine.take_busy_sums()
            log.check_step(step, sampled, decided, synced, sums)  # before a checkpoint is made of it
            with log.phase("checkpoint"):
                checkpoints.stage_if_due(step + 1, stream.position, log.state())
            log.end_step(step, decided, synced)
            checkpoints.write_staged()  # in the background, now that the step's line is on disk

        begun = num_steps, stream.position
        if config.eval.every_steps:  # the policy that the run ends with
            preemption.begin_step(checkpoints.time_to_save_s)
            with log.phase("weight_sync"):
                sync_weights(policy, engine, num_steps, config.rollout.weight_sync_bucket_mib, config.proofs.every_steps, offload)
            with log.phase("eval"):
                log.record(evaluate(held_out, engine, score, config, num_steps))
        with log.phase("checkpoint"):
            checkpoints.wait()
        log.end_run()
    except Preempted as preempted:
        with log.phase("checkpoint"):
            engine.sleep()
            offload.to_device()
            checkpoints.save_begun(*begun, log.state(), preempted.reason)
    log.close()
    rewards.close()
    engine.shutdown()
    end_session()
    return True


def main() -> None:
    """Check everything that can be checked without torch, then train."""
    parser = _parser()
    args = parser.parse_intermixed_args()
    if args.ranks is not None and (args.ranks < 1 or not args.explain):
        parser.error("--ranks is a number from 1 on, and goes with --explain")
    num_ranks = args.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config, sources = load_config_with_sources(args.config, args.overrides)
        inputs = check_inputs(config, num_ranks=num_ranks, to_run=not args.explain)
    except ConfigError as error:
        refuse(error)
    if args.explain:
        print("\n".join(explain(config, sources, read_model(config.model.path), num_rows=len(inputs.rows), num_ranks=num_ranks)))
        return
    if args.check:
        yaml.safe_dump(config_to_dict(config), sys.stdout, sort_keys=False)
        return

    # Warnings of torch's C++ side (NUMA binding, hooks at exit) say nothing that a user could act on; its errors still show.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Huge pages for large tensors in host memory: without, page faults are half the time of a weight sync on the CPU.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from torch.distributed.elastic.multiprocessing.errors import record

    from grpo_spmd.doctor import exit_with_outcome

    with exit_with_outcome():
        finished = record(train)(config, inputs)
        if not finished:  # torch's record takes a sys.exit(0) somewhere below for a success
            raise RuntimeError("something called sys.exit(0) in the middle of the run")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_spmd.train",
        description="Train a language model with GRPO.",
        epilog="config keys:\n" + describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="a YAML file; configs/ has examples")
    parser.add_argument("--check", action="store_true", help="check config and data, print the resolved config, and stop")
    parser.add_argument("--explain", action="store_true", help="print what the config comes to and where each value is from, and stop")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="with --explain: the number of ranks to plan for (default: WORLD_SIZE, else 1)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    return parser


if __name__ == "__main__":
    main()
