"""Plain YAML values into the declared types, within their bounds, or one line: the key, the value, what it must be."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any, Literal, Union

from grpo_spmd.config.aliases import known_by_last_part, known_closely, known_elsewhere
from grpo_spmd.config.describe import flat, join_key, type_name
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, RewardConfig


def build(cls: type, tree: Any, where: str) -> Any:
    """Build dataclass `cls` from mapping `tree`; `where` is the dotted path for messages ("" at the root)."""
    tree = {} if tree in (None, "None", "null") else tree
    if not isinstance(tree, Mapping):
        rule = f"expected a section (a mapping), got {tree!r}"
        raise ConfigError(f"{where}: {rule}{remedy_for_section(where, tree)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in tree:
        if name not in fields:
            pass

            raise ConfigError(unknown_key(join_key(where, str(name)), where, tree[name]))
    values = {}
    for name, field in fields.items():
        full = join_key(where, name)
        if name in tree:
            try:
                values[name] = coerce(hints[name], tree[name], full)
                _check_bounds(values[name], field, full)
            except ConfigError as error:
                raise ConfigError(f"{error}{remedy_for(full, tree[name])}") from None
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = build(typing.cast(type, hints[name]), {}, full)
        elif field.metadata["required"]:
            raise ConfigError(f"{full} is required and missing: {field.metadata['doc']}")
    return cls(**values)


# A control character, or what ends a line: in a path or a name it only misleads.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_OF_SEVERAL_LINES = ("prompt_template", "system_prompt", "args", "rewards", "engine")
_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def _check_bounds(value: Any, field: dataclasses.Field[Any], full: str) -> None:
    """Every number in `value` keeps to the bounds beside its key, and the text of a required key is not empty."""
    bounds = field.metadata.get("bounds", {})
    leaves = flat(list(value) if isinstance(value, tuple) else value, full)
    for name, number in leaves.items() if bounds else ():
        is_number = isinstance(number, int | float)
        if is_number and not all(
            _COMPARISONS[sign](number, bound) for sign, bound in bounds.items()
        ):
            text = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds.items())
            raise ConfigError(
                f"{name} must be {text}; got {number if list(bounds) == ['>='] else format(number, 'g')}"
            )
    if (
        field.metadata.get("required")
        and isinstance(value, str)
        and (not value.strip() or "\0" in value)
    ):
        raise ConfigError(f"{full} must not be empty, nor contain a NUL character; got {value!r}")
    texts = leaves.items() if field.name not in _OF_SEVERAL_LINES else ()
    if bad := [name for name, text in texts if isinstance(text, str) and CONTROL.search(text)]:
        raise ConfigError(
            f"{bad[0]} must not contain a control character, as a line break is; got {leaves[bad[0]]!r}"
        )


# What people look for and will not find, with the reason.
REFUSED_KEYS = {
    name: f"training samples from the whole distribution: with {name} the engine draws from a part of it, while the "
    "policy's logprobs are those of the whole, so that every ratio would be off by the mass that was cut away; take it "
    "out (temperature is rollout.temperature)"
    for name in ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty", "logit_bias")
}  # fmt: skip


def key_names(cls: type, where: str = "") -> list[str]:
    """Dotted names of all keys and sections."""
    names = []
    for name, hint in typing.get_type_hints(cls).items():
        full = join_key(where, name)
        names += (
            [full, *key_names(typing.cast(type, hint), full)]
            if dataclasses.is_dataclass(hint)
            else [full]
        )
    return names


def _is_no_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is not Literal


def coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as the declared type, or ConfigError: "lr: 1e-6" is a string for PyYAML and a float here."""
    value, origin, args = as_meant(hint, value), typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in args):
            return value
        raise ConfigError(f"{where} must be one of {', '.join(map(str, args))}; got {value!r}")
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        # A word of its own before a list, which one name can stand for.
        options = sorted(
            (option for option in args if option is not type(None)), key=_is_no_literal
        )
        for option in options:
            try:
                return coerce(option, value, where)
            except ConfigError:
                if len(options) == 1:
                    raise
        raise ConfigError(f"{where} must be {type_name(hint)}; got {value!r}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list; got {value!r}")
        kinds = args[:1] * len(value) if args[1:] == (Ellipsis,) else args
        if len(value) != len(kinds):
            raise ConfigError(f"{where} must have {len(kinds)} values; got {len(value)}: {value!r}")
        return tuple(coerce(kinds[i], item, f"{where}.{i}") for i, item in enumerate(value))
    if origin is dict:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{where} must be a mapping with names as keys; got {value!r}")
        if args[1] is Any:
            for name, leaf in flat(value, where).items():
                if leaf is not None and not isinstance(
                    leaf, str | int | float | list | dict
                ):  # dates are not JSON
                    raise ConfigError(f"{name} must be text or a number; got {leaf!r}")
            return value
        return {name: coerce(args[1], item, join_key(where, name)) for name, item in value.items()}
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value):
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63:
            return value
    if hint is float and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        raise ConfigError(f"{where} must be a finite number; got {value!r}")
    if hint is str and isinstance(value, str | int | float | date) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{where} must be {type_name(hint)}; got {value!r}")


