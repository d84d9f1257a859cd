"""Worker: steps of nothing but time, until the run is preempted: what a signal, or the deadline,
comes to on real ranks.

    python -m tests.support.workers.stop CONFIG STEP_S [SET_UP_S]
RUN_DIR/rank_R holds the step that the rank comes to; where it stopped it leaves the marker.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed import interrupt
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Terminal
from grpo_spmd.distributed.preemption import Preempted, Preemption, remove_marker, write_marker
from grpo_spmd.distributed.session import end_session, start_session


def main() -> None:
    interrupt.listen()
    config, step_s, set_up_s = (
        load_config(sys.argv[1]),
        float(sys.argv[2]),
        float((sys.argv[3:] or "0")[0]),
    )
    interrupt.set_run_dir(config.run_dir)
    session, log = start_session(), logging.getLogger("grpo_spmd")
    log.setLevel(logging.INFO)
    log.addHandler(Terminal(sys.stdout))
    preemption = Preemption(config.training.max_time_s)
    remove_marker(config.run_dir)
    log.info("set up")
    time.sleep(set_up_s)
    step = 0
    try:
        for step in range(1000):
            Path(config.run_dir, f"rank_{session.rank}").write_text(str(step))
            preemption.begin_step()
            time.sleep(step_s / 2)
            preemption.check_before_update()
            preemption.check_in_update(changes_policy=True)
            log.info("update %d", step)
            time.sleep(step_s / 2)
    except Preempted as preempted:
        log.info("stops: %s", preempted)
        write_marker(config.run_dir, step, str(preempted))
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
