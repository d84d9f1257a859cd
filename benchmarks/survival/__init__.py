"""What a run lives through: kills, damage, full disks, the life of a Slurm job."""
