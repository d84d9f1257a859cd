"""The diagnosis names the cause of a planted trouble, tells its symptoms with it, and stays silent
about a healthy run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.diagnosis.curves import Finding
from grpo_spmd.diagnosis.findings import list_findings, summary_lines
from grpo_spmd.diagnosis.run import read_run
from tests.support.reported import LAUNCH, dump, healthy, make_run, record, step_of

Line = dict[str, Any]
NUM_STEPS = 60
CONFIG = "run_dir: r\nmodel: {path: m, dtype: bfloat16}\noptimizer: {lr: 0.1}\n"


def diagnose(folder: Path, lines: list[Line], config: str = CONFIG) -> dict[str, Finding]:
    run = read_run(make_run(folder, lines, config=config))
    return {finding.title: finding for finding in list_findings(run)}


def changed(change: Callable[[Line, float], None], start: int = 1) -> list[Line]:
    """Lines of a healthy run, changed from `start` on; the change gets the share of the run."""
    lines = healthy(NUM_STEPS)
    for line in lines[start - 1 :]:
        change(line, line["step"] / NUM_STEPS)
    return lines


def test_symptoms_since_the_first_update_are_the_learning_rate(tmp_path: Path) -> None:
    def leap(line: Line, share: float) -> None:
        line |= {
            "reward/mean": 0.0,
            "completion/truncated_frac": 1.0,
            "loss/entropy": 5.0,
            "reward/zero_std_groups_frac": 1.0,
        }

    findings = diagnose(tmp_path, changed(leap, start=2))
    assert [*findings] == ["the learning rate is too high"]
    finding = findings["the learning rate is too high"]
    assert (finding.level, finding.step) == ("bad", 2)
    assert "optimizer.lr=0.001 (it is 0.1)" in finding.text
    for evidence in ("loss/entropy 0.", "-> 5", "completions are cut off", "groups are alike"):
        assert evidence in finding.text
    # The same in the middle of a run is not blamed on the first updates.
    late = diagnose(tmp_path / "late", changed(leap, start=30))
    assert "the learning rate is too high" not in late
    assert late["the reward falls"].level == "bad"


def test_completions_that_were_cut_off_from_the_start_do_not_blame_the_learning_rate(
    tmp_path: Path,
) -> None:
    findings = diagnose(
        tmp_path, changed(lambda line, share: line.update({"completion/truncated_frac": 0.97}))
    )
    assert [*findings] == ["completions are cut off"]


def test_what_fails_is_told_with_its_first_reason(tmp_path: Path) -> None:
    """From rank 0's log, where the run goes on in spite of it."""
    log = (
        "2026-11-27 01:42:59,593 WARNING reward 'judge': 256 of 256 completions failed (0 timeout, "
        "256 error); first: reward 'judge' did not answer: Connection refused (http://h:1)\n"
        "2026-11-27 01:43:59,593 WARNING tool 'count' raised KeyError: 'a' (room.py:7); the policy "
        "is given the error, and environment/tool_error_frac counts them; traceback: x.log\n"
    )
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank_0.log").write_text(log)

    def fail(line: Line, share: float) -> None:
        line |= {"reward/judge/error_frac": 0.25, "environment/tool_error_frac": 0.375}

    findings = diagnose(tmp_path, changed(fail, start=4))
    reason = " First reason: reward 'judge' did not answer: Connection refused (http://h:1)."
    assert findings["reward judge fails"].text.endswith(reason)
    tools = findings["tool calls fail"]
    assert (tools.level, tools.step) == ("warning", 4)
    assert tools.text.startswith("38% of a step's calls raise at the most")
    assert tools.text.endswith("First reason: tool 'count' raised KeyError: 'a' (room.py:7).")


def test_a_reward_that_is_only_watched_stops_no_run(tmp_path: Path) -> None:
    config = CONFIG + "rewards: [{name: math}, {name: judge, weight: 0.0}]\n"

    def fail(line: Line, share: float) -> None:
        line["reward/judge/error_frac"] = 0.5

    finding = diagnose(tmp_path, changed(fail, start=4), config)["reward judge fails"]
    assert (finding.level, finding.text.partition("; ")[2]) == ("warning", "it is only watched.")


