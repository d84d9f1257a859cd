"""A run's checkpoints without the run; and the way of a policy's weights out of one, through a
checkpoint's export."""

from __future__ import annotations

from pathlib import Path

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.run_dir import checkpoint_path
from grpo_spmd.checkpoint.save import Checkpoints
from grpo_spmd.checkpoint.state import run_facts
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import barrier
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy
from tests.support.learn import updater_of
from tests.support.models import write_config


def checkpoints_of(
    config: Config, session: Session, policy: Policy, updater: PolicyUpdater
) -> Checkpoints:
    """As a run over no prompts would have them."""
    run_dir, num_steps = Path(config.run_dir), config.training.num_steps
    facts = run_facts(flatten_config(config), [], session, {})
    return Checkpoints(run_dir, config.checkpoint, num_steps, session, policy, updater, facts)


def export_policy(policy: Policy, model: Path, out: Path, session: Session) -> None:
    """Collective. `out`: what transformers, or peft on top of `model`, load."""
    run_dir = out.with_name(f"{out.name}_run")
    if session.is_rank0:
        run_dir.mkdir()
        write_config(run_dir, model, run_dir=str(run_dir))
    barrier()
    config = load_config(run_dir / "config.yaml")
    checkpoints = checkpoints_of(config, session, policy, updater_of(policy, config))
    checkpoints.stage(1, position=0, log_state={})
    checkpoints.write_staged()
    checkpoints.wait()
    if session.is_rank0:
        export_checkpoint(checkpoint_path(run_dir, 1), out)
    barrier()
