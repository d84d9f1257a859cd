"""Worker: the figures of `tests.support.dry_run.figures`, of real ranks on a CPU.

python -m tests.support.workers.dry_run_cpu CONFIG OUT.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, policy_mesh, sequence_group, start_session
from tests.support.dry_run.device import Recorder
from tests.support.dry_run.figures import VARIANTS, update_figures, with_model


def main() -> None:
    config, session, meter, result = load_config(sys.argv[1]), start_session(), Recorder(), {}
    with meter:
        for variant, changes in VARIANTS.items():
            changed = with_model(config, **changes)
            mesh = policy_mesh(session.device, changed.model.num_replicas)
            group = sequence_group(session.device, changed.model.sequence_parallel_size)
            result[variant] = update_figures(
                changed, dataclasses.replace(session, mesh=mesh, sequence_group=group), meter
            )
    if session.is_rank0:
        Path(sys.argv[2]).write_text(json.dumps(result))
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
