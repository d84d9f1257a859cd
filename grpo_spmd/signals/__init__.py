"""Training signals other than reward functions: teachers and critics, each with its running check and its opening.

Not here: vllm, torch's collectives, the reward functions themselves, the phases of a step.
Imports config, records, distributed, data, model, rewards, learn, proofs, engine, episodes, rollout and checks.
"""
