"""Models, tokenizers, prompts and an environment for the demos, from a seed and without a download.

Not here: anything that a run without a demo needs.
Imports config/, distributed/ and rewards/.
"""
