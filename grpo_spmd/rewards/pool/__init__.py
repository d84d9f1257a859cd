"""Worker processes: a deadline for each call, a hard kill, exact counts.

processes.py is the rank's side, for rewards in pool.py; nursery.py, started by exec, and worker.py
have no torch. Imports config, records, the doctor and the protocol.
"""
