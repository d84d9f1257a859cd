"""Opens what teaches beside the rewards, where the config asks for it; else nothing of it is even imported."""

from __future__ import annotations

from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.signals import Signal, Signals
from grpo_spmd.model.policy import Policy


def open_signals(config: Config, policy: Policy, session: Session) -> Signals:
    """Collective. Teachers and critic of the run, with their models built."""
    signals: list[Signal] = []
    return Signals(signals)
