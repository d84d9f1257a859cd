"""The project's own policy on fake tensors: what one forward and backward pass takes beyond the state of a rank.

Three and four layers are run, and each moment is carried on to the model's own depth: every layer more adds the same to
it, where layers are alike. The moments at both ends (the outermost layers, the lm_head, the reduction of what lies
outside the layers) bound those of the layers between them, which lie on a line.

What is not here: the state itself (checks/memory.py has it), and what no tensor shows (tools/plan/device.py).
"""

from __future__ import annotations

import copy
import weakref
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
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from grpo_spmd.config.schema import LossConfig, ModelConfig, OptimizerConfig, TrainingConfig
from grpo_spmd.distributed.session import policy_mesh
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model import lora
from grpo_spmd.model.families.build import as_config_error, build_hf_model, decoder_layers
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.policy import DTYPES, Policy, set_up_layer
from grpo_spmd.model.sharding import shard_over_ranks
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
                [
                    Rollout(i, 1.0, True, [0] * p, [0] * c, [0.0] * c)
                    for i, (p, c) in enumerate(self.lengths)
                ],
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
                    parameter.grad = (
                        torch.empty_like(parameter) if parameter.requires_grad else None
                    )
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
    with as_config_error(str(work.folder), "cannot be run on fake tensors"):
        moments = at_full_depth(work.run)
    scoring = {moment: parts for moment, parts in moments.items() if moment.startswith("scoring")}
    update = {moment: parts for moment, parts in moments.items() if moment not in scoring}
    return Peaks(
        *(max(of.values(), key=Counter.total, default=Counter()) for of in (scoring, update))
    )


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
        recompute = "selective"  # about what a compiled layer keeps (model/policy.py)
    for layer in decoder_layers(policy.model):
        set_up_layer(layer, recompute, compile=False)
    return policy.train()


def shallow(hf_config: Any, num_layers: int) -> Any:
    shallow, depth = copy.deepcopy(hf_config), hf_config.num_hidden_layers
    for name, value in vars(
        hf_config
    ).items():  # an entry a layer: its kind, whether it has rotary embeddings
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
            given = next(
                (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None
            )
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


# Live bytes of fake tensors, by what they are for, with the peak of each moment.


Parts = Counter[str]  # bytes by what they are for


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operator that makes it to its end, also through FSDP's `resize_`.

    What a storage is for is told by its shape and by when it was made: [..., V] is logits; what FSDP resizes, and a
    flat row made in the forward pass, holds gathered parameters; a parameter's shape, or a flat row, of the backward
    pass is a gradient; the rest are activations. `on_gpu`: two things that a CPU's run has or lacks are counted as on
    a GPU.
    """

    def __init__(
        self, parameter_shapes: set[tuple[int, ...]], vocabulary: int, *, on_gpu: bool
    ) -> None:
        super().__init__()
        self._shapes, self._vocabulary, self._on_gpu = parameter_shapes, vocabulary, on_gpu
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._parts: Parts = Counter()
        self._now, self._peak, self._moment, self._is_backward = 0, 0, "built", False
        self.peaks: dict[str, Parts] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            self._see(storage, "gathered parameters")
            return done

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  FSDP frees and takes gathered parameters by it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*error)

    def begin(self, moment: str, *, is_backward: bool = False) -> None:
        """What is live from here on counts towards the peak of `moment`."""
        self._moment, self._peak, self._is_backward = moment, -1, is_backward
        self._note(0)

    def live(self) -> Parts:
        return Counter({what: size for what, size in self._parts.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; its local operators come here then
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not self._is_cpu_alone(func, tensor):
                if self._is_sum_of_gradients(func, tensor):
                    self._hand_over(args, tensor.untyped_storage())
                self._see(tensor.untyped_storage(), self._kind(tensor))
        if (
            not self._on_gpu
            and func is torch.ops.aten.add_.Tensor
            and args[0].dtype != args[1].dtype
        ):
            self._note(args[0].nbytes)  # a CPU adds what it has cast before
        if self._on_gpu and "_varlen_attn_backward" in func.name():
            self._note(_workspace(args))
        return out

    def _is_cpu_alone(self, func: Any, tensor: torch.Tensor) -> bool:
        """The product that is added to the lm_head's float32 gradient: a GPU adds it in place
        (logprobs.add_product)."""
        is_product = func is torch.ops.aten.mm.default and tensor.dtype != torch.float32
        return (
            self._on_gpu and is_product and tensor.ndim == 2 and tensor.shape[0] == self._vocabulary
        )

    def _is_sum_of_gradients(self, func: Any, tensor: torch.Tensor) -> bool:
        """Of a tied parameter: autograd adds the second in place to the first, but fake ones to a new tensor."""
        return (
            self._is_backward
            and func is torch.ops.aten.add.Tensor
            and tuple(tensor.shape) in self._shapes
        )

    def _hand_over(self, args: Any, storage: torch.UntypedStorage) -> None:
        """What is counted for one of the arguments, where one is counted, is counted for `storage` from now on."""
        boxes = (self._known.get(each.untyped_storage()) for each in args[:2])
        if (
            box := next(
                (box for box in boxes if box is not None and box[0] == storage.nbytes()), None
            )
        ) is not None:
            moved = self._known[storage] = list(box)
            weakref.finalize(storage, self._gone, moved)
            box[0] = 0

    def _kind(self, tensor: torch.Tensor) -> str:
        shape = tuple(tensor.shape)
        is_whole = len(shape) > 1 and shape in self._shapes
        if self._is_backward and (is_whole or (len(shape) == 1 and tensor.is_floating_point())):
            return "gradients"
        # In "scores" nothing is gathered, and the lm_head's gradient is made.
        if self._moment == "gradients" or (is_whole and self._moment == "scores"):
            return "gradients"
        if len(shape) > 1 and shape[-1] == self._vocabulary:
            return "logits"
        if len(shape) == 1 and tensor.is_floating_point() and tensor.numel() > 1 << 16:
            return "gathered parameters"
        return "activations"

    def _see(self, storage: torch.UntypedStorage, kind: str) -> None:
        size, box = storage.nbytes(), self._known.get(storage)
        if box is None:
            box = self._known[storage] = [0, kind]
            weakref.finalize(storage, self._gone, box)
        if (
            kind == "gathered parameters" and box[1] != kind and size != box[0]
        ):  # made as something else, then resized
            self._parts[box[1]] -= box[0]
            self._parts[kind] += box[0]
            box[1] = kind
        self._now += size - box[0]
        self._parts[box[1]] += size - box[0]
        box[0] = size
        self._note(0)

    def _gone(self, box: list[Any]) -> None:
        self._now -= box[0]
        self._parts[box[1]] -= box[0]
        box[0] = 0

    def _note(self, workspace: int) -> None:
        if self._now + workspace > self._peak:
            self._peak = self._now + workspace
            self.peaks[self._moment] = self.live() + Counter({"activations": workspace})


def _workspace(args: Any) -> int:
    """Bytes that flash attention's backward kernel takes for itself (flash_api.cpp, `mha_varlen_bwd`): the query's
    gradient in float32, and with fewer kv heads than heads the gradients of key and value for each head."""
    _, query, key = args[:3]
    expanded = 0 if key.shape[1] == query.shape[1] else 2 * query.numel() * query.element_size()
    return int(4 * query.numel() + expanded)
