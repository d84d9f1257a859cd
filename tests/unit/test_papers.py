"""The papers name files, links and keys that are there, and the first task of configs/README.md fits together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_spmd.config.describe import describe_keys, keys_as_markdown
from grpo_spmd.config.load import load_config
from grpo_spmd.data.rows import read_rows
from grpo_spmd.rewards.protocol import load_rewards
from tests.support.processes import ROOT

PAPERS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")
} | {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("*/README.md"))
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
        if name == "configs/README.md"
        else text
    )
    named = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+[a-z])", text)
    files = re.compile(r"\.(py|md|yaml)$")
    wrong = [
        key for key in named if key not in KEYS and not files.search(key) and not _is_section(key)
    ]
    assert not wrong, wrong


def _is_section(key: str) -> bool:
    return any(known.startswith(key + ".") for known in KEYS)


def test_every_key_is_described() -> None:
    """After a change of the schema: paste what python -m grpo_spmd.config.describe prints between the two marks."""
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
