"""The keys of section `proofs` that switch a check off or relax it, in words.

A run says them at its start, and its report as long as one reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# What nothing looks at any more if the switch is false.
_SWITCHES = {
    "proofs.weights": "nothing compares the engine's weights with the policy's",
    "proofs.logprobs": "no difference between the engine's logprobs and the policy's stops the run",
    "proofs.update": "nothing compares the update with a plain recomputation",
    "proofs.signals": "nothing compares what teachers, critic and reward models give with plain "
    "forward passes",
}


def weakened_proofs(settings: Mapping[str, object]) -> Iterator[str]:
    """Returns an iterator over one sentence for each proof that is off or relaxed.

    `settings` has values by the config's keys, such as "proofs.update". A key that is missing, as
    in the folder of an older run, has its default."""
    for key, consequence in _SWITCHES.items():
        if settings.get(key) is False:
            yield f"{key} is false: {consequence}"
    factor = settings.get("proofs.bound_factor", 1.0)
    if factor != 1.0:
        yield (
            f"proofs.bound_factor is {factor}: the checks of update and signals have bounds that "
            "are as many times wider"
        )
