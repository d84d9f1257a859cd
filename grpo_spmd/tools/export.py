"""python -m grpo_spmd.export CHECKPOINT OUT [--dtype bfloat16|float32] [--merge [--base MODEL]]: a folder that
transformers and vLLM load."""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import SafetensorError

from grpo_spmd.checkpoint.export import DTYPE_BYTES, export_checkpoint
from grpo_spmd.checkpoint.manifest import CheckpointError, read_trainer, verify_checkpoint
from grpo_spmd.checkpoint.run_dir import list_checkpoints
from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.files import hold_standard_streams, show


def main() -> None:
    hold_standard_streams()
    about = "Write the weights of a checkpoint as a model folder that transformers and vLLM load, or its adapters as "
    parser = OneLineParser(prog="python -m grpo_spmd.export", description=about + "peft's.")
    add, dtype = parser.add_argument, "of the weights (default: the dtype that the run computed in)"
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN_DIR/checkpoints/step_NNNNNN")
    add("out", type=Path, metavar="OUT", help="a folder that does not exist yet")
    add("--dtype", choices=list(DTYPE_BYTES), help=dtype)
    add(
        "--merge",
        action="store_true",
        help="of adapters: write the base model with them in its weights",
    )
    add(
        "--base",
        type=Path,
        metavar="MODEL",
        help="with --merge: the base model's folder, if it is not where it was",
    )
    args = parser.parse_args()
    if args.base and not args.merge:
        parser.error("--base goes with --merge")
    try:
        _check_is_checkpoint(args.checkpoint)
        if args.out.resolve() == args.checkpoint.resolve():
            raise ConfigError(
                f"{args.out} is the checkpoint itself, which is never changed; choose another OUT"
            )
        verify_checkpoint(args.checkpoint)
        if args.merge:
            from grpo_spmd.checkpoint.merge import export_merged

            export_merged(args.checkpoint, args.out, args.dtype, args.base)
        else:
            export_checkpoint(args.checkpoint, args.out, args.dtype)
    except (ConfigError, CheckpointError) as error:
        refuse(ConfigError(str(error)))
    except (OSError, SafetensorError) as error:  # a full disk, no permission
        print(f"error: {args.out}: nothing was exported: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    step = read_trainer(args.checkpoint)["step"]
    size = sum(path.stat().st_size for path in args.out.glob("*.safetensors"))
    merged = ", adapters merged" if args.merge else ""
    show(f"{args.out}: {size / (1 << 20):.3g} MiB of weights after {step} steps{merged}")


def _check_is_checkpoint(folder: Path) -> None:
    """One line for what people give instead. What else may be wrong with it `verify_checkpoint` says."""
    if not folder.is_dir():
        raise ConfigError(f"CHECKPOINT: there is no folder {folder}")
    if (folder / "config.json").is_file() and not (folder / "manifest.json").exists():
        raise ConfigError(
            f"CHECKPOINT: {folder} is a model's folder, which transformers and vLLM load as it is"
        )
    for run_dir, what in (
        (folder, "a run folder"),
        (folder.parent, "the folder of a run's checkpoints"),
    ):
        if (run_dir / "config.yaml").is_file() and folder in (run_dir, run_dir / "checkpoints"):
            names = ", ".join(str(path) for path in list_checkpoints(run_dir)) or "there is none"
            raise ConfigError(
                f"CHECKPOINT: {folder} is {what}; give one of its checkpoints: {names}"
            )


if __name__ == "__main__":
    main()
