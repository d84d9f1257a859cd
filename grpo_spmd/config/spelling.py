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


_REMEDIES: dict[str, tuple[str, str]] = {  # key: values that are explained, as a pattern; how
    "rollout.temperature": (r"0(\.0*)?", "sampled greedily, the completions of a group are alike and teach nothing; "
        "eval.temperature: 0 evaluates greedily"),
    "model.dtype": (r".*(16|half).*", "float16 overflows without a loss scaler, which is not here; bfloat16 does not"),
    "model.attention": (r"flash.*|fa\d|eager|xformers|flex.*", "flash is flash-attn; sdpa runs everywhere"),
    "checkpoint.resume": (r"(?i)true|false|yes|no", "auto goes on from run_dir's newest checkpoint, never is the "
        "default, and a checkpoint's folder starts from it"),
    "rewards": (r"[^\[].*", "[{name: gsm8k}], or [{function: 'file.py:fn'}]"),
    "data.train": (r"[\[{].*", "one file, or hub:REPO:SUBSET:SPLIT; cat a.jsonl b.jsonl > both.jsonl makes one of two"),
    "training.num_steps": (r"-.*|0", "without an end: a large number, stopped by Ctrl-C or training.max_time_s"),
    "logging.wandb": (r"(?!(true|false)$).*", "the project's name is logging.wandb_project"),
    "model.lora": (r"[^{].*", "{rank: 16, alpha: 32}"),
    "rollout.engine": (r"[^{].*", "vllm.LLM's arguments: {enforce_eager: true}"),
}  # fmt: skip


def remedy_for(key: str, value: Any) -> str:
    """What is added to the line that refuses this value; "" where the rule in it is enough."""
    pattern, how = _REMEDIES.get(key, ("", ""))
    return f"; {how}" if how and re.fullmatch(pattern, str(value), re.DOTALL) else ""