# The line for a key that is not there. Loaded only when one is met.


_LIKE, _LIKE_ELSEWHERE = 0.7, 0.85
_BESIDE = ("critic.",)


def unknown_key(full: str, where: str, value: Any) -> str:
    """Of the key `full` in section `where`: another trainer's name, the key that was meant, or that --help has all."""
    name = full.removeprefix(f"{where}.") if where else full
    if name in REFUSED_KEYS and where in ("", "rollout"):
        return f"{full}: {REFUSED_KEYS[name]}"
    if "." in name and (full in key_names(Config) or name.startswith("rewards.")):
        section, _, last = full.rpartition(".")
        return f"{full}: a key with a dot is for the command line; in the file write {section}: {{{last}: {value}}}"
    if said := known_elsewhere(full, value):
        return said
    if not _last_names(name) and (said := known_by_last_part(full)):
        return said
    if key := _meant(name, where, isinstance(value, dict)):
        return f"{full}: unknown key; did you mean {key}?"
    return known_closely(full) or f"{full}: unknown key; --help lists them all"


def _meant(name: str, where: str, is_section: bool) -> str | None:
    """A key of the same section with a name like it, else one of that name, or nearly, in another section."""
    known = key_names(Config)
    if where.startswith("rewards"):
        known = [join_key(where, field.name) for field in dataclasses.fields(RewardConfig)]
    sections = {key.rpartition(".")[0] for key in known}
    if not is_section:
        known = [key for key in known if key not in sections]
    inside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == where}
    if like := _like(name, inside, _LIKE):
        return inside[like]
    by_last = {key.rpartition(".")[2]: key for key in known}
    like = name if name in by_last else _like(name, by_last, _LIKE_ELSEWHERE)
    found = keys_named(like, known)
    return found[0] if len(found) == 1 else None


def keys_named(name: str | None, known: Iterable[str]) -> list[str]:
    """Keys with this last part; where the policy and a model beside it have one, the policy's is meant."""
    found = [key for key in known if key.rpartition(".")[2] == name]
    return [key for key in found if not key.startswith(_BESIDE)] or found


def _like(name: str, names: Iterable[str], cutoff: float) -> str | None:
    """The nearest, but for one that means the opposite: max_lr is not min_lr."""
    near = difflib.get_close_matches(name, names := list(names), n=1, cutoff=cutoff)
    near = near or [known for known in names if cutoff == _LIKE and _is_cut_short(name, known)]
    return near[0] if near and _ends(near[0]) == _ends(name) else None


