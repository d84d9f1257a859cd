"""What `--check` and a start try before a model is loaded: rewards, environments, servers and the
first prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.checks.trials import try_and_tell
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from tests.support.models import make_model, write_config
from tests.support.stub_server import stub_server

CODE = '''
import os

def right(completions, answer, **columns): return [float(c in answer) for c in completions]
def text(completions, **columns): return "abc"
def alone(completions, **columns): return 1.0
def by_name(completions, **columns): return {"reward": 1.0}
def forgets(completions, **columns): [1.0 for _ in completions]
def words(completions, **columns): return ["a" for _ in completions]
def few(completions, **columns): return [1.0] * 5
def raises(completions, **columns): return [float(c[0] == "x") for c in completions]
def column(completions, **columns): return [columns["nothing"][0]]
def tips(completions, log_extra, **columns):
    log_extra("tip", [None for _ in completions])
    return [0.0 for _ in completions]
def hangs(completions, **columns): os.kill(os.getpid(), 19)
def stops(completions, **columns): breakpoint(); return [0.0] * len(completions)

class World:
    def reset(self, **row): return None
    def add(self, a: int) -> str:
        """
        Adds.

        Args:
            a: A number.
        """
        return "1"

class Undocumented(World):
    def add(self, a: int) -> str:
        """Adds."""
        return "1"

class WithArgument(World):
    def __init__(self, size): pass

class Down(World):
    def reset(self, **row): raise OSError("no server")

def agent(task): return 1.0
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "model").mkdir()
    for file in model.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    return tmp_path


def tried(folder: Path, **sections: Any) -> tuple[str, list[str]]:
    """The line of what was checked, and what a run says about its prompts."""
    sections = {"data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64}} | sections
    sections.setdefault("rewards", [{"function": f"{folder}/mine.py:right"}])
    path = write_config(folder, folder / "model", **sections)
    config = load_config(path, ["training.max_tokens_per_micro_batch=200"])
    told: list[str] = []
    return try_and_tell(config, check_inputs(config, num_ranks=1), told.append), told


def reward(folder: Path, name: str) -> dict[str, Any]:
    return {"function": f"{folder}/mine.py:{name}"}


def test_what_was_checked_is_one_line_and_prompt_1_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six characters a prompt at most, a token each."""
    summary, told = tried(folder)
    assert summary == "checked: model, 8 prompts (longest 4 tokens), 1 reward"
    assert told == ["prompt 1 of 8, 4 tokens: '0+1='"]
    assert capsys.readouterr().err == ""
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text", "rewards.0: 'text' must return a list of numbers or None; got str; a reward"),
        ("alone", "rewards.0: 'alone' must return a list of numbers or None; got float"),
        ("by_name", "rewards.0: 'by_name' must return a list of numbers or None; got dict"),
        ("forgets", "rewards.0: 'forgets' must return a list of numbers or None; got NoneType"),
        ("words", "rewards.0: 'words' returned 'a', which is no number"),
        ("few", "rewards.0: 'few' returned 5 values for 2 completions"),
    ],
)
def test_a_reward_of_the_wrong_type_is_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tried(folder, rewards=[reward(folder, name)])
    assert str(refused.value).startswith(message)


def test_a_reward_that_fails_is_warned_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the user's line; the second one may be right about an empty completion."""
    names = ["raises", "column", "right", "stops"]
    summary, _ = tried(folder, rewards=[reward(folder, name) for name in names])
    assert summary.endswith("4 rewards")
    index_error, key_error = capsys.readouterr().err.splitlines()
    line = 1 + CODE.splitlines().index(next(r for r in CODE.splitlines() if "def raises" in r))
    assert index_error == (
        "warning: rewards.0: 'raises' raised IndexError: string index out of range "
        f"(mine.py:{line}), for the completion '' and '1' of {folder}/train.jsonl:1"
    )
    assert "rewards.1: 'column' raised KeyError: 'nothing'" in key_error


def test_a_column_that_nobody_writes_into_the_teachers_prompt_is_refused(folder: Path) -> None:
    """`answer` is of the data, and `tip` of a reward, with log_extra."""
    for template, function in (("{answer}{prompt}", "right"), ("{tip} {prompt}", "tips")):
        teacher = {"path": "policy", "prompt_template": template}
        tried(folder, teacher=teacher, rewards=[reward(folder, function)])
    with pytest.raises(ConfigError, match=r"teacher.prompt_template names tip, which is no col"):
        tried(folder, teacher={"path": "policy", "prompt_template": "{tip} {prompt}"})


