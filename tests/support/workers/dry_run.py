"""Worker: the cases and planted faults of `tests/support/dry_run/`, in one process.

python -m tests.support.workers.dry_run SHIM.so CONFIG OUT.json [NAME ...]      SHIM.so:
tests/support/dry_run/shim.cpp OUT.json gets {name: {"found": ...}} or {name: {"error": traceback}}.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path


def main() -> None:
    shim, config, out, *names = sys.argv[1:]
    library = ctypes.CDLL(shim)  # before torch, which asks once what it was built with
    import torch.distributed as dist

    library.take_guard()

    from grpo_spmd.distributed import collectives
    from tests.support.dry_run.cases import CASES, Trials
    from tests.support.dry_run.faults import FAULTS

    warnings.simplefilter("ignore")
    gc.freeze()  # a collection need not look at what was imported
    # The other ranks of a fake group send nothing, and what is received is whatever was in memory
    # there: they say the
    # same as this one.
    collectives.gather_bytes = lambda payload: [payload] * dist.get_world_size()
    trials, results = Trials(Path(config), Path(out).parent), dict[str, dict[str, object]]()
    for name, case in {**CASES, **{fault.__name__: fault for fault in FAULTS}}.items():
        if names and name not in names:
            continue
        start = time.process_time()
        try:
            with trials.cuda:
                results[name] = {"found": case(trials)}
        except Exception as error:
            results[name] = {"error": "".join(traceback.format_exception(error))}
            trials.cuda.host.synchronize()
        results[name]["seconds"] = time.process_time() - start
    Path(out).write_text(json.dumps(results))
    os._exit(0)  # some modules say at the end what they leak


if __name__ == "__main__":
    main()
