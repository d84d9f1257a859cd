"""What a folder from elsewhere holds: it runs no code, and nothing but regular files of it is
read."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.manifest import CheckpointError, verify_checkpoint, write_manifest
from grpo_spmd.checkpoint.state import RunFacts, find_start, write_shard
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.model.config_json import load_config, load_tokenizer
from tests.unit.test_checkpoint_faults import trainer_of

_EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PretrainedConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
class Config(PretrainedConfig):
    model_type = "evil"
class Tokenizer(PreTrainedTokenizerFast):
    pass
class Model(Qwen3ForCausalLM):
    pass
"""


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose every door leads to its code, and a terminal that says yes to all."""
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "code.py").write_text(_EVIL.format(marker=str(tmp_path / "marker")), encoding="utf-8")
    auto_map = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Tokenizer"] * 2,
    }
    config = {"model_type": "evil", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = {
        "tokenizer_class": "Tokenizer",
        "auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    return folder


def test_the_code_of_a_models_folder_never_runs(evil: Path, tmp_path: Path) -> None:
    for load in (load_tokenizer, load_config):
        with pytest.raises(ConfigError, match=r"^model\.path: cannot load .*custom code"):
            load(str(evil))
    assert not (tmp_path / "marker").exists()


def test_the_evil_folder_would_run_it(evil: Path, tmp_path: Path) -> None:
    """Or the test above would show nothing: without the word False, the "y" on stdin is
    believed."""
    transformers.AutoConfig.from_pretrained(str(evil))
    assert (tmp_path / "marker").exists()


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


def _checkpoint(folder: Path) -> Path:
    """One of two tensors, whole and with its manifest."""
    checkpoint = folder / "run" / "checkpoints" / "step_000003"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "model").mkdir()
    (checkpoint / "model" / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    tensors = {"policy.a.weight": torch.zeros(4, 3), "exp_avg.a.weight": torch.zeros(4, 3)}
    write_shard(
        checkpoint / "state" / "shard_00001.safetensors", tensors, dict.fromkeys(tensors, 0)
    )
    write_trainer(checkpoint, trainer_of(3) | {"world_size": 1})
    return checkpoint


def write_trainer(checkpoint: Path, trainer: Any) -> None:
    """And the manifest that goes with it: who can change one file can change the other."""
    (checkpoint / "trainer.json").write_text(json.dumps(trainer), encoding="utf-8")
    write_manifest_anew(checkpoint)


def write_manifest_anew(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink(missing_ok=True)
    write_manifest(checkpoint, {})


ODD: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        -5,
        1.5,
        1e308,
        float("nan"),
        float("inf"),
        10**30,
        "",
        "x",
        "3",
        "\ud800",
        [],
        [1],
    ),
    *(["x", "y"], {}, {"a": 1}, [[[[[[[1]]]]]]], "../../etc/passwd", "a\nb"),
]


def _start(checkpoint: Path, tmp_path: Path, session: Session) -> str | None:
    """How a resume and an export take it, both in this process: what was said, None: it was
    taken."""
    run_dir = checkpoint.parent.parent
    try:
        facts = RunFacts("1" * 64, "2" * 64, trainer_of(3)["config"], "m", "float32", 1)
        find_start(run_dir, str(checkpoint), session, facts, 100, False)
        verify_checkpoint(checkpoint)
        export_checkpoint(checkpoint, tmp_path / "out")
    except (ConfigError, CheckpointError) as error:
        message = str(error)
    else:
        return None
    finally:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert len(message.splitlines()) == 1
    return message


# A value that is right for the field, though odd: another number of finished steps, say.
FITS: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: value in (0, 1) and type(value) is int,
    "config": lambda value: value == {} or value == {"a": 1},
    "mismatch_scale": lambda value: value is None,
    "model_path": lambda value: (
        value in ("x", "3", "../../etc/passwd", "a\nb", "\ud800")
    ),  # noted, never opened
}


@pytest.mark.parametrize("field", sorted(trainer_of(3)))
def test_an_odd_value_of_any_field_of_trainer_json_is_refused_in_one_line(
    field: str, tmp_path: Path, session: Session
) -> None:
    checkpoint, good = _checkpoint(tmp_path), trainer_of(3) | {"world_size": 1}
    assert _start(checkpoint, tmp_path, session) is None
    for odd in ODD:
        write_trainer(checkpoint, good | {field: odd})
        start = _start(checkpoint, tmp_path, session)
        assert (start is None) == FITS.get(field, lambda value: False)(odd) or (
            field == "config" and start
        ), (odd, start)
    del good[field]
    write_trainer(checkpoint, good)
    start = _start(checkpoint, tmp_path, session)
    assert (start is None) == (field in ("mismatch_scale", "model_path")), start


def test_odd_values_of_the_config_in_trainer_json(tmp_path: Path, session: Session) -> None:
    checkpoint, good = _checkpoint(tmp_path), trainer_of(3) | {"world_size": 1}
    for key in ("model.num_replicas", "seed", "loss.dual_clip"):
        for odd in ODD:
            write_trainer(checkpoint, good | {"config": good["config"] | {key: odd}})
            start = _start(checkpoint, tmp_path, session)
            assert key == "loss.dual_clip" or start is not None, (key, odd)


@pytest.mark.parametrize("field", ["bytes", "sha256"])
def test_an_odd_value_of_any_field_of_the_manifest_is_refused_in_one_line(
    field: str, tmp_path: Path, session: Session
) -> None:
    checkpoint = _checkpoint(tmp_path)
    good = json.loads((checkpoint / "manifest.json").read_text())
    for odd in ODD:
        for files in (
            odd,
            good["files"] | {"trainer.json": odd},
            good["files"] | {odd: {}} if isinstance(odd, str) else 3,
        ):
            (checkpoint / "manifest.json").write_text(json.dumps(good | {"files": files}))
            assert _start(checkpoint, tmp_path, session)
        entry = good["files"]["trainer.json"] | {field: odd}
        (checkpoint / "manifest.json").write_text(
            json.dumps(good | {"files": good["files"] | {"trainer.json": entry}})
        )
        assert _start(checkpoint, tmp_path, session), odd


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"a":' * 100_000, "\ufeff[]", '{"format": 1, "format": 1}', "NaN", ""],
)
def test_json_that_is_none(content: str, tmp_path: Path, session: Session) -> None:
    for name in ("trainer.json", "manifest.json"):
        checkpoint = _checkpoint(tmp_path / name)
        (checkpoint / name).write_text(content)
        if name == "trainer.json":
            write_manifest_anew(checkpoint)
        assert f"{name} is damaged" in str(_start(checkpoint, tmp_path, session))


def _rewrite_offsets(checkpoint: Path, offsets: str) -> None:
    """A shard whose header says something else of where its rows belong."""
    path = checkpoint / "state" / "shard_00001.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["DCP_SHARDING_INFO"] = offsets
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    write_manifest_anew(checkpoint)


def test_odd_sharding_info_is_damage(tmp_path: Path, session: Session) -> None:
    checkpoint = _checkpoint(tmp_path)
    for odd in [json.dumps(odd) for odd in ODD] + ["[" * 5000, "{", ""]:
        _rewrite_offsets(checkpoint, odd)
        assert _start(checkpoint, tmp_path, session), odd
    for odd in [*ODD, [-1, 0], [True, 0], ["0", 0], [0, 0, 0], [0], [0.0, 0]]:
        for name in ("policy.a.weight", "exp_avg.a.weight"):
            offsets = {
                key: {"saved_offsets": [0, 0]} for key in ("policy.a.weight", "exp_avg.a.weight")
            }
            _rewrite_offsets(checkpoint, json.dumps(offsets | {name: {"saved_offsets": odd}}))
            assert _start(checkpoint, tmp_path, session), odd
            _rewrite_offsets(checkpoint, json.dumps(offsets | {name: odd}))
            assert _start(checkpoint, tmp_path, session), odd
    _rewrite_offsets(checkpoint, json.dumps(offsets))
    assert _start(checkpoint, tmp_path, session) is None


def _to_zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _to_passwd(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _to_folder(path: Path) -> None:
    path.symlink_to("/etc")


@pytest.mark.parametrize("position", [os.mkfifo, _to_zero, _to_passwd, _to_folder])
@pytest.mark.parametrize(
    "name",
    [
        "trainer.json",
        "manifest.json",
        "model/config.json",
        "model/extra.txt",
        "state/shard_00001.safetensors",
        "state/shard_00002.safetensors",
    ],
)
def test_what_is_no_file_of_a_checkpoint_is_not_read(
    position: Callable[[Path], None], name: str, tmp_path: Path, session: Session
) -> None:
    checkpoint = _checkpoint(tmp_path)
    (checkpoint / name).unlink(missing_ok=True)
    position(checkpoint / name)
    assert re.search(
        r"is a (link|fifo)|not a regular file|cannot read",
        str(_start(checkpoint, tmp_path, session)),
    )


def test_a_shard_by_another_name_is_none(tmp_path: Path, session: Session) -> None:
    """torch's reader takes every file of the folder; ours, which checks them, those with the names
    of shards."""
    checkpoint = _checkpoint(tmp_path)
    shutil.copyfile(
        checkpoint / "state" / "shard_00001.safetensors", checkpoint / "state" / "other.safetensors"
    )
    write_manifest_anew(checkpoint)
    assert "is not the name of a shard" in str(_start(checkpoint, tmp_path, session))
