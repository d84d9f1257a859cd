"""What sets families of models apart: which are refused and why, and what those that train need told apart.

Not here: vllm, and what every model needs.
Imports config and the rest of model/.
"""
