"""Memory that others measured under FSDP2, beside a dry run of what they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from benchmarks.support.report import Row
from grpo_spmd.checks.memory import shard_numel
from grpo_spmd.tools.plan.dry_run import LiveBytes, Usage, at_full_depth, fake_ranks, mark, shallow

_GIB = 2**30
_LLAMA_8B = transformers.LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    attn_implementation="sdpa",
)
_LLAMA_7B = transformers.LlamaConfig(  # transformers' defaults are its sizes
    vocab_size=32_000, intermediate_size=11_008, attn_implementation="sdpa"
)
_OTHERS = "every other product"
_TABLE = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
_PULL = "pytorch/torchtitan pull request 165"


@dataclass(frozen=True)
class Published:
    model: str
    config: Any
    ranks: int
    batch: tuple[int, int]  # sequences of a rank, tokens of each
    recompute: str
    keeps_logits: bool  # float32 ones are alive through the backward pass
    gib: float
    what: str
    source: str


# Percentages of pull request 165 are of the 95.0396 GiB that it names. Until commit e29b6b4 of June
# 2024 torchtitan's
# loop held on to the float32 logits while it went backward.
PUBLISHED = (
    Published("Llama 7B", _LLAMA_7B, 8, (8, 2048), "full", True, 0.2392 * 95.0396, "active", _PULL),
    Published(
        "Llama 7B", _LLAMA_7B, 8, (8, 2048), _OTHERS, True, 0.5213 * 95.0396, "active", _PULL
    ),
    Published(
        "Llama 3.1 8B",
        _LLAMA_8B,
        8,
        (2, 8192),
        _OTHERS,
        False,
        82.4,
        "reserved",
        f"{_TABLE}, table 1",
    ),
    Published(
        "Llama 3.1 8B",
        _LLAMA_8B,
        128,
        (2, 8192),
        _OTHERS,
        False,
        67.0,
        "reserved",
        f"{_TABLE}, table 3",
    ),
)


def rows(_: Path) -> list[Row]:
    result = []
    for item in PUBLISHED:
        peak = _predicted(item) / _GIB
        result.append(
            {
                "model": item.model,
                "ranks": item.ranks,
                "tokens": item.batch[0] * item.batch[1],
                "recomputed": item.recompute,
                "predicted_gib": peak,
                "published_gib": item.gib,
                "which_is": item.what,
                "off_percent": 100 * (peak / item.gib - 1),
                "source": item.source,
            }
        )
    return result


def _predicted(run: Published) -> int:
    """State of AdamW in float32 (12 bytes a parameter of the shard), and the dry run's peak beyond
    it."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(run.config, trust_remote_code=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    moments = at_full_depth(partial(_run, run))
    return 12 * shard_numel(shapes, run.ranks) + max(pieces.total() for pieces in moments.values())


def _run(published: Published, num_layers: int) -> tuple[dict[str, Usage], int]:
    """Transformers' own model, full logits in float32, FSDP2 as torchtitan sets it up."""
    config = published.config
    with torch.device("meta"):
        few = shallow(config, num_layers)
        model = transformers.AutoModelForCausalLM.from_config(
            few, dtype=torch.float32, trust_remote_code=False
        )
    layers = list(model.model.layers)
    for layer in layers:
        layer.forward = _recomputing(layer.forward, published.recompute)
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    live = LiveBytes(shapes, config.vocab_size, on_gpu=True)
    mark(live, layers)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with fake_ranks(published.ranks, 1) as mesh, FakeTensorMode(allow_non_fake_inputs=True), live:
        for layer in layers:
            fully_shard(
                layer, mesh=mesh, mp_policy=precision, reshard_after_forward=layer is not layers[-1]
            )
        fully_shard(model, mesh=mesh, mp_policy=precision)
        model.to_empty(device="cpu")
        state = live.live()
        live.begin("start")
        ids = torch.zeros(published.batch, dtype=torch.int64)
        positions = torch.arange(published.batch[1])[None]
        logits = model(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False
        ).logits
        wide = logits.flatten(0, 1).float()
        del logits
        loss = cross_entropy(wide, ids.flatten())
        if not published.keeps_logits:
            del wide
        loss.backward()
    del live.peaks["built"]
    for pieces in live.peaks.values():
        pieces.subtract(state)
    return live.peaks, config.num_hidden_layers


def _recomputing(forward: Callable[..., Any], label: str) -> Callable[..., Any]:
    method: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if label == _OTHERS:
        method["context_fn"] = _keep_every_other
    return partial(checkpoint, forward, **method)


def _keep_every_other() -> Any:
    """torchtitan's selective recomputation of operators: attention is kept, and every other
    product."""
    seen: Counter[str] = Counter()

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function is torch.ops.aten.mm.default:
            selection = "recompute" if context.is_recompute else "forward"
            seen[selection] += 1
            keeps = seen[selection] % 2 == 1
        else:
            keeps = "scaled_dot_product" in str(function)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
