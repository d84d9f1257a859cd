"""An export holds what the checkpoint held, in files that transformers, peft and vLLM load, and damage is named, never
exported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.manifest import CheckpointError, write_manifest
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.session import end_session, start_session
from tests.support.models import FAMILIES, make_model
from tests.support.processes import Job

COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def write_state(folder: Path, tensors: dict[str, Tensor], num_ranks: int) -> None:
    """Row shards as FSDP deals them, written by safetensors' own writer: an empty share is not written."""
    folder.mkdir(parents=True)
    for rank in range(num_ranks):
        rows, offsets = {}, {}
        for name, tensor in tensors.items():
            chunks = tensor.chunk(num_ranks)
            if rank < len(chunks):
                rows[name] = chunks[rank].contiguous()
                offsets[name] = {"saved_offsets": [rank * len(chunks[0]), *[0] * (tensor.ndim - 1)]}
        if rows:
            save_file(
                rows, folder / f"shard_{rank + 1:05d}.safetensors", metadata={"DCP_SHARDING_INFO": json.dumps(offsets)}
            )


def finish(checkpoint: Path, num_ranks: int, **changes: Any) -> Path:
    """trainer.json and manifest.json."""
    trainer = {
        "format": 1,
        "step": 7,
        "dtype": "bfloat16",
        "world_size": num_ranks,
        "config": {"model.num_replicas": 1},
        **changes,
    }
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    write_manifest(checkpoint, {})
    return checkpoint


def weights_of(model: Path) -> dict[str, Tensor]:
    """A model's tensors as transformers saved them (a tied lm_head is none of them)."""
    return load_file(model / "model.safetensors")


def make_checkpoint(folder: Path, model: Path, num_ranks: int, **changes: Any) -> Path:
    weights = weights_of(model)
    state = {f"policy.{name}": tensor for name, tensor in weights.items()}
    state |= {f"exp_avg.{name}": torch.full_like(tensor, 9.0) for name, tensor in weights.items()}
    write_state(folder / "state", state, num_ranks)
    (folder / "model").mkdir()
    for name in COMPANIONS:
        if (model / name).exists():
            shutil.copy(model / name, folder / "model")
    return finish(folder, num_ranks, **changes)


def command(*arguments: str | Path) -> tuple[int, str]:
    return Job([sys.executable, "-m", "grpo_spmd.export", *map(str, arguments)]).wait(60)


def cast(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("family", "tied", "num_ranks", "dtype"),
    [
        ("qwen3", True, 1, None),
        ("qwen2", False, 2, "float32"),
        ("llama", True, 3, "bfloat16"),
        ("granite", False, 5, "float32"),
    ],
)
def test_transformers_loads_every_tensor_as_it_was(
    tmp_path: Path, family: str, tied: bool, num_ranks: int, dtype: str | None
) -> None:
    assert family in FAMILIES
    model = make_model(tmp_path / "model", family, tied=tied)
    export_checkpoint(make_checkpoint(tmp_path / "step_000007", model, num_ranks), tmp_path / "out", dtype)
    expected = getattr(torch, dtype or "bfloat16")
    assert_same(load_file(tmp_path / "out/model.safetensors"), cast(weights_of(model), expected))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == expected
    original = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert_same(loaded.state_dict(), cast(original.state_dict(), expected))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == (dtype or "bfloat16")
    assert "torch_dtype" not in config
    text = "3,8=24:"
    tokenizers = [transformers.AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "out")]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "step_000007"]


def test_a_model_of_several_files_has_an_index_that_transformers_reads(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    largest = 97 * 64 * 4
    export_checkpoint(
        make_checkpoint(tmp_path / "c", model, 3), tmp_path / "out", "float32", max_file_bytes=2 * largest
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 2 * largest for file in files)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights_of(model).values())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(loaded.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(model).state_dict())


