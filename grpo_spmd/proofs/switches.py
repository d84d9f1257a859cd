"""Describes, in sentences, the checks that section `proofs` of a config switches off or relaxes.

They are logged at the start of a run and shown in its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
    that an older run did not record, counts as the default."""
    for key, consequence in _SWITCHES.items():
        if settings.get(key) is False:
            yield f"{key} is false: {consequence}"
    factor = settings.get("proofs.bound_factor", 1.0)
    if factor != 1.0:
        yield (
            f"proofs.bound_factor is {factor}: the bounds of the checks of update and signals are "
            "multiplied by it"
        )
