"""What the files of a run's teachers, and the rows that name them, tell before torch is there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, DataConfig, LoraConfig
from grpo_spmd.data.early import check_prompts_early, load_tokenizer_file
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.data.rows import read_rows
from grpo_spmd.preflight import arithmetic
from grpo_spmd.preflight.memory import Row, size_text
from grpo_spmd.preflight.model_facts import local_folder, read_model
from grpo_spmd.preflight.model_folder import check_model, num_embeddings


def check_teachers(config: Config, *, num_ranks: int, to_run: bool) -> None:
    """Look through the models' folders as through the policy's, and hold vocabularies and rows against them. A name of
    the hub that is not in the cache yet is only asked for, and so is a server. Raises ConfigError."""
    if config.teacher.url:
        from grpo_spmd.preflight.teacher_server import check_servers

        check_servers(config, num_ranks=num_ranks, to_run=to_run)
    for name, path in config.teacher.paths.items():
        key = f"teacher.path.{name}" if name else "teacher.path"
        # Nothing of it is vLLM's: as on one rank, without adapters.
        own = dataclasses.replace(config.model, path=path, lora=LoraConfig())
        rollout = dataclasses.replace(config.rollout, tensor_parallel_size=1, engine={})
        try:
            folder = check_model(dataclasses.replace(config, model=own, rollout=rollout), to_run=False)
        except ConfigError as error:
            raise ConfigError(str(error).replace("model.path", key)) from None
        if folder is None:
            if to_run:
                check_reachable("models", path, key)
            continue
        check_vocabulary(config.model.path, path, key)
        of_policy = local_folder(config.model.path)  # of the policy's tokens alone is anything said
        known = [num_embeddings(one) for one in (folder, of_policy) if one is not None]
        rows = min((size for size in known if size), default=config.teacher.top_k)
        if config.teacher.loss == "topk" and config.teacher.top_k > rows:
            what = f"teacher.top_k ({config.teacher.top_k}) is more than the tokens that {path} and the policy share"
            raise ConfigError(f"{what} ({rows}); lower it, or set teacher.loss: full")
    _check_rows(config)


def check_vocabulary(policy: str, other: str, key: str, kind: str = "teacher") -> None:
    """Refuse (ConfigError) an `other` model, of this `kind`, that has other tokens than the policy: a token's id must
    mean the same to both. What the files of one of them do not tell is not held against it."""
    folders = [local_folder(path) for path in (policy, other)]
    files = [folder / "tokenizer.json" for folder in folders if folder is not None]
    if policy == other or len(files) < 2:
        return
    sizes = [num_embeddings(folder) for folder in folders if folder is not None]
    if sizes[0] is not None and sizes[1] is not None and sizes[1] < sizes[0]:
        what = f"{other} knows {sizes[1]} tokens, and {policy} {sizes[0]}"
        raise ConfigError(f"{key}: {what}; take a {kind} of the policy's family")
    if not all(file.is_file() for file in files):
        return
    own, theirs = (tokens_of(file) for file in files)
    odd = min((i for i in own.keys() & theirs.keys() if own[i] != theirs[i]), default=None)
    if odd is not None:
        what = f"token {odd} is {theirs[odd]!r} there, and {own[odd]!r} in the policy's"
        raise ConfigError(f"{key}: {other} has another vocabulary than {policy}: {what}; take one of its family")


def teacher_data(config: Config) -> DataConfig | None:
    """The training set, with what the teacher is shown as its prompts; None where it sees the policy's. None of them
    may be dropped."""
    if not config.teacher.is_on or config.teacher.prompt_key is None:
        return None
    changes = {"prompt_key": config.teacher.prompt_key, "prompt_template": None, "on_long_prompt": "error"}
    return dataclasses.replace(config.data, **changes)  # type: ignore[arg-type]


def teacher_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """Memory of the teachers on a rank, for --explain."""
    for name, url in config.teacher.urls.items():
        num = config.rollout.num_prompts_per_step * config.rollout.group_size
        how = f"{url} is asked of {num:,} rollouts a step" + (" less those of others" if name else "")
        yield f"teacher {name}".strip(), "0 B", f"{how}, {config.teacher.max_concurrent} at once"
    itemsize, ranks = arithmetic.ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    for name, path in config.teacher.paths.items():
        what = f"teacher {name}".strip()
        if _is_shared(config, path):
            whose = "the policy's own, its adapters off" if config.model.lora.rank else "the reference's"
            yield what, "0 B", f"{path} is {whose}"
        elif (model := read_model(path)) is None:
            yield what, "unknown", f"{path} is not here"
        else:
            shard = arithmetic.shard_numel(model.shapes, ranks)
            how = f"{shard:,} parameters of a shard x {itemsize} ({config.model.dtype})"
            yield what, size_text(shard * itemsize), f"{how}; in host memory while the engine is awake"


def _is_shared(config: Config, path: str) -> bool:
    """With the policy, whose adapters are off, or with the reference."""
    return path == config.model.path and bool(config.model.lora.rank or config.loss.kl_coef)


def tokens_of(file: Path) -> dict[int, str]:
    return {i: token for token, i in load_tokenizer_file(file).get_vocab(with_added_tokens=True).items()}


def _check_rows(config: Config) -> None:
    own, names = teacher_data(config), config.teacher.names
    if own is not None:
        if config.teacher.prompt_key == config.data.prompt_key and config.data.prompt_template is None:
            raise ConfigError("teacher.prompt_key is data.prompt_key itself; name the teacher's own, or leave it out")
        try:
            rows, folder = read_rows(own), local_folder(config.model.path)
            if folder is not None:
                check_prompts_early(rows, own, folder, num_embeddings(folder))
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.prompt_key", "teacher.prompt_key")) from None
    if "" in names:
        return
    for row in read_rows(config.data):
        if (name := row.columns.get("teacher")) not in names:
            key = "teacher.url" if config.teacher.url else "teacher.path"
            rule = f"the column teacher must name one of {key}: {', '.join(names)}"
            raise ConfigError(f"{row.where}: {rule}; got {name!r}")