def test_shards_that_torchs_own_checkpoints_wrote_are_read(tmp_path: Path) -> None:
    """The format is torch's, not ours alone."""
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    start_session()
    try:
        state = {f"policy.{name}": tensor for name, tensor in weights_of(model).items()}
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "c/state"), save_distributed=True))
    finally:
        end_session()
    (written,) = (tmp_path / "c/state").glob("*.safetensors")
    written.rename(written.with_name("shard_00001.safetensors"))
    shutil.copytree(model, tmp_path / "c/model", ignore=shutil.ignore_patterns("*.safetensors"))
    export_checkpoint(finish(tmp_path / "c", 1), tmp_path / "out", "float32")
    assert_same(load_file(tmp_path / "out/model.safetensors"), weights_of(model))


def test_special_values_are_rounded_as_torch_rounds_them(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", tied=False)
    weights = weights_of(model)
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 65504.1])
    weights["lm_head.weight"].view(-1)[: len(odd)] = odd
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    export_checkpoint(make_checkpoint(tmp_path / "c", model, 2), tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]
    assert torch.equal(found.view(torch.int16), weights["lm_head.weight"].bfloat16().view(torch.int16))


def test_peft_loads_adapters(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    config = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules=["q_proj", "down_proj"], base_model_name_or_path=str(model)
    )
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    prefix = "base_model.model."
    adapters = {name.removeprefix(prefix): tensor for name, tensor in peft.get_peft_model_state_dict(adapted).items()}
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapters)
    write_state(tmp_path / "c/state", {f"policy.{name}": tensor for name, tensor in adapters.items()}, 3)
    adapted.peft_config["default"].save_pretrained(str(tmp_path / "c/model"))
    export_checkpoint(finish(tmp_path / "c", 3), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(model), tmp_path / "out")
    assert_same(peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(adapted))
    ids = torch.tensor([[4, 9, 2, 7]])
    assert torch.equal(loaded(ids).logits, adapted(ids).logits)
    with pytest.raises(ConfigError, match=r"^--dtype bfloat16: .* holds adapters, which are float32 always"):
        export_checkpoint(tmp_path / "c", tmp_path / "other", "bfloat16")


def test_vllm_serves_the_export_with_the_same_greedy_tokens(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    code, output = command(make_checkpoint(tmp_path / "c", model, 2), tmp_path / "out", "--dtype", "float32")
    assert code == 0, output
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [11]]
    script = (
        "import json, sys, vllm\n"
        "llm = vllm.LLM(sys.argv[1], enforce_eager=True, max_model_len=64)\n"
        "sampling = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)\n"
        f"outputs = llm.generate([{{'prompt_token_ids': ids}} for ids in {prompts}], sampling, use_tqdm=False)\n"
        "print('tokens', json.dumps([list(output.outputs[0].token_ids) for output in outputs]))\n"
    )
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    code, output = Job([sys.executable, "-c", script, str(tmp_path / "out")], env=environment).wait(200)
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("tokens ")]
    plain = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for ids, sampled in zip(prompts, json.loads(line.removeprefix("tokens ")), strict=True):
        expected = list(ids)
        for _ in range(8):
            expected.append(int(plain(torch.tensor([expected])).logits[0, -1].argmax()))
        assert sampled == expected[len(ids) :]


def test_it_needs_no_more_memory_than_one_file(tmp_path: Path) -> None:
    """Six tensors of 32 MiB, in files of one each: what a process needs at its peak beyond torch itself."""
    mib = 1 << 20
    write_state(tmp_path / "c/state", {f"policy.{i}.weight": torch.full((2048, 4096), i + 0.5) for i in range(6)}, 2)
    (tmp_path / "c/model").mkdir()
    (tmp_path / "c/model/config.json").write_text("{}")
    finish(tmp_path / "c", 2)
    script = (
        "import resource, sys, torch, safetensors.torch\n"
        "from pathlib import Path\n"
        "from grpo_spmd.export import export_checkpoint\n"
        "torch.zeros(1 << 20).bfloat16()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"export_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), 'float32', max_file_bytes={33 * mib})\n"
        "print('grew', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    code, output = Job([sys.executable, "-c", script, str(tmp_path / "c"), str(tmp_path / "out")]).wait(100)
    assert code == 0, output
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 6
    # one file, one read, and something for the pages between
    assert int(output.split()[-1]) << 10 < (32 + 16 + 24) * mib, output
    for number in (0, 5):
        assert torch.equal(
            load_file(tmp_path / f"out/model-{number + 1:05d}-of-00006.safetensors")[f"{number}.weight"][::2047],
            torch.full((2, 4096), number + 0.5),
        )