def test_a_policy_that_tries_out_arguments_is_left_in_peace(tmp_path: Path) -> None:
    few = changed(lambda line, share: line.update({"environment/tool_error_frac": 0.1}))
    assert "tool calls fail" not in diagnose(tmp_path, few)


def hack(line: Line, share: float) -> None:
    line |= {
        "reward/mean": 0.3 + 1.5 * share,
        "reward/correct/mean": max(0.0, 0.3 - 0.3 * share),
        "reward/correct/std": 0.4,
        "reward/long/mean": 1.5 * share,
        "reward/long/std": 0.4,
    }


def test_a_named_reward_that_falls_while_the_sum_rises_is_reward_hacking(tmp_path: Path) -> None:
    findings = diagnose(tmp_path, changed(hack))
    (finding,) = findings.values()
    assert (finding.level, finding.title) == ("bad", "correct falls while the reward rises")
    assert "mostly by long" in finding.text

    def together(line: Line, share: float) -> None:
        hack(line, share)
        line["reward/correct/mean"] = 0.3 + 0.3 * share

    assert [*diagnose(tmp_path / "together", changed(together))] == ["nothing stands out"]


def test_a_ruined_run_is_not_praised(tmp_path: Path) -> None:
    """N3: the sum is at its best and hardly differs, and what it should measure has fallen."""

    def ruin(line: Line, share: float) -> None:
        hack(line, share)
        line |= {
            "reward/std": 0.45 * (1 - share),
            "reward/zero_std_groups_frac": 0.2 + 0.8 * share,
            "completion/truncated_frac": share,
        }

    findings = diagnose(tmp_path, changed(ruin))
    assert "the prompts are nearly solved" not in findings
    assert findings["correct falls while the reward rises"].level == "bad"
    assert findings["completions are cut off"].level == "bad"


SINGLE_CAUSES: dict[str, tuple[Callable[[Line, float], None], str, str]] = {
    "the reward never differs": (
        lambda line, share: line.update(
            {"reward/mean": 0.5, "reward/std": 0.0, "reward/zero_std_groups_frac": 1.0}
        ),
        "bad",
        "groups are alike",
    ),
    "each prompt's rewards are all alike": (
        lambda line, share: line.update({"reward/zero_std_groups_frac": 1.0}),
        "bad",
        "groups are alike",
    ),
    "the learning rate is 0": (lambda line, share: line.update({"optim/lr": 0.0}), "bad", ""),
    "the teacher teaches nothing": (
        lambda line, share: line.update({"teacher/kl": 1e-7}),
        "warning",
        "",
    ),
    "the policy moves away from its teacher": (
        lambda line, share: line.update({"teacher/kl": 0.1 + share}),
        "warning",
        "",
    ),
    "the critic explains nothing": (
        lambda line, share: line.update({"critic/explained_variance": 0.01, "critic/loss": 1.0}),
        "warning",
        "",
    ),
    "steps wait for checkpoints": (
        lambda line, share: line.update({"time/checkpoint_s": 40.0}),
        "warning",
        "",
    ),
    "the environment or a tool is slow": (
        lambda line, share: line.update(
            {
                "environment/call_s_p95": 8.0,
                "episode/turns_mean": 4.0,
                "time/rollout_s": 30.0,
                "rollout/tail_waste_frac": 0.5,
            }
        ),
        "warning",
        "ranks wait",
    ),
    "memory grows": (
        lambda line, share: line.update({"memory/host/workers_gib": 1 + 2 * share}),
        "warning",
        "keeps what it should drop",
    ),
    "many tokens are clipped": (
        lambda line, share: line.update({"loss/clip_frac": 0.7}),
        "warning",
        "",
    ),
}


@pytest.mark.parametrize("title", SINGLE_CAUSES)
def test_a_cause_is_named_alone_and_tells_its_symptom(title: str, tmp_path: Path) -> None:
    change, level, symptom = SINGLE_CAUSES[title]
    findings = diagnose(tmp_path, changed(change))
    assert [*findings] == [title]
    assert findings[title].level == level
    assert symptom in findings[title].text