def _is_cut_short(one: str, other: str) -> bool:
    """temp is temperature, and lrate lr; lr_end is another thing than lr."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and long[len(short) :].isalpha()


def _ends(name: str) -> list[str]:
    return re.findall(r"min|max|low|high", name)


def _last_names(name: str) -> list[str]:
    return [key for key in key_names(Config) if key.rpartition(".")[2] == name]


# Values as people write them: what can mean one thing alone is taken for it, and what cannot gets its remedy.


_DTYPES = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
}


def as_meant(hint: Any, value: Any) -> Any:
    """`value`, or what it alone can be where `hint` is declared: None for null, 1e3 for a whole number, one name for a
    list of names, bf16 for bfloat16."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, str):
        if (
            origin in (Union, types.UnionType)
            and type(None) in args
            and value.strip().lower() in ("none", "null")
        ):
            return None
        if origin is tuple and args[0] is str:
            return [name for name in re.split(r"[,\s]+", value) if name]
        if origin is Literal and value not in args and _DTYPES.get(value) in args:
            return _DTYPES[value]
        if hint is int and re.fullmatch(r"[+-]?\d{1,18}(\.\d{0,18})?([eE][+]?\d{1,2})?", value):
            value = float(value) if re.search(r"[.eE]", value) else value
    if hint is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


_TAKEN = "auto goes on from run_dir's newest checkpoint, never is the default, and a checkpoint's folder starts from it"
# Of a key, values that are explained, as a pattern, and how. VALUE stands for the value.
_REMEDIES: dict[str, tuple[tuple[str, str], ...]] = {
    "rollout.temperature": ((r"0(\.0*)?", "sampled greedily, the completions of a group are alike and teach nothing; "
        "eval.temperature: 0 evaluates greedily"),),
    "model": ((r"(?!\w+:\S)[^{].*", "model.path=VALUE"),),
    "data": ((r"(?!(?!hub:)\w+:\S)[^{].*", "data.train=VALUE"),),
    "model.dtype": ((r".*(16|half).*", "float16 overflows without a loss scaler, which is not here; bfloat16 does "
        "not"),),
    "model.attention": ((r"flash.*|fa\d|eager|xformers|flex.*", "flash is flash-attn; sdpa runs everywhere"),),
    "model.offload": ((r"cpu|param.*|all|full", "true: parameters and optimizer state; optimizer: its state alone"),),
    "model.activation_checkpointing": ((r"full|block.*|all", "full is true"),),
    "model.lora": ((r"[^{].*", "{rank: 16, alpha: 32}"),),
    "checkpoint.resume": ((r"(?i)true|false|yes|no|none", _TAKEN),),
    "rewards": ((r"[^\[].*", "[{name: gsm8k}], or [{function: 'file.py:fn'}]"),),
    "data.train": ((r"[\[{].*", "one file, or hub:REPO:SUBSET:SPLIT; cat a.jsonl b.jsonl > both.jsonl makes one of "
        "two"),),
    "data.prompt_template": ((r"\{.*", "text with braces stands in quotes, in the file 'Q: {question}', on the command "
        "line data.prompt_template=\"'Q: {question}'\""),),
    "data.system_prompt": ((r"\{.*", "text with braces or a colon stands in quotes"),),
    "data.on_long_prompt": ((r"trunc.*|left|right|middle|cut", "a prompt is never cut, since it would be another one; "
        "drop leaves it out"),),
    "training.num_steps": ((r"-.*|0", "without an end: a large number, stopped by Ctrl-C or training.max_time_s"),),
    "training.max_time_s": ((r"\d+ *[smhd]|\d+ *(min|hours?|days?)", "in seconds, or as 12:00:00"),),
    "logging.wandb": ((r"(?!(true|false)$).*", "the project's name is logging.wandb_project"),),
    "rollout.engine": ((r"[^{].*", "vllm.LLM's arguments: {enforce_eager: true}"),),
    "loss.aggregation": ((r"token[-_]mean|dapo|bnpo", "VALUE is token"), (r"seq[-_]mean[-_]token[-_]mean|grpo",
        "VALUE is sequence"), (r"seq[-_]mean[-_]token[-_]sum[-_]norm|dr_?grpo", "VALUE is constant")),
    "loss.policy": ((r"ppo|grpo|vanilla|token|regular", "VALUE is clip"), (r"gspo.*|sequence", "VALUE is gspo"),
        (r"(dapo|bnpo|dr_?grpo)", "VALUE is clip with another loss.aggregation")),
    "loss.kl_estimator": ((r"low_var_kl", "VALUE is k3"), (r"kl", "VALUE is k1"), (r"mse", "VALUE is k2")),
    "loss.rollout_correction": ((r"token|token_truncate", "VALUE is token_tis"), (r"sequence|sequence_truncate",
        "VALUE is sequence_tis"), (r"token_mask|mask", "VALUE is icepop"),
        (r"(?i)none|null|off|false", "VALUE is none")),
    "advantage.estimator": ((r"reinforce(\+\+|_?plus_?plus)", "VALUE is reinforce_pp"),
        (r"reinforce_baseline|reinforce(\+\+|_?plus_?plus)[-_]baseline", "nearest is grpo with "
        "advantage.normalize_std: batch"), (r"group_norm|group", "VALUE is grpo"), (r"(?i)max_?rl", "VALUE is max_rl"),
        (r"ppo", "VALUE is gae, with a critic.path"), (r"remax|optimal.*", "there is no greedy baseline")),
    "advantage.normalize_std": ((r"(?i)false|no|off", "VALUE is none"), (r"(?i)true|yes|on", "VALUE is group")),
    "optimizer.schedule": ((r"constant_with_warmup", "constant with optimizer.warmup_steps"), (r"cosine_with_min_lr.*",
        "cosine with optimizer.min_lr"), (r"(cosine|linear)_with_.*|warmup_.*", "cosine or linear, with "
        "optimizer.warmup_steps"), (r"wsd|warmup_stable_decay|polynomial|inverse_sqrt", "linear is the nearest")),
}  # fmt: skip
_NUMBERS = (  # of any key; how a number is written
    (r"[+-]?[1-9]\d{0,2}([,_ ]\d{3})+", lambda text: re.sub(r"[,_ ]", "", text)),
    (r"[+-]?\d+,\d+", lambda text: f"{text.replace(',', '.')}, with a point"),
    (
        r"\d+(\.\d+)?[kK]",
        lambda text: f"{float(text[:-1]) * 1000:.0f}, or {float(text[:-1]) * 1024:.0f}",
    ),
    (r"\d+(\.\d+)?[mM]", lambda text: f"{float(text[:-1]) * 1e6:.0f}"),
    (r"\d+(\.\d+)? ?%", lambda text: f"{float(text.rstrip(' %')) / 100:g}, as a share"),
)


