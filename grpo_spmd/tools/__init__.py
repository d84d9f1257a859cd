"""The commands beside training: report, show, replay, checkup, plan, export, prefetch, port (its
reader of scripts is scripts.py) and GRPO on one page (small). Not here: anything that a training
run imports. `python -m grpo_spmd.report` finds tools/report by the package's path. Imports every
room below it; no room imports this one but cli.py.
"""
