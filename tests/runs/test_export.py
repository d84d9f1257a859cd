"""The command that exports: vLLM serves its files, bad input costs one line, and a full disk leaves
nothing."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

from grpo_spmd.checkpoint.export import export_checkpoint
from tests.support.exports import finish, make_checkpoint, write_state
from tests.support.models import make_model
from tests.support.processes import Job, run_command
from tests.support.ranks import RanksJob


def command(*arguments: str | Path) -> tuple[int, str]:
    return RanksJob(1, "grpo_spmd.tools.export", *map(str, arguments)).wait(60)


def test_vllm_serves_the_export_with_the_same_greedy_tokens(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    code, output = command(
        make_checkpoint(tmp_path / "c", model, 2), tmp_path / "out", "--dtype", "float32"
    )
    assert code == 0, output
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [11]]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    arguments = [str(tmp_path / "out"), json.dumps(prompts)]
    code, output = RanksJob(
        1, "tests.support.workers.vllm_greedy", *arguments, env=environment
    ).wait(500)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("tokens ")]
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for ids, sampled in zip(prompts, json.loads(line.removeprefix("tokens ")), strict=True):
        expected = list(ids)
        for _ in range(8):
            expected.append(int(plain(torch.tensor([expected])).logits[0, -1].argmax()))
        assert sampled == expected[len(ids) :]


def test_it_needs_no_more_memory_than_one_file(tmp_path: Path) -> None:
    """Six tensors of 32 MiB, in files of one each: what a process needs at its peak beyond torch
    itself."""
    mib = 1 << 20
    write_state(
        tmp_path / "c/state",
        {f"policy.{i}.weight": torch.full((2048, 4096), i + 0.5) for i in range(6)},
        2,
    )
    (tmp_path / "c/model").mkdir()
    (tmp_path / "c/model/config.json").write_text('{"model_type": "llama"}')
    finish(tmp_path / "c", 2)
    script = (
        "import resource, sys, torch, safetensors.torch\n"
        "from pathlib import Path\n"
        "from grpo_spmd.checkpoint import export\n"
        f"export.FILE_BYTES = {33 * mib}\n"
        "torch.zeros(1 << 20).bfloat16()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "export.export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), 'float32')\n"
        "print('grew', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    code, output = Job(
        [sys.executable, "-c", script, str(tmp_path / "c"), str(tmp_path / "out")]
    ).wait(100)
    assert code == 0, output
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 6
    # one file, one read, and something for the pages between
    assert int(output.split()[-1]) << 10 < (32 + 16 + 24) * mib, output
    for number in (0, 5):
        assert torch.equal(
            load_file(tmp_path / f"out/model-{number + 1:05d}-of-00006.safetensors")[
                f"{number}.weight"
            ][::2047],
            torch.full((2, 4096), number + 0.5),
        )


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file-size limit stands for a full disk: real errors of real writes, in the middle of a
    file."""
    checkpoint = make_checkpoint(
        tmp_path / "c", make_model(tmp_path / "model", "llama", tied=False), 2
    )
    script = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 17}, {1 << 17}))\n"
        "from grpo_spmd.tools.export import main\n"
        "main()\n"
    )
    done = run_command([sys.executable, "-c", script, str(checkpoint), str(tmp_path / "out")])
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'out'}: nothing was exported: ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "model"]
    # Into the checkpoint itself: what was there stays, and nothing is added.
    old = sorted(checkpoint.rglob("*"))
    (checkpoint / "model/config.json").write_text("no json")
    with pytest.raises(ValueError, match="Expecting value"):
        export_checkpoint(checkpoint, checkpoint)
    assert sorted(checkpoint.rglob("*")) == old


