"""A dumped step once more, on the CPU: python -m grpo_spmd.replay RUN_DIR --step N.

Not here: anything that writes into the run folder.
Imports everything but parts and loop; nothing imports it.
"""
