"""Decides when a running proof is due and at which micro-batches it looks, and describes the
checks that section `proofs` of a config switches off or relaxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from grpo_spmd.records import MicroBatch

# Steps since the process began. The first step is trivial in many ways: a value head and adapters
# are zero, and policy and reference are equal. Two steps later none of this is true any more.
_EARLY = (0, 2)


class ProofSchedule:
    """The steps at which a proof is due: the first and the third of this process, and every
    `proofs.every_steps`."""

    def __init__(self, every_steps: int) -> None:
        """`every_steps` is `proofs.every_steps`. 0: only the first and the third step are due."""
        self._every_steps = every_steps
        self._first_step: int | None = None

    def is_early(self, step: int) -> bool:
        """Returns True in the first and the third step of the process. The first call must be made
        in the first step."""
        if self._first_step is None:
            self._first_step = step
        return step - self._first_step in _EARLY

    def is_due(self, step: int) -> bool:
        """Returns True if the proof is due in this step. The first call must be made in the first
        step."""
        is_early = self.is_early(step)
        return is_early or (self._every_steps > 0 and step % self._every_steps == 0)


def rows_to_check(rows: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Returns the first, the second and the last of a batch's micro-batches, each once.

    All ranks have the same number of micro-batches, so a check makes the same number of passes on
    every rank."""
    # The first row alone would not show that rows were given the scores of the row before them.
    return [rows[i] for i in sorted({0, min(1, len(rows) - 1), len(rows) - 1})]


# For each switch, what is no longer checked if it is false.
_SWITCHES = {
    "proofs.weights": "nothing compares the engine's weights with the policy's",
    "proofs.logprobs": "no difference between the engine's logprobs and the policy's stops the run",
    "proofs.update": "nothing compares the update with a plain recomputation",
    "proofs.signals": "nothing compares what teachers, critic and reward models give with plain "
    "forward passes",
}


def weakened_proofs(settings: Mapping[str, object]) -> Iterator[str]:
    """Returns an iterator over one sentence for each proof that is off or relaxed.

    `settings` has values by the config's keys, such as "proofs.update". A missing key, such as one
    that an older run did not record, counts as the default. They are logged at the start of a run
    and shown in its report."""
    for key, consequence in _SWITCHES.items():
        if settings.get(key) is False:
            yield f"{key} is false: {consequence}"
    factor = settings.get("proofs.bound_factor", 1.0)
    if factor != 1.0:
        yield (
            f"proofs.bound_factor is {factor}: the bounds of the checks of update and signals are "
            "multiplied by it"
        )
