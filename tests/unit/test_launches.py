"""launches.jsonl: who made a run, whatever its command line holds, and never at the run's cost."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import grpo_spmd
from grpo_spmd.config.describe import redact
from grpo_spmd.observe import launches
from grpo_spmd.observe.launches import Launch, begin_launch, other_versions, read_launches

PLACES = [("node1", "cpu"), ("node1", "cpu"), ("node2", "NVIDIA H200")]


def begin(run_dir: Path, first_step: int = 1) -> int | None:
    return begin_launch(run_dir, first_step, time.monotonic() - 100.0, PLACES, is_restart=False)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """By plain JSON, as somebody's jq would."""
    return [
        json.loads(line)
        for line in (run_dir / "launches.jsonl").read_text(encoding="ascii").splitlines()
    ]


def test_a_launch_is_described_and_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["/x/grpo_spmd/train.py", "--config", "a b.yaml", "optimizer.lr=1e-6"]
    )
    monkeypatch.setenv("WANDB_API_KEY", "sesame-open-now")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    number = begin(tmp_path)
    [launch] = lines(tmp_path)
    assert (number, launch["launch"], launch["first_step"], launch["world_size"]) == (1, 1, 1, 3)
    assert launch["command"] == [
        "/x/grpo_spmd/train.py",
        "--config",
        "a b.yaml",
        "optimizer.lr=1e-6",
    ]
    assert (launch["end"], launch["outcome"], launch["last_step"], launch["launcher"]) == (
        None,
        None,
        None,
        None,
    )
    began = datetime.fromisoformat(launch["start"]).timestamp()
    assert began == pytest.approx(time.time() - 100, abs=20)
    assert launch["start"].endswith("Z")
    assert (launch["folder"], launch["host"]) == (os.getcwd(), os.uname().nodename)
    assert launch["hosts"] == {"node1": 2, "node2": 1}
    assert launch["devices"] == {"cpu": 2, "NVIDIA H200": 1}
    local = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "grpo_spmd": grpo_spmd.__version__,
    }
    assert local.items() <= launch["versions"].items()
    assert launch["versions"]["vllm"]
    assert launch["versions"]["python"] == sys.version.split()[0]
    assert "sesame" not in (tmp_path / "launches.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 7}\n')
    ended = Launch(tmp_path, number, is_rank0=True)
    ended.end("preempted", "SIGTERM")
    ended.end("done")  # the first word stays
    [launch] = lines(tmp_path)
    assert (launch["outcome"], launch["why"], launch["last_step"]) == ("preempted", "SIGTERM", 7)
    assert datetime.fromisoformat(launch["end"]) > datetime.fromisoformat(launch["start"])
    assert datetime.now(UTC).timestamp() - datetime.fromisoformat(launch["end"]).timestamp() < 60


def test_a_resumed_run_adds_a_line_and_a_killed_launch_is_seen(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    for first_step in (1, 5):
        number = begin(tmp_path, first_step)
    assert number == 2
    assert [(launch["outcome"], launch["end"]) for launch in lines(tmp_path)] == [
        ("killed", None),
        (None, None),
    ]
    Launch(tmp_path, number, is_rank0=False).end("done")  # rank 0 says so
    assert lines(tmp_path)[1]["outcome"] is None
    # Of a failure any rank may be the one that tells; what it quotes is one line, without what
    # looks like a key.
    report = Launch(tmp_path, number, is_rank0=False)
    report.fail(
        "rank 1 failed first, in phase reward, step 6: Error: sk-0123456789abcdefghij\nTraceback"
    )
    report.fail("later")
    final = lines(tmp_path)[1]
    assert final["outcome"] == "failed"
    assert final["why"] == "rank 1 failed first, in phase reward, step 6: Error: <redacted>"
    assert (
        final["last_step"] is None
    )  # it finished none: the line of step 4 is of the launch before
    begin(tmp_path, 5)
    assert [launch["outcome"] for launch in lines(tmp_path)] == ["killed", "failed", None]
    assert [launch["launch"] for launch in read_launches(tmp_path)] == [1, 2, 3]


def test_hostile_content_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "train.py",
        "run_dir=a\nb\r\u2028c",
        "x=\udcff\udc80",
        "\0",
        "\x1b[2J",
        "y" * 200_000,
        "a= " * 50_000,
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, *["z"] * 100_000])
    path = tmp_path / "launches.jsonl"
    path.write_bytes(
        b'{"launch": "7"}\n[1]\nnoise\xff\n{"launch": 3, "outcome": {}}\n'
        + b"[" * 100_000
        + b'\n{"half": '
    )
    start = time.process_time()
    assert begin(tmp_path) == 4
    assert time.process_time() - start < 5
    *_, launch = lines(tmp_path)
    assert launch["command"][:5] == arguments[:5]
    assert launch["command"][5] == "y" * 4000
    assert path.stat().st_size < 50_000
    Launch(tmp_path, 4, is_rank0=True).end("done")
    assert lines(tmp_path)[-1]["outcome"] == "done"


