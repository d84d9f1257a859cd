"""Values as people write them: what can mean one thing alone is taken for it, and what cannot gets its remedy."""

from __future__ import annotations

import re
import types
import typing
from typing import Any, Literal, Union

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "torch.bfloat16": "bfloat16", "torch.float32": "float32"}


def as_meant(hint: Any, value: Any) -> Any:
    """`value`, or what it alone can be where `hint` is declared: None for null, 1e3 for a whole number, one name for a
    list of names, bf16 for bfloat16."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, str):
        if origin in (Union, types.UnionType) and type(None) in args and value.strip().lower() in ("none", "null"):
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
    (r"\d+(\.\d+)?[kK]", lambda text: f"{float(text[:-1]) * 1000:.0f}, or {float(text[:-1]) * 1024:.0f}"),
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


def of_others(parameter: str) -> str:
    """What is added where a reward function asks for a column of that name."""
    if parameter not in _OF_OTHERS:
        return ""
    ours = "fn(prompts, completions, completion_ids, **columns), lists in, a list of numbers out"
    return f"; {parameter!r} is of another trainer's signature: here it is {ours}"