def test_a_reward_that_hangs_is_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = [{**reward(folder, "hangs"), "timeout_s": 0.5}, reward(folder, "right")]
    tried(folder, rewards=rewards)
    [line] = capsys.readouterr().err.splitlines()
    assert "rewards.0: 'hangs' took longer than its time limit" in line


def test_servers_are_knocked_on_and_not_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stub_server(lambda body: 1) as server:
        tried(folder, rewards=[{"name": "rm", "url": server.url}])
        assert (server.asked, capsys.readouterr().err) == ([], "")
    tried(folder, rewards=[{"name": "rm", "url": server.url}])
    assert "warning: rewards.0.url: nobody answers at 127.0.0.1:" in capsys.readouterr().err


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"factory": "Undocumented"}, "no description for the argument 'a'"),
        ({"agent": "agent"}, "'agent' must be called as rollout(task, base_url, api_key, model)"),
        ({"factory": "World"}, "rewards: the environment gives none"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(
    folder: Path, environment: dict[str, str], message: str
) -> None:
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    section = {name: f"{folder}/mine.py:{value}" for name, value in environment.items()}
    with pytest.raises(ConfigError) as refused:
        tried(folder, environment=section, rewards=[])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("World", ""),
        ("WithArgument", "cannot begin: it raised TypeError: WithArgument.__init__() missing 1"),
        ("Down", "cannot begin: it raised OSError: no server"),
    ],
)
def test_an_environment_begins_the_first_row(
    folder: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    summary, _ = tried(folder, environment={"factory": f"{folder}/mine.py:{name}"})
    assert summary.endswith("1 reward, environment")
    errors = capsys.readouterr().err
    assert message in errors if message else not errors


def test_a_turn_that_ends_with_no_stop_token_is_warned_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The template ends turns with <|im_end|>, which generation_config.json does not name."""
    path = folder / "model/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    number = max(tokenizer["model"]["vocab"].values()) + 1
    end = {"id": number, "content": "<|im_end|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append(end | flags)
    path.write_text(json.dumps(tokenizer))
    ended = TEMPLATE.replace("{% endfor %}", "<|im_end|>{% endfor %}")
    (folder / "model/chat_template.jinja").write_text(ended)
    data = {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64}
    tried(folder, data=data)  # plain text has no turns
    assert capsys.readouterr().err == ""
    tried(folder, data={**data, "as_chat": True})
    warning = capsys.readouterr().err
    assert "ends a turn with '<|im_end|>', at which no completion stops" in warning
    assert f"add {number} to eos_token_id in {folder}/model/generation_config.json" in warning
    (folder / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [1, number]}))
    tried(folder, data={**data, "as_chat": True})
    assert capsys.readouterr().err == ""


def test_an_environment_needs_a_chat_template(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template, which a conversation needs"):
        tried(folder, environment={"factory": f"{folder}/mine.py:World"})


def test_what_looks_like_a_mistake_in_the_data_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = str(folder / "train.jsonl")
    (folder / "copy.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    (folder / "model/chat_template.jinja").write_text(TEMPLATE)
    data = {"train": train, "max_prompt_tokens": 64, "eval": {"held": str(folder / "copy.jsonl")}}
    _, told = tried(folder, data=data, eval={"every_steps": 1})
    assert told[1:] == [
        "note: the prompts are plain text, though the model has a chat template: "
        "data.as_chat: true shows them as a user's messages",
        "note: data.eval.held is data.train: it measures what was learned by heart",
    ]
    # The letters of a word that the template adds are tokens, too: <user> and 0+1=.
    summary, told = tried(folder, data={**data, "as_chat": True}, eval={"every_steps": 1})
    assert told[0].endswith("tokens: '<user>0+1='")
    assert "8 of data.eval.held" in summary
    (folder / "model/chat_template.jinja").write_text("{{ messages[0].a.b }}")
    tried(folder, data={**data, "as_chat": True}, eval={"every_steps": 1})
    assert "its chat template fails for" in capsys.readouterr().err


def test_prompts_that_are_all_dropped_are_refused(folder: Path) -> None:
    data = {
        "train": str(folder / "train.jsonl"),
        "max_prompt_tokens": 3,
        "on_long_prompt": "drop",
    }
    with pytest.raises(ConfigError, match=r"the shortest prompts have 4 tokens, and .* leave none"):
        tried(folder, data=data)
