"""What a folder from elsewhere holds: it runs no code, and nothing but regular files of it is read."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import transformers

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.hf_files import load_config, load_tokenizer

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
    settings = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_the_code_of_a_models_folder_never_runs(evil: Path, tmp_path: Path) -> None:
    for load in (load_tokenizer, load_config):
        with pytest.raises(ConfigError, match=r"^model\.path: cannot load .*custom code"):
            load(str(evil))
    assert not (tmp_path / "marker").exists()


def test_the_evil_folder_would_run_it(evil: Path, tmp_path: Path) -> None:
    """Or the test above would show nothing: without the word False, the "y" on stdin is believed."""
    transformers.AutoConfig.from_pretrained(str(evil))
    assert (tmp_path / "marker").exists()
