"""Checks host name, port, hub, launcher and environment, and the time left to a Slurm job."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from grpo_spmd.data.hub import ask, is_offline
from grpo_spmd.distributed.processes import seconds_left
from grpo_spmd.tools.checkup.results import (
    Result,
    Target,
    bad,
    join_items,
    ok,
    rated,
    warning,
)

_DEFAULT_PORT = "29500"  # torchrun's
_SHORT_S = 600.0  # less time than this left to a job is a warning
# Variables whose values are not shown.
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL", re.IGNORECASE)
# Variables that must be the same on all ranks.
_REPORTED = re.compile(
    r"(OMP_NUM_THREADS|(NCCL|GLOO|HF|VLLM|PYTORCH|TORCH|CUDA|FI|UCX|TRITON|TOKENIZERS)_\w+"
    r"|LD_LIBRARY_PATH)"
)
# Except these, which differ from rank to rank.
_RANK_SPECIFIC = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC", "TORCH_ELASTIC")
# Variables that slow ranks down: the value that does, and its effect.
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by another"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through host memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a node talk through sockets"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over TCP"),
    "TORCH_COMPILE_DISABLE": ("1", "nothing is compiled"),
    "VLLM_ENFORCE_EAGER": ("1", "no CUDA graphs"),
}


def check_host_name(target: Target) -> Iterator[Result]:
    """Checks that other hosts can connect to gloo and NCCL on this one.

    The network interfaces that variables name must exist, and the host's name, which gloo uses by
    default, must have an address that others can reach."""
    interfaces = [name for _, name in socket.if_nameindex()]
    # NCCL accepts the beginning of a name, gloo only the whole name.
    for variable, matches in (
        ("GLOO_SOCKET_IFNAME", str.__eq__),
        ("NCCL_SOCKET_IFNAME", str.startswith),
    ):
        for entry in filter(None, target.environ.get(variable, "").split(",")):
            wanted = entry.lstrip("=").partition(":")[0]
            # "^" excludes an interface, so it need not exist.
            if entry[0] != "^" and not any(matches(name, wanted) for name in interfaces):
                yield bad(
                    "interface",
                    f"{variable} names {wanted}, but this host has {join_items(interfaces)}",
                    f"export {variable}=... (ip -br address shows them)",
                )
    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        yield warning(
            "host name",
            f"the name of this host, {name}, has no address ({error.strerror or error})",
            f"echo '127.0.1.1 {name}' >>/etc/hosts, or GLOO_SOCKET_IFNAME",
        )
        return
    addresses = sorted({str(entry[4][0]).partition("%")[0] for entry in entries})
    finding = f"{name} has the address {join_items(addresses)}"
    # If it has only loopback addresses, ranks of other hosts cannot connect to gloo here.
    is_loopback = all(ip_address(address).is_loopback for address in addresses)
    has_other_hosts = target.is_launched and target.num_ranks > target.local_ranks
    if is_loopback and has_other_hosts and "GLOO_SOCKET_IFNAME" not in target.environ:
        yield bad(
            "host name",
            f"{finding}, which ranks of other hosts cannot reach",
            f"export GLOO_SOCKET_IFNAME=... ({join_items(interfaces)})",
        )
    else:
        yield ok("host name", finding)


def check_port(target: Target) -> Iterator[Result]:
    """Checks that the port where ranks would meet is free. Launched ranks already use it."""
    if target.is_launched or target.environ.get("TORCHELASTIC_RUN_ID"):
        return
    variable = target.environ.get("MASTER_PORT") or target.environ.get("PET_MASTER_PORT")
    text = variable or _DEFAULT_PORT
    remedy = "MASTER_PORT, or torchrun --master-port or --standalone, takes another port"
    try:
        with socket.socket() as trial:
            # A port that a finished run still holds in the state TIME_WAIT counts as free, since
            # ranks can use it.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # -1 raises OverflowError, while 0 would stand for any free port.
            trial.bind(("", int(text) or -1))
    except (ValueError, OverflowError):
        yield bad("port", f"MASTER_PORT={text!r} is no port from 1 to 65535", remedy)
    except OSError as error:
        finding = f"port {text} is in use{_find_listener(int(text))} ({error.strerror})"
        yield (bad if variable else warning)("port", finding, remedy)
    else:
        yield ok("port", f"port {text} is free")


def _find_listener(port: int) -> str:
    """Returns which process listens at the port, as " by process PID (COMMAND)".

    Returns "" if that cannot be told, since the process belongs to another user."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            if is_listener and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by process {connection.pid} ({command[:60]})"
    return ""


