"""Episodes: conversations of the policy with tools, environments and agents.

Not here: the engine's generation loop, rewards for completions without an environment.
Imported only if the config sets `environment`; chat_format also serves judges and reward models.
"""
