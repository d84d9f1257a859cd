"""The checkup as a command: on a machine with faults that are really there, by ranks of torchrun,
by ranks that do not
come or hang, on two hosts, at a terminal."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.load import load_config
from grpo_spmd.tools.checkup.devices import check_config, check_plan
from grpo_spmd.tools.checkup.results import Target
from tests.support.models import make_model, write_config
from tests.support.processes import ROOT, Job, processes_left, run_command, torchrun
from tests.support.terminal import TerminalJob
from tests.unit.test_checkup import H100, smi, with_smi

CHECKUP = [sys.executable, "-m", "grpo_spmd.checkup"]
LEVELS = ("ok", "warning", "bad")
# In a namespace that ends with the command: $0 is the run folder's disk, the rest the command.
PLANTED = """mount -t tmpfs -o size=16m planted /dev/shm &&
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"
"""


def written(path: Path) -> tuple[dict[str, str], dict[str, str], str]:
    """By the lines' names the worst level, and all that was found; the verdict."""
    levels: dict[str, str] = {}
    result: dict[str, str] = {}
    *lines, final = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        name = line["name"]
        levels[name] = max(levels.get(name, "ok"), line["level"], key=LEVELS.index)
        result[name] = f"{result.get(name, '')}\n{line['found']}".strip()
        assert line["remedy"] or line["level"] == "ok"
    return levels, result, final["verdict"]


def a_config(folder: Path, run_dir: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(
        f"run_dir: {run_dir}\nmodel: {{path: {folder}/model}}\ndata: {{train: "
        f"{folder}/train.jsonl}}\n"
        "rewards: [{name: countdown}]\n"
    )
    return path


def may_mount() -> bool:
    try:
        return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(
    not may_mount(), reason="mount namespaces take a privilege that this user has not"
)
def test_planted_faults_are_found_and_nothing_where_they_are_not(tmp_path: Path) -> None:
    """A /dev/shm of 16 MiB, a run_dir that is mounted read-only, a wrong torch, more threads than
    cores, a port in use:
    each bad with them, and not bad without them, by the same command."""
    (disk := tmp_path / "disk").mkdir()
    metadata = tmp_path / "site/torch-2.9.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    out = tmp_path / "lines.jsonl"
    config = a_config(tmp_path, disk / "runs/new")
    only = "versions,memory,disk,network"
    command = [*CHECKUP, "--config", str(config), "--only", only, "--json", str(out)]
    faults = {"/dev/shm": "bad", "run_dir": "bad", "torch": "bad", "threads": "bad", "port": "bad"}
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = {"MASTER_PORT": str(holder.getsockname()[1])}
        several = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)) + 1)}
        env = port | several | {"PYTHONPATH": f"{metadata.parents[1]}:{ROOT}"}
        done = run_command(["unshare", "-m", "sh", "-c", PLANTED, str(disk), *command], env=env)
    assert done.returncode == 2, done.stdout + done.stderr
    levels, result, verdict = written(out)
    assert {name: levels[name] for name in faults} == faults
    assert verdict == "not fit"
    assert "16.00 MiB" in result["/dev/shm"]
    assert "Read-only file system" in result["run_dir"]
    assert "torch 2.9.0" in result["torch"]
    assert f"process {os.getpid()} (" in result["port"]

    run_command(command, env=port)
    levels, _, _ = written(out)
    assert not [name for name in faults if levels[name] == "bad"]
    assert [*disk.iterdir()] == []  # neither of them left anything


