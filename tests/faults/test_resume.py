"""A run that was killed goes on as if nothing had happened: to the bit at the same number of ranks,
within rounding at
another."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from grpo_spmd.checkpoint.manifest import verify_checkpoint
from grpo_spmd.checkpoint.run_dir import list_checkpoints
from grpo_spmd.checkpoint.state import write_shard
from tests.support.dumps import dumped
from tests.support.models import make_model, write_config
from tests.support.processes import Job, torchrun
from tests.support.ranks import RanksJob, run_worker, train

FEATURES: dict[str, Any] = {
    "training": {"num_steps": 5, "num_mini_batches": 2, "max_tokens_per_micro_batch": 64},
    "checkpoint": {"every_steps": 2, "resume": "auto"},
    "optimizer": {"lr": 1e-2, "warmup_steps": 3, "schedule": "cosine", "min_lr": 1e-3},
    "loss": {"kl_coef": 0.01},
    "rollout": {
        "num_prompts_per_step": 6,
        "group_size": 4,
        "max_completion_tokens": 12,
        "dynamic_sampling": True,
    },
}
# What may differ between two runs of the same thing: how long it took, and memory.
TIMED = re.compile(r"time/|memory/|throughput/|_s$|tokens_per_s|tail_waste")


def start(num_ranks: int, folder: Path, *overrides: str) -> Job:
    target = ["-m", "grpo_spmd.train", "--config", str(folder / "config.yaml"), *overrides]
    return Job(torchrun(num_ranks, *target) if num_ranks > 1 else [sys.executable, *target])


def run(num_ranks: int, folder: Path, *overrides: str) -> None:
    """To its end, nothing being killed."""
    train(num_ranks, folder / "config.yaml", *overrides, timeout_s=500)


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not TIMED.search(name)} for line in lines
    ]


def state(folder: Path, step: int) -> dict[str, str]:
    """SHA-256 of each rank's shard."""
    files = json.loads((folder / f"run/checkpoints/step_{step:06d}/manifest.json").read_text())[
        "files"
    ]
    return {name: facts["sha256"] for name, facts in files.items() if name.startswith("state/")}


def make(folder: Path, model: Path, **sections: Any) -> Path:
    folder.mkdir()
    for file in (model, model.parent / "train.jsonl"):
        if file.exists():
            (folder / file.name).symlink_to(file)
    write_config(folder, model, **{**FEATURES, **sections})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    created = make_model(folder / "model", "qwen3", tied=True)
    write_config(folder, created)  # makes the data
    return created


@pytest.fixture(scope="module")
def uninterrupted(model: Path) -> Path:
    folder = make(model.parent / "uninterrupted", model)
    run(2, folder)
    return folder


@pytest.fixture(scope="module")
def killed(model: Path) -> Path:
    """Killed in its 4th step, one rank first, then gone on with at the same number of ranks."""
    folder = make(model.parent / "killed", model)
    kill_in_fourth_step(folder)
    return folder


def kill_in_fourth_step(folder: Path) -> None:
    """Starts a run on 2 ranks, and kills one of them once its third step is written."""
    job = start(2, folder)
    deadline = time.monotonic() + 240
    while (
        not (folder / "run/metrics.jsonl").exists()
        or len((folder / "run/metrics.jsonl").read_text().splitlines()) < 3
    ):
        assert time.monotonic() < deadline, job.wait(1)
        time.sleep(0.02)
    ranks = [
        pid
        for pid in job.running()
        if b"grpo_spmd.train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(
        random.Random(0).choice([pid for pid in ranks if pid != job.process.pid]), signal.SIGKILL
    )
    code, output = job.wait(60)
    assert code != 0, output
    # as a kill in the middle of a write would leave it
    (folder / "run/metrics.jsonl").open("a").write('{"step": 77, "half a li')
    (folder / "run/checkpoints/step_000004.tmp/state").mkdir(parents=True, exist_ok=True)