def remedy_for(key: str, value: Any) -> str:
    """What is added to the line that refuses this value; "" where the rule in it is enough."""
    for pattern, how in _REMEDIES.get(key, ()):
        if re.fullmatch(pattern, str(value), re.DOTALL):
            return f"; {how.replace('VALUE', str(value))}"
    for pattern, written in _NUMBERS:
        if isinstance(value, str) and re.fullmatch(pattern, value):
            return f"; write {written(value)}"
    return ""


def remedy_for_section(where: str, value: Any) -> str:
    """The same where a section is expected."""
    if where.startswith("rewards.") and isinstance(value, str):
        return f"; {{function: '{value}'}}" if ".py:" in value else f"; {{name: {value}}}"
    if isinstance(value, str) and (found := re.fullmatch(r"(\w+):(\S+)", value)):
        return f"; a blank is missing after the colon: {found[1]}: {found[2]}"
    return ""


_OF_OTHERS = (  # parameters of rewards elsewhere, which no column of a row is named after
    "data_source", "solution_str", "ground_truth", "extra_info", "queries", "labels", "completion", "prompt",
    "response", "responses", "reward_kwargs",
)  # fmt: skip


def foreign_parameter_hint(parameter: str) -> str:
    """What is added where a reward function asks for a column of that name."""
    if parameter not in _OF_OTHERS:
        return ""
    ours = "fn(prompts, completions, completion_ids, **columns), lists in, a list of numbers out"
    return f"; {parameter!r} is of another trainer's signature: here it is {ours}"
