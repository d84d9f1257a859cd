"""Worker: a training whose steps are episodes, all parts real: two steps of a TRL environment, one
of a Gym one whose turns have rewards of their own.

python -m tests.support.workers.played CONFIG
"""

from __future__ import annotations

import dataclasses
import sys

from grpo_spmd.checks.inputs import Inputs, check_inputs
from grpo_spmd.config.command_line import number_of_ranks
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.loop import _train_step
from grpo_spmd.model.config_json import load_tokenizer
from grpo_spmd.parts import Run, open_environments, open_run
from grpo_spmd.rollout import buffer
from grpo_spmd.rollout.sample import Sampler
from grpo_spmd.signals.opening import open_rewards

GYM = (
    "environment.factory={}",
    "environment.gym=tests/support/played.py:Quiz",
    "environment.discount=0.5",
)
GYM_STEP = 3


def main() -> None:
    config = load_config(sys.argv[1])
    inputs = check_inputs(config, num_ranks=number_of_ranks(None))
    buffer._WRITE_EVERY_S = 0.0  # each episode at once: a run of seconds is killed
    run = open_run(config, inputs)
    assert run is not None
    for step in run.steps():
        if step == GYM_STEP:
            run = with_gym(run, inputs)
        _train_step(run, step)
    run.close()


def with_gym(run: Run, inputs: Inputs) -> Run:
    """The same training, with the other environment."""
    config, session = load_config(sys.argv[1], GYM), run.session
    tokenizer = load_tokenizer(config.model.path)
    environments = open_environments(config, [], tokenizer, session, run.preemption.check_scoring)
    assert run.environments is not None
    run.environments.close()
    run.rewards.close()
    pool, score = open_rewards(config, inputs, tokenizer, session, run.preemption, environments)
    sampler = Sampler(run.engine, config.rollout.group_size, config.seed, environments=environments)
    rules = dataclasses.replace(run.step_rules, discount=config.environment.discount)
    created = dataclasses.replace(
        run, config=config, environments=environments, rewards=pool, score=score
    )
    return dataclasses.replace(created, sampler=sampler, step_rules=rules)


if __name__ == "__main__":
    with exit_with_outcome():
        main()
