"""Model-written code in a closed process.

sandbox.py judges from outside; jail.py is the process, the standard library alone.
Imports files alone.
"""
