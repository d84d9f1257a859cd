"""The commands other than training: report, show, replay, checkup, plan, export, eval, prefetch,
port and GRPO on one page (small). Not here: anything that a training run imports.
`python -m grpo_spmd.report` finds tools/report since this folder is on the package's path. Imports
every room below it; only cli.py runs what is here.
"""
