"""What only GPUs and several hosts need, without either: a GPU that torch cannot use, an address
that others cannot
reach, memory that ranks cannot share, caches on a shared disk. Each is silence or a hang where
nobody says it."""

from __future__ import annotations

import logging
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from grpo_spmd.config import load
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RolloutConfig, WatchdogConfig
from grpo_spmd.data.cache import is_of_this_host
from grpo_spmd.distributed import doctor, machine
from grpo_spmd.engine import start

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading "
    "and installing a new version."
)


# E1: GPUs that torch cannot use


@pytest.fixture
def eight_unusable_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(machine, "num_gpus", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refused)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("eight_unusable_gpus")
def test_gpus_that_torch_cannot_use_are_no_cpu_run() -> None:
    with pytest.raises(ConfigError) as message:
        machine.rank_device(0)
    assert str(message.value) == (
        f"this machine has 8 GPUs, and torch {torch.__version__} (CUDA "
        "13.0) cannot use them: "
        "The NVIDIA driver on your system is too old (found version 12020); look whether "
        "CUDA_VISIBLE_DEVICES=all names GPUs that are there, update the driver, or install a torch "
        "for "
        "it; CUDA_VISIBLE_DEVICES= trains on the CPU"
    )


@pytest.mark.usefixtures("eight_unusable_gpus")
@pytest.mark.parametrize("hidden", ["", "-1", "-1,0", "NoDevFiles", "none"])
def test_gpus_that_are_hidden_are_meant_to_be(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert machine.rank_device(0) == torch.device("cpu")


@pytest.mark.usefixtures("eight_unusable_gpus")
def test_gpus_that_are_named_and_not_there_are_no_cpu_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    with pytest.raises(
        ConfigError, match="look whether CUDA_VISIBLE_DEVICES=9 names GPUs that are there, update"
    ):
        machine.rank_device(0)


def test_a_device_that_may_not_be_opened_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a job whose cgroup leaves it out, and in a container that sees all names."""
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").mkdir()  # no file that can be opened to write, even by root
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(load, "Path", lambda _: tmp_path)
    assert machine.num_gpus() == 1


def said_by_setup(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        machine.check_setup()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("eight_unusable_gpus")
def test_set_up_for_gpus_refuses_what_would_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        "The NVIDIA driver on your system is too old (found version 12020); look"
        in said_by_setup(capsys)
    )
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    machine.check_setup()  # a login node
    monkeypatch.setattr(torch.version, "cuda", None)
    assert f"pip installed torch {torch.__version__}, a build for the CPU" in said_by_setup(capsys)


@pytest.mark.usefixtures("eight_unusable_gpus")
def test_a_build_for_the_cpu_beside_gpus_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    assert machine.rank_device(0) == machine.rank_device(1) == torch.device("cpu")
    assert [record.getMessage() for record in caplog.records] == [
        f"this machine has 8 GPUs, and torch {torch.__version__} is a build for the CPU: "
        "training there"
    ]


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert machine.rank_device(3) == torch.device("cuda", 3)
    with pytest.raises(
        ConfigError, match=r"rank 4 of this node .* has no GPU: torch sees 4; start as many ranks"
    ):
        machine.rank_device(4)


# E11: where other hosts find this one


def listening() -> set[tuple[str, int]]:
    """Addresses and ports at which this host listens, over IPv4, as the kernel says."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    result = [line[1].split(":") for line in lines if line[3] == "0A"]
    return {
        (socket.inet_ntoa(struct.pack("<I", int(address, 16))), int(port, 16))
        for address, port in result
    }


def test_gloo_listens_where_we_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    old = listening()
    device = distributed_c10d.ProcessGroupGloo.create_default_device()
    opened = {address for address, _ in listening() - old}
    del device
    if not opened:
        pytest.skip(
            "gloo opened nothing over IPv4: the name of this host leads to an address of IPv6"
        )
    assert machine.gloo_address() in opened


def as_two_hosts(monkeypatch: pytest.MonkeyPatch, address: str, second: str) -> HashStore:
    """Of 16 ranks, 8 a host: this is rank 0, whose name leads to `address`; rank 15 says it is on
    `other`."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(machine, "gloo_address", lambda: address)
    monkeypatch.setattr(machine, "host_identity", lambda: "here")
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    store.set("host/15", second)
    return store


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_name_that_leads_to_loopback_is_refused_between_hosts(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    store = as_two_hosts(monkeypatch, address, "there")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    with pytest.raises(ConfigError) as message:
        machine.refuse_unreachable(store, 0, 16)
    expected = (
        f"leads to {address}, where ranks of other hosts cannot reach it: set "
        "GLOO_SOCKET_IFNAME to the network"
    )
    assert expected in str(message.value)
    assert str(message.value).endswith("(this host has eth0, ib0)")


def test_who_can_be_reached_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.refuse_unreachable(as_two_hosts(monkeypatch, "10.0.0.7", "there"), 0, 16)
    machine.refuse_unreachable(
        as_two_hosts(monkeypatch, "127.0.0.1", "here"), 0, 16
    )  # two launchers on one host
    store = as_two_hosts(monkeypatch, "127.0.0.1", "there")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    machine.refuse_unreachable(store, 0, 16)
    assert store.get("host/0") == b"here"  # which others may have to know
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    machine.refuse_unreachable(HashStore(), 0, 16)  # one node: nobody is asked


def test_this_host_is_its_name_its_boot_and_its_network() -> None:
    """Equal for all its processes, and for no other host, nor a container of the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert machine.host_identity().split() == [
        socket.gethostname(),
        boot,
        os.readlink(f"/proc/{os.getppid()}/ns/net"),
    ]


# E3: memory that ranks of one engine cannot share


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_and_tensor_parallelism_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments:True")
    two = RolloutConfig(tensor_parallel_size=2)
    with pytest.raises(
        ConfigError,
        match=r"expandable_segments with rollout\.tensor_parallel_size 2: vLLM's custom",
    ):
        start.refuse_unshareable_segments(two, "cuda")
    start.refuse_unshareable_segments(two, "cpu")
    start.refuse_unshareable_segments(RolloutConfig(), "cuda")
    start.refuse_unshareable_segments(
        RolloutConfig(tensor_parallel_size=3), "cuda"
    )  # vLLM has none for three
    for key in (
        "disable_custom_all_reduce",
        "enforce_eager",
    ):  # the second: nothing is captured in a CUDA graph
        start.refuse_unshareable_segments(
            RolloutConfig(tensor_parallel_size=2, engine={key: True}), "cuda"
        )
    monkeypatch.setenv(name, "expandable_segments:False")
    start.refuse_unshareable_segments(two, "cuda")


# E7: seeds


def test_v1s_loop_over_seeds_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    start.warn_of_slow_seeds(SimpleNamespace(use_v2_model_runner=True), "cuda")
    start.warn_of_slow_seeds(
        SimpleNamespace(), "cpu"
    )  # it is V1 there, and the model takes far longer than the loop
    assert not caplog.records
    start.warn_of_slow_seeds(SimpleNamespace(use_v2_model_runner=False), "cuda")
    assert "V1 model runner, which samples seeded requests one by one" in caplog.text


# E8: caches and the start at scale


CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")


@pytest.fixture
def shared_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home that all nodes mount, beside a temporary folder of this node; no cache has a place."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setattr(
        start, "is_of_this_host", lambda position: home not in (position, *position.parents)
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    for name in (*CACHES, "XDG_CACHE_HOME", "TRITON_HOME", "FLASHINFER_CUBIN_DIR"):
        monkeypatch.setenv(name, "")  # put back after the test
        if name == "FLASHINFER_CUBIN_DIR":
            monkeypatch.delenv(name)
    return home


def caches() -> list[str]:
    return [os.environ[name] for name in CACHES]


def test_caches_lie_on_the_node_where_the_home_does_not(shared_home: Path, tmp_path: Path) -> None:
    start.keep_caches_on_node()
    local = tmp_path / f"vllm-{os.geteuid()}"
    assert caches() == [str(local), str(local / "triton"), str(local)]
    assert local.stat().st_mode & 0o777 == 0o700
    assert "FLASHINFER_CUBIN_DIR" not in os.environ
    for name in CACHES:
        os.environ[name] = ""
    start.keep_caches_on_node()  # the node's next rank
    assert caches() == [str(local), str(local / "triton"), str(local)]


def test_a_place_that_is_given_or_on_the_node_stays(
    shared_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "local"))  # where vLLM looks by itself
    (shared_home / ".cache/flashinfer/cubins").mkdir(
        parents=True
    )  # prefetched, and not to be had again
    start.keep_caches_on_node()
    assert caches() == ["", "/elsewhere", str(tmp_path / f"vllm-{os.geteuid()}")]
    assert os.environ["FLASHINFER_CUBIN_DIR"] == str(shared_home / ".cache/flashinfer/cubins")
    monkeypatch.setenv("HOME", str(tmp_path / "own_home"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "")
    start.keep_caches_on_node()
    assert caches() == ["", "/elsewhere", ""]


def test_the_file_systems_of_clusters_are_of_another_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for kind in ("ext4", "xfs", "overlay", "tmpfs"):
        monkeypatch.setattr("grpo_spmd.data.cache._file_system_of", lambda _, kind=kind: kind)
        assert is_of_this_host(tmp_path)
    for kind in ("nfs4", "lustre", "fuse.wekafs", "unknown"):
        monkeypatch.setattr("grpo_spmd.data.cache._file_system_of", lambda _, kind=kind: kind)
        assert not is_of_this_host(tmp_path)


def test_caches_stay_where_the_temporary_folder_is_no_better(
    shared_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID))
        start.keep_caches_on_node()
    monkeypatch.setattr(start, "is_of_this_host", lambda _: False)
    start.keep_caches_on_node()
    assert caches() == ["", "", ""]
    assert sorted(tmp_path.iterdir()) == [shared_home]


