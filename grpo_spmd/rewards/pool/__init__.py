"""Worker processes for rewards: time limits for calls, a hard kill, exact counts of failures.

pool.py scores rewards through processes.py, which is the rank's side. nursery.py, a process that is
started by exec, forks the workers (worker.py); neither has torch.
Imports config, files, records, distributed (doctor.py, processes.py) and the rest of rewards/.
"""
