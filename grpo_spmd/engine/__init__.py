"""The engine: vLLM in this process, the policy's weights in it, and the proof that they arrived.

Not here: rewards, the loss, files. No other folder imports vllm.
Imports everything up to observe.
"""
