"""Episodes do not depend on who plays them, on how long their environments take, or on a kill in
the middle of one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.config.schema import PHASES
from grpo_spmd.observe.timeline import read_timeline
from tests.support.dumps import dumped, logprobs_of, scores_of
from tests.support.models import write_config
from tests.support.played import make_caller
from tests.support.ranks import RanksJob
from tests.support.workers.played import GYM_STEP

NUM_PROMPTS, GROUP_SIZE = 4, 4
NUM_EPISODES = NUM_PROMPTS * GROUP_SIZE
# FULL_MATRIX=1 tests/run.sh -k episodes    takes tensor parallelism as well.
RANKS = {"one": (1, 1), "two": (2, 1)} | ({"tp2": (2, 2)} if os.environ.get("FULL_MATRIX") else {})
HOW = ["", "raises", "hangs", "dies"] + 8 * ["raises"]  # of each row
# What may differ between two runs of the same thing.
TIMED = re.compile(r"time/|memory/|throughput/|_s$|_s_p|tokens_per_s|tail_waste")


def start(folder: Path, model: Path, num_ranks: int, tensor_parallel: int = 1) -> RanksJob:
    folder.mkdir(exist_ok=True)
    config = write_config(
        folder, model,
        data={"train": str(model.parent / "train.jsonl"), "max_prompt_tokens": 8},
        rollout={
            "num_prompts_per_step": NUM_PROMPTS, "group_size": GROUP_SIZE, "max_completion_tokens": 16,  # noqa: E501
            "tensor_parallel_size": tensor_parallel,
        },
        environment={
            "factory": "tests/support/played.py:Shelf", "max_turns": 4, "max_tokens": 96, "num_workers": 2,  # noqa: E501
            "call_timeout_s": 120,
        },
        rewards=[],
        optimizer={"lr": 1e-4},
        training={"num_steps": GYM_STEP, "max_tokens_per_micro_batch": 512},
        checkpoint={"every_steps": 1, "resume": "auto"},
        proofs={"every_steps": 1},
    )  # fmt: skip
    return RanksJob(
        num_ranks, "tests.support.workers.played", str(config), env={"PLAYED": str(folder)}
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not TIMED.search(name)} for line in lines
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_caller(tmp_path_factory.mktemp("played"))


@pytest.fixture(scope="module")
def played(model: Path) -> dict[str, Path]:
    folders = {name: model.parent / name for name in RANKS}
    jobs = [start(folders[name], model, *layout) for name, layout in RANKS.items()]
    for job in jobs:
        code, output = job.wait(300)
        assert code == 0, output
    return folders


@pytest.fixture(scope="module")
def killed(model: Path) -> tuple[Path, int, str]:
    """A run that was killed in its second step, when it has been gone on with; how many episodes of
    this step had been
    kept; and the output of the first launch."""
    folder = model.parent / "killed"
    folder.mkdir()
    (folder / "kill").write_text(str(NUM_EPISODES + NUM_EPISODES // 2))
    code, old = start(folder, model, 2).wait(300)
    assert code != 0, old
    assert (folder / "killed").exists(), old
    num_kept = 0
    for path in (folder / "run/rollout_buffer/step_000002").glob("*.msgpack"):
        num_kept += len(msgspec.msgpack.decode(path.read_bytes())["records"])
    (folder / "resets").unlink()
    code, output = start(folder, model, 2).wait(300)
    assert code == 0, output
    assert "goes on from" in output
    return folder, num_kept, old


def test_the_episodes_are_such_as_could_differ(played: dict[str, Path]) -> None:
    for step in (1, 2, GYM_STEP):
        rollouts = dumped(played["one"] / "run", step)
        assert len(rollouts) == NUM_EPISODES
        shapes = {
            tuple((turn["sampled"], len(turn["token_ids"])) for turn in r["turns"])
            for r in rollouts
        }
        assert len(shapes) > 3
        assert len({sum(turn["sampled"] for turn in r["turns"]) for r in rollouts}) > 1, (
            "of several numbers of turns"
        )
        assert len({r["reward"] for r in rollouts}) > NUM_EPISODES // 2
        output = [
            message["content"]
            for r in rollouts
            for message in r["messages"]
            if message["role"] != "assistant"
        ]
        assert len({text for text in output if text.isdigit()}) > 1, (
            "what environments draw is told to the policy"
        )
    turns_values = [
        turn["reward"]
        for r in dumped(played["one"] / "run", GYM_STEP)
        for turn in r["turns"]
        if turn["sampled"]
    ]
    assert len(set(turns_values)) > NUM_EPISODES


@pytest.mark.parametrize("layout", [name for name in RANKS if name != "one"])
def test_episodes_and_training_do_not_depend_on_the_ranks(
    played: dict[str, Path], layout: str
) -> None:
    """Tokens, turns, messages and rewards to the bit, whatever time environments took. Logprobs and
    what is trained at
    rounding: 1e-6, more behind an optimizer step (test_partition.py) and where slices of a layer
    add up in another
    order, of logits of around 10."""
    for step in range(1, GYM_STEP + 1):
        local, alone = (dumped(played[name] / "run", step) for name in (layout, "one"))
        bound = 1e-6 if step == 1 and RANKS[layout][1] == 1 else 1e-5
        for ours, theirs in zip(local, alone, strict=True):
            assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=bound)
            assert ours["advantage"] == pytest.approx(theirs["advantage"], abs=1e-6)
            for name in (
                "completion_ids",
                "turns",
                "messages",
                "status",
                "reward",
                "rewards",
                "finish_reason",
            ):
                assert ours[name] == theirs[name], (step, name)
    for mine_of_step, one_values in zip(
        metrics(played[layout]), metrics(played["one"]), strict=True
    ):
        for name in ("loss/total", "loss/policy", "loss/entropy", "optim/grad_norm"):
            assert mine_of_step[name] == pytest.approx(one_values[name], rel=1e-5, abs=1e-6), name
        for name, value in one_values.items():
            if name.startswith(("episode/", "reward/")):
                assert mine_of_step[name] == value, name


@pytest.fixture(scope="module")
def plain(played: dict[str, Path], model: Path) -> dict[int, Any]:
    """By step, the policy that sampled in it, as plain transformers has it."""
    export_checkpoint(
        played["one"] / "run/checkpoints/step_000002", model.parent / "after_2", "float32"
    )

    def load(path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )

    return {1: load(model), GYM_STEP: load(model.parent / "after_2")}


@pytest.mark.parametrize("layout", RANKS)
def test_scores_of_tokens_are_those_of_plain_transformers(
    played: dict[str, Path], plain: dict[int, Any], layout: str
) -> None:
    """Over each segment as the dump has it; the sampled tokens in the order of completion_ids."""
    for step, policy in plain.items():
        lines = {line["rollout_id"]: line for line in scores_of(played[layout] / "run", step)}
        rollouts = dumped(played[layout] / "run", step)
        assert sorted(lines) == list(range(NUM_EPISODES))
        assert any(sum(turn["sampled"] for turn in r["turns"]) > 1 for r in rollouts)
        bound = 1e-5 if step == 1 and RANKS[layout][1] == 1 else 1e-4
        for r in rollouts:
            line, entropies, differences = lines[r["rollout_id"]], list[float](), list[float]()
            for segment in range(1 + max(turn["segment"] for turn in r["turns"])):
                turns = [turn for turn in r["turns"] if turn["segment"] == segment]
                ids = [token for turn in turns for token in turn["token_ids"]]
                sampled = [turn["sampled"] for turn in turns for _ in turn["token_ids"]]
                with torch.no_grad():
                    log_p = policy(torch.tensor([ids])).logits[0].double().log_softmax(-1)
                for position in (
                    position for position, is_sampled in enumerate(sampled) if is_sampled
                ):
                    entropies.append(
                        -(log_p[position - 1].exp() * log_p[position - 1]).sum().item()
                    )
                    differences.append(log_p[position - 1, ids[position]].item())
            engine = logprobs_of(r)
            assert (
                len(engine) == len(line["difference"]) == len(line["entropy"]) == len(differences)
            )
            assert line["entropy"] == pytest.approx(entropies, rel=5e-4, abs=bound)
            differences = [policy - its for policy, its in zip(differences, engine, strict=True)]
            assert line["difference"] == pytest.approx(differences, abs=bound)
            assert line["difference_max"] == pytest.approx(max(map(abs, differences)), abs=bound)
            assert "loss_mask" not in line
            assert step == GYM_STEP or "advantages" not in line


def test_advantages_of_turns_are_beside_the_scores(played: dict[str, Path]) -> None:
    """With environment.discount: a turn's return to go in the place of the whole return, on the
    line on which the
    group's advantages are; all worked out from the dump."""
    lines = {line["rollout_id"]: line for line in scores_of(played["two"] / "run", GYM_STEP)}
    rollouts, num_unlike = dumped(played["two"] / "run", GYM_STEP), 0
    for initial in range(0, NUM_EPISODES, GROUP_SIZE):
        group = rollouts[initial : initial + GROUP_SIZE]
        sampled = [[turn for turn in r["turns"] if turn["sampled"]] for r in group]
        max_length = max(map(len, sampled))
        to_go = np.zeros((GROUP_SIZE, max_length + 1))
        for local, turns in zip(to_go, sampled, strict=True):
            for number, turn in reversed([*enumerate(turns)]):
                local[number] = turn["reward"] + 0.5 * local[number + 1]
        rewards, advantages = (
            np.array([r[name] for r in group]) for name in ("reward", "advantage")
        )
        slope = np.ptp(advantages) / np.ptp(rewards)
        over = to_go - to_go[:, :1]
        turns_values = advantages[:, None] + slope * (over - over.mean(0))
        for r, turns, values in zip(group, sampled, turns_values.tolist(), strict=True):
            expected = [
                value for turn, value in zip(turns, values, strict=False) for _ in turn["token_ids"]
            ]
            result = lines[r["rollout_id"]].get("advantages") or [r["advantage"]] * len(expected)
            assert result == pytest.approx(expected, rel=1e-3, abs=1e-3)
            num_unlike += len(set(result)) > 1
    assert num_unlike > NUM_EPISODES // 2


