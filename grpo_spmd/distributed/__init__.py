"""What concerns ranks: session, collectives, the run's store, the hang doctor, preemption.

Not here: models, rollouts, files of the run. No other folder calls torch.distributed's collectives.
Imports config, records and files.
"""
