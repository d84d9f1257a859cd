"""Tools and environments that come with the trainer, by TRL's protocol: Python, search, the game of countdown.

Not here: who calls them (rollout/environments/).
Imports rewards/ and data/.
"""
