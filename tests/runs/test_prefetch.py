"""python -m grpo_spmd.prefetch with the hub's own client and a hub on loopback; then the run's
readers without one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_spmd.checks.memory import size_text
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.tools import prefetch
from tests.support.fake_hub import FakeHub, serve
from tests.support.models import make_model, make_reward_model
from tests.support.processes import Job, run_command

PREFETCH = [sys.executable, "-m", "grpo_spmd.prefetch", "--config", "config.yaml"]
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub with a model (and what is not to be fetched) and a data set, and a config that names
    them."""
    root = tmp_path_factory.mktemp("prefetch")
    model, data = root / "hub/models/acme/tiny", root / "hub/datasets/acme/sums"
    shutil.copytree(make_model(root / "made", "qwen3", tied=True), model)
    (model / "pytorch_model.bin").write_bytes(b"unpickled")
    (model / "modeling_tiny.py").write_text("raise SystemExit('remote code')")
    (root / "hub/models/acme/old").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(model / name, root / "hub/models/acme/old")
    data.mkdir(parents=True)
    (data / "README.md").write_text(CARD)
    for split, count in (("train", 20), ("test", 3)):
        rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(count)]
        (data / f"{split}.jsonl").write_text("\n".join(rows))
    config: dict[str, Any] = {
        "run_dir": "run",
        "model": {"path": "acme/tiny"},
        "data": {"train": "hub:acme/sums:main:train", "eval": {"held": "hub:acme/sums:main:test"}},
        "eval": {"every_steps": 5},
        "rewards": [{"name": "exact_match"}],
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture
def hub(world: Path) -> Iterator[FakeHub]:
    with serve(world / "hub") as hub:
        yield hub


LOCAL_DATA = ["data.train=a.jsonl", "data.eval={held: b.parquet}"]


def lines_of(world: Path, hub: FakeHub, home: Path, *overrides: str) -> list[str]:
    # The command itself, and whether it imported what takes seconds.
    program = (
        "import sys; from grpo_spmd.tools.prefetch import main; main(); "
        "print(sorted({'torch', 'vllm'} & {*sys.modules}))"
    )
    done = run_command(
        [sys.executable, "-c", program, "--config", "config.yaml", *overrides],
        cwd=world,
        env=hub.environment | {"HF_HOME": str(home)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_what_it_fetched_is_enough_where_there_is_no_network(
    world: Path, hub: FakeHub, tmp_path: Path
) -> None:
    home, model = tmp_path / "home", world / "hub/models/acme/tiny"
    lines = lines_of(world, hub, home)
    wanted = {path.name for path in model.iterdir()} - {"pytorch_model.bin", "modeling_tiny.py"}
    assert sorted(hub.served) == sorted([*wanted, "README.md", "train.jsonl", "test.jsonl"])
    size = size_text(sum((model / name).stat().st_size for name in wanted))
    assert lines[0].startswith("prefetch: model acme/tiny, revision ")
    assert f": {len(wanted)} files, {size}, {size} fetched in " in lines[0]
    assert lines[1] == f"  {home}/hub/models--acme--tiny"
    assert lines[2].startswith("prefetch: data hub:acme/sums:main:train: 20 rows, ")
    assert lines[-2:] == [f"  export HF_HOME={home} HF_HUB_OFFLINE=1", "[]"]

    hub.served.clear()
    again = lines_of(world, hub, home)
    assert not hub.served
    assert [line for line in again if line.endswith(", already there")] == [*again[0:6:2]]

    # No hub at all, and the readers that a run has.
    program = """
from grpo_spmd.config.load import load_config
from grpo_spmd.data.rows import read_rows
from grpo_spmd.model import config_json
config = load_config("config.yaml")
path = config.model.path
files = config_json.tensor_files(config_json.checkpoint_folder(path))
print(len(read_rows(config.data)), len(read_rows(config.data, "held")), config_json.load_config(path).model_type)
print(config_json.load_tokenizer(path)("1 + 1")["input_ids"], {str(file.resolve()) for file in files.values()})
"""  # noqa: E501
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run_command([sys.executable, "-c", program], cwd=world, env=offline)
    assert done.returncode == 0, done.stderr
    counts, tokens = done.stdout.splitlines()
    assert counts == "20 3 qwen3"
    weights = next(
        iter({*(home / "hub/models--acme--tiny/snapshots").glob("*/model.safetensors")})
    ).resolve()
    assert tokens.endswith(f"{{'{weights}'}}")
    assert weights.read_bytes() == (model / "model.safetensors").read_bytes()


def test_models_that_teach_come_too(world: Path, hub: FakeHub, tmp_path: Path) -> None:
    """A reward model with its tokenizer and template, a teacher and a critic; then a run's readers
    without a hub."""
    reward_model, home = make_reward_model(tmp_path / "made", "qwen3", seed=1), tmp_path / "home"
    (reward_model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    for name in ("judge", "teacher", "critic"):
        source = reward_model if name == "judge" else world / "hub/models/acme/tiny"
        shutil.copytree(source, world / "hub/models/acme" / name, dirs_exist_ok=True)
    teach = ["teacher.path=acme/teacher", "critic.path=acme/critic", "advantage.estimator=gae"]
    names = [
        *teach,
        "advantage.normalize_std=batch",
        "rewards=[{model: acme/judge}, {name: exact_match}]",
    ]
    lines = lines_of(world, hub, home, *LOCAL_DATA, *names)
    fetched = re.findall("^prefetch: model (acme/[a-z]+), ", "\n".join(lines), re.MULTILINE)
    assert sorted(fetched) == ["acme/critic", "acme/judge", "acme/teacher", "acme/tiny"]
    program = f"""
import sys
from grpo_spmd.config.load import load_config
from grpo_spmd.model import config_json
from grpo_spmd.model.reward_model_files import read_reward_model
from grpo_spmd.rollout.reward_models import RewardTexts
config = load_config("config.yaml", {[*LOCAL_DATA, *names]})
for path in (config.teacher.path, config.critic.path):
    print(config_json.load_config(path).model_type, len(config_json.tensor_files(config_json.checkpoint_folder(path))))
judge = config.rewards[0]
files = read_reward_model(0, judge, config_json.checkpoint_folder(judge.model, judge.revision), 64)
texts = RewardTexts(files, config_json.load_tokenizer(config.model.path))
print(texts.tokenizer.chat_template is not None, len(files.shapes))
"""  # noqa: E501
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run_command([sys.executable, "-c", program], cwd=world, env=offline)
    assert done.returncode == 0, done.stderr
    teacher, critic, judge = done.stdout.splitlines()
    assert teacher == critic
    assert teacher.startswith("qwen3 ")
    assert judge == f"True {int(teacher.split()[1]) + 1}"  # a head more than a tied model has


def test_local_folders_need_nothing(world: Path) -> None:
    done = run_command([*PREFETCH, "model.path=hub/models/acme/tiny", *LOCAL_DATA], cwd=world)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "prefetch: the model and the data are local: nothing to fetch\n"


def test_each_refusal_is_one_line_and_exit_code_2(
    world: Path, hub: FakeHub, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        local = "model.path=hub/models/acme/tiny"
        for overrides, variables, expected in (
            (
                [],
                {"HF_ENDPOINT": nobody},
                f"error: model.path: acme/tiny is not in the local cache, and {nobody} gives no "
                "answer (",
            ),
            (
                [local],
                {"HF_ENDPOINT": nobody},
                f"error: data.train: acme/sums is not in the local cache, and {nobody} gives no "
                "answer (",
            ),
            (
                ["model.path=acme/none"],
                {},
                f"error: model.path: there is no {hub.url}/acme/none, or it is private",
            ),
            (
                ["model.path=acme/old"],
                {},
                "error: model.path: acme/old has no .safetensors at the hub",
            ),
            (
                [],
                {"HF_HUB_OFFLINE": "1"},
                "error: HF_HUB_OFFLINE is set, but prefetch needs the network",
            ),
            (["sed=1"], {}, "error: sed: unknown key"),
        ):
            env = hub.environment | {"HF_HOME": str(tmp_path)} | variables
            done = run_command([*PREFETCH, *overrides], cwd=world, env=env)
            assert done.returncode == 2, done.stderr
            assert done.stderr.startswith(expected), done.stderr
            assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not hub.served


def test_a_disk_without_room_is_named_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    prefetch._check_disk(tmp_path / "cache", 1 << 20, "acme/tiny")
    with pytest.raises(
        ConfigError, match=r"acme/tiny needs 2.00 MiB more in .*, and 1.00 MiB are free"
    ):
        prefetch._check_disk(tmp_path / "cache", 2 << 20, "acme/tiny")


def test_ctrl_c_leaves_at_once_and_the_next_start_goes_on(
    world: Path, hub: FakeHub, tmp_path: Path
) -> None:
    hub.holds = "model.safetensors"
    job = Job([*PREFETCH, *LOCAL_DATA], cwd=world, env=hub.environment | {"HF_HOME": str(tmp_path)})
    while "model.safetensors" not in hub.served:
        assert job.process.poll() is None, job.wait()[1]
        time.sleep(0.02)
    began = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)
    code, output = job.wait(15)
    assert time.monotonic() - began < 5
    assert (code, output) == (130, "prefetch: stopped; the next start goes on from here\n")
    hub.holds = ""
    assert "prefetch: model acme/tiny" in lines_of(world, hub, tmp_path, *LOCAL_DATA)[0]
