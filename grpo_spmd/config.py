"""One tree of frozen dataclasses: load YAML, override, validate, dump. Imports neither torch nor vllm.

Every value lives here once. `load_config` either returns a tree in which every key was declared, typed and checked, or raises
`ConfigError` with one line that names the key, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
import time
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

import yaml


class ConfigError(ValueError):
    """What a user typed (config, command line or data) cannot be used; the command ends with exit code 2.

    Its text is one line, also where it quotes another library's message or a value with line breaks.
    """

    def __str__(self) -> str:
        return " ".join(super().__str__().split("\n"))


def refuse(error: ConfigError) -> typing.NoReturn:
    """End this rank with one line and exit code 2.

    Under torchrun all ranks see the same mistake, the first of the node says so, and torchrun ends the others once it is gone. They
    wait for that; one that is still there afterwards was alone with its mistake (a file that only its node lacks) and says it itself.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def key(default: Any, doc: str) -> Any:
    """A config key with its default and the sentence that `--help` prints for it."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"doc": doc})
    return dataclasses.field(default=default, metadata={"doc": doc})


def required(doc: str) -> Any:
    return dataclasses.field(metadata={"doc": doc})


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = key(0, "rank of the adapters; 0: full fine-tuning")
    alpha: float = key(32.0, "the adapters' product counts alpha / rank")
    target_modules: tuple[str, ...] | Literal["all-linear"] = key("all-linear", "names of the layers that get one, or all but the lm_head")
    sync: Literal["merged", "adapter"] = key("merged", "what the engine gets: base plus adapters, or, after the start, the adapters alone")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = required("folder with config.json, safetensors and a tokenizer, or a hub id")
    dtype: Literal["float32", "bfloat16"] = key("bfloat16", "compute dtype of policy and engine; master weights are float32")
    attention: Literal["auto", "flash", "sdpa"] = key(
        "auto", "auto: flash-attn on a GPU where it is installed, else torch's own varlen attention; on the CPU sdpa"
    )
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    activation_checkpointing: bool | Literal["selective"] = key(
        False, "true: recompute each layer in the backward pass instead of keeping its activations; selective: all but its products"
    )
    offload: bool | Literal["optimizer"] = key(
        False, "keep in host memory while the engine is awake: optimizer: its state; true: the policy's parameters too"
    )
    compile: bool = key(False, "torch.compile the layers")
    num_replicas: int = key(1, "copies of the policy (HSDP): each is sharded over ranks / this many consecutive ranks")
    logprob_chunk_tokens: int = key(1024, "tokens whose [tokens, vocabulary] logits exist at one time")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: str = required("a .jsonl or .parquet file, or hub:REPO:SUBSET:SPLIT (SUBSET may be empty)")
    eval: dict[str, Any] | str = key({}, "held-out sets, {name: source}, a source written as in data.train; or one source")
    prompt_key: str = key("prompt", "column that holds the prompt: a string, or a list of chat messages")
    prompt_template: str | None = key(None, "the prompt written out, with columns in braces: 'Use {nums} to make {target}'; not prompt_key")
    as_chat: bool = key(False, "send a string prompt through the tokenizer's chat template as one user message")
    system_prompt: str | None = key(None, "system message put before a chat prompt that has none")
    max_prompt_tokens: int = key(512, "longest prompt, in tokens")
    on_long_prompt: Literal["error", "drop"] = key("error", "what a longer prompt means: refuse to start, or drop it and count")
    shuffle: bool = key(True, "a new order each epoch, a function of seed and epoch alone")

    @property
    def eval_sets(self) -> dict[str, str]:
        """The held-out sets by name; a single source is named after its file or hub repository."""
        if isinstance(self.eval, str):
            return {Path(self.eval.split(":")[1] if self.eval.startswith("hub:") else self.eval).stem: self.eval} if self.eval else {}
        return self.eval


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    num_prompts_per_step: int = key(64, "prompts a step over all ranks (P)")
    group_size: int = key(8, "completions per prompt (G)")
    max_completion_tokens: int = key(1024, "longest completion, in tokens")
    temperature: float = key(1.0, "sampling temperature; the policy's logprobs are taken at the same one")
    tensor_parallel_size: int = key(1, "ranks that share one engine")
    dynamic_sampling: bool = key(False, "drop groups whose rewards are all alike, and refill the step from further prompts")
    dynamic_sampling_max_rounds: int = key(10, "rounds of generation after which such a step trains on the groups that it has")
    gpu_memory_utilization: float = key(0.6, "share of a GPU's memory that the engine may take (GPU only)")
    schedule: Literal["shared_queue", "static"] = key(
        "shared_queue", "shared_queue: engines claim groups as they get free; static: each has its share from the start"
    )
    sleep_level: Literal[1, 2] | None = key(
        None, "while the policy trains, 1 keeps the engine's weights in host memory, 2 drops them; null: what the sync needs (GPU only)"
    )
    weight_sync_bucket_mib: int = key(16, "bytes of one gather of the weight sync, over the ranks of a replica; two are in memory")
    engine: dict[str, Any] = key({}, "passed through to vllm.LLM")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    name: str | None = key(None, "a shipped reward (math, gsm8k, countdown, code, format, exact), or the metric's name for `function`")
    function: str | None = key(None, '"file.py:function" with the signature fn(prompts, completions, completion_ids, **columns)')
    weight: float = key(1.0, "factor of this reward in the sum")
    args: dict[str, Any] = key({}, "further keyword arguments for the function")


@dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    num_workers: int = key(4, "processes on each rank that score rewards")
    timeout_s: float = key(10.0, "seconds that scoring one completion may take before its process is killed")
    max_error_frac: float = key(0.3, "share of a step's completions without a usable reward at which the run stops")


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = key(
        "grpo",
        "grpo: minus the group's mean, scaled by normalize_std; dr_grpo: never scaled; rloo: minus the mean of the others; "
        "reinforce_pp: minus the mean of the step's rewards, over their standard deviation",
    )
    normalize_std: Literal["group", "batch", "none"] = key("group", "which standard deviation grpo divides by")
    overlong_buffer_tokens: int = key(0, "completions that end within this many tokens of the longest are punished, linearly; 0: none")
    overlong_penalty: float = key(1.0, "what a completion of the full length loses of its reward")


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    policy: Literal["clip", "gspo", "cispo"] = key(
        "clip",
        "clip: PPO's, a ratio for each token; gspo: one for each sequence; cispo: a clipped, detached ratio as weight of the logprob",
    )
    clip_ratio_low: float = key(0.2, "the ratio is clipped below at 1 - this; 1: never")
    clip_ratio_high: float = key(0.28, "the ratio is clipped above at 1 + this")
    dual_clip: float | None = key(3.0, "where the advantage is negative the ratio counts as this at most (clip, gspo); null: no bound")
    aggregation: Literal["token", "sequence", "constant"] = key(
        "token", "mean over tokens; over sequences of their token means; or token sum over sequences * rollout.max_completion_tokens"
    )
    mask_truncated: bool = key(False, "leave completions that were cut off out of the loss (their rewards count in their group)")
    old_logprobs: Literal["policy", "engine"] = key("policy", "what the ratio is taken to: the policy before the update, or the engine")
    rollout_correction: Literal["none", "token_tis", "sequence_tis", "icepop"] = key(
        "token_tis",
        "weight for the difference of engine and policy, r = policy / engine: min(r, cap) of a token; of a sequence; or r of a token, "
        "0 outside [1/cap, cap]",
    )
    rollout_correction_cap: float = key(2.0, "that cap")
    kl_coef: float = key(0.0, "weight of the KL term to the reference model; 0 builds no reference model")
    kl_estimator: Literal["k1", "k2", "k3"] = key("k3", "per-token estimator of that KL (Schulman's names)")
    kl_in: Literal["loss", "reward"] = key("loss", "a term of the loss, or taken from a completion's reward, summed over its tokens")
    entropy_coef: float = key(0.0, "weight of an entropy bonus")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = key(1e-6, "learning rate after the warm-up, constant")
    weight_decay: float = key(0.01, "decoupled weight decay, on matrices only")
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's two")
    max_grad_norm: float = key(1.0, "global gradient norm above which gradients are scaled down")
    warmup_steps: int = key(0, "optimizer steps over which lr rises linearly")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    num_steps: int = key(100, "rollout-and-update steps of the run")
    num_mini_batches: int = key(1, "optimizer steps a rollout, in each epoch over it")
    num_epochs: int = key(1, "passes over each step's rollouts")
    max_tokens_per_micro_batch: int = key(16384, "prompt and completion tokens of one forward-backward on one rank")
    max_nonfinite_in_a_row: int = key(3, "updates in a row, skipped since loss or gradient was not finite, at which the run stops")
    max_time_s: float | None = key(None, "seconds after which the run saves and ends as preempted; null: when Slurm's time ends")

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps a rollout."""
        return self.num_mini_batches * self.num_epochs


