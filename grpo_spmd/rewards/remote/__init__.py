"""Rewards that a server gives: what it is sent, what of its answers is taken, a judge's prompt and score.

A request is one connection, made in a worker of the pool, which bounds its time; pool/call_limits.py makes it again.
Imports config, the protocol and the verifiers' readers of numbers. Imported only where a reward has a url.
"""
