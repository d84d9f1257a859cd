"""Worker processes: a deadline for each call, a hard kill, exact counts of errors and timeouts.

pool.py scores rewards through processes.py, the rank's side. nursery.py, a process started by exec,
forks the workers (worker.py); neither has torch. Imports config, records,
the doctor and the protocol.
"""
