"""The project's own policy on fake tensors: what one forward and backward pass takes beyond the state of a rank.

Three and four layers are run, and each moment is carried on to the model's own depth: every layer more adds the same to
it, where layers are alike. The moments at both ends (the outermost layers, the lm_head, the reduction of what lies
outside the layers) bound those of the layers between them, which lie on a line.

What is not here: the state itself (preflight/memory.py has it), and what no tensor shows (plan/device.py).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_spmd.config.schema import LossConfig, ModelConfig, OptimizerConfig, TrainingConfig
from grpo_spmd.distributed.session import policy_mesh
from grpo_spmd.learn.packing import pack_rollouts
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model import lora
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, one_line_for
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.layers import set_up_layer
from grpo_spmd.model.policy import DTYPES, Policy
from grpo_spmd.model.sharding import shard_over_ranks
from grpo_spmd.plan.live_bytes import LiveBytes, Parts
from grpo_spmd.records import Rollout

_FEW = (3, 4)  # layers


@dataclass(frozen=True)
class Pass:
    """A micro-batch of one rank, and all else that its memory depends on."""

    folder: Path  # with config.json
    model: ModelConfig
    loss: LossConfig
    num_ranks: int
    lengths: tuple[tuple[int, int], ...]  # prompt and completion tokens of its rollouts
    accumulates: bool  # an earlier micro-batch has left gradients
    scores: bool  # there is a pass for logprobs before the update
    on_gpu: bool

    def run(self, num_layers: int) -> tuple[dict[str, Parts], int]:
        """Peaks of each moment beyond the state, and the depth of the model, run with `num_layers` of its layers."""
        hf_config = load_config(str(self.folder))
        depth = hf_config.num_hidden_layers
        policy = _build(self, shallow(hf_config, num_layers))
        layers = list(decoder_layers(policy.model))
        shapes = {tuple(parameter.shape) for parameter in policy.parameters()}
        live = LiveBytes(shapes, hf_config.vocab_size, on_gpu=self.on_gpu)
        mark(live, layers)
        compute = DTYPES[self.model.dtype]
        with (
            fake_ranks(self.num_ranks, self.model.num_replicas) as mesh,
            FakeTensorMode(allow_non_fake_inputs=True),
            live,
        ):
            shard_over_ranks(policy, layers, mesh, compute, reshard_root=False)
            policy.to_empty(device="cpu")
            policy.model.tie_weights()
            longest = max(c for _, c in self.lengths)
            updater = PolicyUpdater(policy, OptimizerConfig(), self.loss, TrainingConfig(), longest)
            state = live.live()
            batch = pack_rollouts(
                [Rollout(i, 1.0, True, [0] * p, [0] * c, [0.0] * c) for i, (p, c) in enumerate(self.lengths)],
                torch.device("cpu"),
            )
            if self.scores:
                live.begin("scoring: start")
                with torch.no_grad():
                    policy(batch)
                cast(FSDPModule, policy).reshard()
            live.begin("gradients")
            if self.accumulates:
                for parameter in policy.parameters():
                    parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            live.begin("start")
            updater.backward(batch, batch.loss_mask.numel(), len(self.lengths), is_synced=True)
        del live.peaks["built"], live.peaks["gradients"]
        for parts in live.peaks.values():
            parts.subtract(state)
        return live.peaks, depth


@dataclass(frozen=True)
class Peaks:
    """Bytes beyond the state of a rank, by what they are for."""

    scoring: Parts  # without gradients
    update: Parts


@lru_cache(maxsize=64)
def peaks_of(work: Pass) -> Peaks:
    """Of the whole model. Raises ConfigError where transformers cannot build or run it."""
    with one_line_for(str(work.folder), "cannot be run on fake tensors"):
        moments = at_full_depth(work.run)
    scoring = {moment: parts for moment, parts in moments.items() if moment.startswith("scoring")}
    update = {moment: parts for moment, parts in moments.items() if moment not in scoring}
    return Peaks(*(max(of.values(), key=Counter.total, default=Counter()) for of in (scoring, update)))


def at_full_depth(run: Callable[[int], tuple[dict[str, Parts], int]]) -> dict[str, Parts]:
    """Peaks of each moment of a model, from `run` with a few of its layers; it returns their peaks and the depth."""
    few, depth = run(_FEW[0])
    if depth <= _FEW[0]:
        return few
    more, _ = run(_FEW[1])
    return {moment: _carried_on(parts, more[moment], depth) for moment, parts in few.items()}


def _carried_on(few: Parts, more: Parts, depth: int) -> Parts:
    """On the line through `few` and `more` layers, at `depth` layers."""
    per_layer = {what: more[what] - few[what] for what in few.keys() | more.keys()}
    return Counter({what: few[what] + each * (depth - _FEW[0]) for what, each in per_layer.items()})


def parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the model that transformers makes of config.json, a tied lm_head once. Raises ConfigError."""
    with torch.device("meta"):
        model = build_hf_model(load_config(str(folder)), str(folder))
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _build(work: Pass, hf_config: Any) -> Policy:
    """As policy.build_policy does, up to where it needs weights. Not on fake tensors: transformers computes with
    some."""
    trains_all = not work.model.lora.rank
    stored = torch.float32 if trains_all else DTYPES[work.model.dtype]
    # What a rank picks on a GPU; flash-attn, where it is installed, keeps the same.
    is_varlen = work.on_gpu and work.model.attention != "sdpa" and work.model.dtype == "bfloat16"
    chunk = work.model.logprob_chunk_tokens
    with torch.device("meta"):
        policy = Policy(hf_config, 1.0, chunk, "varlen" if is_varlen else "sdpa", stored)
        policy.requires_grad_(trains_all)
        if not trains_all:
            lora.add_adapters(policy.model, work.model.lora)
    recompute = work.model.activation_checkpointing
    if work.model.compile and not recompute:
        recompute = "selective"  # about what a compiled layer keeps (model/layers.py)
    for layer in decoder_layers(policy.model):
        set_up_layer(layer, recompute, compile=False)
    return policy.train()


