"""Keys of `rollout.engine` that vLLM refuses at its start, or takes and then does something else than is trained."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import FROM_RECIPE
from grpo_spmd.config.schema import Config

_OWN_CONFIG = (
    "the policy is built from the model's own config.json, and the engine must be the same model"
)
_NO_TOKENIZER = "the engine gets and gives token ids; the tokenizer is model.path's"
_NO_DRAFTS = "with drafts the engine has weights that no sync brings"
# With those of config/rules.py, which say where a value is set instead.
_REFUSED = {
    **dict.fromkeys(
        ("hf_overrides", "config_format", "model_class_overrides", "model_weights"), _OWN_CONFIG
    ),
    "revision": "the policy reads what model.path gives; for another revision give its folder (hf download --revision)",
    **dict.fromkeys(
        ("runner", "convert", "task", "pooler_config"),
        "the engine generates, and does nothing else",
    ),
    **dict.fromkeys(("tokenizer_mode", "tokenizer_revision"), _NO_TOKENIZER),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _NO_DRAFTS),
}
for _name in ("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size"):
    _REFUSED[_name] = (
        "the weight sync writes weights on the device; lower rollout.gpu_memory_utilization or shard more"
    )
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
            raise ConfigError(
                f"rollout.engine.{name}: vllm.LLM of the installed version has no such argument{hint}"
            )


# Keys that are set and would do nothing, or end a run's sense: what a run would say by its curve, days later.


# First parts of the metrics' names.
_METRICS = (
    "batching", "completion", "critic", "dynamic_sampling", "environment", "episode", "eval", "loss", "memory", "optim",
    "process", "progress", "reward", "rollout", "rollout_correction", "teacher", "throughput", "time", "weight_sync",
)  # fmt: skip


def check_idle_keys(config: Config, sources: Mapping[str, str] | None = None) -> None:
    """Refuse (ConfigError) what makes a run another one than was meant. `sources`: where each value was set."""
    lora = config.model.lora
    if not lora.rank and sources and sources.get("model.lora.rank") == "default":
        given = [
            name
            for name, source in sources.items()
            if name.startswith("model.lora.") and source != "default"
        ]
        if given:
            what = f"model.lora.rank is not set (0: full fine-tuning), so that {given[0]} would do nothing"
            raise ConfigError(f"{what}; set it, e.g. to 16, or take the other out")
    if lora.rank and not lora.target_modules:
        raise ConfigError(
            "model.lora.target_modules names no layer; leave it out (all-linear), or name some: [q_proj]"
        )
    given = [
        name
        for name in sources or ()
        if name.startswith("teacher.") and (sources or {})[name] != "default"
    ]
    if (
        given and not config.teacher.is_on and (sources or {}).get("teacher.path") == "default"
    ):  # not a run's own
        what = f"teacher.path is not set, so that {given[0]} would do nothing"
        raise ConfigError(
            f"{what}; set it to the folder or hub id of a model, or take the other out"
        )
    teaches = config.teacher.is_on or config.environment.can_reward
    if config.rewards and not any(reward.weight for reward in config.rewards) and not teaches:
        raise ConfigError(
            "rewards: all weights are 0, so that every reward is 0; set one rewards.N.weight"
        )
    if config.optimizer.lr > 1:
        what = f"optimizer.lr ({config.optimizer.lr:g}) is above 1, where AdamW moves each weight by more than that"
        raise ConfigError(f"{what} a step; is a sign missing? e.g. 2e-6")
    metric = config.checkpoint.best_metric
    if metric is not None and (metric.partition("/")[0] not in _METRICS or "/" not in metric):
        rule = (
            "is no metric's name: they are as in metrics.jsonl, e.g. reward/mean or eval/SET/mean"
        )
        raise ConfigError(f"checkpoint.best_metric ({metric}) {rule}")


def idle_keys(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    """A line for each key that was set, and that another key leaves without effect."""
    advantage, loss = config.advantage, config.loss
    estimator = f"advantage.estimator is {advantage.estimator}"
    of_critic = (name for name in sources if name.startswith("critic."))
    for key, is_idle, why in (
        *((name, config.critic.path is None, "critic.path is null") for name in of_critic),
        ("critic.coef", not config.critic.is_on_policy, "critic.path is not policy"),
        (
            "critic.length_alpha",
            config.critic.lam_policy != "length",
            "critic.lam_policy is no length",
        ),
        ("loss.kl_estimator", not loss.kl_coef, "loss.kl_coef is 0"),
        (
            "advantage.overlong_penalty",
            not advantage.overlong_buffer_tokens,
            "advantage.overlong_buffer_tokens is 0",
        ),
        ("advantage.normalize_std", advantage.estimator not in ("grpo", "gae"), estimator),
        ("eval.temperature", not config.eval.every_steps, "eval.every_steps is 0"),
        ("eval.num_samples", not config.eval.every_steps, "eval.every_steps is 0"),
        ("teacher.beta", config.teacher.loss == "sampled", "teacher.loss is sampled"),
        ("teacher.top_k", config.teacher.loss != "topk", f"teacher.loss is {config.teacher.loss}"),
        ("data.prompt_key", config.data.prompt_template is not None, "data.prompt_template is set"),
        (
            "loss.rollout_correction_cap",
            loss.rollout_correction == "none",
            "loss.rollout_correction is none",
        ),
    ):
        if is_idle and not sources.get(key, "default").startswith(("default", FROM_RECIPE)):
            yield f"{key} does nothing: {why}"
