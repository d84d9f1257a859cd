"""The table of GPUs by name: memory, arithmetic and bandwidth. Imports no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from grpo_spmd.config.errors import ConfigError

_CUSTOM = "80GiB,989TFLOPS,3350GB/s"


@dataclass(frozen=True)
class Card:
    """One GPU. All figures are ceilings: what is computed from them is an estimate."""

    name: str
    gib: float
    """What the driver tells a process before any context; a little less than the nominal figure."""
    tflops: float
    """Dense bfloat16 products with float32 sums, 1e12/s."""
    memory_gb_s: float
    link_gb_s: float
    """To the other GPUs of a node, in one direction."""
    host_gb_s: float = 25.0
    """To and from pinned host memory; PCIe 4 x16 reaches about 25 of its 32."""


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
# Sold under other names with the same arithmetic, by a part of what the driver calls them.
_ALIKE = {
    "H800": "H100-80GB",
    "GH200": "H200-141GB",
    "A800": "A100-80GB",
    "RTX 4090": "RTX4090-24GB",
}


def peak_tflops(device_name: str) -> float | None:
    """Of the device that the driver calls so ("NVIDIA H100 80GB HBM3"); None where it is not in the
    table."""
    pieces = {card.name.partition("-")[0]: card.tflops for card in CARDS.values()}
    pieces |= {piece: CARDS[name].tflops for piece, name in _ALIKE.items()}
    return next(
        (pieces[piece] for piece in sorted(pieces, key=len, reverse=True) if piece in device_name),
        None,
    )


def find_card(text: str) -> Card:
    """A card by name ("H100-80GB", "h200", "A100"), or by figures as in _CUSTOM, in which a fourth,
    "450GB/s", is the link to other GPUs. Raises ConfigError."""
    plain = re.sub(r"[\s_]", "", text).lower()
    if "," in plain or plain.endswith("gib"):
        return _custom(text, plain.split(","))
    names = {name.lower(): card for name, card in CARDS.items()}
    fitting = [
        card for name, card in names.items() if name == plain or name.partition("-")[0] == plain
    ]
    if plain == "a100":
        raise ConfigError("--gpu: A100 is sold with 40 and with 80 GB; say A100-40GB or A100-80GB")
    if fitting:
        return fitting[0]
    close = difflib.get_close_matches(plain, names, n=1)
    hint = f"; did you mean {names[close[0]].name}?" if close else "."
    raise ConfigError(
        f"--gpu: no card {text!r}{hint} Known are {', '.join(CARDS)}, or give figures: {_CUSTOM}"
    )


def _custom(text: str, pieces: list[str]) -> Card:
    units = ("gib", "tflops", "gb/s", "gb/s")
    if not 3 <= len(pieces) <= 4 or not all(
        piece.endswith(unit) for piece, unit in zip(pieces, units, strict=False)
    ):
        raise ConfigError(
            f"--gpu: {text!r} is not GiB, TFLOP/s and GB/s of a card, as in {_CUSTOM}"
        )
    try:
        values = [
            float(piece.removesuffix(unit)) for piece, unit in zip(pieces, units, strict=False)
        ]
    except ValueError:
        raise ConfigError(
            f"--gpu: {text!r} has a figure that is no number; write {_CUSTOM}"
        ) from None
    if not all(0 < value < 1e7 for value in values):
        raise ConfigError(f"--gpu: {text!r} has a figure that is not above 0; write {_CUSTOM}")
    gib, tflops, memory, *link = values
    return Card(text, gib, tflops, memory, link[0] if link else 25.0)