def shallow(hf_config: Any, num_layers: int) -> Any:
    shallow, depth = copy.deepcopy(hf_config), hf_config.num_hidden_layers
    for name, value in vars(hf_config).items():  # an entry a layer: its kind, whether it has rotary embeddings
        if isinstance(value, list) and len(value) == depth:
            setattr(shallow, name, value[:num_layers])
    shallow.num_hidden_layers = min(num_layers, depth)
    return shallow


def mark(live: LiveBytes, layers: list[nn.Module]) -> None:
    """Have `live` told when a layer begins, forward and backward: from the end that it is nearest to. Hooks on tensors
    keep nothing alive."""
    names = _names(len(layers))

    def forward(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            given = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
            if not torch.is_grad_enabled():
                live.begin(f"scoring: {names[number]}")
                return
            live.begin(f"forward: {names[number]}")
            if given is not None and given.requires_grad and number == 0:
                _when_reached(given, live, "backward: root")

        return hook

    def forward_done(number: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
            hidden = out[0] if isinstance(out, tuple) else out
            if hidden.requires_grad:
                _when_reached(hidden, live, f"backward: {names[number]}")
            if number == len(layers) - 1:
                live.begin("scores" if torch.is_grad_enabled() else "scoring: scores")

        return hook

    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(forward(number), with_kwargs=True)
        layer.register_forward_hook(forward_done(number), with_kwargs=True)


def _when_reached(tensor: torch.Tensor, live: LiveBytes, moment: str) -> None:
    def begin(_: torch.Tensor) -> None:
        live.begin(moment, is_backward=True)

    tensor.register_hook(begin)


def _names(num_layers: int) -> list[str]:
    """The first layer, the last two; the others lie between them."""
    names = ["first", *["between"] * (num_layers - 3), "last but one", "last"]
    return names if num_layers >= 3 else names[:1] + names[-1:] * (num_layers - 1)


@contextmanager
def fake_ranks(num_ranks: int, num_replicas: int) -> Iterator[DeviceMesh]:
    """The mesh of a process group of that many ranks, of which only this one exists, and whose collectives do
    nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield policy_mesh(torch.device("cpu"), num_replicas)
    finally:
        dist.destroy_process_group()