@dataclass(frozen=True, kw_only=True)
class ProofConfig:
    every_steps: int = key(20, "steps between proofs that the engine holds the policy's weights, tensor by tensor; 0: only at the start")
    max_mismatch: float | None = key(
        None, "mean |policy - engine| in nats a token at which the run stops; null: from what the first step measures"
    )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every_steps: int = key(0, "evaluate on the sets of data.eval at each N-th step and after the last; 0: never")
    num_samples: int = key(4, "completions per prompt")
    temperature: float = key(1.0, "sampling temperature of the evaluation; 0: greedy")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = key(
        100, "save all that the run needs to go on each N steps; 0: only at the end of the run, and when it is preempted"
    )
    keep: int = key(2, "how many of the newest checkpoints stay on disk")
    best_metric: str | None = key(None, "a key of metrics.jsonl, e.g. eval/gsm8k/mean: the checkpoint with its highest value stays too")
    export_every_steps: int = key(0, "put the model in HF's format (adapters in peft's) into each N-th step's checkpoint; 0: the last")
    resume: str = key(
        "never", "auto: go on from the newest good checkpoint of run_dir, if any; never: refuse a run_dir in use; or a checkpoint's folder"
    )
    rollout_buffer: bool = key(True, "keep finished completions on disk until their step is saved, so that none is sampled again on resume")


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    timeout_s: float = key(1800.0, "seconds that a phase may take on a rank before the run is stopped with a report of where each rank is")
    phase_timeouts_s: dict[str, Any] = key({}, "other limits by phase: {rollout: 3600, checkpoint: 600}")


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    wandb: bool | Literal["online", "offline"] = key(False, "send the metrics to Weights & Biases too")
    wandb_project: str = key("grpo_spmd", "its project there")
    rollouts_every_steps: int = key(1, "dump each N-th step's rollouts as jsonl; 0: never")


