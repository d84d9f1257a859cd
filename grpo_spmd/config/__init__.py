"""The config: every key with its default, bounds and meaning; reading, checking and printing it.

Nothing here reads a file of the user other than the YAML, uses torch or starts a process.
This room imports no other room of the package.
"""
