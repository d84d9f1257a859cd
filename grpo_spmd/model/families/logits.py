"""What a model does to its logits after the lm_head (Gemma 2 caps them, Granite and Cohere scale them): not read from
config.json, whose names for it differ, but seen by running transformers' own forward pass on a few numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from grpo_spmd.config.errors import ConfigError

_TINY, _HUGE = 1e-6, 1e30
_NAMES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


class LogitsMap(NamedTuple):
    """Logits as the lm_head's products `x` give them: x / divisor, or softcap * tanh(x / softcap)."""

    divisor: float = 1.0
    softcap: float | None = None


def logits_map(model: Any) -> LogitsMap:
    """Of a model on the meta device. Raises ConfigError for a map of another form, and where the lm_head does not read
    the decoder's last hidden states as they are."""
    given = torch.tensor([-_HUGE, -50, -3, -_TINY, 0, _TINY, 0.5, 3, 50, _HUGE], dtype=torch.float64, device="cpu")
    try:
        found = _logits_of(model, given)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError, NotImplementedError) as error:
        raise _unknown(model, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}") from None
    # Twelve digits: the number in config.json again, which 1 / (1 / number) need not be.
    slope, softcap = found[5].item() / _TINY, found[-1].item()
    divisor = float(f"{1 / slope:.12g}") if slope else 0.0
    if abs(softcap) > 1e20:
        told, expected = LogitsMap(divisor), given / (divisor or 1.0)
    else:
        told, expected = LogitsMap(1.0, softcap), torch.tanh(given / softcap) * softcap
    if not (divisor > 0 and torch.allclose(found, expected, rtol=1e-6, atol=0)):
        raise _unknown(model, f"3 becomes {found[7].item():g}, and 50 becomes {found[8].item():g}")
    names = [name for name in _NAMES if getattr(model.config, name, None) not in (None, 0, 1)]
    if names and told == LogitsMap():  # the engine may know it
        what = f"changes its logits by {names[0]}, of which transformers' {type(model).__name__} knows nothing"
        raise ConfigError(f"model.path: config.json {what}")
    return told


def _unknown(model: Any, what: str) -> ConfigError:
    name = type(model).__name__
    return ConfigError(f"model.path: {name} changes its logits in a way that chunked logprobs do not know ({what})")


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]
    """Has nothing else that a decoder may return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _logits_of(model: Any, given: Tensor) -> Tensor:
    """What transformers' forward pass makes of the lm_head's products `given`."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    hidden = _Hidden(last_hidden_state=given.view(1, -1, 1))
    ids = torch.zeros(1, len(given), dtype=torch.long, device="cpu")
    decoder.forward, head.forward = lambda *args, **kwargs: hidden, lambda products: products
    try:
        with torch.no_grad(), torch.device("cpu"):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        del decoder.forward, head.forward  # the instance's own, which hid those of its class
    return logits.double().flatten()
