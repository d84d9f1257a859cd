"""What must be right with a machine before its rank joins the others, and otherwise comes to light as a run on the CPU
that nobody asked for, or as a hang."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import torch
from torch.distributed import Store

from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.load import gpus_are_hidden, num_gpus
from grpo_spmd.config.schema import WatchdogConfig

_log = logging.getLogger("grpo_spmd")
_START_S_A_RANK = 10.0


def rank_device(local_rank: int) -> torch.device:
    """The GPU of this rank, or the CPU where the machine has none, or where they are hidden (CUDA_VISIBLE_DEVICES= ).
    Raises ConfigError: there are GPUs, and torch cannot use them, or there are fewer than ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch only warns, and says False
        is_usable = torch.cuda.is_available()
    if is_usable:
        if local_rank >= (found := torch.cuda.device_count()):
            ranks = f"rank {local_rank} of this node (counted from 0) has no GPU"
            raise ConfigError(
                f"{ranks}: torch sees {found}; start as many ranks, or look at CUDA_VISIBLE_DEVICES"
            )
        return torch.device("cuda", local_rank)
    if num_gpus() and not gpus_are_hidden():
        build = f"torch {torch.__version__}"
        if torch.version.cuda is None:
            if local_rank == 0:
                _log.warning(
                    "this machine has %d GPUs, and %s is a build for the CPU: training there",
                    num_gpus(),
                    build,
                )
            return torch.device("cpu")
        what = f"this machine has {num_gpus()} GPUs{_driver()}, and {build} (CUDA {torch.version.cuda}) cannot use them"
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        look = (
            f"look whether CUDA_VISIBLE_DEVICES={named} names GPUs that are there, "
            if named
            else ""
        )
        remedy = f"{look}update the driver, or install a torch for it; CUDA_VISIBLE_DEVICES= trains on the CPU"
        raise ConfigError(f"{what}: {_why_not()}; {remedy}")
    return torch.device("cpu")


def _driver() -> str:
    with suppress(OSError, IndexError):
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        numbers = [word for word in line.split() if word[0].isdigit() and "." in word]
        return f" with driver {numbers[0]}"
    return ""


def _why_not() -> str:
    """Torch's own reason, in a sentence."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
    return "torch.cuda.is_available() says no, without a reason"


def with_time_to_start(watchdog: WatchdogConfig, world_size: int) -> WatchdogConfig:
    """The limits, with more time for phase start where there are more ranks than a node has, unless it was given: all
    ranks make vLLM's groups one after another, and each compiles."""
    start_s = watchdog.timeout_s + _START_S_A_RANK * max(0, world_size - 8)
    return replace(watchdog, phase_timeouts_s={"start": start_s, **watchdog.phase_timeouts_s})


def refuse_unreachable(store: Store, rank: int, world_size: int) -> None:
    """Collective. Raises ConfigError where ranks of other hosts could not reach this one: gloo listens where the name
    of the host leads, and a name that leads to the loopback interface (127.0.1.1 of many Linux installations) has all
    ranks wait for each other until their limits are over."""
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
        return
    store.set(f"host/{rank}", host_identity())
    address = None if os.environ.get("GLOO_SOCKET_IFNAME") else gloo_address()
    if address is None or not ip_address(address).is_loopback:
        return
    # One from the far end: rank 0's host, or for those on it the last rank's. Two launchers on one host are let be.
    others = {store.get(f"host/{other}").decode() for other in (0, world_size - 1)}
    if others != {host_identity()}:
        names = [name for _, name in socket.if_nameindex() if name != "lo"]
        there = f" (this host has {', '.join(names)})" if names else ""
        where = f"the name of host {socket.gethostname()!r} leads to {address}, where ranks of other hosts cannot reach it"
        raise ConfigError(
            f"{where}: set GLOO_SOCKET_IFNAME to the network interface between the hosts{there}"
        )


def gloo_address() -> str:
    """Where torch's gloo listens if GLOO_SOCKET_IFNAME is not set: at the first address of this host's name that it can
    bind, else at the loopback interface (ProcessGroupGloo.cpp of torch 2.11 to 2.13)."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            socket.gethostname(), 0, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(address)
                return str(address[0]).partition("%")[0]
    return "127.0.0.1"


def host_identity() -> str:
    """Of this boot of the kernel and this network: the same for all processes that a loopback address joins."""
    boot, network = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {boot} {network}"


def check_setup() -> None:
    """Of launch/setup.sh gpu: a login node may have no GPU, but torch must be a build for one. Exits with 2 if not."""
    try:
        if torch.version.cuda is None:
            raise ConfigError(
                f"pip installed torch {torch.__version__}, a build for the CPU: look at pip's indexes"
            )
        rank_device(0)
    except ConfigError as error:
        refuse(error)


if __name__ == "__main__":
    check_setup()
