"""Ranks that share their rows (model.sequence_parallel_size) beside ranks that do not: is the
update the same, what does a rank hold, and what does it send?

    benchmarks/run.sh sequence_parallel [--json FILE]        about 4 minutes on 2 cores

A row for 1, 2 and 4 ranks that share each row, of 4 real CPU ranks in float32. "loss", "gradient"
and "update" are the largest relative differences from plain transformers over five settings of the
loss and, of the first, recomputation, compilation and two replicas; the rows are ragged, and a
group in them was cut off as a whole. "from 1 rank" are those from ranks that share nothing.
"activations" is what a forward and backward pass over 2,048 tokens of five layers takes at its
peak, by torch's account of one real rank whose peers are absent; "sent" counts the bytes that it
sends to the others in a forward pass, and "formula" is what the planner takes. Exit code 1 where a
loss or an update is off by more than 1e-6 (1e-5 after several optimizer steps), where N ranks hold
more than 1 / 0.9 N of the activations each, or where the formula is not what was sent.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.support.report import Row, arguments_parser, report

SIZES = (1, 2, 4)
SETTINGS = (
    "as configured",
    "gspo, sequence",
    "kl in reward",
    "mask_truncated",
    "two epochs, two mini-batches",
)


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = agreement(Path(folder))
        for row in rows:
            row |= memory(Path(folder, "memory"), row["ranks that share a row"])
    for row in rows:
        is_met = row["loss and update"] == "met" and row["sent, MiB"] == row["formula, MiB"]
        saved = rows[0]["activations, MiB"] / row["activations, MiB"]
        is_met &= saved >= 0.9 * row["ranks that share a row"]
        row |= {"times less": saved, "goal": "met" if is_met else "missed"}
    report("sequence_parallel", rows, args.json)
    missed = [row for row in rows if row["goal"] == "missed"]
    sys.exit(f"shared rows are not what they should be: {missed}" if missed else 0)


def agreement(folder: Path) -> list[Row]:
    """The rows of all sizes, with their differences."""
    import torch

    from grpo_spmd.config.load import load_config
    from tests.ranks.test_partition import SECTIONS, SEVERAL_STEPS, plain_update
    from tests.support.models import make_model, write_config
    from tests.support.ranks import run_worker
    from tests.support.workers.update import with_setting

    for name, seed in (("model", 0), ("reference", 1)):
        make_model(folder / name, "qwen3", tied=True, seed=seed)
    config_file = write_config(folder, folder / "model", **SECTIONS)
    reference, out = folder / "reference", folder / "updates.pt"
    sizes = ",".join(map(str, SIZES))
    arguments = [str(config_file), str(reference), str(out), sizes, *SETTINGS]
    run_worker(4, "sequence_parallel", *arguments, timeout_s=1800)
    results = torch.load(out, weights_only=True)
    config = load_config(config_file)
    plain = {name: plain_update(with_setting(config, name), reference) for name in SETTINGS}
    rows: list[Row] = []
    for size in SIZES:
        largest: dict[str, float] = {}
        is_met = True
        for (number, setting, _), result in results.items():
            if number != size:
                continue
            alone = differences(result, results[1, setting, "one row"])
            differs = differences(result, plain[setting])
            bound = 1e-5 if setting == SEVERAL_STEPS else 1e-6
            is_met &= max(differs["loss"], differs["update"]) <= bound
            for name, value in differs.items():
                largest[name] = max(largest.get(name, 0.0), value)
                key = f"{name} from 1 rank"
                largest[key] = max(largest.get(key, 0.0), alone[name])
        met = "met" if is_met else "missed"
        rows.append({"ranks that share a row": size, **largest, "loss and update": met})
    return rows


def differences(result: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """The relative differences of two updates: of the loss, and the largest of a tensor's."""
    from tests.ranks.test_partition import relative_difference

    gradients = zip(result["gradients"], expected["gradients"], strict=True)
    parameters = result["parameters"]
    return {
        "loss": abs(result["loss"] / expected["loss"] - 1),
        "gradient": max(
            relative_difference(value, wanted[name])
            for actual, wanted in gradients
            for name, value in actual.items()
        ),
        "update": max(
            relative_difference(value, expected["parameters"][name])
            for name, value in parameters.items()
        ),
    }


def memory(folder: Path, size: int) -> Row:
    """What one of 4 ranks holds and sends."""
    from grpo_spmd.checks.memory import exchanged_bytes
    from grpo_spmd.config.load import load_config
    from grpo_spmd.distributed.collectives import exchange_blocks
    from grpo_spmd.model import sequence_parallel
    from grpo_spmd.model.config_json import read_model
    from tests.support.models import make_model, write_config
    from tests.support.real_memory import lone_rank, measured

    model = make_model(folder, "qwen3", tied=False, num_hidden_layers=5, intermediate_size=256)
    config_file = write_config(
        folder,
        model,
        data={"max_prompt_tokens": 64},
        rollout={"num_prompts_per_step": 8, "group_size": 4, "max_completion_tokens": 192},
        training={"max_tokens_per_micro_batch": 2048},
    )
    overrides = ["model.logprob_chunk_tokens=256", f"model.sequence_parallel_size={size}"]
    config = load_config(config_file, overrides)
    sent: list[int] = []

    def counted(blocks: Any, group: Any) -> Any:
        sent.append(blocks.nbytes * (size - 1) // size)
        return exchange_blocks(blocks, group)

    counting = patch.object(sequence_parallel, "exchange_blocks", counted)
    with counting, lone_rank(4, 1, size) as session:
        held = measured(config, session)
    facts = read_model(str(model))
    assert facts is not None
    assert facts.dimensions is not None
    # Passes over 4 tokens forward and backward, which make AdamW's moments, then five over 2,048.
    small, row = (exchanged_bytes(facts.dimensions, tokens, size, 4) for tokens in (4, 2048))
    return {
        "activations, MiB": (held["update"] - held["state"]) / 2**20,
        "sent, MiB": (sum(sent) - 2 * small) / 5 / 2**20,
        "formula, MiB": row / 2**20,
    }


if __name__ == "__main__":
    main()
