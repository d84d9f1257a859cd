"""How transformers' models are built, which are refused and why, and what logits some change.

Not here: vllm, and what every model needs.
Imports config and the rest of model/.
"""