@pytest.mark.parametrize("layout", RANKS)
def test_the_timeline_is_what_the_metrics_are_of(played: dict[str, Path], layout: str) -> None:
    num_ranks, run_dir = RANKS[layout][0], played[layout] / "run"
    timelines, lines = read_timeline(run_dir), (run_dir / "metrics.jsonl").read_text().splitlines()
    assert list(timelines) == [1, 2, GYM_STEP]
    for line in map(json.loads, lines):
        timeline = timelines[line["step"]]
        assert timeline.ranks == list(range(num_ranks))
        assert line["time/unix_s"] - timeline.unix_s == pytest.approx(line["time/step_s"], abs=0.5)
        for name in PHASES:
            per_rank = [[span for span in spans if span.phase == name] for spans in timeline.spans]
            assert all(per_rank), name
            seconds = max(sum(span.end_s - span.start_s for span in spans) for spans in per_rank)
            assert line[f"time/{name}_s"] == pytest.approx(
                seconds, abs=0.001 * len(per_rank[0])
            )  # each to the ms
            peak = max(span.peak_gib or 0.0 for spans in per_rank for span in spans)
            assert line[f"memory/{name}/peak_gib"] == pytest.approx(
                peak, abs=0.002
            )  # each to the MiB
        busy = [
            [span.busy_s for span in spans if span.phase == "rollout"] for spans in timeline.spans
        ]
        assert [[seconds is None for seconds in rank_values] for rank_values in busy] == [
            [False, True]
        ] * num_ranks
        generation_s = [rank_values[0] or 0.0 for rank_values in busy]
        waste = 1 - sum(generation_s) / num_ranks / max(generation_s)
        assert line["rollout/tail_waste_frac"] == pytest.approx(waste, abs=0.02)


