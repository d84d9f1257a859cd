"""What the files of a run's teachers, and the rows that name them, tell before torch is there."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from grpo_spmd.checks import memory
from grpo_spmd.checks.data import check_prompts_early, load_tokenizer_file
from grpo_spmd.checks.memory import Row, size_text
from grpo_spmd.checks.model_folder import check_model, folder_of, num_embeddings
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import VALUE_HEADS, Config, DataConfig, LoraConfig
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.data.rows import read_rows
from grpo_spmd.files import UntrustedError, read_model_config
from grpo_spmd.model.config_json import (
    local_folder,
    read_model,
    refuse_by_config,
    shapes_from_headers,
)
from grpo_spmd.rewards.remote.client import PromptLogprobs, Served, headers_of
from grpo_spmd.rewards.trl import FailedCallError


def check_teachers(config: Config, *, num_ranks: int, to_run: bool) -> None:
    """Look through the models' folders as through the policy's, and hold vocabularies and rows against them. A name of
    the hub that is not in the cache yet is only asked for, and so is a server. Raises ConfigError."""
    if config.teacher.url:
        pass

        check_servers(config, num_ranks=num_ranks, to_run=to_run)
    for name, path in config.teacher.paths.items():
        key = f"teacher.path.{name}" if name else "teacher.path"
        # Nothing of it is vLLM's: as on one rank, without adapters.
        own = dataclasses.replace(config.model, path=path, lora=LoraConfig())
        rollout = dataclasses.replace(config.rollout, tensor_parallel_size=1, engine={})
        try:
            folder = check_model(
                dataclasses.replace(config, model=own, rollout=rollout), to_run=False
            )
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
        raise ConfigError(
            f"{key}: {other} has another vocabulary than {policy}: {what}; take one of its family"
        )


def teacher_data(config: Config) -> DataConfig | None:
    """The training set, with what the teacher is shown as its prompts; None where it sees the policy's. None of them
    may be dropped."""
    if not config.teacher.is_on or config.teacher.prompt_key is None:
        return None
    changes = {
        "prompt_key": config.teacher.prompt_key,
        "prompt_template": None,
        "on_long_prompt": "error",
    }
    return dataclasses.replace(config.data, **changes)  # type: ignore[arg-type]


def teacher_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """Memory of the teachers on a rank, for --explain."""
    for name, url in config.teacher.urls.items():
        num = config.rollout.num_prompts_per_step * config.rollout.group_size
        how = f"{url} is asked of {num:,} rollouts a step" + (
            " less those of others" if name else ""
        )
        yield f"teacher {name}".strip(), "0 B", f"{how}, {config.teacher.max_concurrent} at once"
    itemsize, ranks = memory.ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    for name, path in config.teacher.paths.items():
        what = f"teacher {name}".strip()
        if _is_shared(config, path):
            whose = (
                "the policy's own, its adapters off"
                if config.model.lora.rank
                else "the reference's"
            )
            yield what, "0 B", f"{path} is {whose}"
        elif (model := read_model(path)) is None:
            yield what, "unknown", f"{path} is not here"
        else:
            shard = memory.shard_numel(model.shapes, ranks)
            how = f"{shard:,} parameters of a shard x {itemsize} ({config.model.dtype})"
            yield (
                what,
                size_text(shard * itemsize),
                f"{how}; in host memory while the engine is awake",
            )


def _is_shared(config: Config, path: str) -> bool:
    """With the policy, whose adapters are off, or with the reference."""
    return path == config.model.path and bool(config.model.lora.rank or config.loss.kl_coef)


def tokens_of(file: Path) -> dict[int, str]:
    return {
        i: token for token, i in load_tokenizer_file(file).get_vocab(with_added_tokens=True).items()
    }


def _check_rows(config: Config) -> None:
    own, names = teacher_data(config), config.teacher.names
    if own is not None:
        if (
            config.teacher.prompt_key == config.data.prompt_key
            and config.data.prompt_template is None
        ):
            raise ConfigError(
                "teacher.prompt_key is data.prompt_key itself; name the teacher's own, or leave it out"
            )
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


# What a teacher's server tells before a model is built: that it is there, has the model, and means by each token's id
# what the policy does.


T = TypeVar("T")
_MOST_S = 30.0  # of one request
_FIRST_PAUSE_S = 0.5
_NUM_PROBED = 256  # tokens of the policy's vocabulary


def check_servers(config: Config, *, num_ranks: int, to_run: bool) -> None:
    """Raises ConfigError. Asks them only `to_run`, and on one rank."""
    most = config.teacher.max_concurrent
    if most < num_ranks:
        why = "each of which makes its own share of the requests; raise it, or take fewer ranks"
        raise ConfigError(
            f"teacher.max_concurrent ({most}) must be >= the number of ranks ({num_ranks}), {why}"
        )
    headers_of(config.teacher.headers_env, "teacher.headers_env")
    if to_run and os.environ.get("RANK", "0") == "0":
        for name in config.teacher.urls:
            check_server(config, name)


def check_server(config: Config, name: str) -> str:
    """The name that the teacher's server has for its model. Raises ConfigError where it is not there, or is no teacher
    for this run."""
    teacher, key = config.teacher, f"teacher.url.{name}" if name else "teacher.url"
    server = open_server(config, name, teacher.model)
    served = _served(config, server, key)
    longest = config.max_rollout_tokens + 1  # it samples one, which nobody needs
    if served.max_tokens is not None and served.max_tokens < longest:
        what = f"{served.name} takes {served.max_tokens} tokens there, and the longest rollout and one more are {longest}"
        raise ConfigError(
            f"{key}: {what}; start it with --max-model-len {longest}, or lower the rollout's limits"
        )
    _check_vocabulary(config, open_server(config, name, served.name), key, served)
    return served.name


def open_server(config: Config, name: str, model: str | None) -> PromptLogprobs:
    headers = headers_of(config.teacher.headers_env, "teacher.headers_env")
    return PromptLogprobs(config.teacher.urls[name], headers, model)


def _served(config: Config, server: PromptLogprobs, key: str) -> Served:
    model = config.teacher.model
    try:
        found = _patiently(config, server.served)
    except FailedCallError as error:
        if model is not None and error.status is not None:  # it is there, and only has no list
            return Served(model, None)
        how = (
            "start it, or correct the address"
            if error.status is None
            else "or name its model: teacher.model"
        )
        raise ConfigError(f"{key}: the server {error}; {how}") from None
    names = [each.name for each in found]
    if model is None and len(found) == 1:
        return found[0]
    if model not in names:
        rule = (
            "must be one that the server has"
            if model is not None
            else "is needed where a server has several"
        )
        raise ConfigError(
            f"teacher.model {rule} ({key} has {', '.join(names) or 'none'}); got {model}"
        )
    return found[names.index(model)]


def _check_vocabulary(config: Config, server: PromptLogprobs, key: str, served: Served) -> None:
    """What its server writes for each of some tokens beside what the policy's tokenizer does. What one of both does not
    write by itself, a part of a character, is not held against it."""
    folder, top_k = (
        local_folder(config.model.path),
        config.teacher.top_k if config.teacher.loss == "topk" else 0,
    )
    file = None if folder is None else folder / "tokenizer.json"
    ids = [0] if file is None or not file.is_file() else sorted(tokens_of(file))
    most = min(_NUM_PROBED, (served.max_tokens or _NUM_PROBED) - 2)
    ids = sorted({ids[place * (len(ids) - 1) // most] for place in range(most + 1)})
    asked = [ids[0], *ids]  # of the first nothing is said

    def texts(number: int) -> list[str]:
        return _patiently(config, lambda limit_s: server.texts(asked, number, limit_s))

    try:
        said = texts(top_k)
    except FailedCallError as error:
        if not top_k or error.status != 400:
            raise ConfigError(f"{key}: {_why(error, config, served)}") from None
        try:
            texts(0)
        except FailedCallError as without:
            raise ConfigError(f"{key}: {_why(without, config, served)}") from None
        how = f"start it with --max-logprobs {top_k}, or lower teacher.top_k"
        raise ConfigError(
            f"teacher.top_k ({top_k}) is more than the server takes; {how}: it {error}"
        ) from None
    if file is None or not file.is_file():
        return
    tokenizer = load_tokenizer_file(file)
    own = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
    pairs = [
        (i, a, b) for i, a, b in zip(ids, own, said, strict=True) if _is_whole(a) and _is_whole(b)
    ]
    if not pairs:
        raise ConfigError(
            f"{key}: the server does not say what tokens are; start it with its tokenizer"
        )
    odd = next(((i, a, b) for i, a, b in pairs if a.strip() != b.strip()), None)
    if odd is not None:
        what = f"token {odd[0]} is {odd[2]!r} there, and {odd[1]!r} in the policy's"
        rule = f"{served.name} has another vocabulary than {config.model.path}"
        raise ConfigError(f"{key}: {rule}: {what}; take a teacher of its family")


def _why(error: FailedCallError, config: Config, served: Served) -> str:
    if error.status == 400:
        rule = "teachers have the policy's vocabulary, and give prompt_logprobs as vLLM does"
        return f"{served.name} does not take tokens of {config.model.path} ({rule}): the server {error}"
    return f"the server {error}; it must be vLLM's"


def _is_whole(text: str) -> bool:
    return bool(text) and "\ufffd" not in text


def _patiently(config: Config, ask: Callable[[float], T]) -> T:
    """What `ask` gives, asked again as the run asks again. Raises FailedCallError."""
    limit_s = min(config.teacher.timeout_s, _MOST_S)
    for number in range(config.teacher.retries + 1):
        try:
            return ask(limit_s)
        except FailedCallError as error:
            if not error.may_retry or number == config.teacher.retries:
                raise
            time.sleep(
                min(_FIRST_PAUSE_S * 2**number if error.wait_s is None else error.wait_s, limit_s)
            )
    raise AssertionError("the last time raises")


# What the folder of a run's critic tells before torch is there, and the memory that it takes.


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
        refuse_by_config(
            model | {"architectures": None}, path
        )  # its own head is left out, or is the critic's
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
    labels = (
        ", ".join(map(str, names.values()))[:100] if isinstance(names, Mapping) else "of no name"
    )
    what = f"{path} tells {rows} labels apart ({name}.weight: {labels}), and a value is one number"
    raise ConfigError(
        f"critic.path: {what}; take a classifier of one label, or the causal LM that it was made of"
    )


def critic_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """Memory of the critic on a rank, for --explain."""
    path, ranks = str(config.critic.path), num_ranks // config.model.num_replicas
    if config.critic.is_on_policy:
        yield from _head_rows(config)
        return
    if (model := read_model(path)) is None:
        yield "critic and its optimizer", "unknown", f"{path} is not here"
        return
    shard = memory.shard_numel(
        {name: shape for name, shape in model.shapes.items() if "lm_head" not in name}, ranks
    )
    size = memory.TRAINED_ITEMSIZE
    how = f"{shard:,} parameters of a shard x {size} (float32 and two moments)"
    yield (
        "critic and its optimizer",
        size_text(shard * size),
        f"{how}; in host memory while the engine is awake",
    )
    yield (
        "its copy for a checkpoint, in host memory",
        size_text(shard * size),
        "while a thread writes it",
    )
    yield "its gradients", size_text(shard * 4), f"{shard:,} x 4, in its update"


def _head_rows(config: Config) -> Iterator[Row]:
    model = read_model(config.model.path)
    if model is not None and (sizes := model.dimensions) is not None:
        numel, size = sizes.hidden + 1, memory.TRAINED_ITEMSIZE
        how = f"{numel:,} parameters x {size} on the rank that has its row; the layers are the policy's"
        yield "value head and its optimizer", size_text(numel * size), how
