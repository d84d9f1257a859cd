"""Builds transformers' models. Whatever goes wrong becomes one line."""

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
from grpo_spmd.model.config_json import is_constant
from grpo_spmd.model.families.recurrent import compute_by_sequence
from grpo_spmd.model.hf_files import first_line, load_config

_log = logging.getLogger("grpo_spmd")
# What code raises for a model that it was not written for. Not OSError: that is the machine's.
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_MACHINE_FAULT = re.compile(
    "out of memory|not enough memory|CUDA|NCCL|[Gg]loo|[Ss]ocket|shm|timed out|driver"
)


@contextmanager
def as_config_error(path: str, problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns errors inside into a ConfigError: the model of `path` `problem`, and the reason.

    Errors of the machine, and of other `kinds` if any are given, pass. The traceback is logged at
    DEBUG."""
    caught = kinds or _MODEL_ERRORS
    try:
        yield
    except ConfigError:
        raise
    except caught as error:
        if isinstance(error, torch.OutOfMemoryError) or _MACHINE_FAULT.search(str(error)):
            raise
        _log.debug("model.path: %s %s", path, problem, exc_info=True)
        raise ConfigError(
            f"model.path: {path} {problem}: {type(error).__name__}: {first_line(error)}"
        ) from error


def build_hf_model(
    hf_config: Any,
    path: str,
    auto_class: Any = transformers.AutoModelForCausalLM,
    /,
    **options: Any,
) -> Any:
    """Returns transformers' model of a config, by default its causal LM, on the current device.

    Raises ConfigError if transformers cannot build it."""
    # On a CPU the loop over the experts is the fastest. On a GPU transformers takes grouped
    # products by default; asked for them by name, it would refuse a model without experts.
    if not torch.cuda.is_available():
        options.setdefault("experts_implementation", "eager")
    with as_config_error(path, "cannot be built by transformers"):
        # Some models look the attention up among classes of their own, one for each kind, and raise
        # KeyError: packed rows need transformers' attention interface.
        model = auto_class.from_config(hf_config, trust_remote_code=False, **options)
    compute_by_sequence(model)
    return model


def decoder_layers(model: Any) -> nn.ModuleList:
    """Returns the decoder's list of layers. Raises ConfigError unless there is exactly one."""
    depth = getattr(model.config, "num_hidden_layers", None)
    lists = [
        child
        for child in model.get_decoder().children()
        if isinstance(child, nn.ModuleList) and len(child) == depth
    ]
    if len(lists) != 1:
        raise ConfigError(
            f"model.path: {type(model).__name__}'s decoder has {len(lists)} lists of {depth} "
            "layers; only a causal decoder with one list of layers trains"
        )
    return lists[0]


def initialise_buffers(model: Any) -> None:
    """Fills the buffers that no checkpoint holds (rotary frequencies) as HF does.

    Raises ConfigError if one stays unfilled."""
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not is_constant(name)
    }
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    owners = {name.rpartition(".")[0] for name in buffers}
    for name, module in model.named_modules():
        if name in owners:
            model._init_weights(module)
    # Looked up again: HF may have replaced a buffer.
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.isnan().any():
            raise ConfigError(
                f"model.path: do not know how to fill buffer {name} of {type(model).__name__}"
            )


def keep_hf_classes(path: str) -> Callable[[nn.Module], None]:
    """Saves transformers' classes, and returns a function that restores them.

    Call it before vLLM builds its model, and the result afterwards with that model. If vLLM has no
    class of its own for a model (its Transformers backend) it puts its compiler into HF's class,
    and nobody else can build or call such a model from then on (0.26 to 0.33: "Current vLLM config
    is not set"). The class is restored, and the engine's modules get a subclass with what vLLM had
    added."""
    AutoModelForCausalLM._model_mapping.get(type(load_config(path)), None)  # imports the classes
    saved: dict[type[Any], tuple[Any, dict[str, Any]]] = {
        hf_class: (hf_class.__bases__, dict(vars(hf_class)))
        for hf_class in _subclasses(PreTrainedModel)
    }

    def restore(model: nn.Module) -> None:
        for hf_class, (bases, members) in saved.items():
            if hf_class.__bases__ == bases:
                continue
            added = {
                name: member
                for name, member in vars(hf_class).items()
                if members.get(name) is not member
            }
            added_bases = [base for base in hf_class.__bases__ if base not in bases]
            for name in added:
                if name in members:
                    setattr(hf_class, name, members[name])
                else:
                    delattr(hf_class, name)
            hf_class.__bases__ = bases
            engine_class = type(hf_class.__name__, (hf_class, *added_bases), added)
            for module in model.modules():
                if type(module) is hf_class:
                    module.__class__ = engine_class

    return restore


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
