"""Peak memory of a forward and backward pass, measured on fake tensors with the project's policy.

The passes run with three and with four layers. Each further layer adds the same bytes, so the two
runs are extrapolated to the model's depth. The first and the last layers, the lm_head and the
gradients outside the layers are measured themselves; the layers between them lie on a line.

The state between updates is counted in checks/memory.py, and memory without tensors in
step_time.py. A *moment* is a part of a pass, such as "forward of layer 2", with its own peak.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

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
from grpo_spmd.model.policy import DTYPES, Policy, logit_settings, set_up_layer
from grpo_spmd.model.sharding import shard_over_ranks
from grpo_spmd.records import Rollout

Usage = Counter[str]  # bytes by what they are for
_NUM_LAYERS = (3, 4)  # of the two runs
_GATHERED = "gathered parameters"


@dataclass(frozen=True)
class Peaks:
    """Holds the most bytes that a rank needs in addition to its state, by purpose."""

    scoring: Usage  # without gradients
    update: Usage


@dataclass(frozen=True)
class Pass:
    """Describes one micro-batch of one rank, and everything that its memory depends on."""

    folder: Path  # with config.json
    model: ModelConfig
    loss: LossConfig
    num_ranks: int
    lengths: tuple[tuple[int, int], ...]  # prompt and completion tokens of its rollouts
    accumulates: bool  # gradients of an earlier micro-batch exist
    scores: bool  # a pass for logprobs comes before the update
    on_gpu: bool

    def run(self, num_layers: int) -> tuple[dict[str, Usage], int]:
        """Returns the peaks by moment with `num_layers` layers, and the model's depth."""
        hf_config = load_config(str(self.folder))
        depth = hf_config.num_hidden_layers
        policy = self._build_policy(shallow(hf_config, num_layers))
        layers = list(decoder_layers(policy.model))
        # Before sharding: gathered tensors and gradients have these shapes.
        shapes = {tuple(parameter.shape) for parameter in policy.parameters()}
        live = LiveBytes(shapes, hf_config.vocab_size, on_gpu=self.on_gpu)
        mark(live, layers)
        with (
            fake_ranks(self.num_ranks, self.model.num_replicas) as mesh,
            FakeTensorMode(allow_non_fake_inputs=True),
            live,
        ):
            shard_over_ranks(policy, layers, mesh, DTYPES[self.model.dtype], reshard_root=False)
            # Fake tensors: nothing is allocated.
            policy.to_empty(device="cpu")
            policy.model.tie_weights()
            state = live.live()
            self._run_passes(policy, live)
        del live.peaks["built"], live.peaks["gradients"]
        for usage in live.peaks.values():
            usage.subtract(state)
        return live.peaks, depth

    def _build_policy(self, hf_config: Any) -> Policy:
        """As build_policy does, up to the weights. Not on fake tensors: transformers computes with
        some tensors here."""
        trains_all = not self.model.lora.rank
        stored = torch.float32 if trains_all else DTYPES[self.model.dtype]
        # What a rank chooses on a GPU; flash-attn, if installed, keeps the same tensors.
        is_varlen = self.on_gpu and self.model.attention != "sdpa"
        attention: Literal["varlen", "sdpa"] = "sdpa"
        if is_varlen and self.model.dtype == "bfloat16":
            attention = "varlen"
        with torch.device("meta"):
            # A machine without triton counts the plain code's buffers, which are larger.
            fused = self.on_gpu and self.model.logprob_kernel != "plain" and find_spec("triton")
            logits = logit_settings(1.0, self.model.logprob_chunk_tokens, is_fused=bool(fused))
            policy = Policy(hf_config, logits, attention, stored)
            if policy.saved:
                # As on a GPU. A loop over experts would ask fake tensors for numbers.
                policy.model.set_experts_implementation("grouped_mm")
            policy.requires_grad_(trains_all)
            if not trains_all:
                lora.add_adapters(policy.model, self.model.lora)
        recompute = self.model.recompute
        if self.model.compile and not recompute:
            # About what a compiled layer keeps (model/policy.py).
            recompute = "selective"
        for layer in decoder_layers(policy.model):
            set_up_layer(layer, recompute, compile=False)
        return policy.train()

    def _run_passes(self, policy: Policy, live: LiveBytes) -> None:
        max_tokens = max(completion for _, completion in self.lengths)
        updater = PolicyUpdater(policy, OptimizerConfig(), self.loss, TrainingConfig(), max_tokens)
        rollouts = [
            Rollout(number, 1.0, True, [0] * prompt, [0] * completion, [0.0] * completion)
            for number, (prompt, completion) in enumerate(self.lengths)
        ]
        batch = pack_rollouts(rollouts, torch.device("cpu"))
        if self.scores:
            live.begin("scoring: start")
            with torch.no_grad():
                policy(batch)
            cast(FSDPModule, policy).reshard()
        live.begin("gradients")
        if self.accumulates:
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
        live.begin("start")
        updater.backward(batch, batch.loss_mask.numel(), len(self.lengths), is_synced=True)


