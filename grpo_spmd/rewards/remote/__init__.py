"""Clients of servers that give rewards or a teacher's logprobs, and the prompt of a judge.

Each request opens one connection, in a worker of the pool or a thread, whose time is limited;
pool/call_limits.py tries it again. Imports config, the protocol, and of the verifiers the functions
that parse numbers.
Imported only where a reward or a teacher has a url.
"""
