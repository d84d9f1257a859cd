"""Clients of servers that return rewards or a teacher's logprobs, and the prompt of a judge.

Each request opens its own connection, in a pool worker or a thread whose time is limited;
pool/call_limits.py repeats a request that failed. Imported only if a reward or teacher has a url.
Imports config, data, files, the pool's call limits, and the errors of rewards/trl.py.
"""
