"""The story: the order of the phases, nothing else.

torchrun --nproc-per-node 8 -m grpo_spmd.train --config x.yaml [section.key=value ...]
python -m grpo_spmd.train --config x.yaml [...]      one process: breakpoint() works in a reward, the loss and the sync
"""

from __future__ import annotations

import argparse
import os
import sys

import yaml

from grpo_spmd.config import Config, ConfigError, config_to_dict, describe_keys, load_config, refuse
from grpo_spmd.data import PromptStream, build_prompts
from grpo_spmd.preflight import Inputs, check_inputs
from grpo_spmd.rewards import score_groups


def train(config: Config, inputs: Inputs) -> bool:
    """Collective. One whole run; True when it came to its end."""
    # Imported here, because --help and a config error should not wait seconds for torch and vllm.
    from grpo_spmd.assemble import assemble_batch
    from grpo_spmd.checkpoint import save_weights_if_due
    from grpo_spmd.distributed import end_session, start_session
    from grpo_spmd.metrics import MetricsLog, dump_rollouts_if_due, log_to_terminal, open_run_dir
    from grpo_spmd.policy import build_optimizer, build_policy, build_reference, load_tokenizer, stop_token_ids
    from grpo_spmd.rollout import RolloutEngine, rollout_groups
    from grpo_spmd.update import attach_logprobs, update_policy
    from grpo_spmd.weight_sync import sync_weights

    tokenizer = load_tokenizer(config.model.path)
    prompts = build_prompts(inputs.rows, tokenizer, config)
    stream = PromptStream(prompts, config.seed, config.data.shuffle)

    session = start_session()
    log_to_terminal(session)
    # The engine first: it measures the GPU's free memory, then sleeps and leaves it to the policy.
    engine = RolloutEngine(config, session, stop_token_ids(config.model.path, tokenizer))
    policy = build_policy(config.model, config.rollout.temperature, session)
    reference = build_reference(config, session)
    optimizer, schedule = build_optimizer(policy, config.optimizer)
    # Only now, when all that could still be refused has been tried: a refusal leaves nothing behind.
    open_run_dir(config, session, num_dropped_prompts=len(inputs.rows) - len(prompts))
    log = MetricsLog(config, session, policy.num_parameters)

    for step in range(config.training.num_steps):
        with log.phase("weight_sync"):
            synced = sync_weights(policy, engine, step, config.rollout.weight_sync_bucket_mib)
        with log.phase("rollout"):
            groups = rollout_groups(engine, stream.take_step(step, config.rollout.num_prompts_per_step), config, step)
            engine.sleep()
        with log.phase("reward"):
            scored = score_groups(inputs.rewards, groups, tokenizer)
            batch, decided = assemble_batch(groups, scored, config, session)
            dump_rollouts_if_due(config, step, groups, scored, decided)
        with log.phase("logprobs"):
            attach_logprobs(policy, reference, batch)
        with log.phase("update"):
            sums = update_policy(policy, optimizer, schedule, batch, config.loss, config.optimizer.max_grad_norm)
        with log.phase("checkpoint"):
            save_weights_if_due(policy, config, step + 1, session)
        log.end_step(step, decided, synced, sums)

    log.close()
    engine.shutdown()
    end_session()
    return True


def main() -> None:
    """Check everything that can be checked without torch, then train."""
    args = _parser().parse_intermixed_args()
    try:
        config = load_config(args.config, args.overrides)
        inputs = check_inputs(config)
    except ConfigError as error:
        refuse(error)
    if args.check:
        yaml.safe_dump(config_to_dict(config), sys.stdout, sort_keys=False)
        return

    # Warnings of torch's C++ side (NUMA binding, hooks at exit) say nothing that a user could act on; its errors still show.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing.errors import record

    from grpo_spmd.distributed import exit_with_outcome

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
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    return parser


if __name__ == "__main__":
    main()
