"""A rank of the plan benchmark: what it really holds, without the others.

python -m benchmarks.agreement.plan_worker RANKS CONFIG [section.key=value ...]
"""

from __future__ import annotations

import sys

from benchmarks.support.ranks import tell
from grpo_spmd.config.load import load_config
from tests.support.real_memory import lone_rank, measured


def main() -> None:
    config = load_config(sys.argv[2], sys.argv[3:])
    with lone_rank(int(sys.argv[1]), config.model.num_replicas) as session:
        tell(measured(config, session))


if __name__ == "__main__":
    main()
