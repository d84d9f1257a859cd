"""What the folder of a run's critic tells before torch is there, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.model.families.config_json import refuse_by_config
from grpo_spmd.preflight import arithmetic
from grpo_spmd.preflight.beside import folder_of
from grpo_spmd.preflight.memory import Row, size_text
from grpo_spmd.preflight.model_facts import local_folder, read_model
from grpo_spmd.preflight.model_folder import num_embeddings
from grpo_spmd.preflight.teacher import check_vocabulary
from grpo_spmd.untrusted import UntrustedError, read_model_config

_PER_PARAMETER = 12  # bytes: float32 and AdamW's two moments


def check_critic_model(config: Config, *, to_run: bool = True) -> None:
    """That there is such a model, that it can train, and that it knows the policy's tokens. It needs no tokenizer.
    Raises ConfigError."""
    path = str(config.critic.path)
    folder = folder_of(path, "critic.path", to_run=to_run)
    if folder is None:
        return
    try:
        refuse_by_config(read_model_config(folder), path)
        theirs = num_embeddings(folder)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "critic.path", 1)) from None
    except UntrustedError as error:
        raise ConfigError(f"critic.path: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"critic.path: cannot read {error.filename}: {error.strerror}; name a model's folder"
        ) from None
    policy = local_folder(config.model.path)
    own = num_embeddings(policy) if policy is not None else None
    if own is not None and theirs is not None and theirs < own:
        what = f"{path} knows {theirs} tokens, and {config.model.path} {own}"
        raise ConfigError(f"critic.path: {what}; take a model of the policy's family")
    check_vocabulary(config.model.path, path, "critic.path")


def critic_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """Memory of the critic on a rank, for --explain."""
    path, ranks = str(config.critic.path), num_ranks // config.model.num_replicas
    if (model := read_model(path)) is None:
        yield "critic and its optimizer", "unknown", f"{path} is not here"
        return
    shard = arithmetic.shard_numel(
        {name: shape for name, shape in model.shapes.items() if "lm_head" not in name}, ranks
    )
    how = f"{shard:,} parameters of a shard x {_PER_PARAMETER} (float32 and two moments)"
    yield (
        "critic and its optimizer",
        size_text(shard * _PER_PARAMETER),
        f"{how}; in host memory while the engine is awake",
    )
    yield "its gradients", size_text(shard * 4), f"{shard:,} x 4, in its update"