def check_hub(target: Target) -> Iterator[Result]:
    """Checks whether the Hugging Face hub answers, unless HF_HUB_OFFLINE is set."""
    if is_offline():
        yield ok("hub", "HF_HUB_OFFLINE is set: nothing is asked; model and data must be here")
        return
    endpoint = target.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    status, text = ask(f"{endpoint}/api/models?limit=1")
    config = target.config
    # Without a config, the hub counts as needed.
    sources = [config.data.train, *config.data.eval_sets.values()] if config else ["hub:"]
    is_local = not any(str(source).startswith("hub:") for source in sources)
    # A status such as 401 or 404 is an answer too.
    if status is not None and status < 500:
        yield ok("hub", f"{endpoint} answers")
    elif is_local and config and Path(config.model.path).is_dir():
        yield ok("hub", f"{endpoint} gives no answer, and model and data of the config are local")
    else:
        yield warning(
            "hub",
            f"{endpoint} gives no answer ({text or status})",
            "python -m grpo_spmd.prefetch where there is network, and HF_HUB_OFFLINE=1 here",
        )


def check_torchrun(target: Target) -> Iterator[Result]:
    """Checks that the torchrun on PATH starts the Python of this environment."""
    if target.is_launched or target.environ.get("TORCHELASTIC_RUN_ID"):
        return
    path = shutil.which("torchrun", path=target.environ.get("PATH"))
    if path is None:
        yield ok("torchrun", "not on PATH; grpo-spmd train does not need it")
        return
    with open(path, "rb") as file:
        line = file.readline(512).decode(errors="replace").strip()
    # Only an absolute path in the first line tells which Python it starts; `env python3` does not.
    interpreter = re.fullmatch(r"#!\s*(/\S*/python[\d.]*)", line)
    if interpreter and Path(interpreter[1]).parent != Path(sys.executable).parent:
        yield warning(
            "torchrun",
            f"{path} starts {interpreter[1]}, but this is {sys.executable}",
            "activate the environment, or python -m torch.distributed.run",
        )
    else:
        yield ok("torchrun", path)


def check_environment(target: Target) -> Iterator[Result]:
    """Checks for environment variables that slow ranks down.

    The values of all variables that matter to a run are facts of the line, which are compared
    across ranks."""
    facts: dict[str, str] = {}
    slow: list[str] = []
    for name, value in sorted(target.environ.items()):
        if _REPORTED.fullmatch(name) and not name.startswith(_RANK_SPECIFIC):
            is_secret = _SECRET.search(name)
            facts[name] = f"a secret of {len(value)} characters" if is_secret else value
        # Somebody may have set it for debugging and forgotten it.
        if value.upper() == _SLOWING.get(name, ("", ""))[0]:
            slow.append(name)
    if slow:
        effects = "; ".join(f"{name}={facts[name]}: {_SLOWING[name][1]}" for name in slow)
        yield warning("environment", effects, f"unset {' '.join(slow)}", facts)
    else:
        names = join_items(name for name in facts if name.startswith(("NCCL_", "GLOO_")))
        yield ok("environment", names or "nothing set that slows ranks", facts)


def check_slurm(target: Target) -> Iterator[Result]:
    """Checks how much time a Slurm job has left."""
    if not target.environ.get("SLURM_JOB_ID"):
        return
    rest_s = seconds_left(None)
    if rest_s is None:
        yield ok("job", "the Slurm job has no time limit, or it is not known")
    else:
        yield rated(
            "job",
            f"Slurm ends this job in {max(0.0, rest_s) / 3600:.1f} h",
            "sbatch --time=24:00:00: a start and a step may take longer than that; the run saves "
            "and queues again near its end",
            value=rest_s,
            wanted=_SHORT_S,
        )
