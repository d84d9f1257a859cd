"""Episodes: tools, environments and agents that answer the policy's turns.

Not here: the engine's loop, rewards of single turns. Imported only where `environment` is set.
"""