@dataclass(frozen=True, kw_only=True)
class Config:
    run_dir: str = required("folder of this run: config, metrics, rollouts, logs, checkpoints")
    seed: int = key(0, "the run is a function of config and seed")
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    rewards: tuple[RewardConfig, ...] = required("one or more rewards; the reward of a completion is their weighted sum")
    reward_pool: RewardPoolConfig = dataclasses.field(default_factory=RewardPoolConfig)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    proofs: ProofConfig = dataclasses.field(default_factory=ProofConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    @property
    def max_rollout_tokens(self) -> int:
        """Longest prompt plus longest completion, in tokens: what engine and micro-batch must have room for."""
        return self.data.max_prompt_tokens + self.rollout.max_completion_tokens

    @property
    def base_stays_in_engine(self) -> bool:
        """The weight sync brings adapters alone, so that the engine must not lose the weights that they go with."""
        return self.model.lora.rank > 0 and self.model.lora.sync == "adapter"

    @property
    def sleep_level(self) -> int:
        """`rollout.sleep_level`, or what the weight sync needs: 2 where it brings every weight anyway, 1 where the base stays."""
        return self.rollout.sleep_level or (1 if self.base_stays_in_engine else 2)


# What the trainer itself decides about the engine: a second value for it in `rollout.engine` would be a second source of truth.
_ENGINE_KEYS_OWNED = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_lora": "model.lora.sync",
    "max_lora_rank": "model.lora.rank",
    "max_model_len": "data.max_prompt_tokens and rollout.max_completion_tokens",
    "distributed_executor_backend": None,
    "data_parallel_size": None,
    "pipeline_parallel_size": None,
    "enable_sleep_mode": None,
    "logprobs_mode": None,
    "load_format": None,
    "skip_tokenizer_init": None,
    "scheduling_policy": None,
    "quantization": None,
    "generation_config": None,
    "override_generation_config": None,
    "logits_processors": None,
}