@pytest.mark.parametrize(
    ("num_workers", "calls_s", "text"),
    [
        # 8 workers for 30 s are 240 s: busy for 90 %, though no call is long.
        (8, 216.0, "Its 8 workers a rank are busy for 90% of the time that a step samples"),
        # 32 workers are idle for most of their time, and an episode does not wait for them.
        (32, 216.0, ""),
    ],
)
def test_episodes_that_wait_for_a_free_worker_are_a_slow_environment(
    num_workers: int, calls_s: float, text: str, tmp_path: Path
) -> None:
    def wait(line: Line, share: float) -> None:
        line |= {
            "environment/call_s_p95": 0.4,
            "environment/calls_s_per_rank": calls_s,
            "episode/turns_mean": 4.0,
            "time/rollout_s": 30.0,
        }

    config = f"{CONFIG}environment: {{num_workers: {num_workers}}}\n"
    (finding,) = diagnose(tmp_path, changed(wait), config).values()
    title = "the environment or a tool is slow" if text else "nothing stands out"
    assert finding.title == title
    assert text in finding.text
    assert "More environment.num_workers" in finding.text or not text


def test_an_agents_one_call_is_its_whole_episode(tmp_path: Path) -> None:
    """Figures of a real run: 0.47 s of 1.6 s are no half, whatever the number of turns."""

    def call(line: Line, share: float) -> None:
        line |= {
            "environment/call_s_p95": 0.467,
            "environment/calls_s_per_rank": 3.0,
            "episode/turns_mean": 3.0,
            "time/rollout_s": 1.64,
        }

    for key, title in (
        ("agent: a.py:f", "nothing stands out"),
        ("gym: a.py:G", "the environment or a tool is slow"),
    ):
        folder = tmp_path / key[:3]
        config = f"{CONFIG}environment: {{{key}}}\n"
        assert [*diagnose(folder, changed(call), config)] == [title]


def test_three_steps_do_not_blame_the_learning_rate(tmp_path: Path) -> None:
    """Figures of a real run of 16 completions a step."""
    lines = healthy(3)
    figures = ((0.625, 0.25), (0.5625, 0.75), (0.25, 1.0))
    for line, (reward, alike) in zip(lines, figures, strict=True):
        line |= {"reward/mean": reward, "reward/std": 0.5, "reward/zero_std_groups_frac": alike}
    assert "the learning rate is too high" not in diagnose(tmp_path, lines)


def test_a_cause_is_as_grave_as_what_it_explains(tmp_path: Path) -> None:
    """So that it stands in front: a wrong token at the end of turns is why groups are alike."""

    def cut(line: Line, share: float) -> None:
        line |= {
            "completion/truncated_frac": 1.0,
            "reward/zero_std_groups_frac": 1.0,
            "reward/std": 0.0,
            "reward/mean": 0.0,
        }

    run = make_run(tmp_path, changed(cut), config=CONFIG)
    token = {"id": 2, "content": "<|im_end|>", "special": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [token]}))
    dump(
        tmp_path,
        1,
        [
            record(1, position, sample, "text", completion_ids=[70, 2, 71], finish_reason="length")
            for position in range(3)
            for sample in range(4)
        ],
    )
    (finding,) = list_findings(read_run(run))
    assert (finding.level, finding.title) == ("bad", "'<|im_end|>' does not end a completion")
    for effect in (
        "groups are alike (from step 1)",
        "the reward never differs",
        "are cut off (from step 1)",
    ):
        assert effect in finding.text.partition(" This also explains: ")[2]


def test_a_reward_that_hangs_is_why_steps_wait_and_needs_no_workers(tmp_path: Path) -> None:
    lines = healthy(12)
    for line in lines[3:]:
        line |= {"reward/judge/error_frac": 0.0, "reward/judge/timeout_frac": 0.03}
    make_run(tmp_path, lines)
    write_timeline(tmp_path, slow_rank=None, reward_s=20.0)
    (finding,) = list_findings(read_run(tmp_path))
    assert (finding.title, finding.step) == ("reward judge times out", 4)
    assert "more workers do not end a call that hangs" in finding.text
    assert finding.text.endswith("This also explains: steps wait for rewards.")


