"""Episodes: tools, environments and agents that answer what the policy writes.

Not here: the engine's loop, rewards of single turns.
Imported only where `environment` is set.
"""
