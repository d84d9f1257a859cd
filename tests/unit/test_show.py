"""The pages of a run in a terminal: their figures are those of its files, whatever state the folder
is in."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.diagnosis.run import read_run
from grpo_spmd.observe.metrics_file import is_evaluation
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.show.__main__ import main
from grpo_spmd.tools.show.completions import TokenDifferences, contains_text
from grpo_spmd.tools.show.overview import number
from tests.support.processes import ROOT, environment
from tests.support.shown_run import metrics_of, rollout_of, write_lines, write_run, write_scored_run

METRICS = [metrics_of(step) for step in range(1, 11)]
# Two groups: rewards 0, 1 and 1, none.
ROLLOUTS = [
    rollout_of(0, 0, 0.0, "no, it is not"),
    rollout_of(0, 1, 1.0, "Yes it is"),
    rollout_of(1, 0, 1.0, "yes", finish_reason="length"),
    rollout_of(1, 1, None, "who knows"),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", METRICS, {4: ROLLOUTS[:2], 8: ROLLOUTS})


class Shown:
    """What the command printed, and how it ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("COLUMNS", "80")

    def __call__(self, run: Path, *words: str, code: int = 0) -> str:
        """stdout, or stderr where `code` is 2: that must be one line."""
        self._monkeypatch.setattr(sys, "argv", ["show", str(run), *words])
        ended = 0
        try:
            main()
        except SystemExit as end:
            ended = int(end.code or 0)
        out, err = self._capsys.readouterr()
        assert ended == code, err or out
        assert "Traceback" not in err
        if code == 2:
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            return err
        assert err == ""
        assert "\x1b" not in out
        return out


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(monkeypatch, capsys)


def test_figures_of_the_curves_are_those_of_the_file(run: Path, shown: Shown) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = shown(run)
    labels = {
        "reward": "reward/mean",
        "spread": "reward/std",
        "groups alike": "reward/zero_std_groups_frac",
    }
    labels |= {
        "tokens": "completion/tokens_mean",
        "truncated": "completion/truncated_frac",
        "entropy": "loss/entropy",
    }
    labels |= {"grad norm": "optim/grad_norm", "mismatch KL": "weight_sync/mismatch_kl"}
    labels |= {"tokens/s": "rollout/tokens_per_s", "step time (s)": "time/step_s"}
    for label, name in labels.items():
        row = re.search(
            rf"^{re.escape(label)} +([▁-█]+) +(\S+) +(\S+) +(\S+) +(\S+)$", result, re.MULTILINE
        )
        assert row, (label, result)
        values = [line[name] for line in lines]
        assert row.groups()[1:] == tuple(
            map(number, (values[0], values[-1], min(values), max(values)))
        ), label
        assert len(row[1]) == len(lines)
    assert "KL " not in result.replace("mismatch KL", "")  # always 0: not trained with
    assert re.search(r"^rollout +█+ +50% +2 s$", result, re.MULTILINE)  # 2 of 4 s
    assert re.search(r"^update +█+ +25% +1 s$", result, re.MULTILINE)
    assert re.search(r"^between them +█+ +25% +1 s$", result, re.MULTILINE)
    assert re.search(r"step 10/20 +0\.100 ", result)  # the console's line of the newest step


def test_a_teacher_and_a_critic_have_a_curve(tmp_path: Path, shown: Shown) -> None:
    signals = {"teacher/kl": 0.25, "critic/explained_variance": 0.5}
    result = shown(write_run(tmp_path, [metrics_of(step, **signals) for step in (1, 2)]))
    assert re.search(r"^teacher KL +[▁-█]+ +0\.25 ", result, re.MULTILINE)
    assert re.search(r"^critic +[▁-█]+ +0\.5 ", result, re.MULTILINE)


