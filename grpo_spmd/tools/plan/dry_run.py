"""Measures the peak memory of a forward and backward pass by running the project's policy on fake
tensors.

The passes are run with three and with four layers. Each further layer adds the same number of
bytes, so the two results are extrapolated linearly to the model's depth. The first and the last two
layers have names of their own in the results, and the layers between them share one.

The state between updates is counted in checks/memory.py, and memory outside of tensors in
step_time.py. A *moment* is a part of a pass, such as "forward: last", with its own peak.
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
from grpo_spmd.distributed.session import policy_mesh, sequence_group
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model import lora
from grpo_spmd.model.config_json import load_config
from grpo_spmd.model.families.build import as_config_error, build_hf_model, decoder_layers
from grpo_spmd.model.policy import DTYPES, Policy, logit_settings, set_up_layer
from grpo_spmd.model.sharding import shard_over_ranks
from grpo_spmd.records import Rollout

Usage = Counter[str]  # bytes by purpose
_GATHERED = "gathered parameters"


@dataclass(frozen=True)
class Peaks:
    """The peaks of the memory that a rank needs in addition to its state, by purpose."""

    scoring: Usage  # in a forward pass without gradients
    update: Usage  # in a forward and backward pass


@dataclass(frozen=True)
class Pass:
    """The passes over one micro-batch of a rank, with everything on which their memory depends.

    `peaks_of` runs it with few layers and returns its peaks for the whole model."""

    folder: Path  # of the model's config.json
    model: ModelConfig
    loss: LossConfig
    num_ranks: int
    lengths: tuple[tuple[int, int], ...]  # (prompt tokens, completion tokens) of each rollout
    accumulates: bool  # True: gradients of an earlier micro-batch exist already
    scores: bool  # True: a pass for logprobs comes before the update
    on_gpu: bool  # True: count as on a GPU, where operators differ from those of a CPU

    def run(self, num_layers: int) -> tuple[dict[str, Usage], int]:
        """Runs the passes on fake tensors, with a model of only `num_layers` layers.

        Returns (peaks by moment, the number of layers of the whole model). The peaks are without
        the state that exists before the passes.
        """
        hf_config = load_config(str(self.folder))
        depth = hf_config.num_hidden_layers
        sharing = self.model.sequence_parallel_size
        # With sequence parallelism several ranks share a row of packed rollouts. The last of these
        # ranks has the most completion tokens, so its passes are run.
        with fake_ranks(self.num_ranks, self.model.num_replicas, rank=sharing - 1) as mesh:
            group = sequence_group(torch.device("cpu"), sharing)
            policy = self._build_policy(shallow(hf_config, num_layers), group)
            layers = list(decoder_layers(policy.model))
            # The shapes before sharding, which gathered parameters and gradients have.
            shapes = {tuple(parameter.shape) for parameter in policy.parameters()}
            live = LiveBytes(shapes, hf_config.vocab_size, on_gpu=self.on_gpu)
            mark(live, layers)
            with FakeTensorMode(allow_non_fake_inputs=True), live:
                shard_over_ranks(policy, layers, mesh, DTYPES[self.model.dtype], reshard_root=False)
                # Nothing is allocated, since the tensors are fake.
                policy.to_empty(device="cpu")
                policy.model.tie_weights()
                # The bytes of the sharded policy.
                state = live.live()
                self._run_passes(policy, live)
        # These two moments only prepare the passes.
        del live.peaks["built"], live.peaks["gradients"]
        for usage in live.peaks.values():
            usage.subtract(state)
        return live.peaks, depth

    def _build_policy(self, hf_config: Any, group: dist.ProcessGroup | None) -> Policy:
        """Returns a policy without weights, built like in build_policy.

        It is not built under FakeTensorMode, because transformers reads the values of some tensors
        in its constructors."""
        trains_all = not self.model.lora.rank
        stored = torch.float32 if trains_all else DTYPES[self.model.dtype]
        # The attention that a rank chooses on a GPU. flash-attn would keep the same tensors.
        is_varlen = self.on_gpu and self.model.attention != "sdpa"
        attention: Literal["varlen", "sdpa"] = "sdpa"
        if is_varlen and self.model.dtype == "bfloat16":
            attention = "varlen"
        with torch.device("meta"):
            # Without triton on this machine the plain code is run, whose buffers are larger.
            fused = self.on_gpu and self.model.logprob_kernel != "plain" and find_spec("triton")
            # The temperature, 1.0, has no effect on the memory.
            logits = logit_settings(1.0, self.model.logprob_chunk_tokens, is_fused=bool(fused))
            policy = Policy(hf_config, logits, attention, stored, group)
            if policy.saved:
                # Only a mixture of experts has parameters that are saved in another layout. This is
                # its implementation on a GPU; a loop over experts would need the values of routes,
                # which fake tensors lack.
                policy.model.set_experts_implementation("grouped_mm")
            policy.requires_grad_(trains_all)
            if not trains_all:
                lora.add_adapters(policy.model, self.model.lora)
        recompute = self.model.recompute
        if self.model.compile and not recompute:
            # A compiled layer keeps about as much as selective checkpointing (model/policy.py).
            recompute = "selective"
        for layer in decoder_layers(policy.model):
            set_up_layer(layer, recompute, compile=False)
        return policy.train()

    def _run_passes(self, policy: Policy, live: LiveBytes) -> None:
        """Runs a pass for logprobs, if the config has one, and a forward and backward pass, while
        `live` counts."""
        # Only the numbers of tokens matter here. Ids, logprobs, advantages (1.0) and masks (True)
        # may have any values.
        max_tokens = max(completion for _, completion in self.lengths)
        updater = PolicyUpdater(policy, OptimizerConfig(), self.loss, TrainingConfig(), max_tokens)
        rollouts = [
            Rollout(number, 1.0, True, [0] * prompt, [0] * completion, [0.0] * completion)
            for number, (prompt, completion) in enumerate(self.lengths)
        ]
        batch = pack_rollouts(rollouts, torch.device("cpu"), policy.sequence_ranks)
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
    """Returns the peaks of the passes with the model's full depth.

    They are cached, since several plans of a command may need the same passes. Raises ConfigError
    if transformers cannot build or run the model.
    """
    with as_config_error(str(work.folder), "cannot be run on fake tensors"):
        moments = at_full_depth(work.run)
    largest = {"scoring": Usage(), "update": Usage()}
    for moment, usage in moments.items():
        name = "scoring" if moment.startswith("scoring") else "update"
        largest[name] = max(largest[name], usage, key=Usage.total)
    return Peaks(**largest)


def at_full_depth(run: Callable[[int], tuple[dict[str, Usage], int]]) -> dict[str, Usage]:
    """Returns the peaks by moment with the model's full depth, extrapolated from runs with fewer
    layers. `run` is Pass.run."""
    # The numbers of layers in the two runs.
    few, more = 3, 4
    peaks, depth = run(few)
    if depth > few:
        larger_peaks, _ = run(more)
        # The difference of the two runs is the bytes of one layer; add it for each missing layer.
        for moment, usage in peaks.items():
            slope = larger_peaks[moment]
            slope.subtract(usage)
            for name, num_bytes in slope.items():
                usage[name] += num_bytes * (depth - few)
    return peaks


def parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns the parameter shapes, by name, of the model that transformers builds from
    config.json. A tied lm_head is left out. Raises ConfigError."""
    with torch.device("meta"):
        model = build_hf_model(load_config(str(folder)), str(folder))
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shallow(hf_config: Any, num_layers: int) -> Any:
    """Returns a copy of a transformers config with at most `num_layers` layers."""
    config, depth = copy.deepcopy(hf_config), hf_config.num_hidden_layers
    # Lists of this length have an entry for each layer, for example its type.
    for name, value in vars(hf_config).items():
        if isinstance(value, list) and len(value) == depth:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = min(num_layers, depth)
    return config


