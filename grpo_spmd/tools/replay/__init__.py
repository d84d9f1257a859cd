"""`python -m grpo_spmd.replay RUN_DIR --step N` repeats a dumped step on the CPU.

Not here: anything that writes into the run folder.
Imports every room below tools/ but loop; nothing imports it.
"""
