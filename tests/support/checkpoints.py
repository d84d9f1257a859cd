"""The way of a policy's weights out of a run: through a checkpoint and its export."""

from __future__ import annotations

from pathlib import Path

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.manifest import checkpoint_path
from grpo_spmd.checkpoint.save import Checkpoints
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.collectives import barrier
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy
from tests.support.models import write_config


def export_policy(policy: Policy, model: Path, out: Path, session: Session) -> None:
    """Collective. `out`: what transformers, or peft on top of `model`, load."""
    run_dir = out.with_name(f"{out.name}_run")
    if session.is_rank0:
        run_dir.mkdir()
        write_config(run_dir, model, run_dir=str(run_dir))
    barrier()
    config = load_config(run_dir / "config.yaml")
    checkpoints = Checkpoints(config, session, policy, PolicyUpdater(policy, config), [])
    checkpoints.stage(1, position=0, log_state={})
    checkpoints.write_staged()
    checkpoints.wait()
    if session.is_rank0:
        export_checkpoint(checkpoint_path(run_dir, 1), out)
    barrier()