def test_nothing_is_praised_beside_trouble(tmp_path: Path) -> None:
    def learn(line: Line, share: float) -> None:
        line |= {
            "reward/mean": 0.2 + 0.7 * min(1.0, 2 * share),
            "reward/std": 0.45 * (1.1 - min(1.0, 2 * share)),
            "reward/zero_std_groups_frac": 0.2 + 0.75 * min(1.0, 2 * share),
        }

    titles = [*diagnose(tmp_path, changed(learn))]
    assert "the prompts are nearly solved" in titles

    def leak(line: Line, share: float) -> None:
        learn(line, share)
        line["memory/host/workers_gib"] = 1 + 2 * share

    assert [*diagnose(tmp_path / "leak", changed(leak))] == ["memory grows"]


def test_a_run_that_learns_within_its_first_steps_has_learned(tmp_path: Path) -> None:
    """Figures of a real run: 0.52 in the first step, 0.98 in the fourth."""
    lines = healthy(NUM_STEPS)
    rewards = [0.52, 0.82, 0.90, 0.98, *[1.0] * (NUM_STEPS - 4)]
    for line, reward in zip(lines, rewards, strict=True):
        line |= {
            "reward/mean": reward,
            "reward/std": (0.385, 0.33, 0.26, 0.12)[line["step"] - 1] if reward < 1 else 0.0,
            "reward/zero_std_groups_frac": 1.0 if reward == 1 else 0.5,
        }
    findings = diagnose(tmp_path, lines, CONFIG.replace("lr: 0.1", "lr: 1.0e-3"))
    assert "the prompts are nearly solved" in findings
    assert {finding.level for finding in findings.values()} == {"ok"}


@pytest.mark.parametrize(("error_frac", "level"), [(0.3, "warning"), (0.69, "bad")])
def test_most_calls_of_tools_that_fail_are_bad(
    error_frac: float, level: str, tmp_path: Path
) -> None:
    lines = changed(lambda line, share: line.update({"environment/tool_error_frac": error_frac}))
    assert diagnose(tmp_path, lines)["tool calls fail"].level == level


@pytest.mark.parametrize(("lr", "advice"), [("0.1", "0.001"), ("0.03", "0.001"), ("1e-4", "1e-05")])
def test_the_learning_rate_that_is_advised_is_one_that_trains(
    lr: str, advice: str, tmp_path: Path
) -> None:
    def leap(line: Line, share: float) -> None:
        line |= {"reward/mean": 0.0, "completion/truncated_frac": 1.0, "loss/entropy": 5.0}

    config = CONFIG.replace("lr: 0.1", f"lr: {float(lr)}")
    finding = diagnose(tmp_path, changed(leap, start=2), config)["the learning rate is too high"]
    assert f"try optimizer.lr={advice} (it is {float(lr):g})" in finding.text


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("optim/lr", 1e-6),
        ("memory/host/workers_gib", 20.0),
        ("teacher/kl", 0.2),
        ("critic/explained_variance", 0.4),
        ("time/checkpoint_s", 5.0),
        ("loss/clip_frac", 0.02),
    ],
)
def test_a_healthy_figure_is_no_finding(metric: str, value: float, tmp_path: Path) -> None:
    lines = changed(lambda line, share: line.update({metric: value}))
    assert [*diagnose(tmp_path, lines)] == ["nothing stands out"]


def test_the_figures_of_a_critic_are_in_its_finding(tmp_path: Path) -> None:
    change, _, _ = SINGLE_CAUSES["the critic explains nothing"]
    (finding,) = diagnose(tmp_path, changed(change)).values()
    assert "is 0.01 after 60 steps" in finding.text
    assert "critic/loss went from 1 to 1" in finding.text


def test_a_critic_that_learns_what_can_be_foreseen_is_no_finding(tmp_path: Path) -> None:
    lines = changed(
        lambda line, share: line.update(
            {"critic/explained_variance": 0.01, "critic/loss": 1.0 - 0.5 * share}
        )
    )
    assert [*diagnose(tmp_path, lines)] == ["nothing stands out"]