def test_components_and_evaluations_have_curves_of_their_own(tmp_path: Path, shown: Shown) -> None:
    lines = []
    for step in range(1, 5):
        lines += [metrics_of(step, **{"reward/form/mean": 0.5 * step})]
        lines += [{"step": step, "eval/held/mean": step / 8, "eval/held/pass_at_4": 1.0}] * (
            step % 2 == 0
        )
    assert is_evaluation(lines[2])
    result = shown(write_run(tmp_path / "run", lines))
    assert re.search(r"^  form +▁▃▆█ +0\.5 +2 +0\.5 +2$", result, re.MULTILINE)
    assert re.search(r"^  right +▁▃▆█ +0\.01 +0\.04 ", result, re.MULTILINE)
    assert re.search(r"^eval held +▁█ +0\.25 +0\.5 ", result, re.MULTILINE)


def test_every_metric_of_a_step_is_on_its_page(run: Path, shown: Shown) -> None:
    line = METRICS[7]
    result = shown(run, "--step", "8")
    for name, value in line.items():
        if name not in ("step", "time/unix_s", "time/step_s"):
            label = re.escape(
                name.split("/")[-1].removesuffix("_s" if name.startswith("time/") else "_gib")
            )
            label = (
                r"  update"
                if name.startswith("memory/")
                else label.replace("mean", "(?:right/)?mean")
            )
            assert re.search(
                rf"{label}\b[^\n]*? {re.escape(number(value))}( |$)", result, re.MULTILINE
            ), (name, result)
    assert "where the time goes: 4 s a step" in result


def test_groups_of_a_step_by_hand(run: Path, shown: Shown) -> None:
    result = shown(run, "--step", "8")
    assert "2 groups, 4 completions; rewards from 0 to 1" in result
    # 0 and 1: a mean of 0.5, a spread of 0.7071 (of n - 1); 1 and one that is not known, half of
    # them cut
    assert re.search(
        r"^ +10 +2     0\.5  0\.7071    0%  █      █       -  question 0$", result, re.MULTILINE
    ), result
    assert re.search(
        r"^ +11 +2       1       -   50%         █       -  question 1$", result, re.MULTILINE
    ), result
    assert "1 completions have no reward" in result


def test_the_best_and_the_worst_in_their_order(run: Path, shown: Shown) -> None:
    worst, best = shown(run, "--worst", "4"), shown(run, "--best", "2")
    order = [(line["row"], line["sample"]) for line in ROLLOUTS]
    assert re.findall(r"^worst \d of 4, step 8, row (\d+), sample (\d)$", worst, re.MULTILINE) == [
        tuple(map(str, order[position]))
        for position in (0, 2, 1, 3)  # equal ones by sample; the unscored one last
    ]
    assert re.findall(r"^best .* row (\d+), sample (\d)$", best, re.MULTILINE) == [
        ("11", "0"),
        ("10", "1"),
    ]
    for text in (
        "no, it is not",
        "question 0",
        "answer = yes",
        "right - (error)",
        "cut off",
        "advantage -0.5",
    ):
        assert text in worst
    assert "step 4, row" in shown(run, "--best", "1", "--step", "4")


def test_a_prompt_over_the_steps(run: Path, shown: Shown) -> None:
    result = shown(run, "--prompt", "10")
    assert "row 10: sampled at 2 of 2 steps with completions" in result
    assert re.findall(r"^ +(\d) +2     0\.5  0\.7071    0%  █      █$", result, re.MULTILINE) == [
        "4",
        "8",
    ]
    assert "step 8, row 10, sample 0" in result
    assert "step 8, row 11" not in result
    assert shown(run, "--prompt", "QUESTION 0") == result  # by a text in it, in any case
    assert re.search(
        r"^ +10 +2 +0\.5 +0\.5  question 0\n +11 +1 +1 +1  question 1$",
        shown(run, "--prompt", "question"),
        re.MULTILINE,
    )
    assert "not sampled at step 4" in shown(run, "--prompt", "11", "--step", "4")
    assert "no prompt of 2 steps contains" in shown(run, "--prompt", "nowhere", code=2)
    assert "no such row" in shown(run, "--prompt", "12345", code=2)


