"""Transformers' classes of models, kept as they are where an engine would change them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_spmd.model.hf_files import load_config


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
            added = {name: member for name, member in vars(hf_class).items() if members.get(name) is not member}
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