def load_config(path: str | os.PathLike[str], overrides: typing.Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, coerce by declared type and cross-check.

    Raises:
        ConfigError: one line that names the file or key, the value found and what to do.
    """
    return load_config_with_sources(path, overrides)[0]


def load_config_with_sources(path: str | os.PathLike[str], overrides: typing.Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """`load_config`, and where each value came from.

    Returns:
        The config, and {dotted key: "default", "FILE:LINE" or "command line"} with the keys of `flat_config`, in their order.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    given: dict[str, str] = {}
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node is not None else None
        _mark_lines(node, "", path, given)
    except _YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a config is a mapping of sections, got {type(tree).__name__}")
    for override in overrides:
        name, value = _apply_override(tree, override)
        # What the file said below this key is gone with the value that held it.
        given = {known: source for known, source in given.items() if known != name and not known.startswith(f"{name}.")}
        given |= {_join(name, inner) if inner else name: "command line" for inner in _flat(value)}
    config: Config = _build(Config, tree, "")
    _cross_check(config)
    return config, {name: given.get(name, "default") for name in flat_config(config)}


def flat_config(config: Config) -> dict[str, Any]:
    """`config_to_dict` as {dotted key: value}, list items by their number: "optimizer.betas.0", "rewards.0.name"."""
    return _flat(config_to_dict(config))


def config_to_dict(config: Config) -> dict[str, Any]:
    """The resolved tree as plain YAML types; strings under names like api_key or password are replaced by "<redacted>"."""
    plain: dict[str, Any] = _plain(config)
    return plain


def describe_keys() -> str:
    """Every config key with its type, default and meaning, one a line, for `--help`."""
    return "\n".join(_describe(Config, ""))


# What PyYAML raises: its own errors, ValueError for a date like 2024-13-45 or a number of 5000 digits, RecursionError for deep nesting,
# KeyError and AttributeError for "!!bool x" and "!!timestamp x".
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, KeyError, AttributeError)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where PyYAML silently keeps the last."""


def _strict_mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # "<<: *anchor", whose keys may be given again
            continue
        name = loader.construct_object(key_node)
        if isinstance(name, list | dict):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is given twice", key_node.start_mark)
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _strict_mapping)


def _mark_lines(node: yaml.Node | None, where: str, path: Path, given: dict[str, str]) -> None:
    """Enter {dotted key: "FILE:LINE"} for all that `node` holds. Called once it is constructed: by then merged keys ("<<") are its own."""
    if isinstance(node, yaml.MappingNode):
        items = [(str(key_node.value), key_node, value) for key_node, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, marked, value in items:
        full = _join(where, name)
        given[full] = f"{path}:{marked.start_mark.line + 1}"
        _mark_lines(value, full, path, given)


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, Any]:
    """Put one `section.key=value` into `tree`; returns its dotted key and value."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except _YAML_ERRORS:
        raise ConfigError(f"{name}: the value {text!r} is not valid YAML") from None
    node: Any = tree
    *parents, last = name.split(".")
    for depth, parent in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(node, list):
            node = node[_list_index(node, parent, where)]
        elif isinstance(node, dict):
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{name}: {where} is a value, not a section")
    if isinstance(node, list):
        node[_list_index(node, last, name)] = value
    else:
        node[last] = value
    return name, value


def _list_index(node: list[Any], text: str, where: str) -> int:
    if not text.isdecimal() or int(text) >= len(node):
        raise ConfigError(f"{where}: {text!r} is not an index into a list of {len(node)}")
    return int(text)