def test_bad_input_costs_one_line(tmp_path: Path) -> None:
    """One process each, so all in one test over one checkpoint."""
    run = tmp_path / "run"
    model = make_model(tmp_path / "model", "llama", tied=False)
    checkpoint = make_checkpoint(run / "checkpoints/step_000007", model, 2)
    (run / "config.yaml").write_text("{}")
    selected, leftover, flipped, newer, unsealed = (
        tmp_path / name for name in ("taken", "left", "flipped", "newer", "step_000009")
    )
    selected.mkdir()
    (selected / "file").write_text("mine")
    (tmp_path / "left.tmp").mkdir()
    shutil.copytree(checkpoint, flipped)
    shard = flipped / "state/shard_00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    shutil.copytree(checkpoint, newer)
    (newer / "manifest.json").unlink()
    finish(newer, 2, format=3)
    shutil.copytree(checkpoint, unsealed)
    (unsealed / "manifest.json").unlink()
    out = tmp_path / "out"
    for arguments, expected in [
        ((tmp_path / "nowhere", out), f"CHECKPOINT: there is no folder {tmp_path / 'nowhere'}"),
        (
            (run, out),
            f"CHECKPOINT: {run} belongs to a run; give one of its checkpoints: {checkpoint}",
        ),
        (
            (run / "checkpoints", out),
            f"CHECKPOINT: {run / 'checkpoints'} belongs to a run; give one of its checkpoints: "
            f"{checkpoint}",
        ),
        (
            (model, out),
            f"CHECKPOINT: {model} is a model's folder, which transformers and vLLM load as it is",
        ),
        ((unsealed, out), f"{unsealed}: manifest.json is missing"),
        (
            (flipped, out),
            f"{flipped}: state/shard_00002.safetensors is damaged (its SHA-256 is not the "
            "manifest's)",
        ),
        (
            (newer, out),
            f"{newer}: written by a newer grpo_spmd (format 3, this one reads up to 2); update "
            "grpo_spmd",
        ),
        (
            (checkpoint, checkpoint),
            f"{checkpoint} is the checkpoint itself, which is never changed; choose another OUT",
        ),
        (
            (checkpoint, selected),
            f"{selected} exists and is not an empty folder; nothing is written over: choose "
            "another, or move it away",
        ),
        (
            (checkpoint, leftover),
            f"{leftover}.tmp exists: an export is under way there, or one was killed; in that "
            "case remove it",
        ),
    ]:
        code, output = command(*arguments)
        assert (code, output.splitlines()) == (2, [f"error: {expected}"])
    assert not out.exists()
    assert (selected / "file").read_text() == "mine"
    out.mkdir()  # an empty folder is no obstacle
    code, output = command(checkpoint, out)
    mib = (out / "model.safetensors").stat().st_size / (1 << 20)
    assert (code, output.splitlines()) == (0, [f"{out}: {mib:.3g} MiB of weights after 7 steps"])


def test_help_and_a_wrong_path_do_not_wait_for_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_spmd.tools.export import main; sys.argv[1:] = sys.argv[1:]\ntry: "
        "main()\nfinally: "
        "print('torch' in sys.modules)"
    )
    start = time.monotonic()
    for arguments in (["--help"], [str(tmp_path / "nowhere"), "out"]):
        assert run_command([sys.executable, "-c", code, *arguments]).stdout.endswith("False\n")
    assert time.monotonic() - start < 20


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_export_of_a_real_run_is_what_torch_reads_from_its_checkpoint(
    elaborate_run: Path, tmp_path: Path
) -> None:
    """Two ranks wrote it; torch's own reader is the second opinion."""
    run = elaborate_run / "run"
    checkpoint = run / "checkpoints/step_000003"
    export_checkpoint(checkpoint, tmp_path / "out")
    result = load_file(tmp_path / "out/model.safetensors")
    reader = dcp.HuggingFaceStorageReader(str(checkpoint / "state"))
    stored = reader.read_metadata().state_dict_metadata
    shapes = {
        name: getattr(facts, "size", None)
        for name, facts in stored.items()
        if name.startswith("policy.")
    }
    state = {name: torch.empty(size or ()) for name, size in shapes.items()}
    dcp.load(dict(state), storage_reader=reader, no_dist=True)
    assert (
        result.keys()
        == {name.removeprefix("policy.") for name in state}
        == load_file(run.parent / "model/model.safetensors").keys()
    )
    for name, tensor in state.items():
        assert torch.equal(result[name.removeprefix("policy.")], tensor), name
        assert not torch.equal(
            tensor, load_file(run.parent / "model/model.safetensors")[name.removeprefix("policy.")]
        ), name