@lru_cache(maxsize=64)
def peaks_of(work: Pass) -> Peaks:
    """Returns the peaks of the whole model.

    Raises ConfigError if transformers cannot build or run the model.
    """
    with as_config_error(str(work.folder), "cannot be run on fake tensors"):
        moments = at_full_depth(work.run)
    largest = {"scoring": Usage(), "update": Usage()}
    for moment, usage in moments.items():
        name = "scoring" if moment.startswith("scoring") else "update"
        largest[name] = max(largest[name], usage, key=Usage.total)
    return Peaks(**largest)


def at_full_depth(run: Callable[[int], tuple[dict[str, Usage], int]]) -> dict[str, Usage]:
    """Returns the peaks of the whole model by moment.

    `run(num_layers)` returns the peaks with so many layers, and the model's depth.
    """
    few, more = _NUM_LAYERS
    peaks, depth = run(few)
    if depth > few:
        larger_peaks, _ = run(more)
        for moment, usage in peaks.items():
            slope = larger_peaks[moment]
            slope.subtract(usage)
            for name, num_bytes in slope.items():
                usage[name] += num_bytes * (depth - few)
    return peaks


def parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the model that transformers builds from config.json.

    A tied lm_head counts once. Raises ConfigError.
    """
    with torch.device("meta"):
        model = build_hf_model(load_config(str(folder)), str(folder))
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shallow(hf_config: Any, num_layers: int) -> Any:
    """Returns a copy of transformers' config with fewer layers."""
    config, depth = copy.deepcopy(hf_config), hf_config.num_hidden_layers
    # Some lists have an entry for each layer: its kind, or whether it has rotary embeddings.
    for name, value in vars(hf_config).items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = min(num_layers, depth)
    return config