@pytest.fixture(scope="module")
def preempted(killed: Path) -> Path:
    """Gone on with, and then told to leave as soon as it has finished a step."""
    job = start(2, killed)
    deadline = time.monotonic() + 120
    while '"half' in (text := (killed / "run/metrics.jsonl").read_text()) or text.count("\n") < 3:
        assert time.monotonic() < deadline, job.wait(1)
        time.sleep(0.01)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.wait(60)
    assert code == 1, output  # torchrun's own, which was signalled
    assert "goes on from" in output, output
    assert output.count("everything is saved") == 1, output
    assert job.survivors() == []
    marker = json.loads((killed / "run/preempted.json").read_text())
    assert marker == {"step": marker["step"], "reason": "SIGTERM", "saved": True}
    assert marker["step"] in (3, 4)
    assert list_checkpoints(killed / "run")[-1].name == f"step_{marker['step']:06d}"
    return killed


def test_a_run_killed_and_preempted_goes_on_to_the_bit(
    uninterrupted: Path, preempted: Path
) -> None:
    output = train(2, preempted / "config.yaml", timeout_s=500)
    assert "goes on from" in output
    assert not (preempted / "run/preempted.json").exists()
    assert metrics(preempted) == metrics(uninterrupted)
    assert [line["step"] for line in metrics(preempted)] == list(range(1, 6))
    for step in range(1, 6):
        assert dumped(preempted / "run", step) == dumped(uninterrupted / "run", step), step
    for step in (4, 5):
        assert state(preempted, step) == state(uninterrupted, step), step
    assert [path.name for path in sorted((preempted / "run/checkpoints").iterdir())] == [
        "step_000004",
        "step_000005",
    ]
    lines = [
        json.loads(line) for line in (preempted / "run/metrics.jsonl").read_text().splitlines()
    ]
    for name in ("time/wall_s", "time/unix_s"):
        times = [line[name] for line in lines]
        assert times == sorted(set(times)), (name, times)
    again = train(2, preempted / "config.yaml")
    assert "is the end of this run; raise training.num_steps (5) to go on" in again
    assert "starting vLLM" not in again
    assert metrics(preempted) == metrics(uninterrupted)


def test_the_run_folder_names_each_launch_and_how_it_ended(
    uninterrupted: Path, preempted: Path
) -> None:
    [full] = launches(uninterrupted)
    assert (full["outcome"], full["first_step"], full["last_step"], full["world_size"]) == (
        "done",
        1,
        5,
        2,
    )
    killed, told_to_stop, *_ = launches(preempted)
    assert killed["outcome"] == "failed"
    assert "its process is gone" in killed["why"]
    marker = told_to_stop["last_step"]
    assert (killed["first_step"], told_to_stop["first_step"]) == (1, 3)
    assert (told_to_stop["outcome"], told_to_stop["why"], marker in (3, 4)) == (
        "preempted",
        "SIGTERM",
        True,
    )
    for launch in (killed, told_to_stop):
        assert launch["start"] < launch["end"]  # ISO dates sort as text
        assert launch["launcher"][1:3] == ["-m", "torch.distributed.run"]
        assert launch["launcher"][-2:] == ["--config", str(preempted / "config.yaml")]
        assert launch["command"][1:] == ["--config", str(preempted / "config.yaml")]


def launches(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/launches.jsonl").read_text().splitlines()]


def test_other_numbers_of_ranks_go_on_within_rounding(uninterrupted: Path, model: Path) -> None:
    """From the same checkpoint, that of 2 ranks after 4 steps, the 5th step on 1 rank."""
    folder = make(model.parent / "one", model)
    named = f"checkpoint.resume={uninterrupted}/run/checkpoints/step_000004"
    run(1, folder, named)
    (single,), two = metrics(folder), metrics(uninterrupted)[4]
    assert single["step"] == 5
    for name in (
        "loss/total",
        "loss/policy",
        "loss/kl",
        "loss/entropy",
        "optim/grad_norm",
        "optim/lr",
        "reward/mean",
    ):
        assert math.isclose(single[name], two[name], rel_tol=1e-5, abs_tol=1e-6), name
    local, theirs = (dumped(f / "run", 5) for f in (folder, uninterrupted))
    assert [r["completion_ids"] for r in local] == [r["completion_ids"] for r in theirs]
    # Should it die before its first save, it comes back to where it began, and not to the model.
    assert [path.name for path in list_checkpoints(folder / "run")] == [
        "step_000004",
        "step_000005",
    ]
    verify_checkpoint(list_checkpoints(folder / "run")[0])
    code, output = refused(folder, "checkpoint.resume=never")
    assert code == 2, output
    assert "set checkpoint.resume: auto to go on" in output


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=4", "seed (4) was 0 in the run that wrote"),
        ("data.shuffle=false", "data.shuffle (False) was True"),
        (
            "data.chat_template_kwargs={thinks: 1}",
            "data.chat_template_kwargs (None) was {}",
        ),
        ("model.lora.rank=4", "model.lora.rank (4) was 0"),
        ("optimizer.name=adamw_8bit", "optimizer.name (adamw_8bit) was adamw"),
    ],
)
def test_what_would_make_it_another_run_is_refused_before_torch(
    uninterrupted: Path, override: str, expected: str
) -> None:
    code, output = start(1, uninterrupted, override).wait(60)
    assert code == 2, output
    assert expected in output
    assert len(output.splitlines()) == 1