def _build(cls: type, tree: Any, where: str) -> Any:
    """Build dataclass `cls` from mapping `tree`; `where` is the dotted path for messages ("" at the root)."""
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}: expected a section (a mapping), got {tree!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in tree:
        if name not in fields:
            raise ConfigError(_unknown_key(_join(where, str(name)), str(name), where))
    values = {}
    for name, field in fields.items():
        if name in tree:
            values[name] = _coerce(hints[name], tree[name], _join(where, name))
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = _build(typing.cast(type, hints[name]), {}, _join(where, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{_join(where, name)} is required and missing: {field.metadata['doc']}")
    return cls(**values)


# What people look for and will not find, with the reason.
_REFUSED_KEYS = {
    name: f"training samples from the whole distribution: with {name} the engine draws from a part of it, while the policy's logprobs are "
    "those of the whole, so that every ratio would be off by the mass that was cut away; take it out (temperature is rollout.temperature)"
    for name in ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
}


def _unknown_key(full: str, name: str, where: str) -> str:
    if name in _REFUSED_KEYS and where in ("", "rollout"):
        return f"{full}: {_REFUSED_KEYS[name]}"
    known = _key_names(Config, "")
    if where.startswith("rewards"):
        known = [_join(where, field.name) for field in dataclasses.fields(RewardConfig)]
    close = difflib.get_close_matches(full, known, n=1, cutoff=0.6)
    if not close:  # right name in the wrong section
        by_last = {candidate.rsplit(".", 1)[-1]: candidate for candidate in known}
        close = [by_last[match] for match in difflib.get_close_matches(name, list(by_last), n=1, cutoff=0.6)]
    return f"{full}: unknown key" + (f"; did you mean {close[0]}?" if close else "; --help lists them all")


def _key_names(cls: type, where: str) -> list[str]:
    names = []
    for name, hint in typing.get_type_hints(cls).items():
        full = _join(where, name)
        names += [full, *_key_names(typing.cast(type, hint), full)] if dataclasses.is_dataclass(hint) else [full]
    return names


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the declared type, or ConfigError: "lr: 1e-6" is a string for PyYAML and a float here."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, where)
    if origin is Literal:
        for option in args:
            if value == option and type(value) is type(option):
                return option
        raise ConfigError(f"{where} must be one of {', '.join(map(str, args))}; got {value!r}")
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        for option in args:
            if option is type(None):
                continue
            try:
                return _coerce(option, value, where)
            except ConfigError as error:
                last = error
        raise (
            last
            if len([a for a in args if a is not type(None)]) == 1
            else ConfigError(f"{where} must be {' or '.join(_type_name(a) for a in args)}; got {value!r}")
        )
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list; got {value!r}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_coerce(args[0], item, f"{where}.{i}") for i, item in enumerate(value))
        if len(value) != len(args):
            raise ConfigError(f"{where} must have {len(args)} values; got {len(value)}: {value!r}")
        return tuple(_coerce(arg, item, f"{where}.{i}") for i, (arg, item) in enumerate(zip(args, value, strict=True)))
    if origin is dict:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{where} must be a mapping with names as keys; got {value!r}")
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if hint is float and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise ConfigError(f"{where} must be a finite number; got {value!r}")
    if hint is str:
        if isinstance(value, str):
            return value
        if value is not None and not isinstance(value, bool | list | dict):
            return str(value)
    raise ConfigError(f"{where} must be {_type_name(hint)}; got {value!r}")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_name(arg) for arg in typing.get_args(hint))
    if hint is type(None):
        return "null"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(hint) or str(hint).replace("typing.", "")


def _cross_check(config: Config) -> None:
    rollout, training = config.rollout, config.training
    at_least = {
        "seed": (config.seed, 0),
        "model.logprob_chunk_tokens": (config.model.logprob_chunk_tokens, 1),
        "model.lora.rank": (config.model.lora.rank, 0),
        "model.num_replicas": (config.model.num_replicas, 1),
        "data.max_prompt_tokens": (config.data.max_prompt_tokens, 1),
        "rollout.num_prompts_per_step": (rollout.num_prompts_per_step, 1),
        "rollout.group_size": (rollout.group_size, 2),
        "rollout.max_completion_tokens": (rollout.max_completion_tokens, 1),
        "rollout.tensor_parallel_size": (rollout.tensor_parallel_size, 1),
        "rollout.weight_sync_bucket_mib": (rollout.weight_sync_bucket_mib, 1),
        "rollout.dynamic_sampling_max_rounds": (rollout.dynamic_sampling_max_rounds, 1),
        "reward_pool.num_workers": (config.reward_pool.num_workers, 1),
        "advantage.overlong_buffer_tokens": (config.advantage.overlong_buffer_tokens, 0),
        "advantage.overlong_penalty": (config.advantage.overlong_penalty, 0),
        "rollout.temperature": (rollout.temperature, 0.01),  # vLLM would silently sample at 0.01
        "loss.kl_coef": (config.loss.kl_coef, 0),
        "loss.entropy_coef": (config.loss.entropy_coef, 0),
        "optimizer.lr": (config.optimizer.lr, 0),
        "optimizer.weight_decay": (config.optimizer.weight_decay, 0),
        "optimizer.warmup_steps": (config.optimizer.warmup_steps, 0),
        "training.num_steps": (training.num_steps, 1),
        "training.num_mini_batches": (training.num_mini_batches, 1),
        "training.num_epochs": (training.num_epochs, 1),
        "training.max_nonfinite_in_a_row": (training.max_nonfinite_in_a_row, 1),
        "proofs.every_steps": (config.proofs.every_steps, 0),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 0),
        "checkpoint.keep": (config.checkpoint.keep, 1),
        "checkpoint.export_every_steps": (config.checkpoint.export_every_steps, 0),
        "eval.every_steps": (config.eval.every_steps, 0),
        "eval.num_samples": (config.eval.num_samples, 1),
        "eval.temperature": (config.eval.temperature, 0),
        "logging.rollouts_every_steps": (config.logging.rollouts_every_steps, 0),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ConfigError(f"{name} must be >= {least}; got {value}")
    inside = {
        "model.lora.alpha": (config.model.lora.alpha, 0.0, math.inf),
        "loss.clip_ratio_high": (config.loss.clip_ratio_high, 0.0, math.inf),
        "loss.dual_clip": (config.loss.dual_clip if config.loss.dual_clip is not None else 2.0, 1.0, math.inf),
        "loss.rollout_correction_cap": (config.loss.rollout_correction_cap, 1.0, math.inf),
        "reward_pool.timeout_s": (config.reward_pool.timeout_s, 0.0, math.inf),
        "proofs.max_mismatch": (config.proofs.max_mismatch if config.proofs.max_mismatch is not None else 1.0, 0.0, math.inf),
        "optimizer.max_grad_norm": (config.optimizer.max_grad_norm, 0.0, math.inf),
        "training.max_time_s": (training.max_time_s if training.max_time_s is not None else 1.0, 0.0, math.inf),
        "watchdog.timeout_s": (config.watchdog.timeout_s, 0.0, math.inf),
        "rollout.gpu_memory_utilization": (rollout.gpu_memory_utilization, 0.0, 1.0),
    }
    for name, (number, low, high) in inside.items():
        if not low < number < high:
            raise ConfigError(f"{name} must be > {low:g}" + (f" and < {high:g}" if high < math.inf else "") + f"; got {number:g}")
    for name, number in {
        "loss.clip_ratio_low": config.loss.clip_ratio_low,
        "reward_pool.max_error_frac": config.reward_pool.max_error_frac,
    }.items():
        if not 0.0 < number <= 1.0:
            raise ConfigError(f"{name} must be > 0 and <= 1; got {number:g}")
    for index, beta in enumerate(config.optimizer.betas):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"optimizer.betas.{index} must be >= 0 and < 1; got {beta:g}")
    for name, text in {"run_dir": config.run_dir, "model.path": config.model.path, "data.train": config.data.train}.items():
        if not text.strip() or "\0" in text:
            raise ConfigError(f"{name} must not be empty, nor contain a NUL character; got {text!r}")
    if training.max_tokens_per_micro_batch < config.max_rollout_tokens:
        raise ConfigError(
            f"training.max_tokens_per_micro_batch ({training.max_tokens_per_micro_batch}) must hold the longest rollout: "
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + rollout.max_completion_tokens "
            f"({rollout.max_completion_tokens}) = {config.max_rollout_tokens}; raise the first or lower one of the others"
        )
    if rollout.num_prompts_per_step % training.num_mini_batches:
        raise ConfigError(
            f"training.num_mini_batches ({training.num_mini_batches}) must divide rollout.num_prompts_per_step "
            f"({rollout.num_prompts_per_step}), so that every optimizer step sees as many prompts"
        )
    for name in rollout.engine:
        if name in _REFUSED_KEYS:
            raise ConfigError(f"rollout.engine.{name}: {_REFUSED_KEYS[name]}")
        if name in _ENGINE_KEYS_OWNED:
            instead = _ENGINE_KEYS_OWNED[name]
            raise ConfigError(f"rollout.engine.{name}: " + (f"set {instead} instead" if instead else "the trainer decides this itself"))
    if config.data.prompt_template is not None and not re.search(r"\{\w+\}", config.data.prompt_template):
        raise ConfigError(
            f"data.prompt_template names no column in braces, so that all prompts were alike; got {config.data.prompt_template!r}"
        )
    _cross_check_features(config)
    if not config.rewards:
        raise ConfigError("rewards must name at least one reward, e.g. `rewards: [{name: gsm8k}]`")
    for index, reward in enumerate(config.rewards):
        if reward.name is None and reward.function is None:
            raise ConfigError(f"rewards.{index} needs a name (a shipped reward) or a function (file.py:function)")


