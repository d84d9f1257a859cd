"""Runs model-written code in an isolated process.

sandbox.py starts the process and judges its results; jail.py is what the process runs, and imports
the standard library only.
Imports only files from the rest of the package.
"""
