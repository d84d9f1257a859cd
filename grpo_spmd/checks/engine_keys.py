"""Keys of `rollout.engine` that vLLM would refuse at its start, or that break the training."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError

_MODEL_CONFIG = (
    "the policy is built from the model's own config.json, and the engine must be the same model"
)
_REVISION = (
    "the policy reads what model.path gives; for another revision give its folder "
    "(hf download --revision)"
)
_GENERATES = "the engine generates, and does nothing else"
_TOKENIZER = "the engine gets and gives token ids; the tokenizer is model.path's"
_DRAFTS = "with drafts the engine has weights that no sync brings"
_ON_DEVICE = (
    "the weight sync writes weights on the device; lower rollout.gpu_memory_utilization or "
    "shard more"
)
# config/rules.py refuses more: keys whose value is set elsewhere in the config.
_REFUSED = {
    **dict.fromkeys(
        ("hf_overrides", "config_format", "model_class_overrides", "model_weights"), _MODEL_CONFIG
    ),
    "revision": _REVISION,
    **dict.fromkeys(("runner", "convert", "task", "pooler_config"), _GENERATES),
    **dict.fromkeys(("tokenizer_mode", "tokenizer_revision"), _TOKENIZER),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFTS),
    **dict.fromkeys(
        ("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size"),
        _ON_DEVICE,
    ),
}
# For 0 or less vLLM says nothing, or many lines.
_POSITIVE = (
    "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override",
    "max_num_scheduled_tokens",
)  # fmt: skip


def check_engine_keys(engine: Mapping[str, Any]) -> None:
    """Refuse keys that the trainer decides itself or does not support, and arguments that the
    installed vLLM does not have. Raises ConfigError. Keys that only cost speed or memory pass."""
    for name, value in engine.items():
        if name in _REFUSED:
            raise ConfigError(f"rollout.engine.{name}: {_REFUSED[name]}; take it out")
        if name == "kv_cache_dtype" and value != "auto":
            raise ConfigError(
                f"rollout.engine.kv_cache_dtype must be auto; got {value!r}: a cache of fewer "
                "bits gives logprobs that the policy does not have"
            )
        if name in _POSITIVE and type(value) is int and value < 1:
            raise ConfigError(f"rollout.engine.{name} must be at least 1; got {value}")
    types = _read_vllm_arguments() if engine else None
    for name, value in engine.items() if types else ():
        _check_argument(name, value, types or {})


def _check_argument(name: str, value: Any, types: Mapping[str, str]) -> None:
    """`types`: vLLM's arguments with their annotations."""
    words = set(re.findall(r"\w+", types.get(name, ""))) - {"None"}
    for kind, text in ((int, "a whole number"), (bool, "true or false")):
        # bool is a subclass of int, so that types are compared exactly.
        if words == {kind.__name__} and value is not None and type(value) is not kind:
            raise ConfigError(f"rollout.engine.{name} must be {text}; got {value!r}")
    if name not in types:
        close = difflib.get_close_matches(name, types, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"rollout.engine.{name}: vllm.LLM of the installed version has no such argument{hint}"
        )


def _read_vllm_arguments() -> dict[str, str] | None:
    """Arguments of vllm.LLM with their annotations, "" for an unknown type. None without vLLM.

    Reads vLLM's source, because importing vllm takes ten seconds.
    """
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return None
    types: dict[str, str] = {}
    for file, class_name in (("engine/arg_utils.py", "EngineArgs"), ("entrypoints/llm.py", "LLM")):
        path = Path(package.origin).parent / file
        # Another version may have another layout: then vllm itself will refuse.
        if not path.is_file():
            return None
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                types = _arguments_of(node) | types
    return types


def _arguments_of(node: ast.ClassDef) -> dict[str, str]:
    """Annotated fields of a class and the parameters of its __init__."""
    types: dict[str, str] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            types[item.target.id] = ast.unparse(item.annotation)
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            for argument in [*item.args.args, *item.args.kwonlyargs]:
                types.setdefault(argument.arg, "")
    return types
