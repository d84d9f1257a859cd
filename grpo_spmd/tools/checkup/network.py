"""Names, ports, the hub, and who started the ranks; of a Slurm job the time that is left."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from grpo_spmd.data.hub import ask, is_offline
from grpo_spmd.distributed.processes import seconds_left
from grpo_spmd.tools.checkup.results import Place, Result, listed

_DEFAULT_PORT = 29500
_SHORT_S = 600.0
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|API_KEY|CREDENTIAL", re.IGNORECASE)
_TOLD = re.compile(
    r"(OMP_NUM_THREADS|(NCCL|GLOO|HF|VLLM|PYTORCH|TORCH|CUDA|FI|UCX|TRITON|TOKENIZERS)_\w+|LD_LIBRARY_PATH)"
)
_OWN = ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC", "TORCH_ELASTIC")  # these differ from rank to rank
_SLOWING = {
    "CUDA_LAUNCH_BLOCKING": ("1", "each kernel is waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "each collective is checked by another"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of a node talk through host memory"),
    "NCCL_SHM_DISABLE": ("1", "GPUs of a node talk through sockets"),
    "NCCL_IB_DISABLE": ("1", "nodes talk over TCP"),
    "TORCH_COMPILE_DISABLE": ("1", "nothing is compiled"),
    "VLLM_ENFORCE_EAGER": ("1", "no CUDA graphs"),
}


def look_at_name(place: Place) -> Iterator[Result]:
    name = socket.gethostname()
    interfaces = [each for _, each in socket.if_nameindex() if each != "lo"]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for asked in filter(None, place.environ.get(variable, "").split(",")):
            wanted = asked.lstrip("^=").partition(":")[0]
            fits = [
                each
                for each in ["lo", *interfaces]
                if each == wanted or (variable[0] == "N" and each.startswith(wanted))
            ]
            if not fits and not asked.startswith("^"):
                what = f"{variable} names {wanted}, and this host has {listed(interfaces) or 'lo alone'}"
                yield Result(
                    "interface", "bad", what, f"export {variable}=... (ip -br address shows them)"
                )
    try:
        found = {
            str(each[4][0]).partition("%")[0]
            for each in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
        }
    except OSError as error:
        what = f"the name of this host, {name}, leads nowhere ({error.strerror or error})"
        yield Result(
            "host name",
            "warning",
            what,
            f"echo '127.0.1.1 {name}' >>/etc/hosts, or GLOO_SOCKET_IFNAME",
        )
        return
    leads = f"{name} leads to {listed(sorted(found))}"
    if (
        all(ip_address(address).is_loopback for address in found)
        and "GLOO_SOCKET_IFNAME" not in place.environ
    ):
        several = place.is_launched and place.num_ranks > place.local_ranks
        what, remedy = (
            f"{leads}, this host alone",
            f"export GLOO_SOCKET_IFNAME=... ({listed(interfaces) or 'none here'})",
        )
        if several:
            yield Result(
                "host name", "bad", f"{what}: ranks of other hosts do not reach it", remedy
            )
        else:
            yield Result("host name", "ok", f"{what}; several nodes need GLOO_SOCKET_IFNAME")
    else:
        yield Result("host name", "ok", leads)


def look_at_port(place: Place) -> Iterator[Result]:
    """Where ranks would meet, while there are none."""
    if place.is_launched or place.environ.get("TORCHELASTIC_RUN_ID"):  # its agent holds it
        return
    given = place.environ.get("MASTER_PORT") or place.environ.get("PET_MASTER_PORT")
    text = given or str(_DEFAULT_PORT)
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        yield Result(
            "port", "bad", f"MASTER_PORT={text!r} is no port", "a number from 1024 to 65535"
        )
        return
    port = int(text)
    what = f"port {port}, " + ("by MASTER_PORT" if given else "where plain torchrun's ranks meet")
    try:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", port))
    except OSError as error:
        who = _listener(place, port)
        taken = f"{what}, is in use{f' by {who}' if who else ''} ({error.strerror})"
        remedy = (
            "end it, or another MASTER_PORT"
            if given
            else "torchrun --standalone, --master-port, or grpo-spmd train"
        )
        yield Result("port", "bad" if given else "warning", taken, remedy)
    else:
        yield Result("port", "ok", f"{what}, is free")


def _listener(place: Place, port: int) -> str:
    """The process that listens there, where /proc says it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in place.read(f"/proc/net/{table}").splitlines()[1:]:
            fields = line.split()
            if (
                len(fields) > 9
                and fields[3] == "0A"
                and int(fields[1].rpartition(":")[2], 16) == port
            ):
                inodes.add(f"socket:[{fields[9]}]")
    for process in sorted((place.root / "proc").glob("[0-9]*")) if inodes else ():
        with suppress(OSError):
            if any(os.readlink(each) in inodes for each in (process / "fd").iterdir()):
                command = place.read(f"/proc/{process.name}/cmdline").replace("\0", " ").strip()
                return f"process {process.name} ({command[:60]})"
    return ""


