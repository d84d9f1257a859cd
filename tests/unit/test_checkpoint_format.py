"""The format of a checkpoint, written here by hand as every version has written it: one of an
earlier version loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_spmd.checkpoint.manifest import write_manifest
from grpo_spmd.checkpoint.run_dir import check_same_run, checkpoint_path
from grpo_spmd.checkpoint.state import RunFacts, find_start, load_state, run_facts
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import Prompt
from tests.support.learn import updater_of
from tests.support.models import make_model, write_config

PROMPTS = [Prompt(0, 0, [5, 6, 7], "abc", {}), Prompt(1, 1, [8], "d", {})]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


def write_by_hand(run: Path, config: Config, state: dict[str, torch.Tensor]) -> None:
    """As two ranks leave it: half the rows in each shard's file, the place of the first in its
    header."""
    folder = run / "checkpoints" / "step_000003"
    (folder / "state").mkdir(parents=True)
    for rank in range(2):
        halves = {name: -(-len(tensor) // 2) for name, tensor in state.items()}
        rows = {
            name: tensor[rank * halves[name] :][: halves[name]].contiguous()
            for name, tensor in state.items()
        }
        positions = {
            name: {"saved_offsets": [rank * halves[name], *[0] * (t.ndim - 1)]}
            for name, t in rows.items()
        }
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(positions)}
        save_file(rows, folder / "state" / f"shard_{rank + 1:05d}.safetensors", metadata)
    model, tokens = hashlib.sha256(), hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        content = Path(config.model.path, name).read_bytes()
        model.update(
            f"{name}\0{len(content)}\0".encode() + content[: 1 << 20] + content[-(1 << 16) :]
        )
    for number in (3, 5, 6, 7, 1, 8):  # each prompt's length, and its tokens
        tokens.update(number.to_bytes(8, "little"))
    trainer = {
        "format": 1, "step": 3, "position": 21, "num_updates": 6, "skipped_in_a_row": 1, "mismatch_scale": [1e-7, 2e-6],  # noqa: E501
        "model_fingerprint": model.hexdigest(), "data_fingerprint": tokens.hexdigest(), "config": flatten_config(config),  # noqa: E501
        "model_path": config.model.path, "dtype": "float32", "world_size": 2,
    }  # fmt: skip
    (folder / "trainer.json").write_text(json.dumps(trainer))
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    digests = {
        name: {"bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()}
        for name, b in files.items()
    }
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": digests}))


def test_a_checkpoint_of_an_earlier_version_loads(
    tmp_path: Path,
    session: Session,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, run = make_model(tmp_path / "model", "qwen3", tied=True), tmp_path / "run"
    config = load_config(write_config(tmp_path, model, run_dir=str(run)))
    policy = build_policy(config.model, 1.0, session)
    updater = updater_of(policy, config)
    weights = {
        name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()
    }
    state = {f"policy.{name}": tensor + 0.5 for name, tensor in weights.items()}
    state |= {f"exp_avg.{name}": tensor.sin() for name, tensor in weights.items()}
    state |= {f"exp_avg_sq.{name}": tensor.square() for name, tensor in weights.items()}
    write_by_hand(run, config, state)

    facts = run_facts(flatten_config(config), PROMPTS, session, {})
    start = find_start(run, "auto", session, facts, 3, False)
    assert (start.step, start.position, start.goes_on, start.is_over) == (3, 21, True, True)
    assert not find_start(run, "auto", session, facts, 4, False).is_over
    assert not find_start(
        run, "auto", session, facts, 3, True
    ).is_over  # the closing evaluation has no line yet
    assert start.folder is not None
    load_state(policy, updater, start.folder, start.trainer)
    for name, parameter in policy.model.named_parameters():
        moments = updater.optimizer.state[parameter]
        assert torch.equal(parameter.full_tensor(), state[f"policy.{name}"])
        assert torch.equal(moments["exp_avg"].full_tensor(), state[f"exp_avg.{name}"])
        assert torch.equal(moments["exp_avg_sq"].full_tensor(), state[f"exp_avg_sq.{name}"])
        assert float(moments["step"]) == 6
    assert updater.state() == {"num_updates": 6, "skipped_in_a_row": 1}
    cut = dict(state)
    for moment in ("exp_avg", "exp_avg_sq"):
        del cut[f"{moment}.model.norm.weight"]
    write_by_hand(tmp_path / "cut", config, cut)
    with pytest.raises(ConfigError, match=r"lacks exp_avg\.model\.norm\.weight, and has those"):
        load_state(policy, updater, checkpoint_path(tmp_path / "cut", 3), start.trainer)

    def refusal(second: RunFacts) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            find_start(run, "auto", session, second, 3, False)
        return caught.value

    def refused(second: RunFacts, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            find_start(run, "auto", session, second, 3, False)

    def said(second: RunFacts) -> str:
        caplog.clear()
        find_start(run, "auto", session, second, 4, False)
        return "\n".join(caplog.messages)

    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    caplog.set_level("INFO")
    # what an earlier version did not write down cannot be said
    assert "does not record answers, reward files and tokenizer" in said(facts)
    trainer_file = start.folder / "trainer.json"
    trainer = json.loads(trainer_file.read_text()) | {"contents": facts.contents}
    trainer_file.write_text(json.dumps(trainer))
    (start.folder / "manifest.json").unlink()
    write_manifest(start.folder, {})
    assert said(facts) == f"changed since {start.folder} was written: ranks 2 -> 1"
    assert said(replace(facts, world_size=2)) == ""
    data = [replace(prompt, columns={"answer": 7}) for prompt in PROMPTS]
    reward = tmp_path / "mine.py"
    reward.write_text("1")
    tokenizer = (model / "tokenizer.json").read_bytes()
    (model / "tokenizer.json").write_bytes(tokenizer + b" ")
    edited = run_facts(flatten_config(config), PROMPTS, session, {})
    assert "was written: tokenizer.json of model.path edited; ranks 2 -> 1" in said(edited)
    reason = "(tokenizer.json of model.path edited; ranks 2 -> 1); restore it"
    assert reason in str(refusal(replace(edited, data_fingerprint="")))
    (model / "tokenizer.json").write_bytes(tokenizer)
    edited = run_facts(flatten_config(config), data, session, {})
    assert "was written: answers and other columns of data.train edited" in said(
        replace(edited, world_size=2)
    )
    spec = {"rewards.0.function": f"{reward}:f"}
    initial = run_facts(flatten_config(config) | spec, PROMPTS, session, {"held": PROMPTS})
    reward.write_text("2")
    again = run_facts(flatten_config(config) | spec, PROMPTS, session, {"held": data})
    names = {name for name in initial.contents if initial.contents[name] != again.contents[name]}
    assert names == {f"rewards.0.function ({reward}:f)", "data.eval.held"}

    refused(replace(facts, model_fingerprint=""), "model.path holds another model than the run had")
    refused(replace(facts, data_fingerprint=""), "data.train gives other prompts than the run had")
    refused(replace(facts, config={**facts.config, "seed": 7}), r"seed \(7\) was 0 in the run")


def test_variables_of_the_template_cannot_change_and_an_old_checkpoint_has_none(
    tmp_path: Path,
) -> None:
    key = "data.chat_template_kwargs"
    # A checkpoint from before the key, and a config that does not use it.
    assert check_same_run(tmp_path, {"config": {"seed": 0}}, {"seed": 0, key: {}}) == []
    for recorded, config, text in (
        ({key: {}}, {f"{key}.a": 1}, rf"{key} \(None\) was {{}}"),
        ({f"{key}.a": 1}, {key: {}}, rf"{key}\.a \(None\) was 1"),
        ({f"{key}.a": 1}, {f"{key}.a": 1, f"{key}.b": 2}, rf"{key}\.b \(2\) was None"),
        ({"seed": 0}, {"seed": 0, f"{key}.a": 1}, rf"{key}\.a \(1\) was None"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_same_run(tmp_path, {"config": recorded}, config)
