"""Writes a checkpoint as a model folder that transformers and vLLM load, or its LoRA adapters as
PEFT's.

python -m grpo_spmd.export CHECKPOINT OUT [--dtype bfloat16|float32] [--merge [--base MODEL]]

--merge writes a whole model with the adapters in it; --base says where the base model is now.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import SafetensorError

from grpo_spmd.checkpoint.export import DTYPE_BYTES, export_checkpoint, export_merged
from grpo_spmd.checkpoint.manifest import CheckpointError, read_trainer, verify_checkpoint
from grpo_spmd.checkpoint.run_dir import list_checkpoints
from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.files import hold_standard_streams, show


def main() -> None:
    """Runs the command: checks the checkpoint, writes OUT, and prints its size.

    The exit code is 2 for wrong input, and 1 if OUT cannot be written."""
    hold_standard_streams()
    parser = OneLineParser(
        prog="python -m grpo_spmd.export",
        description="Write a checkpoint as a model folder that transformers and vLLM load, or its "
        "LoRA adapters as PEFT's.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN_DIR/checkpoints/step_NNNNNN")
    add("out", type=Path, metavar="OUT", help="folder that does not exist yet")
    add("--dtype", choices=list(DTYPE_BYTES), help="of the weights (default: the run's dtype)")
    add("--merge", action="store_true", help="write the base model with the adapters merged in")
    add(
        "--base",
        type=Path,
        metavar="MODEL",
        help="with --merge: folder of the base model, if it was moved",
    )
    args = parser.parse_args()
    if args.base and not args.merge:
        parser.error("--base goes with --merge")
    try:
        check_is_checkpoint(args.checkpoint)
        if args.out.resolve() == args.checkpoint.resolve():
            rule = "is the checkpoint itself, which is never changed; choose another OUT"
            raise ConfigError(f"{args.out} {rule}")
        # All files are compared with their checksums before anything is written.
        verify_checkpoint(args.checkpoint)
        if args.merge:
            export_merged(args.checkpoint, args.out, args.dtype, args.base)
        else:
            export_checkpoint(args.checkpoint, args.out, args.dtype)
    except (ConfigError, CheckpointError) as error:
        refuse(ConfigError(str(error)))
    # For example a full disk, or no permission to write.
    except (OSError, SafetensorError) as error:
        print(f"error: {args.out}: nothing was exported: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    # The export is complete; the step is only for the last line.
    step = read_trainer(args.checkpoint)["step"]
    mib = sum(path.stat().st_size for path in args.out.glob("*.safetensors")) / (1 << 20)
    merged = ", adapters merged" if args.merge else ""
    show(f"{args.out}: {mib:.3g} MiB of weights after {step} steps{merged}")


def check_is_checkpoint(folder: Path) -> None:
    """Raises ConfigError if `folder` is absent, a model's folder or a run's folder.

    These are common mistakes. `verify_checkpoint` finds everything else that may be wrong.
    """
    if not folder.is_dir():
        raise ConfigError(f"CHECKPOINT: there is no folder {folder}")
    if (folder / "config.json").is_file() and not (folder / "manifest.json").exists():
        rule = "is a model's folder, which transformers and vLLM load as it is"
        raise ConfigError(f"CHECKPOINT: {folder} {rule}")
    run_dir = folder.parent if folder.name == "checkpoints" else folder
    if (run_dir / "config.yaml").is_file():
        names = ", ".join(str(path) for path in list_checkpoints(run_dir)) or "there is none"
        raise ConfigError(
            f"CHECKPOINT: {folder} belongs to a run; give one of its checkpoints: {names}"
        )


if __name__ == "__main__":
    main()
