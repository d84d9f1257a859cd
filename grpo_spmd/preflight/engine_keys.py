"""Keys of `rollout.engine` that vLLM refuses at its start, or takes and then does something else than is trained."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError

_OWN_CONFIG = "the policy is built from the model's own config.json, and the engine must be the same model"
_NO_TOKENIZER = "the engine gets and gives token ids; the tokenizer is model.path's"
_NO_DRAFTS = "with drafts the engine has weights that no sync brings"
# With those of config/rules.py, which say where a value is set instead.
_REFUSED = {
    **dict.fromkeys(("hf_overrides", "config_format", "model_class_overrides", "model_weights"), _OWN_CONFIG),
    "revision": "the policy reads what model.path gives; for another revision give its folder (hf download --revision)",
    **dict.fromkeys(("runner", "convert", "task", "pooler_config"), "the engine generates, and does nothing else"),
    **dict.fromkeys(("tokenizer_mode", "tokenizer_revision"), _NO_TOKENIZER),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _NO_DRAFTS),
}
for _name in ("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size"):
    _REFUSED[_name] = "the weight sync writes weights on the device; lower rollout.gpu_memory_utilization or shard more"
# Whole numbers of which vLLM says nothing, or many lines, before it has started.
_AT_LEAST_ONE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_gpu_blocks_override",
    "max_num_scheduled_tokens",
)


def check_engine_keys(engine: Mapping[str, Any]) -> None:
    """Refuse what the trainer decides or does not have, and what the installed vLLM has no argument for. Raises
    ConfigError. Keys that only make it slower or larger pass: what vLLM says of them is said at its start."""
    for name, value in engine.items():
        if name in _REFUSED:
            raise ConfigError(f"rollout.engine.{name}: {_REFUSED[name]}; take it out")
        if name == "kv_cache_dtype" and value != "auto":
            why = "a cache of fewer bits gives logprobs that the policy does not have"
            raise ConfigError(f"rollout.engine.kv_cache_dtype must be auto; got {value!r}: {why}")
        if name in _AT_LEAST_ONE and type(value) is int and value < 1:
            raise ConfigError(f"rollout.engine.{name} must be at least 1; got {value}")
    _check_arguments(engine)


def _check_arguments(engine: Mapping[str, Any]) -> None:
    """By reading vLLM's source: importing vllm to ask it takes ten seconds."""
    package = importlib.util.find_spec("vllm") if engine else None
    if package is None or package.origin is None:
        return
    known, kinds = set[str](), dict[str, str]()
    for file, of in (("engine/arg_utils.py", "EngineArgs"), ("entrypoints/llm.py", "LLM")):
        path = Path(package.origin).parent / file
        if not path.is_file():  # another layout in another version: vllm itself will tell
            return
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == of]
        for item in (item for found in classes for item in found.body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                known.add(item.target.id)
                kinds[item.target.id] = ast.unparse(item.annotation)
            elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
                known |= {argument.arg for argument in [*item.args.args, *item.args.kwonlyargs]}
    for name, value in engine.items():
        types = set(re.findall(r"\w+", kinds.get(name, ""))) - {"None"}
        for kind, says in ((int, "a whole number"), (bool, "true or false")):
            if types == {kind.__name__} and value is not None and type(value) is not kind:
                raise ConfigError(f"rollout.engine.{name} must be {says}; got {value!r}")
        if known and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"rollout.engine.{name}: vllm.LLM of the installed version has no such argument{hint}")
