"""Worker: one training after another in one process, which starts vLLM anew for each.

python -m tests.support.workers.train_each CONFIG...
"""

from __future__ import annotations

import sys

from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.loop import train


def main() -> None:
    for path in sys.argv[1:]:
        config = load_config(path)
        assert train(config, check_inputs(config, num_ranks=1))
        print(f"trained {path}", flush=True)


if __name__ == "__main__":
    with exit_with_outcome():
        main()
