"""`python -m grpo_spmd.report`: a run, or several, as one HTML file that needs no network and no server.

Not here: torch, vllm, anything that a run does. What a run records is written and read in observe/.
Imports what stands below it.
"""
