"""Lists GPUs ("cards") by name, with their memory, arithmetic and bandwidth.

The figures are used for MFU and for planning runs. Host memory is here, too. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_spmd.config.errors import ConfigError

_CUSTOM = "80GiB,989TFLOPS,3350GB/s"
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
# The groups are memory, arithmetic, bandwidth of the memory and, if given, of the link.
_FIGURES = re.compile(f"{_NUMBER}gib,{_NUMBER}tflops,{_NUMBER}gb/s(?:,{_NUMBER}gb/s)?")


@dataclass(frozen=True)
class Card:
    """The figures of one GPU. All are ceilings, so what is computed from them is an estimate."""

    name: str
    gib: float
    """The device's memory as torch reports it, a little below the nominal figure."""
    tflops: float
    """The peak of dense bfloat16 products with float32 sums, in TFLOP/s."""
    memory_gb_s: float
    """The bandwidth of the device's memory."""
    link_gb_s: float
    """The bandwidth to the other GPUs of a node, in one direction."""
    host_gb_s: float = 25.0
    """The bandwidth to and from pinned host memory; PCIe 4 x16 reaches about 25 of its 32."""


# TFLOP/s, GB/s and links: NVIDIA's data sheets of each card (A100: DS-10031 of 2021; H100 and H200:
# of 2024; B200: DGX B200's, an eighth each; L40S; RTX 4090: the Ada white paper, half of its figure
# with sparsity). GiB: "has a total capacity of ..." in torch's out-of-memory messages of public bug
# reports; drivers differ by about 0.2 GiB.
CARDS = {
    card.name: card
    for card in (
        Card("A100-40GB", 39.4, 312, 1555, 300),
        Card("A100-80GB", 79.2, 312, 2039, 300),
        Card("H100-80GB", 79.1, 989, 3350, 450, 50),
        Card("H200-141GB", 139.8, 989, 4800, 450, 50),
        Card("B200-180GB", 178.3, 2250, 7700, 900, 50),
        Card("L40S-48GB", 44.4, 362, 864, 25),
        Card("RTX4090-24GB", 23.6, 165, 1008, 25),
    )
}
# Models that have the same peak TFLOP/s as another one, and only slower links.
_ALIKE = {"H800": "H100", "A800": "A100"}


def find_device(device_name: str, gib: float | None = None) -> Card | None:
    """Returns the card for a device's name, or None if the table does not have it.

    `device_name` is the driver's name for it, such as "NVIDIA H100 80GB HBM3". If `gib` is given,
    the card's memory must agree with it within 15 %, because drivers reserve some.
    """
    for card in CARDS.values():
        is_named = card.name.partition("-")[0] in device_name.replace(" ", "")
        if is_named and (gib is None or abs(card.gib - gib) < 0.15 * card.gib):
            return card
    return None


def is_large_for_vllm(device_name: str, gib: float) -> bool:
    """Returns True if vLLM uses its defaults for large GPUs on this device.

    These are 16,384 tokens and 1,024 sequences in a batch, in the place of 8,192 and 256
    (EngineArgs.get_batch_defaults, 0.26 to 0.33)."""
    return gib >= 70 and "A100" not in device_name.upper()


def max_num_seqs(
    device_name: str, gib: float, options: Mapping[str, Any], num_sequences: float
) -> int:
    """Returns vLLM's max_num_seqs for a GPU: the most sequences in one of its batches.

    `options` is the user's rollout.engine, which may set it. Otherwise it is vLLM's default,
    lowered to the number of sequences that an engine can get at all, `num_sequences`, but not below
    256: vLLM allocates tables of the vocabulary's size for each of them."""
    if options.get("max_num_seqs"):
        return int(options["max_num_seqs"])
    default = 1024 if is_large_for_vllm(device_name, gib) else 256
    # vLLM refuses fewer tokens in a batch than sequences, unless both are its own defaults.
    limit = min(default, options.get("max_num_batched_tokens") or default)
    return math.ceil(min(limit, max(256, num_sequences)))


def peak_tflops(device_name: str) -> float | None:
    """Returns the peak TFLOP/s of a device, by the driver's name for it; None if it is unknown."""
    for model, equal_model in _ALIKE.items():
        device_name = device_name.replace(model, equal_model)
    card = find_device(device_name)
    return card.tflops if card else None


def find_card(text: str) -> Card:
    """Returns a card by its name or by its figures.

    Names are "H100-80GB", "h200" and the like. Figures are written as in _CUSTOM: memory,
    arithmetic and bandwidth. A fourth figure, such as "450GB/s", is the bandwidth of the link to
    other GPUs. Raises ConfigError for anything else.
    """
    plain = re.sub(r"[\s_]", "", text).lower()
    figures = _FIGURES.fullmatch(plain)
    if figures:
        values = [float(figure) for figure in figures.groups("25")]
        if all(0 < value < 1e7 for value in values):
            return Card(text, *values)
    # "H100" alone is enough, unless the table has the model in two sizes
    fitting = [name for name in CARDS if name.lower().startswith(plain + "-")]
    fitting += [name for name in CARDS if name.lower() == plain]
    if len(fitting) == 1:
        return CARDS[fitting[0]]
    raise ConfigError(
        f"--gpu: no card {text!r}. Known are {', '.join(CARDS)}, "
        f"or give GiB, TFLOP/s and GB/s, all above 0, as in {_CUSTOM}"
    )


def host_bytes() -> int:
    """Returns the size of this host's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_cache_bytes() -> int:
    """Returns the largest size of one rank's KV cache on a CPU, in bytes.

    All ranks of a host together may use an eighth of its memory.
    """
    return host_bytes() // 8 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