def test_a_cache_that_is_linked_to_a_disk_of_the_node_stays(
    shared_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders themselves are asked about, not the home that they are below."""
    requests = list[Path]()

    def is_of_this_host(position: Path) -> bool:
        requests.append(position)
        return True

    monkeypatch.setattr(start, "is_of_this_host", is_of_this_host)
    start.keep_caches_on_node()
    assert requests == [
        shared_home / ".cache/vllm",
        shared_home / ".triton",
        shared_home / ".cache/flashinfer",
    ]
    assert caches() == ["", "", ""]


@pytest.mark.parametrize(
    "trap", ["open to all", "open to a group", "another user's", "a link", "a file"]
)
def test_a_cache_that_others_can_write_to_is_not_used(
    shared_home: Path,
    tmp_path: Path,
    trap: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM runs the code that it finds there."""
    if trap == "another user's":
        second = os.geteuid() + 1
        monkeypatch.setattr("os.geteuid", lambda: second)
    planted = tmp_path / f"vllm-{os.geteuid()}"
    if trap == "a link":
        (tmp_path / "theirs").mkdir()
        planted.symlink_to(tmp_path / "theirs")
    elif trap == "a file":
        planted.write_text("")
    else:
        planted.mkdir()
        planted.chmod({"open to all": 0o777, "open to a group": 0o775}.get(trap, 0o700))
    start.keep_caches_on_node()
    assert str(planted) in caplog.text
    used = Path(os.environ["VLLM_CACHE_ROOT"])
    assert used != planted
    assert used.stat().st_mode & 0o777 == 0o700


def test_many_ranks_have_longer_to_start() -> None:
    config = WatchdogConfig(timeout_s=100.0, phase_timeouts_s={"rollout": 5.0})
    longer = {ranks: machine.with_time_to_start(config, ranks) for ranks in (1, 8, 64)}
    assert {ranks: doctor.limit_s(limits, "start") for ranks, limits in longer.items()} == {
        1: 100.0,
        8: 100.0,
        64: 660.0,
    }
    assert [doctor.limit_s(longer[64], phase) for phase in ("rollout", "update")] == [5.0, 100.0]
    inputs = WatchdogConfig(timeout_s=100.0, phase_timeouts_s={"start": 7.0})
    assert doctor.limit_s(machine.with_time_to_start(inputs, 64), "start") == 7.0


# E5: buckets


def test_buckets_are_larger_on_gpus_where_nobody_says() -> None:
    assert [RolloutConfig().sync_bucket_bytes(device) >> 20 for device in ("cpu", "cuda")] == [
        16,
        256,
    ]
    inputs = RolloutConfig(weight_sync_bucket_mib=7)
    assert [inputs.sync_bucket_bytes(device) >> 20 for device in ("cpu", "cuda")] == [7, 7]
