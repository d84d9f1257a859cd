"""Servers that gave rewards of a recorded step are not asked again unless it is said so: they cost, and may be gone."""

from __future__ import annotations

from grpo_spmd.replay.read import RecordedStep


def unasked_rewards(recorded: RecordedStep) -> list[str]:
    """Names of the rewards whose servers are not to be asked; none with --ask-servers."""
    return (
        [] if recorded.asks_servers else [each.shown_name for each in recorded.config.rewards if each.url is not None]
    )


def note_of(unasked: list[str]) -> str:
    names = ", ".join(unasked)
    return f"rewards are those that the run recorded: servers, which were not asked (--ask-servers), gave {names}"
