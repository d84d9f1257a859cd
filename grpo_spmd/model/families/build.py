"""Models of transformers are made here, and whatever goes wrong while one is made becomes one line."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.hf_files import load_config

_log = logging.getLogger("grpo_spmd")
# What code for a model that it was not made for raises. Not OSError: that is the machine's.
_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_LONGEST = 300  # characters of its first line
_OF_THE_MACHINE = re.compile(
    "out of memory|not enough memory|CUDA|NCCL|[Gg]loo|[Ss]ocket|shm|timed out|driver"
)


@contextmanager
def as_config_error(path: str, what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what is raised inside, unless it is the machine's fault, into a ConfigError: the model of `path` `what`, and
    why. The traceback goes to the log for whoever asks it for details (DEBUG)."""
    try:
        yield
    except ConfigError:
        raise
    except _ERRORS as error:
        if kinds and not isinstance(error, kinds):
            raise
        text = str(error).strip() or "no message"
        if isinstance(error, torch.OutOfMemoryError) or _OF_THE_MACHINE.search(text):
            raise
        _log.debug("model.path: %s %s", path, what, exc_info=True)
        lines = [
            line.strip()
            for line in text.splitlines()
            if not re.match(r"\s*$|\d+ validation error", line)
        ]
        raise ConfigError(
            f"model.path: {path} {what}: {type(error).__name__}: {lines[0][:_LONGEST]}"
        ) from error


def build_hf_model(
    hf_config: Any, path: str, kind: Any = transformers.AutoModelForCausalLM, /, **options: Any
) -> Any:
    """The causal LM of a config, or what another auto class makes of it, on the device that is set. Raises ConfigError
    where transformers cannot build it."""
    with as_config_error(path, "cannot be built by transformers"):
        try:
            return kind.from_config(hf_config, trust_remote_code=False, **options)
        except KeyError as error:  # looked up among classes, one for each kind of attention
            if error.args != (options.get("attn_implementation"),):
                raise
            attention = (
                "attention in code of its own, not through transformers' attention interface"
            )
            raise ConfigError(
                f"model.path: {path} has its {attention}, which packed rows need"
            ) from None


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of the decoder's layers. Raises ConfigError where there is none, or more than one."""
    depth, lists = getattr(model.config, "num_hidden_layers", None), list[nn.ModuleList]()
    for child in model.get_decoder().children():
        if isinstance(child, nn.ModuleList) and len(child) == depth:
            lists.append(child)
    if len(lists) != 1:
        where = f"{type(model).__name__}'s decoder has {len(lists)} lists of {depth} layers"
        raise ConfigError(
            f"model.path: {where}; only a causal decoder with one list of layers trains"
        )
    return lists[0]


def initialise_buffers(model: Any) -> None:
    """Fill what no checkpoint holds (rotary frequencies) as HF does. Raises ConfigError for any other such buffer."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    owners = {name.rpartition(".")[0] for name in buffers}
    for name, module in model.named_modules():
        if name in owners:
            model._init_weights(module)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise ConfigError(
                f"model.path: do not know how to fill buffer {name} of {type(model).__name__}"
            )


# Transformers' classes of models, kept as they are where an engine would change them.


def keep_hf_classes(path: str) -> Callable[[nn.Module], None]:
    """To be called before vLLM builds its model, the returned function with that model afterwards. Where vLLM has no
    class of its own for a model (its Transformers backend) it puts its compiler into HF's class, of which nobody else
    can make or call a model from then on (0.26 to 0.33: "Current vLLM config is not set"). The class is put back as it
    was, and the engine's modules get one derived from it with what vLLM had added."""
    AutoModelForCausalLM._model_mapping.get(type(load_config(path)), None)  # imports them
    before: dict[type[Any], tuple[Any, dict[str, Any]]] = {
        of: (of.__bases__, dict(vars(of))) for of in _derived_from(PreTrainedModel)
    }

    def put_back(model: nn.Module) -> None:
        for hf_class, (bases, members) in before.items():
            if hf_class.__bases__ == bases:
                continue
            added = {
                name: member
                for name, member in vars(hf_class).items()
                if members.get(name) is not member
            }
            added_bases = tuple(base for base in hf_class.__bases__ if base not in bases)
            for name in added:
                if name in members:
                    setattr(hf_class, name, members[name])
                else:
                    delattr(hf_class, name)
            hf_class.__bases__ = bases
            of_engine = type(hf_class.__name__, (hf_class, *added_bases), added)
            for module in model.modules():
                if type(module) is hf_class:
                    module.__class__ = of_engine

    return put_back


def _derived_from(base: type[Any]) -> Iterator[type[Any]]:
    for derived in base.__subclasses__():
        yield derived
        yield from _derived_from(derived)