def test_a_run_killed_in_an_episode_goes_on_to_the_bit(
    played: dict[str, Path], killed: tuple[Path, int, str]
) -> None:
    folder, num_kept, old = killed
    assert "in phase rollout, step 2: its process is gone" in old
    assert metrics(folder) == metrics(played["two"])
    assert [line["step"] for line in metrics(folder)] == [1, 2, GYM_STEP]
    for step in range(1, GYM_STEP + 1):
        assert without_times(folder, step) == without_times(played["two"], step), step
        assert scores_of(folder / "run", step) == scores_of(played["two"] / "run", step), step
    timelines = read_timeline(folder / "run")
    assert sorted(timelines) == [1, 2, GYM_STEP]
    assert timelines[2].unix_s > timelines[1].unix_s + (timelines[1].spans[0][-1].end_s)
    # Every episode that had been kept is used, and no other is begun twice.
    assert 0 < num_kept < NUM_EPISODES
    assert (folder / "resets").stat().st_size == NUM_EPISODES - num_kept


def without_times(folder: Path, step: int) -> list[dict[str, Any]]:
    rollouts = dumped(folder / "run", step)
    return [
        {**r, "environment": {**r["environment"], "calls_s": len(r["environment"]["calls_s"])}}
        for r in rollouts
    ]


