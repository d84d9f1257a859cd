"""Checks the machine of a rank before the rank joins the others.

Without these checks, a fault of the machine would only show as an unwanted run on the CPU, or as a
hang.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address

import torch
from torch.distributed import Store

from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.load import gpus_are_hidden, num_gpus
from grpo_spmd.config.schema import WatchdogConfig
from grpo_spmd.distributed.processes import host_identity

_log = logging.getLogger("grpo_spmd")
_START_S_PER_RANK = 10.0
_RANKS_PER_NODE = 8


def rank_device(local_rank: int) -> torch.device:
    """Returns this rank's GPU, or the CPU if torch is not to use or cannot see any GPU.

    That is so if there are no GPUs, if an empty CUDA_VISIBLE_DEVICES hides them, or if torch is a
    build for the CPU. Raises ConfigError if a CUDA build of torch cannot use the GPUs, or if the
    node has fewer GPUs than ranks.
    """
    with warnings.catch_warnings():
        # If torch cannot use the driver, it warns and returns False. Our error below says why.
        warnings.simplefilter("ignore")
        is_usable = torch.cuda.is_available()
    if is_usable:
        num_devices = torch.cuda.device_count()
        if local_rank >= num_devices:
            raise ConfigError(
                f"rank {local_rank} of this node (counted from 0) has no GPU: torch sees "
                f"{num_devices}; start as many ranks, or look at CUDA_VISIBLE_DEVICES"
            )
        return torch.device("cuda", local_rank)
    if not num_gpus() or gpus_are_hidden():
        return torch.device("cpu")
    build = f"torch {torch.__version__}"
    if torch.version.cuda is None:
        if local_rank == 0:
            text = "this machine has %d GPUs, and %s is a build for the CPU: training there"
            _log.warning(text, num_gpus(), build)
        return torch.device("cpu")
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    raise ConfigError(
        f"this machine has {num_gpus()} GPUs, and {build} (CUDA {torch.version.cuda}) cannot use "
        f"them: {_why_not()}; look whether CUDA_VISIBLE_DEVICES={devices} names GPUs that are "
        "there, update the driver, or install a torch for it; CUDA_VISIBLE_DEVICES= trains on the "
        "CPU"
    )


def _why_not() -> str:
    """Returns why torch cannot use the GPUs: the first sentence of torch's own error."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0].split(". ")[0].rstrip(".")
    return "torch.cuda.is_available() says no, without a reason"


def with_time_to_start(watchdog: WatchdogConfig, world_size: int) -> WatchdogConfig:
    """Returns the watchdog's config with more time for phase "start", if ranks are more than 8.

    All ranks create vLLM's process groups one after another, and each rank compiles. If the user
    has set a limit for the phase, it stays.
    """
    more_ranks = max(0, world_size - _RANKS_PER_NODE)
    start_s = watchdog.timeout_s + _START_S_PER_RANK * more_ranks
    return replace(watchdog, phase_timeouts_s={"start": start_s, **watchdog.phase_timeouts_s})


def refuse_unreachable(store: Store, rank: int, world_size: int) -> None:
    """Collective. Raises ConfigError on a rank that ranks on other hosts cannot reach.

    gloo listens at the address to which the host's name resolves. If that is the loopback interface
    (127.0.1.1 in many Linux installations), all ranks would wait for each other until their time
    limits. The ranks compare their hosts through `store`.
    """
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size)):
        return
    store.set(f"host/{rank}", host_identity())
    address = None if os.environ.get("GLOO_SOCKET_IFNAME") else gloo_address()
    if address is None or not ip_address(address).is_loopback:
        return
    # If there are other hosts, the first or the last rank is on one of them. Two launchers on one
    # host are fine.
    hosts = {store.get(f"host/{peer}").decode() for peer in (0, world_size - 1)}
    if hosts != {host_identity()}:
        names = ", ".join(name for _, name in socket.if_nameindex() if name != "lo")
        raise ConfigError(
            f"the name of host {socket.gethostname()!r} leads to {address}, where ranks of other "
            "hosts cannot reach it: set GLOO_SOCKET_IFNAME to the network interface between the "
            f"hosts (this host has {names})"
        )


def gloo_address() -> str:
    """Returns the address at which torch's gloo listens if GLOO_SOCKET_IFNAME is not set.

    It is the first address of the host's name that can be bound, else the loopback address
    (ProcessGroupGloo.cpp of torch 2.11 to 2.13).
    """
    with suppress(OSError):
        host = socket.gethostname()
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind) as trial:
                trial.bind(address)
                return str(address[0]).partition("%")[0]
    return "127.0.0.1"


def check_setup() -> None:
    """Exits with code 2 if torch is a build for the CPU or cannot use this machine's GPUs.

    `launch/setup.sh gpu` calls it. A machine without GPUs passes: it may be a login node.
    """
    try:
        if torch.version.cuda is None:
            version = torch.__version__
            raise ConfigError(
                f"pip installed torch {version}, a build for the CPU: look at pip's indexes"
            )
        rank_device(0)
    except ConfigError as error:
        refuse(error)


if __name__ == "__main__":
    check_setup()