def _cross_check_features(config: Config) -> None:
    """Combinations that cannot mean what they say."""
    loss = config.loss
    if loss.dual_clip is not None and loss.policy != "cispo" and loss.dual_clip <= 1.0 + loss.clip_ratio_high:
        raise ConfigError(
            f"loss.dual_clip ({loss.dual_clip:g}) must be > 1 + loss.clip_ratio_high ({1.0 + loss.clip_ratio_high:g}), or it would cut off "
            "what the upper clip leaves; raise it, or set it to null"
        )
    if config.loss.kl_in == "reward" and not config.loss.kl_coef:
        raise ConfigError("loss.kl_in: reward needs loss.kl_coef > 0; set it, or leave kl_in out")
    if config.loss.old_logprobs == "engine" and config.loss.rollout_correction != "none":
        raise ConfigError(
            f"loss.rollout_correction ({config.loss.rollout_correction}) needs loss.old_logprobs: policy; with engine the ratio itself is "
            "taken to the engine's logprobs, so that nothing is left to correct: set rollout_correction: none"
        )
    if config.advantage.overlong_buffer_tokens > config.rollout.max_completion_tokens:
        raise ConfigError(
            f"advantage.overlong_buffer_tokens ({config.advantage.overlong_buffer_tokens}) must be <= rollout.max_completion_tokens "
            f"({config.rollout.max_completion_tokens})"
        )
    if config.rollout.sleep_level == 2 and config.base_stays_in_engine:
        raise ConfigError(
            "rollout.sleep_level: 2 drops the engine's weights, and with model.lora.sync: adapter no sync brings the base back; "
            "leave sleep_level out, or set it to 1"
        )
    phases = ("start", "weight_sync", "eval", "rollout", "reward", "logprobs", "update", "checkpoint")
    for name, limit_s in config.watchdog.phase_timeouts_s.items():
        where = f"watchdog.phase_timeouts_s.{name}"
        if name not in phases:
            raise ConfigError(f"{where}: no such phase; there are {', '.join(phases)}")
        if _coerce(float, limit_s, where) <= 0:
            raise ConfigError(f"{where} must be > 0; got {limit_s}")
    if config.data.eval_sets and not config.eval.every_steps:
        raise ConfigError("data.eval is set, but eval.every_steps is 0, so that nothing would be evaluated; set it, e.g. to 20")
    if config.eval.every_steps and not config.data.eval_sets:
        raise ConfigError("eval.every_steps needs held-out sets: set data.eval, e.g. {gsm8k: hub:openai/gsm8k:main:test}")
    if config.eval.temperature and config.eval.temperature < 0.01:  # vLLM would silently sample at 0.01
        raise ConfigError(f"eval.temperature must be 0 (greedy) or >= 0.01; got {config.eval.temperature:g}")
    if not config.eval.temperature and config.eval.num_samples > 1:
        raise ConfigError(f"eval.num_samples ({config.eval.num_samples}) must be 1 with eval.temperature: 0, where all samples are alike")
    for name, source in config.data.eval_sets.items():
        if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"data.eval.{name} must be a name (letters, digits, . _ -) with a source as in data.train; got {source!r}")