def mark(live: LiveBytes, layers: list[nn.Module]) -> None:
    """Adds hooks to the layers with which `live` begins a new moment at each layer, in the forward
    and in the backward pass. The hooks keep no tensor alive."""

    def begin_backward_at(tensor: torch.Tensor, name: str) -> None:
        """Lets `live` begin the moment "backward: NAME" in the backward pass, at this tensor."""
        # The moment begins when this tensor's gradient is ready.
        if tensor.requires_grad:
            tensor.register_hook(lambda _: live.begin(f"backward: {name}", is_backward=True))

    def before(name: str, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Is called before the forward pass of the layer with this name."""
        live.begin(f"{'forward' if torch.is_grad_enabled() else 'scoring'}: {name}")
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        # When the gradient of the first layer's input is ready, all layers have run backward.
        if name == "first" and tensors:
            begin_backward_at(tensors[0], "root")

    def after(name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Is called after the forward pass of the layer with this name."""
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
def fake_ranks(num_ranks: int, num_replicas: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """Returns a context manager that yields a device mesh of `num_ranks` ranks.

    Only this process, which is `rank`, exists, and collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield policy_mesh(torch.device("cpu"), num_replicas)
    finally:
        dist.destroy_process_group()


class _Account:
    """The bytes that are counted for one storage, and their purpose."""

    def __init__(self, kind: str) -> None:
        self.num_bytes, self.kind = 0, kind


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of fake tensors by kind (their purpose), with the peak of each moment.

    A storage is counted from the operator that makes it until it is freed, and FSDP's `resize_`
    changes its size. Its kind is inferred from its shape and the time when it was made. The kinds
    are logits (shape [..., V]), gathered parameters (resized by FSDP, or a large flat tensor in the
    forward pass), gradients (a parameter's shape, or a flat tensor, in the backward pass), and
    activations (all others). With `on_gpu`, operators are counted as on a GPU where a CPU's differ.
    """

    def __init__(
        self, parameter_shapes: set[tuple[int, ...]], vocabulary: int, *, on_gpu: bool
    ) -> None:
        """`parameter_shapes` are those before sharding; `vocabulary` is the number of tokens V."""
        super().__init__()
        self._shapes, self._vocabulary, self._on_gpu = parameter_shapes, vocabulary, on_gpu
        # By storage; a storage that is freed is dropped from it.
        self._accounts: Any = WeakIdKeyDictionary()
        self._usage: Usage = Counter()
        self._peak, self._moment, self._is_backward = 0, "built", False
        # By moment: the live bytes when they were the most.
        self.peaks: dict[str, Usage] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        """Begins to count."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            """Calls torch's resize_, and counts the new size."""
            resized = self._resize(storage, size)
            self._count(storage, _GATHERED)
            return resized

        # FSDP frees and allocates gathered parameters with `resize_`, which no dispatch mode sees.
        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*error)

    def begin(self, moment: str, *, is_backward: bool = False) -> None:
        """Begins a moment: the most bytes that are live until the next call are its peak."""
        # -1, so that the bytes that are live now are recorded as the first peak.
        self._moment, self._peak, self._is_backward = moment, -1, is_backward
        self._update_peak()

    def live(self) -> Usage:
        """Returns the bytes that are live now, by kind."""
        return Counter({kind: size for kind, size in self._usage.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts its outputs, and memory that it only needs while it runs."""
        if any(issubclass(kind, DTensor) for kind in types):
            # Let DTensor handle the operator first. Its operators on local tensors come here again.
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._count_output(func, args, tensor)
        if self._on_gpu and "_varlen_attn_backward" in func.name():
            self._update_peak(_attention_workspace(args))
        is_cast_add = func is torch.ops.aten.add_.Tensor and args[0].dtype != args[1].dtype
        if is_cast_add and not self._on_gpu:
            # A CPU makes a temporary copy of the second operand in the first one's dtype.
            self._update_peak(args[0].nbytes)
        return output

    def _count_output(self, func: Any, args: Any, tensor: torch.Tensor) -> None:
        """Counts the storage of an operator's output, except where real tensors need none."""
        shape = tuple(tensor.shape)
        is_product = self._on_gpu and func is torch.ops.aten.mm.default
        if is_product and shape[0] == self._vocabulary and tensor.dtype != torch.float32:
            # This matrix product is a part of the lm_head's gradient, which is float32. On a GPU it
            # is added to the gradient in place and takes no memory (logprobs.add_product).
            return
        is_sum = self._is_backward and func is torch.ops.aten.add.Tensor
        if is_sum and shape in self._shapes:
            # The sum of a tied parameter's two gradients. Autograd adds real gradients in place,
            # but makes a new tensor for fake ones, so one of the two is no longer counted.
            accounts = (self._accounts.get(argument.untyped_storage()) for argument in args[:2])
            for account in accounts:
                if account and account.num_bytes == tensor.untyped_storage().nbytes():
                    self._resize_account(account, 0)
                    break
        self._count(tensor.untyped_storage(), self._kind_of(tensor))

    def _resize_account(self, account: _Account, num_bytes: int) -> None:
        """Changes the number of bytes that are counted for a storage."""
        self._usage[account.kind] += num_bytes - account.num_bytes
        account.num_bytes = num_bytes

    def _kind_of(self, tensor: torch.Tensor) -> str:
        """Returns the kind of a new storage, by the rules in the docstring of the class."""
        shape = tuple(tensor.shape)
        is_parameter = len(shape) > 1 and shape in self._shapes
        is_flat = len(shape) == 1 and tensor.is_floating_point()
        if self._is_backward and (is_parameter or is_flat):
            return "gradients"
        # In the moment "scores" no parameters are gathered, so a tensor with a parameter's shape is
        # the lm_head's gradient.
        if self._moment == "gradients" or (is_parameter and self._moment == "scores"):
            return "gradients"
        if len(shape) > 1 and shape[-1] == self._vocabulary:
            return "logits"
        return _GATHERED if is_flat and tensor.numel() > 1 << 16 else "activations"

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Counts a storage with its present size, until it is freed."""
        account = self._accounts.get(storage)
        if account is None:
            account = self._accounts[storage] = _Account(kind)
            weakref.finalize(storage, self._resize_account, account, 0)
        num_bytes = storage.nbytes()
        if kind == _GATHERED and num_bytes != account.num_bytes:
            # A storage that FSDP resizes holds gathered parameters, whatever it was counted as.
            self._resize_account(account, 0)
            account.kind = kind
        self._resize_account(account, num_bytes)
        self._update_peak()

    def _update_peak(self, workspace: int = 0) -> None:
        """Records the live bytes if they are the moment's peak. `workspace` are bytes that an
        operator allocates while it runs."""
        total = self._usage.total() + workspace
        if total > self._peak:
            self._peak = total
            self.peaks[self._moment] = self.live() + Counter({"activations": workspace})


def _attention_workspace(args: Any) -> int:
    """Returns the bytes that flash attention's backward kernel allocates while it runs.

    According to `mha_varlen_bwd` in flash_api.cpp they are the query's gradient in float32, and if
    there are fewer KV heads than heads, the gradients of key and value for each head."""
    _, query, key = args[:3]
    expanded = 0 if key.shape[1] == query.shape[1] else 2 * query.numel() * query.element_size()
    return int(4 * query.numel() + expanded)