def look_at_hub(place: Place) -> Iterator[Result]:
    if is_offline():
        yield Result(
            "hub", "ok", "HF_HUB_OFFLINE is set: nothing is asked; model and data must be here"
        )
        return
    endpoint = place.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    status, said = ask(f"{endpoint}/api/models?limit=1")
    if status is not None and status < 500:
        yield Result("hub", "ok", f"{endpoint} answers")
    elif place.config is not None and _is_local(place):
        yield Result(
            "hub", "ok", f"{endpoint} gives no answer, and model and data of the config are local"
        )
    else:
        remedy = "python -m grpo_spmd.prefetch where there is network, and HF_HUB_OFFLINE=1 here"
        yield Result("hub", "warning", f"{endpoint} gives no answer ({said or status})", remedy)


def _is_local(place: Place) -> bool:
    assert place.config is not None
    data = place.config.data
    sources = (data.train, *data.eval_sets.values())
    return Path(place.config.model.path).is_dir() and not any(
        str(source).startswith("hub:") for source in sources
    )


def look_at_torchrun(place: Place) -> Iterator[Result]:
    if place.environ.get("TORCHELASTIC_RUN_ID"):
        nodes, restarts = (
            place.environ.get("GROUP_WORLD_SIZE", "1"),
            place.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"),
        )
        what = f"{place.num_ranks} ranks on {nodes} node{'s' * (nodes != '1')}, {restarts} restarts"
        yield Result("torchrun", "ok", what)
        return
    path = shutil.which("torchrun", path=place.environ.get("PATH"))
    if place.is_launched:
        return
    if path is None:
        yield Result(
            "torchrun",
            "ok",
            "not on PATH; grpo-spmd train, or python -m torch.distributed.run, is the same",
        )
        return
    with open(path, "rb") as file:
        first = file.readline(512).decode(errors="replace").strip()
    interpreter = first.removeprefix("#!").strip()
    is_other = (
        first.startswith("#!/")
        and "env" not in interpreter
        and Path(interpreter).parent != Path(sys.executable).parent
    )
    if is_other and not interpreter.startswith("/bin/sh"):
        what = f"{path} starts {interpreter}, and this is {sys.executable}"
        yield Result(
            "torchrun",
            "warning",
            what,
            "activate the environment, or python -m torch.distributed.run",
        )
    else:
        yield Result("torchrun", "ok", path)


def look_at_environment(place: Place) -> Iterator[Result]:
    told = {name: value for name, value in sorted(place.environ.items()) if _TOLD.fullmatch(name)}
    alike = {name: _shown(name, value) for name, value in told.items() if not name.startswith(_OWN)}
    wrong = [
        f"{name}={value}: {_SLOWING[name][1]}"
        for name, value in told.items()
        if _slows(name, value)
    ]
    if wrong:
        names = " ".join(name for name in told if _slows(name, told[name]))
        yield Result("environment", "warning", "; ".join(wrong), f"unset {names}", alike)
    else:
        shown = [name for name in alike if name.startswith(("NCCL_", "GLOO_"))]
        yield Result(
            "environment",
            "ok",
            listed(shown) if shown else "nothing set that slows ranks",
            alike=alike,
        )


def _slows(name: str, value: str) -> bool:
    return name in _SLOWING and value.upper() == _SLOWING[name][0]


def _shown(name: str, value: str) -> str:
    return f"a secret of {len(value)} characters" if _SECRET.search(name) else value


def look_at_slurm(place: Place) -> Iterator[Result]:
    if not place.environ.get("SLURM_JOB_ID"):
        return
    left = seconds_left(None)
    if left is None:
        yield Result("job", "ok", "Slurm sets no end, or does not say it")
    elif left < _SHORT_S:
        what = f"Slurm ends this job in {max(0, left) / 60:.0f} min, less than a start and a step may take"
        yield Result(
            "job",
            "warning",
            what,
            "sbatch --time=24:00:00; the run saves and queues again near its end",
        )
    else:
        yield Result("job", "ok", f"Slurm ends this job in {left / 3600:.1f} h")
