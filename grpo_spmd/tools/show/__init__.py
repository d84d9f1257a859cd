"""`python -m grpo_spmd.show`: a run in a terminal.

Not here: torch, vllm; how a run folder is read, which is in report/ and observe/.
Imports what stands below it.
"""
