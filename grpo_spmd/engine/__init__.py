"""The engine: vLLM in this process, the sync of the policy's weights, and the proof of the sync.

Not here: rewards, the loss, files. No other folder imports vllm.
Imports everything up to observe.
"""