def test_a_removed_working_folder_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    begin(tmp_path)
    assert lines(tmp_path)[0]["folder"] is None


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    number = begin(tmp_path)
    old = (tmp_path / "launches.jsonl").read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # as a full disk
        assert begin(tmp_path) is None
        Launch(tmp_path, number, is_rank0=True).end("done")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caplog.text.count("launches.jsonl is not written: File too large") == 2
    assert (tmp_path / "launches.jsonl").read_bytes() == old
    (tmp_path / "launches.jsonl").unlink()
    os.mkfifo(tmp_path / "launches.jsonl")
    assert begin(tmp_path) is None
    assert "a device, and not a regular file" in caplog.text
    Launch(tmp_path, None, is_rank0=True).end("done")  # as the run has it then
    assert begin(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optimizer.lr=1e-6", "optimizer.lr=1e-6"),
        # declared keys that only sound so, counts, and a function in a file
        ("data.prompt_key=question", "data.prompt_key=question"),
        ("rollout.max_completion_tokens=1024", "rollout.max_completion_tokens=1024"),
        (
            "rollout.engine={max_num_batched_tokens: 8192}",
            "rollout.engine={max_num_batched_tokens: 8192}",
        ),
        ("rewards.0.function=my_tokens.py:token", "rewards.0.function=my_tokens.py:token"),
        ("data.train=/data/tokens:v2/train.jsonl", "data.train=/data/tokens:v2/train.jsonl"),
        ("rewards.0.args.api_key=abc", "rewards.0.args.api_key=<redacted>"),
        ("rewards.0.args.password=12345", "rewards.0.args.<redacted>"),
        ("rewards.0.args.credentials.user=me", "rewards.0.args.credentials.user=<redacted>"),
        (
            "rewards=[{name: j, args: {api_key: abc, n: 3}}]",
            "rewards=[{name: j, args: {api_key: <redacted>, n: 3}}]",
        ),
        (
            'rewards=[{"args":{"token":"a b c","n":3}}]',
            'rewards=[{"args":{"token":<redacted>,"n":3}}]',
        ),
        ("x={credentials: {user: me, pin: 1}, n: 1}", "x={credentials: <redacted>"),
        ("x={password: 'two words', n: 1}", "x={password: <redacted>, n: 1}"),
        ("WANDB_API_KEY=abc", "WANDB_API_KEY=<redacted>"),
        ("--api-key=abc", "--api-key=<redacted>"),
        ("note=hf_abcdefghijklmnopqrstuvwxyz and more", "note=<redacted>"),
        ("x.url=https://me:pass@host/v1", "x.url=https<redacted>"),
        ("header=Authorization: Bearer abcdefgh12345678", "header=<redacted>"),
    ],
)
def test_secrets_are_masked_and_what_sounds_like_one_is_not(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_a_secret_may_be_an_argument_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["train.py", "--hf-token", "abc", "--config", "x.yaml", "--token=def", "ghi"]
    )
    begin(tmp_path)
    assert lines(tmp_path)[0]["command"] == [
        "train.py", "--hf-token", "<redacted>", "--config", "x.yaml", "--token=<redacted>", "ghi",
    ]  # fmt: skip


