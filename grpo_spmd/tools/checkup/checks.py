"""All checks that one machine, or one rank, makes by itself, in the order in which they are shown: the quick first."""

from __future__ import annotations

from grpo_spmd.tools.checkup import devices, disk, memory, network, versions
from grpo_spmd.tools.checkup.results import Check

CHECKS = (
    Check("python", "versions", versions.look_at_python, of="rank"),
    Check("packages", "versions", versions.look_at_packages, of="rank"),
    Check("torch's build", "versions", versions.look_at_build, of="rank"),
    Check("tested set", "versions", versions.look_at_tested_set),
    Check("torchrun", "versions", network.look_at_torchrun),
    Check("GPUs", "devices", devices.look_at_gpus, 20.0),
    Check("topology", "devices", devices.look_at_links, 10.0),
    Check("memory", "memory", memory.look_at_memory),
    Check("swap", "memory", memory.look_at_swap),
    Check("/dev/shm", "memory", memory.look_at_shm),
    Check("threads", "memory", memory.look_at_cores, of="rank"),
    Check("ulimit", "memory", memory.look_at_limits, of="rank"),
    Check("run_dir", "disk", disk.look_at_run_dir, 20.0),
    Check("/tmp", "disk", disk.look_at_temporary),
    Check("environment", "network", network.look_at_environment, of="rank"),
    Check("host name", "network", network.look_at_name, 10.0),
    Check("port", "network", network.look_at_port),
    Check("hub", "network", network.look_at_hub),
    Check("job", "network", network.look_at_slurm, 25.0, of="run"),
    Check("sandbox", "config", devices.look_at_isolation, 15.0),
    Check("--check", "config", devices.look_at_config, devices.CHECK_S + 5),
    Check("planner", "config", devices.look_at_plan, devices.PLAN_S + 20, of="run"),
)
