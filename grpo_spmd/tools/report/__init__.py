"""The command `python -m grpo_spmd.report`: one HTML file about a run, without network or server.

Not here: torch, vllm, and the readers of a run folder's files, which are in observe/.
Imports rooms below tools/.
"""
