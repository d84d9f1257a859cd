"""Tools and environments that come with the trainer, in TRL's form: Python, search, countdown.

Not here: who calls them (the drivers in episodes/). Imports config, files, rewards and data.
"""
