"""Evaluates a checkpoint, or a model, on the held-out sets of a config, without training.

grpo-spmd eval CHECKPOINT --config x.yaml [section.key=value ...]
torchrun --nproc-per-node 8 -m grpo_spmd.eval CHECKPOINT --config x.yaml [...]

The parts are those of a training, so that a checkpoint has the figures that its run had at that
step. Nothing is written to the run folder.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.manifest import (
    TO_GO_ON,
    CheckpointError,
    read_trainer,
    verify_checkpoint,
)
from grpo_spmd.checkpoint.run_dir import check_same_run
from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.config.command_line import OverridesParser, number_of_ranks
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.load import load_config_with_sources, trains_on_cpu
from grpo_spmd.files import show
from grpo_spmd.tools.export import check_is_checkpoint
from grpo_spmd.train import listen, torch_process


def main() -> None:
    """Runs the command on each rank: evaluates the checkpoint or the model.

    Rank 0 prints the metrics and writes the file of --json."""
    listen()
    parser = OverridesParser(
        allow_abbrev=False,
        prog="python -m grpo_spmd.eval",
        description="Evaluate a checkpoint, or a model, on data.eval of a config.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="RUN_DIR/checkpoints/step_NNNNNN, or a model's folder")
    add("--config", required=True, help="YAML file, such as the config.yaml of the run")
    add("--json", type=Path, metavar="FILE", help="write the metrics there as JSON")
    args = parser.parse()
    checkpoint = args.checkpoint
    # Without eval.every_steps a config has no evaluation. Its value does not matter otherwise.
    overrides = [*args.overrides, "eval.every_steps=1"]
    trainer: dict[str, Any] = {}  # what the checkpoint recorded of its run; {} for a model
    try:
        is_model = (checkpoint / "config.json").is_file()
        if is_model and not (checkpoint / "manifest.json").exists():
            overrides.append(f"model.path={checkpoint}")
        else:
            check_is_checkpoint(checkpoint)
            # Rank 0 compares all files with their checksums.
            if os.environ.get("RANK", "0") == "0":
                verify_checkpoint(checkpoint)
            trainer = read_trainer(checkpoint, TO_GO_ON)
        config, sources = load_config_with_sources(args.config, overrides, on_cpu=trains_on_cpu())
        if trainer:
            # Other adapters would make another model of the same tensors.
            recorded, values = trainer["config"], flatten_config(config)
            lora = {key: values[key] for key in values if key.startswith("model.lora.")}
            check_same_run(checkpoint, trainer, recorded | lora)
        # The config may be that of a running job, whose folder is not touched.
        inputs = check_inputs(config, num_ranks=number_of_ranks(), to_run=False, sources=sources)
    except (ConfigError, CheckpointError) as error:
        refuse(ConfigError(str(error)))
    with torch_process():
        from grpo_spmd.parts import evaluate_alone

        with tempfile.TemporaryDirectory(prefix="grpo_spmd_eval_") as scratch:
            metrics = evaluate_alone(replace(config, run_dir=scratch), inputs, checkpoint, trainer)
        if os.environ.get("RANK", "0") == "0":
            for name, value in metrics.items():
                show(f"{name:40}  {'unknown' if value is None else format(value, '.6g')}")
            if args.json is not None:
                args.json.write_text(json.dumps(metrics) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
