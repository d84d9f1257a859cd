"""An export holds what the checkpoint held, in files that transformers and peft load, and damage is
named, never
exported."""

from __future__ import annotations

import json
import os
import shutil
import threading
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

from grpo_spmd.checkpoint import export
from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.manifest import CheckpointError, model_fingerprint
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.session import end_session, start_session
from tests.support.exports import finish, make_checkpoint, weights_of, write_state
from tests.support.models import FAMILIES, make_model


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
    export_checkpoint(
        make_checkpoint(tmp_path / "step_000007", model, num_ranks), tmp_path / "out", dtype
    )
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
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(folder) for folder in (model, tmp_path / "out")
    ]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "step_000007"]


def test_a_model_of_several_files_has_an_index_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    largest = 97 * 64 * 4
    monkeypatch.setattr(export, "FILE_BYTES", 2 * largest)
    export_checkpoint(make_checkpoint(tmp_path / "c", model, 3), tmp_path / "out", "float32")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(
        sum(tensor.nbytes for tensor in load_file(file).values()) <= 2 * largest for file in files
    )
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in weights_of(model).values()
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(
        loaded.state_dict(), transformers.AutoModelForCausalLM.from_pretrained(model).state_dict()
    )


def test_shards_that_torchs_own_checkpoints_wrote_are_read(tmp_path: Path) -> None:
    """The format is torch's, not ours alone."""
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    start_session()
    try:
        state = {f"policy.{name}": tensor for name, tensor in weights_of(model).items()}
        dcp.save(
            state,
            storage_writer=dcp.HuggingFaceStorageWriter(
                str(tmp_path / "c/state"), save_distributed=True
            ),
        )
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
    odd = torch.tensor(
        [float("nan"), float("inf"), -0.0, 1e-40, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 65504.1]
    )
    weights["lm_head.weight"].view(-1)[: len(odd)] = odd
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    export_checkpoint(make_checkpoint(tmp_path / "c", model, 2), tmp_path / "out")
    result = load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]
    assert torch.equal(
        result.view(torch.int16), weights["lm_head.weight"].bfloat16().view(torch.int16)
    )