def test_a_text_is_found_marked_and_counted(run: Path, shown: Shown) -> None:
    result = shown(run, "--grep", "yes")
    assert re.findall(r"^step (\d), row (\d+), sample (\d), reward "
                      r"(\S+)$", result, re.MULTILINE) == [
        ("8", "10", "1", "1"), ("8", "11", "0", "1"), ("4", "10", "1", "1"),
    ]  # fmt: skip
    assert ">>Yes<< it is" in result
    assert "3 completions of 2 steps, 3 of them shown; first step 4, last 8" in result
    assert "2 completions of step 8" in shown(run, "--grep", "yes", "--step", "8")
    assert "no completion of 2 steps contains 'answer'" in shown(
        run, "--grep", "answer"
    )  # a column's name
    assert "no completion of 2 steps contains 'question'" in shown(run, "--grep", "question")


@pytest.mark.parametrize(
    "text",
    [
        'say "hi"',
        "back\\slash",
        "two\nlines",
        "\x1b[31m",
        "caf\u00e9",
        "\u4f60\u597d",
        "a.b",
        "tab\t",
    ],
)
def test_a_text_is_found_however_json_writes_it(tmp_path: Path, shown: Shown, text: str) -> None:
    lines = [rollout_of(0, 0, 1.0, f"before {text} after"), rollout_of(0, 1, 1.0, "aXb and others")]
    run = write_run(tmp_path / "run", METRICS, {1: lines})
    path = run / "rollouts" / "step_000002.jsonl"
    path.write_text(
        "".join(
            json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines
        )
    )
    with gzip.open(run / "rollouts" / "step_000003.jsonl.gz", "wb") as file:
        file.write(path.read_bytes())
    assert "3 completions of 3 steps" in shown(
        run, "--grep", text.upper() if text.isascii() else text
    )


def test_an_episode_is_a_conversation(tmp_path: Path, shown: Shown) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "b"}}}
    messages: list[Any] = [{"role": "assistant", "content": "hm", "tool_calls": [call]}]
    messages += [
        {"role": "tool", "name": "look", "content": "5 of them"},
        {"role": "assistant", "content": "5"},
    ]
    turns: list[Any] = [{"segment": 0, "sampled": False, "token_ids": [1, 2]}]
    turns += [{"segment": 0, "sampled": True, "token_ids": [3, 4, 0], "finish_reason": "stop"}]
    episode: dict[str, Any] = {"status": "max_turns", "turns": turns, "messages": messages}
    episode |= {"environment": {"rewards": {"right": 1.0}, "calls_s": [0.1], "error": "it broke"}}
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "count b"}]
    line = rollout_of(0, 0, 1.0, "hm5", prompt=prompt, **episode)
    run = write_run(tmp_path / "run", METRICS, {1: [line]})
    result = shown(run, "--best", "1")
    message = [
        "system",
        "be brief",
        "user",
        "count b",
        "assistant",
        "hm",
        'calls look({"at": "b"})',
        "tool look",
    ]
    message += ["5 of them", "assistant", "    5", "failed: it broke"]
    positions = [result.index(text) for text in message[:4]]
    assert positions == sorted(positions)
    assert all(text in result for text in [*message, "1 turns, max_turns"])
    assert "tool look" in result
    assert "of each step" not in shown(run, "--grep", "5 of them")  # of one step there is no list
    assert "1 completions of step 1" in shown(
        run, "--grep", "5 OF THEM"
    )  # what a tool answered is found too


def test_steps_that_are_not_there(run: Path, shown: Shown) -> None:
    assert "it has steps 1 to 10" in shown(run, "--step", "11", code=2)
    assert "steps with completions: 4, 8" in shown(run, "--worst", "1", "--step", "5", code=2)
    assert "no completions of step 5 were recorded; steps with completions: 4, 8" in shown(
        run, "--step", "5"
    )
    write_lines(run / "rollouts" / "step_000006.jsonl", ROLLOUTS)
    write_lines(run / "rollouts" / "step_000010.jsonl", ROLLOUTS)
    assert "steps with completions: 4, 6, 8, 10" in shown(run, "--grep", "x", "--step", "5", code=2)