def write_timeline(folder: Path, slow_rank: int | None, reward_s: float = 1.0) -> None:
    """Three ranks that leave the reward together; one may sample for longer."""
    lines = []
    for step in range(1, 13):
        spans = []
        for rank in range(3):
            # Without a slow rank each is the slowest in its turn.
            is_slow = rank == (step % 3 if slow_rank is None else slow_rank)
            end_s = 6.0 if is_slow else 2.0
            reward = ["reward", end_s, 6.0 + reward_s, 1.0, None]
            spans.append([["rollout", 0.0, end_s, 1.0, end_s], reward])
        lines.append(
            {"step": step, "unix_s": 1.0, "world_size": 3, "ranks": [0, 1, 2], "spans": spans}
        )
    (folder / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("slow_rank", [0, 2])
def test_a_slow_rank_is_named_with_its_phase(slow_rank: int, tmp_path: Path) -> None:
    make_run(tmp_path, healthy(12))
    write_timeline(tmp_path, slow_rank)
    (finding,) = list_findings(read_run(tmp_path))
    assert finding.title == f"rank {slow_rank} is slow"
    assert "in 12 of the last 12 steps, mostly in rollout" in finding.text
    # 4 of the 7 seconds of each step
    assert "costs 57% of the time" in finding.text


def test_ranks_that_are_slow_in_turn_and_those_that_wait_for_them_are_no_finding(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, healthy(12))
    # Two of three ranks wait 4 seconds of each step in their reward phase.
    write_timeline(tmp_path, slow_rank=None)
    assert [result.title for result in list_findings(read_run(tmp_path))] == ["nothing stands out"]
    write_timeline(tmp_path, slow_rank=None, reward_s=20.0)
    (finding,) = list_findings(read_run(tmp_path))
    assert finding.title == "steps wait for rewards"
    assert "Rewards take 77% of the last 12 steps" in finding.text


def test_a_reward_that_follows_the_length(tmp_path: Path) -> None:
    lines = changed(lambda line, share: line.update({"completion/tokens_mean": 500 * (1 + share)}))
    make_run(tmp_path, lines, config=CONFIG)
    rollouts = [
        record(NUM_STEPS, position, sample, "x" * (10 + 7 * sample), reward=0.1 * sample)
        for position in range(12)
        for sample in range(4)
    ]
    dump(tmp_path, NUM_STEPS, rollouts)
    titles = {finding.title for finding in list_findings(read_run(tmp_path))}
    assert "the reward follows the length" in titles
    # Cut off because it pays to be long: the cause stands in front, and the effect in its text.
    make_run(
        tmp_path,
        [line | {"completion/truncated_frac": line["step"] / NUM_STEPS} for line in lines],
        config=CONFIG,
    )
    finding = list_findings(read_run(tmp_path))[0]
    assert (finding.level, finding.title) == ("bad", "the reward follows the length")
    assert "completions are cut off" in finding.text
    make_run(tmp_path, lines, config=CONFIG)
    dump(tmp_path, NUM_STEPS, step_of(NUM_STEPS, num_groups=12))
    titles = {finding.title for finding in list_findings(read_run(tmp_path))}
    assert "the reward follows the length" not in titles


def test_a_length_that_pays_is_seen_when_all_are_as_long_as_they_can_be(tmp_path: Path) -> None:
    """Lengths double at step 20; the dump of that step has both, the last one long ones alone."""
    lines = healthy(NUM_STEPS)
    for line in lines[19:]:
        line |= {"completion/tokens_mean": 2000.0, "reward/zero_std_groups_frac": 1.0}
    make_run(tmp_path, lines, config=CONFIG)
    for step, growth in ((20, 7), (NUM_STEPS, 0)):
        rollouts = [
            record(step, position, sample, "x" * (10 + growth * sample), reward=0.1 * sample)
            for position in range(12)
            for sample in range(4)
        ]
        dump(tmp_path, step, rollouts)
    findings = {finding.title: finding for finding in list_findings(read_run(tmp_path))}
    assert findings["the reward follows the length"].step == 20
    assert "groups are alike" not in findings


def test_a_token_that_ends_turns_and_no_completion(tmp_path: Path) -> None:
    make_run(
        tmp_path,
        changed(lambda line, share: line.update({"completion/truncated_frac": 1.0})),
        config=CONFIG,
    )
    tokens = [
        {"id": 1, "content": "<eos>", "special": True},
        {"id": 2, "content": "<|im_end|>", "special": True},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    for ids, is_expected in (([70, 2, 71, 72], True), ([70, 73, 71, 72], False)):
        rollouts = [
            record(1, position, sample, "text", completion_ids=ids, finish_reason="length")
            for position in range(3)
            for sample in range(4)
        ]
        dump(tmp_path, 1, rollouts)
        findings = {finding.title: finding for finding in list_findings(read_run(tmp_path))}
        assert ("'<|im_end|>' does not end a completion" in findings) == is_expected
        # The symptom is told by itself only where the cause is not known.
        assert ("completions are cut off" in findings) != is_expected


def test_prompts_that_repeat_and_one_text_for_all(tmp_path: Path) -> None:
    make_run(tmp_path, healthy(NUM_STEPS), config=CONFIG)
    rollouts = [
        record(
            1,
            position,
            sample,
            "yes",
            row=position,
            prompt=f"question {position % 4}",
            columns={"answer": position % 4},
        )
        for position in range(12)
        for sample in range(4)
    ]
    dump(tmp_path, 1, rollouts)
    findings = {finding.title: finding for finding in list_findings(read_run(tmp_path))}
    assert {"the data repeats itself", "all completions are one text"} == findings.keys()
    assert "Of 12 recorded rows 8" in findings["the data repeats itself"].text


def test_one_text_for_all_is_why_groups_are_alike(tmp_path: Path) -> None:
    alike = changed(lambda line, share: line.update({"reward/zero_std_groups_frac": 1.0}), start=9)
    make_run(tmp_path, alike, config=CONFIG)
    rollouts = [
        record(NUM_STEPS, position, sample, "yes", row=position, columns={"n": position})
        for position in range(12)
        for sample in range(4)
    ]
    dump(tmp_path, NUM_STEPS, rollouts)
    (finding,) = list_findings(read_run(tmp_path))
    assert (finding.level, finding.title) == ("bad", "all completions are one text")
    assert finding.text.endswith(
        "This also explains: each prompt's rewards are all alike (from step 9), "
        "groups are alike (from step 9)."
    )


def test_rows_of_an_environment_may_have_one_prompt_and_other_columns(tmp_path: Path) -> None:
    make_run(tmp_path, healthy(NUM_STEPS), config=CONFIG)
    rollouts = [
        record(
            1, position, sample, f"{sample}", row=position, prompt="Play.", columns={"n": position}
        )
        for position in range(12)
        for sample in range(4)
    ]
    dump(tmp_path, 1, rollouts)
    assert [f.title for f in list_findings(read_run(tmp_path))] == ["nothing stands out"]


def test_an_evaluation_set_that_is_the_training_set(tmp_path: Path) -> None:
    config = f"{CONFIG}data: {{train: a.jsonl, eval: {{held: a.jsonl, new: b.jsonl}}}}\n"
    assert [*diagnose(tmp_path, healthy(NUM_STEPS), config)] == ["data.eval.held is data.train"]


def test_hostile_dumps_and_timelines_cost_nothing_but_their_rules(tmp_path: Path) -> None:
    make_run(tmp_path, healthy(NUM_STEPS), config=CONFIG)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step_000001.jsonl").write_text('{"position": []}\n\x00\n{}\n')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [[], {"id": "x"}]}')
    (tmp_path / "timeline.jsonl").write_text('{"step": 1, "ranks": [0, 1], "spans": [[]]}\nnull\n')
    assert [finding.title for finding in list_findings(read_run(tmp_path))] == [
        "nothing stands out"
    ]


def test_the_console_gets_the_worst_findings_or_the_good_news(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, changed(hack), config=CONFIG, launch=LAUNCH))
    (line,) = summary_lines(run)
    assert line.startswith("correct falls while the reward rises (from step ")
    run = read_run(make_run(tmp_path / "well", healthy(NUM_STEPS)))
    (line,) = summary_lines(run)
    assert line.startswith("nothing stands out: 60 steps: rewards, lengths, entropy")