def mark(live: LiveBytes, layers: list[nn.Module]) -> None:
    """Makes `live` begin a named phase of its record at each layer, forward and backward.

    The hooks on tensors keep nothing alive.
    """

    def begin_backward_at(tensor: torch.Tensor, name: str) -> None:
        # The phase begins when this tensor's gradient is ready.
        if tensor.requires_grad:
            tensor.register_hook(lambda _: live.begin(f"backward: {name}", is_backward=True))

    def before(name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        live.begin(f"{'forward' if torch.is_grad_enabled() else 'scoring'}: {name}")
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if name == "first" and tensors:
            begin_backward_at(tensors[0], "root")

    def after(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        begin_backward_at(output[0] if isinstance(output, tuple) else output, name)
        if layer is layers[-1]:
            live.begin("scores" if torch.is_grad_enabled() else "scoring: scores")

    # The first and the last two layers have their own names; the others share one.
    names = ["first", *["between"] * (len(layers) - 3), "last but one", "last"]
    if len(layers) < 3:
        names = ["first", *["last"] * (len(layers) - 1)]
    for name, layer in zip(names, layers, strict=True):
        layer.register_forward_pre_hook(partial(before, name), with_kwargs=True)
        layer.register_forward_hook(partial(after, name), with_kwargs=True)


@contextmanager
def fake_ranks(num_ranks: int, num_replicas: int) -> Iterator[DeviceMesh]:
    """Yields a mesh of `num_ranks` ranks. Only this rank exists, and collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield policy_mesh(torch.device("cpu"), num_replicas)
    finally:
        dist.destroy_process_group()


class _Account:
    """Holds the bytes that are counted for one storage, and what they are for."""

    def __init__(self, kind: str) -> None:
        self.num_bytes, self.kind = 0, kind


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of fake tensors by what they are for, with the peak of each moment.

    It follows every storage from the operator that makes it to its end, also through FSDP's
    `resize_`. The kind of a storage follows from its shape and the time when it was made:
    [..., V] is logits; what FSDP resizes, and a flat row made in the forward pass, holds gathered
    parameters; a parameter's shape or a flat row of the backward pass is a gradient; the rest are
    activations. `on_gpu`: count as on a GPU where a CPU's operators differ.
    """

    def __init__(
        self, parameter_shapes: set[tuple[int, ...]], vocabulary: int, *, on_gpu: bool
    ) -> None:
        super().__init__()
        self._shapes, self._vocabulary, self._on_gpu = parameter_shapes, vocabulary, on_gpu
        self._accounts: Any = WeakIdKeyDictionary()
        self._usage: Usage = Counter()
        self._peak, self._moment, self._is_backward = 0, "built", False
        self.peaks: dict[str, Usage] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = self._resize(storage, size)
            self._count(storage, _GATHERED)
            return resized

        # FSDP frees and allocates gathered parameters by it.
        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*error)

    def begin(self, moment: str, *, is_backward: bool = False) -> None:
        """Begins a moment: live bytes now count towards its peak."""
        self._moment, self._peak, self._is_backward = moment, -1, is_backward
        self._update_peak()

    def live(self) -> Usage:
        return Counter({kind: size for kind, size in self._usage.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor runs first; then its local operators come here.
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._count_output(func, args, tensor)
        if self._on_gpu and "_varlen_attn_backward" in func.name():
            self._update_peak(_attention_workspace(args))
        is_cast_add = func is torch.ops.aten.add_.Tensor and args[0].dtype != args[1].dtype
        if is_cast_add and not self._on_gpu:
            # A CPU casts the second operand first.
            self._update_peak(args[0].nbytes)
        return output

    def _count_output(self, func: Any, args: Any, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        is_product = self._on_gpu and func is torch.ops.aten.mm.default
        if is_product and shape[0] == self._vocabulary and tensor.dtype != torch.float32:
            # The product for the lm_head's float32 gradient: a GPU adds it in place
            # (logprobs.add_product).
            return
        is_sum = self._is_backward and func is torch.ops.aten.add.Tensor
        if is_sum and shape in self._shapes:
            # The sum of a tied parameter's gradients. Autograd adds real gradients in place, but
            # makes a new tensor of fake ones: it takes the place of one of them.
            accounts = (self._accounts.get(argument.untyped_storage()) for argument in args[:2])
            for account in accounts:
                if account and account.num_bytes == tensor.untyped_storage().nbytes():
                    self._resize_account(account, 0)
                    break
        self._count(tensor.untyped_storage(), self._kind_of(tensor))

    def _resize_account(self, account: _Account, num_bytes: int) -> None:
        self._usage[account.kind] += num_bytes - account.num_bytes
        account.num_bytes = num_bytes

    def _kind_of(self, tensor: torch.Tensor) -> str:
        shape = tuple(tensor.shape)
        is_parameter = len(shape) > 1 and shape in self._shapes
        is_flat = len(shape) == 1 and tensor.is_floating_point()
        if self._is_backward and (is_parameter or is_flat):
            return "gradients"
        # While scores are computed nothing is gathered, and the lm_head's gradient is made.
        if self._moment == "gradients" or (is_parameter and self._moment == "scores"):
            return "gradients"
        if len(shape) > 1 and shape[-1] == self._vocabulary:
            return "logits"
        return _GATHERED if is_flat and tensor.numel() > 1 << 16 else "activations"

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        account = self._accounts.get(storage)
        if account is None:
            account = self._accounts[storage] = _Account(kind)
            weakref.finalize(storage, self._resize_account, account, 0)
        num_bytes = storage.nbytes()
        if kind == _GATHERED and num_bytes != account.num_bytes:
            # FSDP resizes a storage that was made as something else.
            self._resize_account(account, 0)
            account.kind = kind
        self._resize_account(account, num_bytes)
        self._update_peak()

    def _update_peak(self, workspace: int = 0) -> None:
        total = self._usage.total() + workspace
        if total > self._peak:
            self._peak = total
            self.peaks[self._moment] = self.live() + Counter({"activations": workspace})


def _attention_workspace(args: Any) -> int:
    """Returns the bytes that flash attention's backward kernel allocates.

    In flash_api.cpp, `mha_varlen_bwd`, they are
    the query's gradient in float32, and with fewer KV heads than heads the gradients of key and
    value for each head."""
    _, query, key = args[:3]
    expanded = 0 if key.shape[1] == query.shape[1] else 2 * query.numel() * query.element_size()
    return int(4 * query.numel() + expanded)