@pytest.mark.nightly
def test_a_mixture_of_experts_with_8_bit_moments_goes_on_to_the_bit(tmp_path: Path) -> None:
    """With replayed routes and a load-balance loss: killed in a step, gone on with on 2 ranks to
    the bit, and on 1 rank within the rounding of a sum over ranks."""
    model = make_model(tmp_path / "model", "qwen3_moe", tied=True)
    write_config(tmp_path, model)
    sections: dict[str, Any] = {
        "optimizer": {**FEATURES["optimizer"], "name": "adamw_8bit"},
        "loss": {**FEATURES["loss"], "router_aux_coef": 0.01},
    }
    whole, killed, single = (make(tmp_path / name, model, **sections) for name in "abc")
    run(2, whole)
    kill_in_fourth_step(killed)
    shutil.copytree(killed / "run", single / "run")
    run(2, killed)
    run(1, single)
    assert metrics(killed) == metrics(whole)
    assert {"engine/router_disagreement_frac", "loss/router_aux"} <= metrics(whole)[-1].keys()
    assert state(killed, 5) == state(whole, 5)
    assert any("exp_avg_sq_scale." in name for name in saved(whole, 4))
    for step in range(1, 6):
        assert dumped(killed / "run", step) == dumped(whole / "run", step), step
    # It goes on from the checkpoint of step 2, from where on rounding grows tenfold a step.
    expected, actual = metrics(whole)[2], metrics(single)[2]
    for name in ("loss/total", "loss/policy", "loss/kl", "loss/router_aux", "optim/grad_norm"):
        assert math.isclose(actual[name], expected[name], rel_tol=1e-5, abs_tol=1e-6), name
    ids = [[r["completion_ids"] for r in dumped(f / "run", 3)] for f in (whole, single)]
    assert ids[0] == ids[1]
    weights = [
        load_file(f / "run/checkpoints/step_000005/model.safetensors") for f in (whole, single)
    ]
    for name, tensor in weights[0].items():
        difference = (weights[1][name] - tensor).norm() / tensor.norm()
        assert difference < 5e-4, (name, difference)


def saved(folder: Path, step: int) -> set[str]:
    """Names of the tensors in the first rank's shard."""
    path = next((folder / f"run/checkpoints/step_{step:06d}/state").glob("shard_*.safetensors"))
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def refused(folder: Path, override: str) -> tuple[int, str]:
    return RanksJob(1, "grpo_spmd.train", "--config", str(folder / "config.yaml"), override).wait(
        60
    )


