"""What of the trainer waits in host memory while the engine is awake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from grpo_spmd.model.parked import HostStorages, held_bytes, optimizer_state

_GIB = 2**30
Beside = tuple[nn.Module, torch.optim.Optimizer | None]


class HostOffload:
    """Moves to host memory while the engine is awake: nothing, the optimizer's state, or all of the trainer; and always
    the models that teach beside the rewards. Forward passes and optimizer steps raise while what they need is away, and
    so does policy.hf_named_parameters."""

    def __init__(
        self,
        what: bool | Literal["optimizer"],
        policy: nn.Module,
        reference: object,
        optimizer: torch.optim.Optimizer,
        beside: Sequence[Beside] = (),
    ) -> None:
        """`reference`: a model of its own; anything else is the policy with its adapters off, or none. `beside`: models
        of their own that are needed only while the engine sleeps (teachers, a critic), each with its optimizer."""
        self._what, self._policy, self._optimizer = what, policy, optimizer
        self._reference = reference if isinstance(reference, nn.Module) else None
        self._beside, self._storages = list(beside), HostStorages()
        models = [] if what is False else [policy] if self._reference is None else [policy, self._reference]
        for model in [*models, *(model for model, _ in self._beside)]:
            # before FSDP's own hook, which would gather from the empty storage
            model.register_forward_pre_hook(lambda *_: self._refuse_if_away(), prepend=True)
        for stepped in [*([optimizer] if what is not False else ()), *(own for _, own in self._beside if own)]:
            stepped.register_step_pre_hook(lambda *_: self._refuse_if_away())

    def before_sync(self) -> None:
        """What the sync does not read makes room for the engine's weights: the optimizer's state, the reference, models
        beside the policy."""
        if self._what is not False:
            self._storages.move_out("optimizer", optimizer_state(self._optimizer))
        if self._what is True and self._reference is not None:
            self._storages.move_out("reference", list(self._reference.parameters()))
        for number, (model, optimizer) in enumerate(self._beside):
            self._storages.move_out(f"beside.{number}", list(model.parameters()))
            if optimizer is not None:
                self._storages.move_out(f"beside.{number}.optimizer", optimizer_state(optimizer))

    def after_sync(self) -> None:
        """The policy has been gathered, and makes room for the KV cache."""
        if self._what is True:
            self._storages.move_out("policy", list(self._policy.parameters()))

    def to_device(self) -> dict[str, float]:
        """The engine sleeps: everything comes back. Returns `memory/host/offloaded_gib`, what had been away."""
        return {"memory/host/offloaded_gib": self._storages.bring_back() / _GIB}

    @property
    def held_bytes(self) -> int:
        """What policy, reference and optimizer take on the device now, and models beside them; with the copies on a
        CPU, its own host."""
        tensors: list[Tensor] = [*self._policy.parameters(), *optimizer_state(self._optimizer)]
        if self._reference is not None:
            tensors += self._reference.parameters()
        for model, optimizer in self._beside:
            tensors += [*model.parameters(), *(optimizer_state(optimizer) if optimizer is not None else ())]
        return held_bytes(tensors, self._storages)

    def _refuse_if_away(self) -> None:
        if away := self._storages.num_away:
            where = f"are in host memory (model.offload: {self._what}); HostOffload.to_device comes first"
            raise RuntimeError(f"{away} tensors of policy, reference or optimizer {where}")
