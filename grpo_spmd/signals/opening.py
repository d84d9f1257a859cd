"""Opens the teachers and the critic that the config asks for. A signal that is off is not even
imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import StopCheck, ValueHead
from grpo_spmd.model.offload import OffloadableModel
from grpo_spmd.model.policy import Policy
from grpo_spmd.proofs.update_check import SignalProofs, UpdateCheckSettings
from grpo_spmd.records import Decision, Prompt, RolloutBatch

if TYPE_CHECKING:
    from grpo_spmd.signals.critic import Critic
    from grpo_spmd.signals.teacher import Teacher


class Signal(Protocol):
    """A training signal for single tokens, besides the rewards. Every call is collective."""

    @property
    def offloadable_models(self) -> Sequence[OffloadableModel]:
        """The signal's own models, each with its optimizer. They wait in host memory while the
        engine is awake."""
        ...

    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Write the signal into the micro-batches, before the first update of the step. Returns the
        decision with the signal's metrics added on rank 0."""
        ...

    def update(self, batch: RolloutBatch) -> Reductions:
        """Train the signal's own model on the batch, after the policy's update. Returns this rank's
        metrics."""
        ...

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        """Returns the signal's contribution to the running check of the update."""
        ...


@dataclass(frozen=True)
class Signals:
    """The signals of a run. Without any, its methods do nothing."""

    critic: Critic | None = None
    teacher: Teacher | None = None

    @property
    def _active(self) -> list[Signal]:
        """The signals that are on. The critic comes first: it replaces advantages that a teacher
        then adjusts."""
        # The order in which they attach and update.
        return [signal for signal in (self.critic, self.teacher) if signal is not None]

    @property
    def value_head(self) -> ValueHead | None:
        """The critic, if its head is on the policy's layers and learns in the policy's update."""
        return self.critic.value_head if self.critic is not None else None

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        """As Signal.offloadable_models, of all signals."""
        return [model for signal in self._active for model in signal.offloadable_models]

    def freezes_policy(self, step: int) -> bool:
        """True in the first steps of a run in which only the critic learns
        (critic.warmup_steps)."""
        return self.critic is not None and step <= self.critic.warmup_steps

    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Collective. As Signal.attach, of all signals."""
        for signal in self._active:
            decision = signal.attach(batch, decision, stop_check)
        return decision

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. As Signal.update, of all signals."""
        metrics: Reductions = {}
        for signal in self._active:
            metrics |= signal.update(batch)
        return metrics

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        """As Signal.proofs, of all signals together."""
        proofs = [signal.proofs(settings) for signal in self._active]
        return SignalProofs(
            checks=[check for proof in proofs for check in proof.checks],
            # A run has at most one teacher signal and one value head.
            make_teacher=next((p.make_teacher for p in proofs if p.make_teacher), None),
            values=next((p.values for p in proofs if p.values), None),
        )


def open_signals(
    config: Config,
    policy: Policy,
    session: Session,
    reference: object = None,
    prompt_at: Callable[[int], Prompt] | None = None,
    tokenizer: Any = None,
) -> Signals:
    """Collective. Builds the models of the run's critic and teachers.

    `prompt_at` returns the prompt at a position of the prompt stream. Raises ConfigError.
    """
    critic = open_critic(config, policy, session)
    teacher = open_teacher(config, policy, session, reference, prompt_at, tokenizer)
    return Signals(critic=critic, teacher=teacher)


def open_critic(config: Config, policy: Policy, session: Session) -> Critic | None:
    """Collective. Returns the critic, or None if the config has none. Raises ConfigError for a
    model that cannot be one."""
    if config.critic.path is None:
        return None
    # Each kind is imported only here, and only if it is on.
    if config.critic.is_on_policy:
        from grpo_spmd.signals.policy_critic import open_policy_critic

        return open_policy_critic(config, policy, session)
    from grpo_spmd.signals.critic import open_own_critic

    return open_own_critic(config, policy, session)


def open_teacher(
    config: Config,
    policy: Policy,
    session: Session,
    reference: object,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> Teacher | None:
    """Collective. Returns the teachers as one signal, or None if the config has none. Raises
    ConfigError."""
    if not config.teacher.is_on:
        return None
    if config.teacher.url:
        from grpo_spmd.signals.served_teacher import open_served_teacher

        return open_served_teacher(config, policy, session, prompt_at, tokenizer)
    from grpo_spmd.signals.teacher import open_model_teacher

    return open_model_teacher(config, policy, session, reference, prompt_at, tokenizer)
