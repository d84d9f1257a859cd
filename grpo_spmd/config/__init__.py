"""The config: every key with its default, bounds and meaning; reading, checking and printing it.

Not here: anything that needs a file other than the YAML, torch or a process.
Imports nothing of the package.
"""