def test_into_a_checkpoint_that_is_still_being_made(tmp_path: Path) -> None:
    """As the trainer does it: without a manifest, in a thread, into the folder itself, with nothing printed."""
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    checkpoint = make_checkpoint(tmp_path / "step_000007.tmp", model, 2)
    (checkpoint / "manifest.json").unlink()
    before = {path.name for path in checkpoint.iterdir()}
    thread = threading.Thread(target=export_checkpoint, args=(checkpoint, checkpoint))
    thread.start()
    thread.join()
    assert {path.name for path in checkpoint.iterdir()} == before | {
        "model.safetensors",
        *(p.name for p in (checkpoint / "model").iterdir()),
    }
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert_same({"norm": loaded.model.norm.weight.data}, {"norm": weights_of(model)["model.norm.weight"].bfloat16()})
    # the companion stays as it was
    assert json.loads((checkpoint / "model/config.json").read_text())["dtype"] == "float32"


def _drop(shard: int) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / f"state/shard_{shard:05d}.safetensors").unlink()


def _double(checkpoint: Path) -> None:
    shutil.copy(checkpoint / "state/shard_00002.safetensors", checkpoint / "state/shard_00004.safetensors")


def _half(checkpoint: Path) -> None:
    os.truncate(checkpoint / "state/shard_00002.safetensors", 5000)


def _bare(checkpoint: Path) -> None:
    save_file({"policy.x": torch.zeros(2)}, checkpoint / "state/shard_00002.safetensors")


def _empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "state")