def test_failures_are_counted_to_the_last_and_too_many_end_the_run(
    model: Path, tmp_path: Path
) -> None:
    """In the first step an environment of each four raises, hangs, dies, all by their rows; in the
    second all raise."""
    rows = [{"prompt": [{"role": "user", "content": "a"}], "method": method} for method in HOW]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "gym": "tests/support/played.py:Rough",
        "max_tokens": 96,
        "num_workers": 8,
        "call_timeout_s": 5,
    }
    config = write_config(
        tmp_path,
        model,
        data={"max_prompt_tokens": 8, "shuffle": False},
        environment=settings,
        rewards=[],
        rollout={"num_prompts_per_step": NUM_PROMPTS, "group_size": GROUP_SIZE},
        training={"num_steps": 3, "max_tokens_per_micro_batch": 512},
        reward_pool={"max_error_frac": 0.8},
    )
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config)).wait(300)
    assert code == 1, output
    (line,) = metrics(tmp_path)
    assert (line["episode/env_error_frac"], line["episode/env_timeout_frac"]) == (8 / 16, 4 / 16)
    assert (line["episode/ok_frac"], line["reward/unscored_frac"]) == (4 / 16, 12 / 16)
    assert line["reward/zero_std_groups_frac"] == 3 / 4
    statuses = [r["status"] for r in dumped(tmp_path / "run", 1)]
    expected = {"": "ok", "raises": "env_error", "hangs": "env_timeout", "dies": "env_error"}
    assert statuses == [expected[method] for method in HOW[:NUM_PROMPTS] for _ in range(GROUP_SIZE)]
    reason = (
        "the environment failed in 16 of 16 episodes (16 env_error, 0 env_timeout), each "
        "tried twice: 1 is not under"
    )
    report, last = [text for text in output.splitlines() if "failed first" in text]
    assert report.startswith("rank 0 ")
    # The user's own error first, with its line.
    error = "environment (row 4, sample 0): reset() raised KeyError: 'gone' ("
    assert f"failed first, in phase reward, step 2: RewardError: {error}" in report
    assert reason in report
    assert last == output.splitlines()[-1]
    assert last.startswith("all ranks stop with exit code 1: ")
    assert error in last
