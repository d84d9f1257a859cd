"""The engine gives back what it took: what is left in use after its sleep must not grow over the run."""

from __future__ import annotations

import logging

import torch

from grpo_spmd.observe.memory import MemoryUse, total_bytes

_log = logging.getLogger("grpo_spmd")
_GIB = 2**30


class SleepCheck:
    def __init__(self, device: torch.device, growth_bytes: int | None = None, tp_size: int = 1) -> None:
        """`growth_bytes`: of what growth to warn; None: 5 % of the device, at least 1 GiB."""
        self._device, self._tp_size = device, tp_size
        self._growth = max(_GIB, total_bytes(device) // 20) if growth_bytes is None else growth_bytes
        self._least: int | None = None
        self._alarmed = 0

    def check(self, before: MemoryUse, after: MemoryUse, held_bytes: int) -> dict[str, float]:
        """Warn where one sleep leaves too much, and again for each further growth as large. Returns
        `memory/sleep/freed_gib`, and `memory/sleep/left_gib`: in use after it, less `held_bytes`.
        `held_bytes` is what policy, reference and optimizer hold (HostOffload.held_bytes), which changes for good
        reasons, as when the first update makes the optimizer's state."""
        freed, left = self._used(before) - self._used(after), self._used(after) - held_bytes
        self._least = left if self._least is None else min(self._least, left)
        if left - max(self._least, self._alarmed) > self._growth:
            self._alarmed = left
            text = (
                "memory grows: %.2f GiB in use after the engine's sleep, beyond what policy, reference and optimizer "
                "hold, where it was %.2f GiB at the least (alarm at +%.2f GiB); the sleep freed %.2f GiB. %s"
            )
            sizes = (size / _GIB for size in (left, self._least, self._growth, freed))
            _log.warning(text, *sizes, self._parts(after, held_bytes))
        return {"memory/sleep/freed_gib": freed / _GIB, "memory/sleep/left_gib": left / _GIB}

    def _used(self, use: MemoryUse) -> int:
        return use.driver_used if self._device.type == "cuda" else use.allocated

    def _parts(self, after: MemoryUse, held_bytes: int) -> str:
        if self._device.type != "cuda":
            return "Likely something keeps tensors or texts of earlier steps alive"
        own, cached = (after.allocated - held_bytes) / _GIB, (after.reserved - after.allocated) / _GIB
        with_tp = " with rollout.engine.disable_custom_all_reduce=true" if self._tp_size > 1 else ""
        return (
            f"Tensors of torch: {own:.2f} GiB (weights that the engine keeps outside its pool, or tensors of earlier "
            f"steps kept alive); cached by torch: {cached:.2f} GiB (fragmentation: try PYTORCH_ALLOC_CONF="
            f"expandable_segments:True{with_tp}); outside torch: {after.other / _GIB:.2f} GiB (a pool not given back: "
            "try another version of vLLM; CUDA graphs, NCCL, another process)"
        )