def test_another_model_or_other_data_are_refused(uninterrupted: Path, model: Path) -> None:
    second = make_model(model.parent / "other", "qwen3", tied=True, seed=5)  # the same shapes
    code, output = refused(uninterrupted, f"model.path={second}")
    assert code == 2, output
    assert "model.path holds another model than the run had" in output
    rows = (model.parent / "train.jsonl").read_text().splitlines()
    (model.parent / "fewer.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    code, output = refused(uninterrupted, f"data.train={model.parent}/fewer.jsonl")
    assert code == 2, output
    assert "data.train gives other prompts" in output


@pytest.mark.parametrize(
    ("adapters", "optimizer"), [(0, "adamw"), (4, "adamw"), (0, "adamw_8bit"), (4, "adamw_8bit")]
)
def test_every_tensor_at_every_number_of_ranks(
    tmp_path: Path, adapters: int, optimizer: str
) -> None:
    """Saved by 2 x 2 ranks (replicas x shards): loaded by 1 and by 3 all tensors have every bit,
    also where neither divides the rows. With 8-bit moments 1 and 3 ranks also compute them so."""
    model = make_model(tmp_path / "model", "qwen2", tied=False)
    for name in (
        "manifest.json",
        "trainer.json",
    ):  # a model folder may be another run's last checkpoint
        (model / name).write_text("{}")
    sections: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32", "lora": {"rank": adapters}},
        "optimizer": {"lr": 1e-2, "name": optimizer},
    }
    config = write_config(tmp_path, model, **sections)
    folder = tmp_path / "run/checkpoints/step_000002"
    saved = run_worker(4, "checkpoint", "save", str(folder), str(config), "2").splitlines()
    assert sorted(path.name for path in (folder / "state").iterdir()) == [
        "shard_00001.safetensors",
        "shard_00002.safetensors",
    ]
    assert (folder / ("adapter_model.safetensors" if adapters else "model.safetensors")).is_file()
    wanted = [line for line in saved if line.startswith(("lr", "policy.", "exp_avg", "steps"))]
    assert sum(line.startswith("exp_avg_sq.") for line in wanted) == (28 if adapters else 27), (
        wanted
    )
    assert "steps {2.0}" in wanted
    for num_ranks in (3,) if adapters else (1, 3):
        loaded = run_worker(
            num_ranks, "checkpoint", "load", str(folder), str(config), "1"
        ).splitlines()
        assert [
            line for line in loaded if line.startswith(("lr", "policy.", "exp_avg", "steps"))
        ] == wanted
    if optimizer == "adamw_8bit":
        assert sum(line.startswith("exp_avg_sq_scale.") for line in wanted) > 10, wanted
        for num_ranks in (1, 3):
            arguments = ("save", str(folder.with_name("step_000002")), str(config), "1")
            folder.rename(folder.with_name(f"by_{num_ranks}"))
            computed = run_worker(num_ranks, "checkpoint", *arguments).splitlines()
            assert [
                line for line in computed if line.startswith(("policy.", "exp_avg", "steps"))
            ] == [line for line in wanted if not line.startswith("lr")]
    elif not adapters:
        second = write_config(
            tmp_path,
            make_model(tmp_path / "other", "qwen2", tied=False, vocab_size=98),
            model={"dtype": "float32"},
        )
        with pytest.raises(
            AssertionError,
            match=r"is of another model: exp_avg\.lm_head\.weight has shape \[97, 128\] there, "
            r"and \[98",
        ):
            run_worker(1, "checkpoint", "load", str(folder), str(second), "1")


def test_a_shard_is_what_safetensors_and_dcp_read(tmp_path: Path) -> None:
    full = torch.randn(7, 3), torch.randn(5)
    for rank, (initial, final) in enumerate([(0, 4), (4, 7)]):
        rows = {"policy.a": full[0][initial:final], "policy.b": full[1][initial:final]}
        facts = write_shard(
            tmp_path / f"shard_{rank}.safetensors",
            {n: t.contiguous() for n, t in rows.items()},
            dict.fromkeys(rows, initial),
        )
        assert facts["bytes"] == (tmp_path / f"shard_{rank}.safetensors").stat().st_size
        assert torch.equal(
            load_file(tmp_path / f"shard_{rank}.safetensors")["policy.b"], rows["policy.b"]
        )
    with safe_open(tmp_path / "shard_1.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"])["policy.a"] == {
            "saved_offsets": [4, 0]
        }
    read = {"policy.a": torch.zeros(7, 3), "policy.b": torch.zeros(5)}
    dcp.load(read, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(read["policy.a"], full[0])
    assert torch.equal(read["policy.b"], full[1])


def test_the_best_checkpoint_stays(uninterrupted: Path, model: Path) -> None:
    """The measured best is an early one: with keep 1 it and the last one are left, both whole."""
    folder = make(
        model.parent / "best",
        model,
        checkpoint={"every_steps": 1, "keep": 1, "best_metric": "optim/grad_norm"},
    )
    run(1, folder)
    norms = {line["step"]: line["optim/grad_norm"] for line in metrics(folder)}
    best = (
        max((step for step in norms if step > 1), key=norms.__getitem__) - 1
    )  # what a step measures is of that policy
    checkpoints = list_checkpoints(folder / "run")
    assert [path.name for path in checkpoints] == sorted({f"step_{best:06d}", "step_000005"})
    for path in checkpoints:
        verify_checkpoint(path)