def test_this_machine_is_looked_at_whole(tmp_path: Path) -> None:
    """Two ranks of its own reduce; every group speaks; the exit code is what the lines say."""
    out = tmp_path / "lines.jsonl"
    job = Job([*CHECKUP, "--json", str(out)], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    code, output = job.wait()
    levels, result, verdict = written(out)
    assert code == (2 if "bad" in levels.values() else 0), output
    assert (verdict == "fit") == (code == 0)
    for group in ("versions", "devices", "memory", "disk", "network", "config", "links"):
        assert f"\n{group}\n" in output
    assert levels["all-reduce"] == "ok", output
    assert "GB/s" in result["all-reduce"]
    assert job.survivors() == []
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_ranks_of_torchrun_speak_once_and_who_differs_is_named(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    only = ["--only", "versions,memory,network,links", "--json", str(out), "--deadline", "100"]
    differs = (
        'if [ "$RANK" = 1 ]; then export NCCL_DEBUG=INFO OMP_NUM_THREADS=4096; fi; exec "$0" "$@"'
    )
    launch = [*torchrun(2, "--no-python", "sh", "-c", differs), *CHECKUP, *only]
    code, output = Job(launch, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path).wait()
    assert code == 1, output  # torchrun's own word for ranks that say 2
    displayed = output[: output.index("not fit: ")]
    assert len(re.findall(r"^  \w+ +python  ", displayed, re.MULTILINE)) == 1
    assert displayed.count("checkup of 2 ranks") == 1
    levels, result, _ = written(out)
    assert levels["threads"] == "bad"
    assert "(rank 1)" in result["threads"]
    assert "ranks differ in NCCL_DEBUG: not set on rank 0, INFO on rank 1" in result["environment"]
    assert levels["all-reduce"] == "ok"
    assert "2 ranks" in result["all-reduce"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def variables(
    rank: int, port: int, local_ranks: int = 2, address: str = "127.0.0.1"
) -> dict[str, str]:
    numbers: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": local_ranks,
        "MASTER_PORT": port,
    }
    numbers["LOCAL_RANK"] = rank % local_ranks
    return {name: str(value) for name, value in numbers.items()} | {
        "MASTER_ADDR": address,
        "PYTHONPATH": str(ROOT),
    }


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    command = [*CHECKUP, "--only", "versions,links", "--deadline", "3", "--json", str(out)]
    code, output = Job(command, env=variables(0, free_port()), cwd=tmp_path).wait()
    levels, result, verdict = written(out)
    assert (code, verdict) == (2, "not fit"), output
    assert (levels["ranks"], result["ranks"]) == ("bad", "rank 1 did not come within 3 s")
    assert levels["python"] == "ok"  # the others are told all the same
    assert "all-reduce" not in levels


def test_ranks_of_srun_speak_once(tmp_path: Path) -> None:
    """By Slurm's variables alone, but for the port, which a test must choose."""
    out, port, jobs = tmp_path / "lines.jsonl", free_port(), []
    for rank in range(2):
        step: dict[str, Any] = {
            "NUM_TASKS": 2,
            "TASKS_PER_NODE": 2,
            "NODELIST": "localhost",
            "ID": 0,
        }
        env = {f"SLURM_STEP_{name}": str(value) for name, value in step.items()}
        env |= {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "MASTER_PORT": str(port),
        }
        env |= {"PYTHONPATH": str(ROOT)} | ({"NCCL_DEBUG": "INFO"} if rank else {})
        jobs.append(
            Job([*CHECKUP, "--only", "network,links", "--json", str(out)], env=env, cwd=tmp_path)
        )
    (code, output), (code_1, output_1) = [job.wait() for job in jobs]
    levels, result, _ = written(out)
    assert output_1 == ""
    assert code == code_1 == (2 if "bad" in levels.values() else 0), output
    assert levels["all-reduce"] == "ok"
    assert "NCCL_DEBUG: not set on rank 0, INFO on rank 1" in result["environment"]


# Comes, and goes to sleep when the others reduce.
SLEEPER = """import sys, time
from grpo_spmd.tools.checkup.exchange import RankFindings, find_launch
from grpo_spmd.tools.checkup.reduce import RankExchange
from grpo_spmd.distributed.processes import host_identity
import os
exchange = RankExchange(find_launch(os.environ), 60.0)
exchange.post("found", RankFindings("h", [], node=host_identity()))
time.sleep(600)
"""


def test_a_rank_that_hangs_in_the_all_reduce_is_named(tmp_path: Path) -> None:
    out, port = tmp_path / "lines.jsonl", free_port()
    sleeper = Job([sys.executable, "-c", SLEEPER], env=variables(1, port), cwd=tmp_path)
    try:
        command = [*CHECKUP, "--only", "links", "--deadline", "15", "--json", str(out)]
        code, output = Job(command, env=variables(0, port), cwd=tmp_path).wait()
        levels, result, _ = written(out)
        assert code == 2, output
        assert "rank 1 on h gave no answer" in result["all-reduce"]
        assert "ranks" not in levels  # it came
    finally:
        sleeper.process.kill()
        sleeper.wait()


def test_a_rank_without_the_others_says_so_itself(tmp_path: Path) -> None:
    command = [*CHECKUP, "--only", "links", "--deadline", "2"]
    code, output = Job(command, env=variables(1, free_port()), cwd=tmp_path).wait()
    (line,) = output.splitlines()
    assert code == 2
    assert line.startswith("checkup: rank 1 on ")
    assert "lost rank 0 at 127.0.0.1:" in line


@pytest.mark.parametrize("sees", [True, False])
def test_two_hosts(tmp_path: Path, two_hosts: list[list[str]], sees: bool) -> None:
    """Both see the run folder, or one has a disk of its own at its target."""
    (shared := tmp_path / "shared").mkdir()
    out, port, jobs = tmp_path / "lines.jsonl", free_port(), []
    command = [
        *CHECKUP,
        "--only",
        "disk,links",
        "--deadline",
        "100",
        "--config",
        str(a_config(tmp_path, shared / "run")),
    ]
    for rank, host in enumerate(two_hosts):
        own_disk = f"mount -t tmpfs own {shared} && " if rank and not sees else ""
        named = [
            "unshare",
            "-u",
            "-m",
            "sh",
            "-c",
            f'hostname node{rank} && {own_disk}exec "$@"',
            "sh",
        ]
        env = variables(rank, port, 1, "10.77.0.1") | {"GLOO_SOCKET_IFNAME": host[-1]}
        arguments = ["--json", str(out)] if rank == 0 else []
        jobs.append(Job([*host, *named, *command, *arguments], env=env, cwd=tmp_path))
    (code, output), (code_1, output_1) = [job.wait() for job in jobs]
    levels, result, _ = written(out)
    assert output_1 == "", output_1  # rank 0 speaks
    assert levels["all-reduce"] == levels["clocks"] == "ok", output
    assert "over 2 nodes" in result["all-reduce"]
    assert "of 2 nodes agree" in result["clocks"]
    if sees:
        assert levels["shared run_dir"] == "ok", output
    else:
        assert (code, code_1, levels["shared run_dir"]) == (2, 2, "bad"), output
        assert "not seen by rank 1 on node1: what rank 0 writes" in result["shared run_dir"]
        assert (
            "in memory or in a container, gone at its next start (rank 1 on node1)"
            in result["run_dir"]
        )
    assert [*shared.iterdir()] == []


def test_what_check_and_planner_say_are_lines(tmp_path: Path) -> None:
    """The real ones, for eight GPUs of which a planted nvidia-smi tells."""
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    config = write_config(tmp_path, model, rollout={"num_prompts_per_step": 8})
    rows = "".join(H100.format(i, "580.95", 4, 0, "Disabled") for i in range(8))
    smi_target = with_smi(tmp_path, smi(rows), 8)
    environ = {**os.environ, **smi_target.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def target(*words: str) -> Target:
        report = ["--config", str(config), *words]
        return replace(
            smi_target,
            num_ranks=8,
            environ=environ,
            config=load_config(config, words),
            arguments=report,
        )

    (plan,) = check_plan(target("rollout.gpu_memory_utilization=0.99"))
    assert plan.level == "bad"
    assert "8 x H100-80GB (79.1 GiB each): does not fit; margin -" in plan.finding
    (check,) = check_config(target())
    assert check.level == "ok", check
    (check,) = check_config(target("data.train=none.jsonl"))
    assert (check.level, "none.jsonl" in check.finding) == ("bad", True)


def test_a_checkup_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    """In the middle of the disk's trial, with its ranks started."""
    job = Job([*CHECKUP, "--only", "disk,links"], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    while not [*tmp_path.iterdir()] or len(job.running()) < 2:
        assert job.process.poll() is None
        time.sleep(0.005)
    job.process.terminate()
    code, output = job.wait()
    assert (code, output.splitlines()[-1]) == (1, "checkup: stopped by a signal")
    # Who appends to its file ends by itself.
    assert processes_left(job.mark, patience_s=60) == []
    assert [*tmp_path.iterdir()] == []


def test_a_terminal_of_80_columns_shows_colours_and_no_longer_line(tmp_path: Path) -> None:
    only = ["--only", "versions,memory", "--ranks", "4096"]  # more than any machine has cores
    code, lines = TerminalJob(["/usr/bin/env", "TERM=xterm", *CHECKUP, *only], tmp_path).wait(120)
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    assert code == 2
    assert max(map(len, plain)) <= 80
    assert plain != lines
    assert any(line.startswith("  \x1b[31mbad    \x1b[0m  /dev/shm") for line in lines), lines
