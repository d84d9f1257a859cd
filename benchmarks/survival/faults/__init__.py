"""Runs of two ranks under kills, damage, full disks and hangs, judged against a run that nobody
touched."""
