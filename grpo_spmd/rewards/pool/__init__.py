"""Worker processes: a deadline for each call, a hard kill, exact counts.

pool.py is the rank's side; worker.py the nursery and its workers, started by exec, without torch.
Imports config, records, the doctor and the protocol.
"""