def _adapted(model: Path, dtype: torch.dtype = torch.float32) -> peft.PeftModel:
    """The model with peft's own layers, their tensors made up."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    config = peft.LoraConfig(
        r=5,
        lora_alpha=7,
        target_modules=["q_proj", "down_proj"],
        base_model_name_or_path=str(model),
    )
    adapted = peft.get_peft_model(base, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_()
    return adapted


def _checkpoint_of(adapted: peft.PeftModel, folder: Path, num_ranks: int, **changes: Any) -> Path:
    """What a run with adapters saves."""
    prefix, state = "base_model.model.", peft.get_peft_model_state_dict(adapted)
    adapters = {
        f"policy.{name.removeprefix(prefix)}": tensor.float() for name, tensor in state.items()
    }
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in adapters)
    write_state(folder / "state", adapters, num_ranks)
    adapted.peft_config["default"].save_pretrained(str(folder / "model"))
    return finish(folder, num_ranks, **changes)


def test_peft_loads_adapters(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=False)
    adapted = _adapted(model)
    checkpoint = _checkpoint_of(adapted, tmp_path / "c", 3)
    export_checkpoint(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(model), tmp_path / "out"
    )
    assert_same(peft.get_peft_model_state_dict(loaded), peft.get_peft_model_state_dict(adapted))
    ids = torch.tensor([[4, 9, 2, 7]])
    assert torch.equal(loaded(ids).logits, adapted(ids).logits)
    with pytest.raises(
        ConfigError, match=r"^--dtype bfloat16: .* holds adapters, which are always float32"
    ):
        export_checkpoint(tmp_path / "c", tmp_path / "other", "bfloat16")


@pytest.mark.parametrize(("family", "tied", "num_ranks"), [("qwen3", True, 1), ("qwen2", False, 3)])
def test_merged_adapters_are_pefts_merge_and_a_plain_model(
    tmp_path: Path, family: str, tied: bool, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        export, "READ_BYTES", 4 * 64 * 5
    )  # a few rows at a time, the last ones fewer
    model = make_model(tmp_path / "model", family, tied=tied)
    adapted = _adapted(model)
    checkpoint = _checkpoint_of(adapted, tmp_path / "step_000007", num_ranks, model_path=str(model))
    ids = torch.tensor([[4, 9, 2, 7]])
    scores, expected = adapted(ids).logits, adapted.merge_and_unload().state_dict()
    export.export_merged(checkpoint, tmp_path / "out", "float32")
    result = load_file(tmp_path / "out/model.safetensors")
    assert ("lm_head.weight" in result) == (not tied)
    assert result.keys() == weights_of(model).keys()
    for name, tensor in result.items():
        is_adapted = name.endswith(("q_proj.weight", "down_proj.weight"))
        assert torch.equal(tensor, weights_of(model)[name]) == (not is_adapted), name
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(
        loaded(ids).logits, scores, rtol=1e-4, atol=1e-4
    )  # made-up adapters are large
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in model.iterdir()}
    # In the dtype of the run: float32's sums, rounded once. One tensor a file.
    monkeypatch.setattr(export, "FILE_BYTES", 1)
    export.export_merged(checkpoint, tmp_path / "run_dtype")
    files = sorted((tmp_path / "run_dtype").glob("*.safetensors"))
    assert len(files) == len(result)
    halves = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert_same(halves, cast(result, torch.bfloat16))
    assert json.loads((tmp_path / "run_dtype/config.json").read_text())["dtype"] == "bfloat16"


def test_a_base_in_bfloat16_is_summed_in_float32(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", tied=False)
    save_file(
        cast(weights_of(model), torch.bfloat16),
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    checkpoint = _checkpoint_of(
        _adapted(model), tmp_path / "c", 2, model_path=str(tmp_path / "gone")
    )
    export.export_merged(checkpoint, tmp_path / "out", base=model)
    expected = _adapted(model).float().merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "out/model.safetensors").items():
        ulps = (
            (tensor.view(torch.int16).int() - expected[name].bfloat16().view(torch.int16).int())
            .abs()
            .max()
        )
        assert ulps <= 1, name  # where float32's last bit decides which way to round


def test_what_cannot_be_merged_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, second = (
        make_model(tmp_path / name, "qwen3", tied=False) for name in ("model", "other")
    )
    full = make_checkpoint(tmp_path / "whole", model, 1, model_path=str(model))
    adapted = _adapted(model)
    expected_names = {
        "model_path": str(tmp_path / "gone"),
        "model_fingerprint": model_fingerprint(model),
    }
    gone = _checkpoint_of(adapted, tmp_path / "gone_c", 1, **expected_names)
    weights = weights_of(second)
    weights["model.norm.weight"] += 1.0
    save_file(weights, second / "model.safetensors", metadata={"format": "pt"})
    strange = _checkpoint_of(adapted, tmp_path / "strange", 1, model_path=str(model))
    config = json.loads((strange / "model/adapter_config.json").read_text())
    (strange / "model/adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    layers = _checkpoint_of(
        adapted,
        tmp_path / "layers",
        1,
        model_path=str(make_model(tmp_path / "l", "qwen3", tied=False, num_hidden_layers=1)),
    )
    for checkpoint, base, message in (
        (full, None, r"^--merge: .*whole holds a whole model and no adapters; leave --merge out$"),
        (
            gone,
            None,
            r"^the base model .*gone cannot be found .*; name the right one with --base$",
        ),
        (
            gone,
            second,
            r"^.*other holds another model than the run began with; name the right one with "
            r"--base$",
        ),
        (strange, None, r"adapter_config.json: use_dora must be off; got True$"),
        (layers, None, r"\d+ tensors of adapters belong to no layer of "),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message) as refused:
            export.export_merged(checkpoint, tmp_path / "out", base=base)
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "out").exists()
    export.export_merged(gone, tmp_path / "out", base=model)


def test_into_a_checkpoint_that_is_still_being_made(tmp_path: Path) -> None:
    """As the trainer does it: without a manifest, in a thread, into the folder itself, with nothing
    printed."""
    model = make_model(tmp_path / "model", "qwen2", tied=True)
    checkpoint = make_checkpoint(tmp_path / "step_000007.tmp", model, 2)
    (checkpoint / "manifest.json").unlink()
    old = {path.name for path in checkpoint.iterdir()}
    thread = threading.Thread(target=export_checkpoint, args=(checkpoint, checkpoint))
    thread.start()
    thread.join()
    assert {path.name for path in checkpoint.iterdir()} == old | {
        "model.safetensors",
        *(p.name for p in (checkpoint / "model").iterdir()),
    }
    # One mode for all files, that which the umask gives.
    modes = {path.stat().st_mode for path in checkpoint.iterdir() if path.is_file()}
    assert modes == {(checkpoint / "config.json").stat().st_mode}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert_same(
        {"norm": loaded.model.norm.weight.data},
        {"norm": weights_of(model)["model.norm.weight"].bfloat16()},
    )
    # the companion stays as it was
    assert json.loads((checkpoint / "model/config.json").read_text())["dtype"] == "float32"


def _drop(shard: int) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / f"state/shard_{shard:05d}.safetensors").unlink()


def _double(checkpoint: Path) -> None:
    shutil.copy(
        checkpoint / "state/shard_00002.safetensors", checkpoint / "state/shard_00004.safetensors"
    )


def _half(checkpoint: Path) -> None:
    os.truncate(checkpoint / "state/shard_00002.safetensors", 5000)


def _bare(checkpoint: Path) -> None:
    save_file({"policy.x": torch.zeros(2)}, checkpoint / "state/shard_00002.safetensors")


def _empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "state")


def _rename_a_tensor(checkpoint: Path) -> None:
    path = checkpoint / "state/shard_00003.safetensors"
    path.write_bytes(
        path.read_bytes().replace(b"policy.model.norm.weight", b"policy.model.nurm.weight")
    )


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            _drop(1),
            r"rows of policy\.lm_head\.weight are missing or .*: shard_00002\.safetensors begins "
            r"at row 33, and the rows before it end at 0",
        ),
        (
            _drop(2),
            r"rows of policy\.lm_head\.weight are missing or .*: shard_00003\.safetensors begins "
            r"at row 66, and the rows before it end at 33",
        ),
        (
            _drop(3),
            r"the last rows of policy\.lm_head\.weight are missing: 66 rows are there, dealt "
            r"over 3 ranks",
        ),
        (
            _double,
            r"rows of policy\.lm_head\.weight are .* there twice: shard_00004\.safetensors begins "
            r"at row 33, and the rows before it end at 66",
        ),
        (_half, r"shard_00002\.safetensors: not a checkpoint's shard \(SafetensorError"),
        (_bare, r"shard_00002\.safetensors: not a checkpoint's shard \(TypeError"),
        (_empty, r"no shard in its state folder holds a tensor policy\.\*"),
        (
            _rename_a_tensor,
            r"the last rows of policy\.model\.norm\.weight are missing: 44 rows are there, dealt "
            r"over 3 ranks",
        ),
    ],
)
def test_rows_that_are_missing_or_doubled_are_named_and_nothing_is_left(
    tmp_path: Path, damage: Callable[[Path], None], expected: str
) -> None:
    """Without a manifest that would tell: the trainer exports before it writes one."""
    checkpoint = make_checkpoint(
        tmp_path / "c", make_model(tmp_path / "model", "llama", tied=False), 3
    )
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=expected) as refused:
        export_checkpoint(checkpoint, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "model"]
