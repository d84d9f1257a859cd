"""Codes of the errors that end an agent's episode, known on both sides of its endpoint."""

LIMITS = {
    "episode_max_turns": "max_turns",
    "episode_max_tokens": "max_tokens",
    "episode_max_all_tokens": "context_overflow",
}
"""To the status of the episode."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's."""
