"""Time and memory: of starts, phases and whole steps, ours beside the plain way or beside TRL."""
