"""The command `python -m grpo_spmd.show`: a run, its steps and completions in the terminal.

Not here: torch, vllm, the layout of text (tools/terminal.py), the reading of a run and its verdict
(diagnosis/). Imports rooms below tools/, and tools/report/ for the texts of tokens.
"""