def _plain(value: Any, name: str = "", free_form: bool = False) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {inner: _plain(item, f"{name}.{inner}", free_form=True) for inner, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, name, free_form) for item in value]
    # Only the free-form mappings can hold a secret; the declared keys (max_prompt_tokens, prompt_key) merely sound like one.
    if free_form and isinstance(value, str) and re.search(r"key|token(?!iz)|secret|password", name, re.IGNORECASE):
        return "<redacted>"
    return value


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    """{dotted key: value} of what a tree of mappings and lists holds; an empty one is a value itself."""
    if not isinstance(value, dict | list) or not value:
        return {where: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {full: leaf for name, inner in items for full, leaf in _flat(inner, _join(where, str(name))).items()}


def _describe(cls: type, where: str) -> list[str]:
    lines = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, full = hints[field.name], _join(where, field.name)
        if dataclasses.is_dataclass(hint):
            lines += _describe(typing.cast(type, hint), full)
            continue
        if full == "rewards":
            lines += _describe(RewardConfig, "rewards.N")
            continue
        if field.default_factory is not dataclasses.MISSING:
            default = f"default {field.default_factory()}"
        else:
            default = "required" if field.default is dataclasses.MISSING else f"default {field.default}"
        lines.append(f"  {full:36} {field.metadata['doc']} ({_type_name(hint)}; {default})")
    return lines


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
