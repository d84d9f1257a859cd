"""What the demos train, from a seed and without a download: tiny models, tokenizers, prompts, an environment.

Nothing that a run needs without a demo.
Imports config/, distributed/ and rewards/.
"""
