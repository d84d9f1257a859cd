"""Reads and checks the files of a reward model before torch is imported.

A reward model is a decoder with a head for sequence classification. Each row of that head is called
a label, and gives one score. The files say which labels there are, how long a text may be, and
which shapes the tensors have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.files import UntrustedError, open_regular, read_model_config
from grpo_spmd.model.config_json import (
    Contents,
    follows_the_row,
    refuse_by_config,
    shapes_from_headers,
)

_HEAD = "score.weight"
_MAX_TEMPLATE_BYTES = 1 << 20


@dataclass(frozen=True)
class RewardModelFiles:
    """What is known about the reward model of one entry of `rewards`, after all checks."""

    name: str
    """The reward's name in the metrics."""
    where: str
    """The entry's key in the config (`rewards.0`), which errors name."""
    folder: Path
    label: int
    """Index of the head's row that gives the score."""
    max_tokens: int
    """The largest number of tokens of one text."""
    drops_start: bool
    """What happens to a longer text. True: its start is dropped. False: it gets no score."""
    template: str | None
    """The chat template. None stands for the tokenizer's own."""
    shapes: dict[str, tuple[int, ...]]
    """The shapes of the model's tensors, by name."""


@contextmanager
def errors_about(key: str) -> Iterator[None]:
    """Turns each ConfigError or OSError raised in its block into a ConfigError about the config key
    `key`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {error.filename}: {error.strerror}") from None
    except ConfigError as error:
        # Checks that are also made for the policy name the policy's key, model.path: replace it.
        text = str(error).removeprefix("model.path: ").removeprefix(f"{key}: ")
        raise ConfigError(f"{key}: {text}") from error


def read_reward_model(
    index: int, reward: RewardConfig, folder: Path, budget: int
) -> RewardModelFiles:
    """Checks the reward model in `folder`, for entry `index` of `rewards`, and describes it.

    `budget` is training.max_tokens_per_micro_batch, which no text may exceed. Raises ConfigError if
    the folder has no decoder with a head for sequence classification or no tokenizer, if the model
    brings its own code, if its score of a text would depend on other texts, if the label is missing
    or ambiguous, or if `max_tokens` is too large."""
    key = f"rewards.{index}"
    with errors_about(f"{key}.model"):
        config = read_model_config(folder)
        # refuse_by_config refuses classifiers, and a reward model is one: hide the class name.
        decoder_config = {name: value for name, value in config.items() if name != "architectures"}
        refuse_by_config(decoder_config, str(folder))
        shapes = shapes_from_headers(folder, tied=False)
        if not shapes:
            raise ConfigError(
                f"{folder} holds no .safetensors file, or lacks one; no other weights are read"
            )
        _refuse_unsuitable_config(config, folder)
        _check_head(config, shapes, folder)
        # If the tokenizer's files are missing, transformers would silently make up a tokenizer.
        patterns = ("tokenizer.*", "vocab*", "*.model", "*.tiktoken")
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise ConfigError(f"{folder} holds no tokenizer; copy that of its base model there")
    positions = config.get("max_position_embeddings")
    limit, limit_name = budget, "training.max_tokens_per_micro_batch"
    if isinstance(positions, int) and positions < budget:
        limit, limit_name = positions, "the model's number of positions"
    if (reward.max_tokens or 0) > limit:
        raise ConfigError(
            f"{key}.max_tokens ({reward.max_tokens}) is more than {limit_name} ({limit}); lower it"
        )
    return RewardModelFiles(
        name=reward.metric_name,
        where=key,
        folder=folder,
        label=_find_label(config, reward.label, f"{key}.label"),
        max_tokens=reward.max_tokens or limit,
        drops_start=reward.on_long == "drop_start",
        template=reward.template and _read_template(reward.template, f"{key}.template"),
        shapes=shapes,
    )


def _refuse_unsuitable_config(config: Contents, folder: Path) -> None:
    """Raises ConfigError if the model comes with its own code, or if the score of a text would
    depend on the other texts that are packed into the same row."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    if follows_the_row(kind):
        reason = "they change with the longest text of a row, and so would the score of the others"
        raise ConfigError(f"{folder} has rotary factors of the kind {kind}: {reason}")
    if config.get("auto_map"):
        raise ConfigError(
            f"{folder} has code of its own (auto_map in its config.json), which is never run"
        )


def _check_head(config: Contents, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raises ConfigError unless the checkpoint has a linear head with one row for each label."""
    if _HEAD not in shapes:
        model_classes = ", ".join(map(str, config.get("architectures") or ["no architectures"]))
        # Name another head that the checkpoint has: it tells the user what kind of model this is.
        other_heads = [
            name
            for name in shapes
            if re.match("(classifier|v_head|value_head|lm_head|reward_head)", name)
        ]
        hint = f"; it has {other_heads[0]}" if other_heads else ""
        raise ConfigError(
            f"{folder} ({model_classes} in its config.json) has no tensor {_HEAD}{hint}; a reward "
            "model is a causal decoder with this linear head (AutoModelForSequenceClassification)"
        )
    # If config.json names more or fewer labels, its names may not stand for the right rows.
    num_rows = shapes[_HEAD][0]
    num_labels = len(_label_names(config))
    if num_rows != num_labels:
        raise ConfigError(
            f"{folder}: {_HEAD} has {num_rows} rows, and config.json names {num_labels} labels"
        )


def _label_names(config: Contents) -> list[str]:
    """Returns the names of the labels in order.

    If config.json says nothing about labels there are two, as in transformers."""
    names = config.get("id2label")
    if not isinstance(names, Mapping):
        return [f"LABEL_{number}" for number in range(config.get("num_labels") or 2)]
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(len(names))]


def _find_label(config: Contents, requested: str | None, key: str) -> int:
    """Returns the index of the label `requested`, which is a label's name, or its index as text.

    None stands for the model's only label. Raises ConfigError, which names `key`, if it is None and
    the model has several labels, or if the model has no such label."""
    names = _label_names(config)
    labels_text = ", ".join(f"{number} ({name})" for number, name in enumerate(names[:8]))
    if requested is None:
        if len(names) > 1:
            raise ConfigError(
                f"{key}: the model has {len(names)} labels; say whose score counts: {labels_text}"
            )
        return 0
    # Look for a name first, since a label may be called "1".
    if requested in names:
        return names.index(requested)
    if re.fullmatch("[0-9]{1,5}", requested) and int(requested) < len(names):
        return int(requested)
    raise ConfigError(f"{key}: the model has no label {requested!r}; it has {labels_text}")


def _read_template(path: str, key: str) -> str:
    """Returns the chat template in the file `path`.

    Raises ConfigError, which names `key`, if it cannot be read or is larger than 1 MiB."""
    with errors_about(key):
        try:
            with open_regular(Path(path), follow=True) as file:
                # Read one byte more than allowed: that shows that a file is too large without
                # reading all of it.
                content = file.read(_MAX_TEMPLATE_BYTES + 1)
            if len(content) > _MAX_TEMPLATE_BYTES:
                raise ConfigError(f"{path} is larger than 1 MiB, which no template is")
            return content.decode("utf-8")
        except UntrustedError as error:
            raise ConfigError(f"{error}; give a file with a chat template") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text") from None
