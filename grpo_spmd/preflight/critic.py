"""What the folder of a run's critic tells before torch is there, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_spmd.config.critic import VALUE_HEADS
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.model.families.config_json import refuse_by_config
from grpo_spmd.preflight import arithmetic
from grpo_spmd.preflight.beside import folder_of
from grpo_spmd.preflight.memory import Row, size_text
from grpo_spmd.preflight.model_facts import read_model, shapes_from_headers
from grpo_spmd.preflight.teacher import check_vocabulary
from grpo_spmd.untrusted import UntrustedError, read_model_config


def check_critic_model(config: Config, *, to_run: bool = True) -> None:
    """That there is such a model, that it can train, and that it knows the policy's tokens. It needs no tokenizer.
    Raises ConfigError."""
    if config.critic.is_on_policy:
        return
    path = str(config.critic.path)
    folder = folder_of(path, "critic.path", to_run=to_run)
    if folder is None:
        return
    try:
        model = read_model_config(folder)
        refuse_by_config(model | {"architectures": None}, path)  # its own head is left out, or is the critic's
        _check_head(model, folder, path)
        check_vocabulary(config.model.path, path, "critic.path", "critic")
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "critic.path", 1)) from None
    except UntrustedError as error:
        raise ConfigError(f"critic.path: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"critic.path: cannot read {error.filename}: {error.strerror}; name a model's folder"
        ) from None


def _check_head(model: Mapping[str, Any], folder: Path, path: str) -> None:
    """A classifier's is the critic's, where it has one label."""
    shapes = shapes_from_headers(folder, tied=False)
    name = next((name for name in VALUE_HEADS if f"{name}.weight" in shapes), None)
    if name is None or (rows := shapes[f"{name}.weight"][0]) == 1:
        return
    names = model.get("id2label")
    labels = ", ".join(map(str, names.values()))[:100] if isinstance(names, Mapping) else "of no name"
    what = f"{path} tells {rows} labels apart ({name}.weight: {labels}), and a value is one number"
    raise ConfigError(f"critic.path: {what}; take a classifier of one label, or the causal LM that it was made of")


def critic_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """Memory of the critic on a rank, for --explain."""
    path, ranks = str(config.critic.path), num_ranks // config.model.num_replicas
    if config.critic.is_on_policy:
        yield from _head_rows(config)
        return
    if (model := read_model(path)) is None:
        yield "critic and its optimizer", "unknown", f"{path} is not here"
        return
    shard = arithmetic.shard_numel(
        {name: shape for name, shape in model.shapes.items() if "lm_head" not in name}, ranks
    )
    size = arithmetic.TRAINED_ITEMSIZE
    how = f"{shard:,} parameters of a shard x {size} (float32 and two moments)"
    yield ("critic and its optimizer", size_text(shard * size), f"{how}; in host memory while the engine is awake")
    yield "its copy for a checkpoint, in host memory", size_text(shard * size), "while a thread writes it"
    yield "its gradients", size_text(shard * 4), f"{shard:,} x 4, in its update"


def _head_rows(config: Config) -> Iterator[Row]:
    model = read_model(config.model.path)
    if model is not None and (sizes := model.dimensions) is not None:
        numel, size = sizes.hidden + 1, arithmetic.TRAINED_ITEMSIZE
        how = f"{numel:,} parameters x {size} on the rank that has its row; the layers are the policy's"
        yield "value head and its optimizer", size_text(numel * size), how