BAD = [
    (["--step", "x"], "--step"),
    (["--step", "-1"], "from 0 to"),
    (["--worst", "0"], "from 1 to 1000"),
    (["--best", "1001"], "from 1 to 1000"),
    (["--worst", "1", "--best", "1"], "not allowed with"),
    (["--grep", ""], "--grep: is empty"),
    (["--follow", "--step", "1"], "newest step"),
    (["--nonsense"], "--nonsense"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_words_cost_one_line(run: Path, shown: Shown, words: list[str], message: str) -> None:
    assert message in shown(run, *words, code=2)


def test_folders_that_are_no_runs(tmp_path: Path, shown: Shown) -> None:
    shown(tmp_path / "nowhere", code=2)
    shown(tmp_path, code=2)
    (tmp_path / "file").touch()
    shown(tmp_path / "file", code=2)


def test_runs_that_did_not_end_well(tmp_path: Path, shown: Shown) -> None:
    empty = write_run(tmp_path / "empty", launch={"outcome": "killed"})
    assert "killed" in shown(empty)
    assert "no step has finished yet" in shown(empty, "--step", "1", code=2)
    assert "no step has any" in shown(empty, "--worst", "1", code=2)
    crashed = write_run(
        tmp_path / "crashed", METRICS, launch={"outcome": "failed", "why": "rank 1: ValueError: no"}
    )
    (crashed / "logs").mkdir()
    (crashed / "logs" / "failure.txt").write_text("=== 2026-01-02 rank 1 failed\nValueError: no\n")
    result = shown(crashed)
    assert "rank 1: ValueError: no" in result
    assert "logs/failure.txt" in result
    assert "=== 2026-01-02 rank 1 failed" in result
    early = (
        tmp_path / "early"
    )  # no launches, no config, fewer metrics, as an earlier version left it
    write_lines(early / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in (1, 2)])
    assert re.search(r"^reward +▅▅ +0\.5", shown(early), re.MULTILINE)
    assert "mean" in shown(early, "--step", "2")


def test_a_dump_that_is_broken_shows_what_can_be_read(run: Path, shown: Shown) -> None:
    path = run / "rollouts" / "step_000008.jsonl"
    lines = [json.dumps(rollout_of(0, n, n / 4, num_rollouts=8)) for n in range(4)]
    path.write_text("\n".join([*lines, "no json", lines[0][:50]]))
    result = shown(run, "--step", "8")
    assert "1 groups, 4 completions" in result
    assert "2 lines or files not read; the first:" in result
    assert "step_000008.jsonl:5" in result
    assert "4 rollouts of the step are not in its files" in result
    assert "worst 4 of 4" in shown(run, "--worst", "9")
    path.unlink()
    os.mkfifo(path)  # nobody writes into it: a reader would wait
    # The path's length decides where the line breaks.
    assert "a fifo" in " ".join(shown(run, "--step", "8").split())
    path.unlink()
    packed = gzip.compress("\n".join(lines).encode())
    path.with_suffix(".jsonl.gz").write_bytes(packed[:-20])
    assert "end-of-stream" in shown(run, "--step", "8")
    path.with_suffix(".jsonl.gz").write_bytes(packed)


def test_a_dump_of_millions_of_lines_is_given_up(run: Path) -> None:
    """Where only some lines are looked at too: 1 MB of gzip holds 300 million."""
    (run / "rollouts/step_000004.node_1.jsonl.gz").write_bytes(
        gzip.compress(b"{}\n" * ((1 << 20) + 1))
    )
    errors = ReadErrors()
    assert (
        len([*read_run(run).files.rollouts(4, errors=errors, is_wanted=contains_text("it is"))])
        == 2
    )
    assert (
        errors.num,
        "nor more than 1,048,576 lines or 4 GiB" in errors.first,
    ) == (1, True)


def test_nothing_is_written_into_a_run(run: Path, shown: Shown) -> None:
    old = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for words in ((), ("--step", "8"), ("--worst", "1"), ("--prompt", "10"), ("--grep", "yes")):
        shown(run, *words)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == old


def test_a_page_needs_no_torch(run: Path) -> None:
    """And nothing of what takes long to import."""
    code = "import sys; from grpo_spmd.tools.show.__main__ import main; main(); "
    code += "print({'torch', 'vllm', 'transformers', 'tokenizers', 'yaml'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[-1] in ("set()", "{'yaml'}")


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    return write_scored_run(tmp_path / "run")


def test_differences_of_tokens_are_said(scored: Path, shown: Shown) -> None:
    result = shown(scored, "--worst", "1")
    assert "policy - engine: mean 0.167, largest 0.5 nats (token 2 'b')" in result
    assert re.search(r"^ +10 +2 .* 0\.5  question 0$", shown(scored, "--step", "8"), re.MULTILINE)
    assert "mismatch" in shown(scored, "--step", "8")


def test_tokens_are_coloured_by_their_difference(scored: Path) -> None:
    """In float32 from 1e-4 nats on: 0.5 is beyond all, 0.001 is ten times that."""
    run, errors = read_run(scored), ReadErrors()
    [(_, record), _] = run.files.rollouts(8, errors=errors)
    text, styles = TokenDifferences(run, 8, [record], errors).token_text(record, True)
    assert text == "ab<end>"
    assert styles == ["", "far", *["over"] * 5]
    second = replace(record, completion="another text")  # that the tokens do not make
    assert TokenDifferences(run, 8, [record], errors).token_text(second, True) == (
        "another text",
        "",
    )
    short = replace(record, completion_ids=[3, 4])  # scores of another run's rollout
    assert TokenDifferences(run, 8, [short], errors).token_text(short, True) == ("ab", ["", ""])
    assert TokenDifferences(run, 8, [short], errors).describe(short) == ""


@pytest.mark.parametrize("has_scores", [False, True])
def test_special_tokens_are_shown_where_the_recorded_text_hides_them(
    has_scores: bool, scored: Path
) -> None:
    """Also without colours: a completion that goes on after its end token looks well without it."""
    run = read_run(scored)
    if not has_scores:
        (scored / "token_scores" / "step_000008.jsonl").unlink()
    [(_, record), _] = run.files.rollouts(8)
    longer = replace(record, completion="aba", completion_ids=[3, 0, 4, 3])
    differences = TokenDifferences(run, 8, [longer], ReadErrors())
    text, styles = differences.token_text(longer, False)
    assert text == "a<end>ba"
    assert not any(styles)


def test_tokens_of_an_episode_are_coloured_turn_by_turn(scored: Path) -> None:
    [(_, record), _] = read_run(scored).files.rollouts(8)
    turns: list[dict[str, Any]] = [
        {"sampled": True, "token_ids": [3]},
        {"sampled": False, "token_ids": [9, 9]},
    ]
    turns += [{"sampled": True, "token_ids": [4, 0]}]
    episode = replace(record, status="ok", turns=turns)
    text, styles = TokenDifferences(read_run(scored), 8, [episode], ReadErrors()).token_text(
        episode, True
    )
    assert text == "a\nb<end>"
    assert styles == ["", "", "far", *["over"] * 5]


def test_scores_that_are_broken_cost_themselves(scored: Path, shown: Shown) -> None:
    (scored / "token_scores" / "step_000008.jsonl").write_text('{"rollout_id": 0}\n')
    result = shown(scored, "--worst", "1")
    assert "worst 1 of 2" in result
    assert "not read" in result
    assert "2 completions" in shown(scored, "--step", "8")
