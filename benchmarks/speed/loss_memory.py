"""Memory and time of logprobs from hidden states, forward and backward: a chunk of logits at a
time, beside all of them at once.

T = 4096 tokens, V = 32,000, D = 256. Each row is a process of its own. Memory is the most that was
held at one time beyond hidden states and lm_head, measured (VmHWM, or torch's peak on a GPU), with
the gradients of both in it (35 MiB in float32). "full" is log_softmax and gather of all logits, as
plain transformers code has it; "full, row by row" is how TRL takes logprobs of float32 logits.
Neither of them computes the entropy, which "chunked" does. Gradients are compared with those of
"full" in float32.
"""

from __future__ import annotations

import tempfile

import torch

from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report, spread

_CHUNKS = (2048, 1024, 512, 256, 128)
_MIB = 2**20


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for dtype in ("float32", "bfloat16") if torch.cuda.is_available() else ("float32",):
            full = _measure("full", 0, dtype, folder)
            rows += [full, _measure("full, row by row", 0, dtype, folder)]
            rows += [_measure("chunked", chunk, dtype, folder) for chunk in _CHUNKS]
            for row in rows[rows.index(full) :]:
                row["less_than_full"] = full["peak_mib"] / row["peak_mib"]
                row["time_to_full"] = row["seconds"] / full["seconds"]
    report("loss_memory", rows, args.json)


def _measure(method: str, chunk: int, dtype: str, folder: str) -> Row:
    (result,) = measure(0, "benchmarks.speed.loss_memory_worker", method, str(chunk), dtype, folder)
    return {
        "logits": method,
        "chunk": chunk or "-",
        "dtype": dtype,
        "peak_mib": result["peak_bytes"] / _MIB,
        **spread("seconds", result["seconds"]),
        "gradients_off_by": result["gradients_off_by"],
    }


if __name__ == "__main__":
    main()