def test_torchruns_own_line_is_its_processs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with subprocess.Popen(["sleep", "60", "0"]) as parent:
        while not Path(
            f"/proc/{parent.pid}/cmdline"
        ).read_bytes():  # the new program has begun, and not its line
            pass
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        begin(tmp_path)
        parent.kill()
    assert lines(tmp_path)[0]["launcher"] == ["sleep", "60", "0"]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30
    ).stdout.strip()


def test_the_commit_of_a_checkout_and_whether_it_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, run_dir = tmp_path / "repository", tmp_path / "run"
    for folder in (repository / "inner", run_dir):
        folder.mkdir(parents=True)
    git(repository, "init", "-q")
    (repository / "reward.py").write_text("a")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "x")
    (repository / "untracked").write_text("")
    watcher = tmp_path / "watcher.sh"  # what a repository's config may have git run
    watcher.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    watcher.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(watcher))
    monkeypatch.chdir(repository / "inner")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    begin(run_dir)
    commit = (repository / ".git/refs/heads").rglob("*").__next__().read_text().strip()
    assert lines(run_dir)[-1]["git"]["folder"] == {"commit": commit, "dirty": False}
    (repository / "reward.py").write_text("b")
    begin(run_dir)
    assert lines(run_dir)[-1]["git"]["folder"] == {"commit": commit, "dirty": True}
    assert not (tmp_path / "ran").exists()
    # Nor the programs of filters, which git runs for a file that was touched.
    monkeypatch.delenv("GIT_DIR")
    (repository / ".git/info/attributes").write_text("*.py filter=mine\n")
    for name in ("clean", "process"):
        git(repository, "config", f"filter.mine.{name}", str(watcher))
    git(repository, "config", "filter.mine.required", "true")
    (repository / "reward.py").write_text("c")
    begin(run_dir)
    assert lines(run_dir)[-1]["git"]["folder"] == {"commit": commit, "dirty": True}
    assert not (tmp_path / "ran").exists()
    # A name that git's command line cannot say.
    git(repository, "config", "filter.mine=x.clean", str(watcher))
    begin(run_dir)
    assert lines(run_dir)[-1]["git"]["folder"] is None
    monkeypatch.chdir(run_dir)
    begin(run_dir)
    assert lines(run_dir)[-1]["git"]["folder"] is None


def test_a_git_that_hangs_or_is_not_there_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    begin(tmp_path)
    assert lines(tmp_path)[-1]["git"] in ({"grpo_spmd": None, "folder": None},)
    (tmp_path / "bin/git").write_text("#!/bin/sh\nexec /bin/sleep 20\n")
    (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setattr(launches, "_GIT_S", 0.1)
    start = time.monotonic()
    begin(tmp_path)
    assert time.monotonic() - start < 10
    assert lines(tmp_path)[-1]["git"] == {"grpo_spmd": None, "folder": None}
    # also where even killing it does not help, as with a file server that is gone
    monkeypatch.setattr(launches, "_git_states", lambda: time.sleep(20))
    monkeypatch.setattr(launches, "_PATIENCE_S", 0.1)
    begin(tmp_path)
    assert lines(tmp_path)[-1]["git"] is None


def test_another_version_is_named_for_the_launch_that_made_the_step(tmp_path: Path) -> None:
    assert other_versions(tmp_path, 3) == ""
    begin(tmp_path, 1)
    assert other_versions(tmp_path, 3) == ""
    begin(tmp_path, 5)
    initial, second = lines(tmp_path)
    initial["versions"] |= {"torch": "1.0", "vllm": None}
    (tmp_path / "launches.jsonl").write_text(json.dumps(initial) + "\n" + json.dumps(second) + "\n")
    assert other_versions(tmp_path, 4) == f"torch 1.0 there, {torch.__version__} here"
    assert other_versions(tmp_path, 5) == ""
