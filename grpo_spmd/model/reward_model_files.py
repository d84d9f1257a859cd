"""What the files of a reward model say before torch reads them: its head, its labels, how long a
text may be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.files import UntrustedError, open_regular, read_header, read_index, read_model_config
from grpo_spmd.model.config_json import refuse_by_config

_HEAD = "score.weight"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class RewardModelFiles:
    """Of one entry of `rewards`."""

    name: str  # the reward's
    where: str  # its key, for what is refused later
    folder: Path
    label: int  # row of the head
    max_tokens: int  # of one text
    drops_start: bool  # of a longer one, which has no score otherwise
    template: str | None  # in place of the tokenizer's
    shapes: dict[str, tuple[int, ...]]


@contextmanager
def errors_about(key: str) -> Iterator[None]:
    """What is refused inside of a model is said of the key `where`, and not of model.path."""
    try:
        yield
    except ConfigError as error:
        text = str(error).removeprefix("model.path: ").removeprefix(f"{key}: ")
        raise ConfigError(f"{key}: {text}") from error


def read_reward_model(
    index: int, reward: RewardConfig, folder: Path, budget: int
) -> RewardModelFiles:
    """`folder`: that of `reward.model`; `budget`: training.max_tokens_per_micro_batch. Raises
    ConfigError for what is
    no decoder with a head for sequence classification, and where it is not clear which label or how
    long a text."""
    key = f"rewards.{index}"
    with errors_about(f"{key}.model"):
        try:
            config = read_model_config(folder)
            refuse_by_config(
                {name: value for name, value in config.items() if name != "architectures"},
                str(folder),
            )
            shapes = _shapes(folder)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
        _check_kind(config, folder)
        _check_head(config, shapes, folder)
        if not any(
            any(folder.glob(pattern))
            for pattern in ("tokenizer.*", "vocab*", "*.model", "*.tiktoken")
        ):
            raise ConfigError(f"{folder} holds no tokenizer; copy that of its base model there")
    positions = config.get("max_position_embeddings")
    maximum = min(positions, budget) if isinstance(positions, int) else budget
    if reward.max_tokens is not None and reward.max_tokens > maximum:
        by_model = maximum != budget
        of = (
            f"its model has positions ({maximum})"
            if by_model
            else f"training.max_tokens_per_micro_batch ({maximum})"
        )
        raise ConfigError(f"{key}.max_tokens ({reward.max_tokens}) is more than {of}; lower it")
    template = (
        _read_template(reward.template, f"{key}.template") if reward.template is not None else None
    )
    return RewardModelFiles(
        reward.metric_name,
        key,
        folder,
        _label(config, reward.label, f"{key}.label"),
        reward.max_tokens or maximum,
        reward.on_long == "drop_start",
        template,
        shapes,
    )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    files = sorted(set((read_index(folder) or {}).values())) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise UntrustedError(f"{folder} holds no .safetensors file, and no other weights are read")
    headers = (read_header(file) for file in files)
    return {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}


def _check_kind(config: Mapping[str, Any], folder: Path) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = str(rope.get("rope_type", rope.get("type", ""))) if isinstance(rope, Mapping) else ""
    if kind == "longrope" or "dynamic" in kind:
        reason = "they change with the longest text of a row, and so would the score of the others"
        raise ConfigError(f"{folder} has rotary factors of the kind {kind}: {reason}")
    if config.get("auto_map"):
        raise ConfigError(
            f"{folder} has code of its own (auto_map in its config.json), which is never run"
        )


def _check_head(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    kinds = ", ".join(map(str, config.get("architectures") or ["no architectures"]))
    if _HEAD not in shapes:
        heads = [
            name
            for name in shapes
            if re.match("(classifier|v_head|value_head|lm_head|reward_head)", name)
        ]
        matches = f"; it has {heads[0]}" if heads else ""
        need = (
            f"a reward model is a causal decoder with a linear head {_HEAD} "
            "(AutoModelForSequenceClassification)"
        )
        raise ConfigError(
            f"{folder} ({kinds} in its config.json) has no tensor {_HEAD}{matches}; {need}"
        )
    rows, labels = shapes[_HEAD][0], len(_labels(config))
    if rows != labels:
        raise ConfigError(
            f"{folder}: {_HEAD} has {rows} rows, and config.json names {labels} labels"
        )


def _labels(config: Mapping[str, Any]) -> list[str]:
    """Their names by number, as transformers counts them: two where config.json says nothing."""
    names = config.get("id2label")
    if not isinstance(names, Mapping):
        return [f"LABEL_{number}" for number in range(config.get("num_labels") or 2)]
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names))]


def _label(config: Mapping[str, Any], requested: str | None, key: str) -> int:
    names = _labels(config)
    known_values = ", ".join(f"{number} ({name})" for number, name in enumerate(names[:8]))
    if requested is None:
        if len(names) > 1:
            raise ConfigError(
                f"{key}: the model has {len(names)} labels; say whose score counts: {known_values}"
            )
        return 0
    if requested in names:
        return names.index(requested)
    if re.fullmatch("[0-9]{1,5}", requested) and int(requested) < len(names):
        return int(requested)
    raise ConfigError(f"{key}: the model has no label {requested!r}; it has {known_values}")


def _read_template(path: str, key: str) -> str:
    try:
        with open_regular(Path(path), follow=True) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(
                f"{key}: {path} is larger than {_MOST_BYTES >> 20} MiB, which no template is"
            )
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from None
    except UntrustedError as error:
        raise ConfigError(f"{key}: {error}; give a file with a chat template") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8 text") from None
