"""Clients of servers that give rewards or a teacher's logprobs, and the prompt of a judge.

A request is one connection, in a worker of the pool or a thread, which bounds its time;
pool/call_limits.py repeats it. Imports config, the protocol and the verifiers' readers of numbers.
Imported only where a reward or a teacher has a url.
"""
