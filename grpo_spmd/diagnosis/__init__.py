"""What is wrong with a run that is alive: causes and symptoms, read from its run folder.

Not here: torch, the training itself, pages and terminals.
Imports config, files, records, proofs, observe and checkpoint.
"""