def _rename_a_tensor(checkpoint: Path) -> None:
    path = checkpoint / "state/shard_00003.safetensors"
    path.write_bytes(path.read_bytes().replace(b"policy.model.norm.weight", b"policy.model.nurm.weight"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_drop(1), r"rows of policy\.lm_head\.weight 0 to 32 are missing, those before shard_00002\.safetensors"),
        (_drop(2), r"rows of policy\.lm_head\.weight 33 to 65 are missing, those before shard_00003\.safetensors"),
        (_drop(3), r"the last rows of policy\.lm_head\.weight are missing: 66 rows are there, dealt over 3 ranks"),
        (_double, r"rows of policy\.lm_head\.weight from 33 on are there twice, also in shard_00004\.safetensors"),
        (_half, r"shard_00002\.safetensors: not a checkpoint's shard \(SafetensorError"),
        (_bare, r"shard_00002\.safetensors: not a checkpoint's shard \(TypeError"),
        (_empty, r"no shard in its state folder holds a tensor policy\.\*"),
        (
            _rename_a_tensor,
            r"the last rows of policy\.model\.norm\.weight are missing: 44 rows are there, dealt over 3 ranks",
        ),
    ],
)
def test_rows_that_are_missing_or_doubled_are_named_and_nothing_is_left(
    tmp_path: Path, damage: Callable[[Path], None], expected: str
) -> None:
    """Without a manifest that would tell: the trainer exports before it writes one."""
    checkpoint = make_checkpoint(tmp_path / "c", make_model(tmp_path / "model", "llama", tied=False), 3)
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=expected) as refused:
        export_checkpoint(checkpoint, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "model"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file-size limit stands for a full disk: real errors of real writes, in the middle of a file."""
    checkpoint = make_checkpoint(tmp_path / "c", make_model(tmp_path / "model", "llama", tied=False), 2)
    script = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 17}, {1 << 17}))\n"
        "from grpo_spmd.export import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, checkpoint, tmp_path / "out"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path / 'out'}: nothing was exported: ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "model"]
    # Into the checkpoint itself: what was there stays, and nothing is added.
    before = sorted(checkpoint.rglob("*"))
    (checkpoint / "model/config.json").write_text("no json")
    with pytest.raises(ValueError, match="Expecting value"):
        export_checkpoint(checkpoint, checkpoint)
    assert sorted(checkpoint.rglob("*")) == before


def test_bad_input_costs_one_line(tmp_path: Path) -> None:
    """One process each, so all in one test over one checkpoint."""
    run = tmp_path / "run"
    model = make_model(tmp_path / "model", "llama", tied=False)
    checkpoint = make_checkpoint(run / "checkpoints/step_000007", model, 2)
    (run / "config.yaml").write_text("{}")
    taken, leftover, flipped, newer, unsealed = (
        tmp_path / name for name in ("taken", "left", "flipped", "newer", "step_000009")
    )
    taken.mkdir()
    (taken / "file").write_text("mine")
    (tmp_path / "left.tmp").mkdir()
    shutil.copytree(checkpoint, flipped)
    shard = flipped / "state/shard_00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    shutil.copytree(checkpoint, newer)
    (newer / "manifest.json").unlink()
    finish(newer, 2, format=2)
    shutil.copytree(checkpoint, unsealed)
    (unsealed / "manifest.json").unlink()
    out = tmp_path / "out"
    for arguments, expected in [
        ((tmp_path / "nowhere", out), f"CHECKPOINT: there is no folder {tmp_path / 'nowhere'}"),
        ((run, out), f"CHECKPOINT: {run} is a run folder; give one of its checkpoints: {checkpoint}"),
        (
            (run / "checkpoints", out),
            f"CHECKPOINT: {run / 'checkpoints'} is the folder of a run's checkpoints; give one of its checkpoints: {checkpoint}",
        ),
        ((model, out), f"{model}: manifest.json is missing"),
        ((unsealed, out), f"{unsealed}: manifest.json is missing"),
        ((flipped, out), f"{flipped}: state/shard_00002.safetensors is damaged (its SHA-256 is not the manifest's)"),
        ((newer, out), f"{newer}: written by a newer grpo_spmd (format 2, this one reads up to 1); update grpo_spmd"),
        (
            (checkpoint, checkpoint),
            f"{checkpoint} is the checkpoint itself, which is never changed; choose another OUT",
        ),
        (
            (checkpoint, taken),
            f"{taken} exists and is not an empty folder; nothing is written over: choose another, or move it away",
        ),
        (
            (checkpoint, leftover),
            f"{leftover}.tmp exists: an export is under way there, or one was killed; in that case remove it",
        ),
    ]:
        code, output = command(*arguments)
        assert (code, output.splitlines()) == (2, [f"error: {expected}"])
    assert not out.exists()
    assert (taken / "file").read_text() == "mine"
    out.mkdir()  # an empty folder is no obstacle
    code, output = command(checkpoint, out)
    mib = (out / "model.safetensors").stat().st_size / (1 << 20)
    assert (code, output.splitlines()) == (0, [f"{out}: {mib:.3g} MiB of weights after 7 steps"])


def test_help_and_a_wrong_path_do_not_wait_for_torch(tmp_path: Path) -> None:
    code = "import sys; from grpo_spmd.export import main; sys.argv[1:] = sys.argv[1:]\ntry: main()\nfinally: print('torch' in sys.modules)"
    start = time.monotonic()
    for arguments in (["--help"], [str(tmp_path / "nowhere"), "out"]):
        assert subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True).stdout.endswith(
            "False\n"
        )
    assert time.monotonic() - start < 20
