"""The papers name files, links and keys that are there, and the first task of configs/README.md
fits together."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import get_json_schema

from grpo_spmd.config.describe import describe_keys, keys_as_markdown
from grpo_spmd.config.load import load_config
from grpo_spmd.data.rows import read_rows
from grpo_spmd.rewards.protocol import load_rewards
from tests.support.processes import ROOT

PAPERS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")
} | {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("*/*.md"))
}
KEYS = {line.split()[0] for line in describe_keys().splitlines() if line[2] != " "}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key} - {"rewards"}


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAPERS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(((?!https?:)[^)]*)\)", PAPERS[name]):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(_slug, headings), target


@pytest.mark.parametrize("name", PAPERS)
def test_files_that_are_named_exist(name: str) -> None:
    """From the repository's root, or, in a folder's own paper, from that folder."""
    for file in re.findall(r"`((?:\w+/)+[\w.-]+\.(?:py|sh|yaml|sbatch))`", PAPERS[name]):
        if name != "CHANGELOG.md" and not file.startswith("runs/"):
            assert (ROOT / file).exists() or ((ROOT / name).parent / file).exists(), file


@pytest.mark.parametrize("name", PAPERS)
def test_config_keys_that_are_named_exist(name: str) -> None:
    text = PAPERS[name]
    # The first column of the tables for people who come from elsewhere has their names.
    text = (
        re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
        if name == "configs/MIGRATION.md"
        else text
    )
    named = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+[a-z])", text)
    files = re.compile(r"\.(py|md|yaml)$")
    faulty = [
        key for key in named if key not in KEYS and not files.search(key) and not _is_section(key)
    ]
    assert not faulty, faulty


def _is_section(key: str) -> bool:
    return any(expected_names.startswith(key + ".") for expected_names in KEYS)


def test_every_key_is_described() -> None:
    """After a change of the schema: paste what python -m grpo_spmd.config.describe prints between
    the two marks."""
    _, begin, rest = PAPERS["configs/README.md"].partition("<!-- keys: begin -->")
    block, end, _ = rest.partition("<!-- keys: end -->")
    assert begin
    assert end
    assert block.strip() == keys_as_markdown().strip()


def test_the_first_task_fits_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    blocks = re.findall(
        r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", PAPERS["configs/README.md"], re.DOTALL
    )
    for file, content in blocks:
        (folder / file).write_text(content, encoding="utf-8")
    assert {file for file, _ in blocks} == {"tasks.jsonl", "reward.py", "config.yaml", "curve.py"}
    monkeypatch.chdir(tmp_path)
    config = load_config(folder / "config.yaml")
    rows = read_rows(config.data)
    assert len(rows) >= config.rollout.num_prompts_per_step
    [reward] = load_rewards(config.rewards)
    # "8,3=11:" wants 3+8: the larger first is half right, another equation not at all.
    completions = ["3+8", "8+3", "8*3", ""]
    columns = {name: [value] * 4 for name, value in rows[0].columns.items()}
    scores = reward.function(
        prompts=[rows[0].prompt] * 4, completions=completions, completion_ids=[[]] * 4, **columns
    )
    assert scores == [1.0, 0.5, 0.0, 0.0]


def _example(name: str) -> dict[str, Any]:
    """Runs the example of configs/EPISODES.md that begins with a comment of this name."""
    blocks = re.findall(r"```python\n(.*?)```", PAPERS["configs/EPISODES.md"], re.DOTALL)
    [code] = [block for block in blocks if block.startswith(f"# {name}\n")]
    namespace: dict[str, Any] = {}
    exec(compile(code, name, "exec"), namespace)
    return namespace


def test_the_example_tool_has_a_schema_and_answers() -> None:
    lookup = _example("my_tools.py")["lookup"]
    function = get_json_schema(lookup)["function"]
    assert function["parameters"]["required"] == ["word"]
    assert (lookup("otter"), lookup("yak")) == ("a mammal that swims", "unknown")


def test_the_example_environment_plays_a_game() -> None:
    game = _example("my_env.py")["Guess"]()
    assert game.reset(secret=4, prompt="unused") == "Guess a number from 1 to 10."
    assert [game.step(guess)[:3] for guess in ("1", "9", "no number", "4")] == [
        ("higher", 0.0, False),
        ("lower", 0.0, False),
        ("higher", 0.0, False),
        ("right", 1.0, True),
    ]


def test_the_example_agent_asks_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[int] = []

    class Client:
        """Answers "42" to everything, and keeps how many messages it was sent."""

        def __init__(self, base_url: str, api_key: str) -> None:
            self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

        async def create(self, model: str, messages: list[Any]) -> Any:
            contexts.append(len(messages))
            return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="42"))])

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(AsyncOpenAI=Client))
    rollout = _example("my_agent.py")["rollout"]
    task = {"prompt": "6 x 7?", "answer": "42"}
    assert asyncio.run(rollout(task, base_url="", api_key="", model="policy")) == 1.0
    assert contexts == [1, 3, 5]


def test_the_example_agent_goes_on_with_its_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second reply is beyond the limit, so that the third part comes after the summary."""
    sent: list[list[str]] = []
    tokens = iter([1000, 3000, 3100, 500])

    class Client:
        """Answers with how many requests it has had, the last time with the answer too."""

        def __init__(self, base_url: str, api_key: str) -> None:
            self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

        async def create(self, model: str, messages: list[Any]) -> Any:
            sent.append([m["content"] if isinstance(m, dict) else m.content for m in messages])
            message = SimpleNamespace(content=f"reply {len(sent)}")
            usage = SimpleNamespace(total_tokens=next(tokens))
            return SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage)

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(AsyncOpenAI=Client))
    rollout = _example("my_compacting_agent.py")["rollout"]
    task = {"prompt": "Q", "parts": ["a", "b", "c"], "answer": "reply 4"}
    assert asyncio.run(rollout(task, base_url="", api_key="", model="policy")) == 1.0
    request = "Summarise what matters for the question."
    assert sent == [
        ["Q\n\na"],
        ["Q\n\na", "reply 1", "b"],
        ["Q\n\na", "reply 1", "b", "reply 2", request],
        ["Q\n\nSo far: reply 3\n\nc"],
    ]


def test_the_example_of_feedback_gives_a_right_answer_of_the_group() -> None:
    [code] = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAPERS["configs/ALGORITHMS.md"], re.DOTALL)
        if block.startswith("# my_feedback.py\n")
    ]
    namespace: dict[str, Any] = {}
    exec(compile(code, "my_feedback.py", "exec"), namespace)
    columns: dict[str, list[Any]] = {}
    rewards = namespace["right"](["q"] * 3, ["1", "2", "3"], ["2"] * 3, columns.__setitem__)
    assert (rewards, columns) == ([0.0, 1.0, 0.0], {"feedback": ["2", None, "2"]})
