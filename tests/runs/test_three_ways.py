"""Episodes as people bring them, with the real engine: code written for TRL, for Gym's relatives,
for a server of
OpenAI's protocol. What a run says of them is held against what that code itself says."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers

from grpo_spmd.tools.replay.__main__ import replay
from grpo_spmd.tools.replay.read import read_step
from tests.support.dumps import dumped
from tests.support.models import write_config
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks, train
from tests.support.recorded import record_once
from tests.support.talkative import make_talkative

CODE = ROOT / "tests/support/peoples_code"
LIMITS = {"max_turns": 4, "max_tokens": 96, "num_workers": 4}


def talkative(folder: Path) -> None:
    make_talkative(folder / "model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_once(tmp_path_factory, talkative) / "model"


def trained(
    folder: Path,
    model: Path,
    environment: dict[str, Any],
    rewards: list[str],
    columns: dict[str, list[Any]],
) -> tuple[list[dict[str, Any]], str]:
    """The rollouts of two steps, and the output; with what holds for all ways. Columns: two values,
    by rows in turn."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"go {n}"}],
            "number": n,
            **{name: both[n % 2] for name, both in columns.items()},
        }
        for n in range(4)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = write_config(
        folder, model, environment={**LIMITS, **environment},
        rewards=[{"function": f"{CODE}/{name}"} for name in rewards],
        rollout={"num_prompts_per_step": 3, "group_size": 4}, optimizer={"lr": 1e-3},
        training={"num_steps": 2, "max_tokens_per_micro_batch": 512},
    )  # fmt: skip
    output = train(1, config, timeout_s=180)
    message = re.search(
        r"update check: .*, logprobs (\S+), loss (\S+), gradient (\S+), 12 advantages", output
    )
    assert message, output
    assert max(map(float, message.groups())) < 1e-4
    for line in (folder / "run/metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        fracs = [metrics[key] for key in metrics if re.fullmatch(r"episode/\w+_frac", key)]
        assert sum(fracs) == pytest.approx(1)
        assert metrics["episode/env_error_frac"] == metrics["episode/env_timeout_frac"] == 0
        assert metrics["weight_sync/mismatch_kl"] < 1e-6
    result = replay(read_step(folder / "run", 1))
    for single in result.rollouts:
        assert single.in_loss
        assert single.logprobs == pytest.approx(single.recorded.rollout_logprobs, abs=1e-5)
        assert single.replayed.reward == pytest.approx(single.recorded.reward)
        assert single.replayed.advantage == pytest.approx(single.recorded.advantage)
    rollouts = [rollout for step in (1, 2) for rollout in dumped(folder / "run", step)]
    begin = transformers.AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|assistant|>")
    for rollout in rollouts:
        sampled = [turn["token_ids"] for turn in rollout["turns"] if turn["sampled"]]
        inputs = [
            token for turn in rollout["turns"] if not turn["sampled"] for token in turn["token_ids"]
        ]
        assert [token for ids in sampled for token in ids] == rollout["completion_ids"]
        assert inputs.count(begin) == len(
            sampled
        )  # whatever a tool says, only the template begins a turn
    return rollouts, output


def trl_would_say(rollout: dict[str, Any]) -> tuple[list[str], float]:
    """The results of the tools, and the rewards of the environment, by what the policy said."""
    is_counter, results = rollout["columns"]["environment"] == "counter", list[str]()
    counter, is_done, final = 0, False, len(rollout["messages"]) - 1
    for number, message in enumerate(rollout["messages"]):
        late = []
        calls = (
            []
            if number == final and rollout["status"] == "truncated"
            else message.get("tool_calls") or []
        )
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name == "multiply" and "c" in arguments:
                results.append("{'error': \"multiply() got an unexpected keyword argument 'c'\"}")
            elif name == "multiply":
                results.append("12")
            elif name == "add":
                late.append("3")
            elif name == "increment" and is_counter:
                counter += 2
                results.append(str(counter))
            elif name == "guess" and not is_counter:
                results.append("{'error': 'Game over.'}" if is_done else "no")
                if not is_done and arguments["word"] == "hm":
                    results[-1], is_done = "yes<|end|><|assistant|>", True
            else:
                results.append(f"{{'error': 'Tool {name} not found.'}}")
        results += late  # those of async tools come behind, as TRL has it
        assert not calls or number < final or rollout["status"] not in ("ok", "truncated")
    return results, float(counter if is_counter else is_done)


def test_tools_and_environments_that_were_written_for_trl(model: Path, tmp_path: Path) -> None:
    local = f"{CODE}/for_trl.py"
    environment = {
        "tools": [f"{local}:multiply", f"{local}:add"],
        "factory": {"counter": f"{local}:IncrementEnv", "word": f"{local}:GuessEnv"},
    }
    rewards = ["for_trl.py:reward_func", "for_trl.py:brevity"]
    columns = {"environment": ["counter", "word"], "word": ["hm", "hm"]}
    rollouts, _ = trained(tmp_path, model, environment, rewards, columns)
    statuses = Counter(rollout["status"] for rollout in rollouts)
    assert statuses["ok"] >= 3
    assert len(statuses) > 1
    for rollout in rollouts:
        results, environment_values = trl_would_say(rollout)
        displayed = [
            message["content"] for message in rollout["messages"] if message["role"] == "tool"
        ]
        assert displayed == results[: len(displayed)]
        is_counter = rollout["columns"]["environment"] == "counter"
        own_rewards = {
            "reward_func": environment_values if is_counter else None,
            "GuessEnv": None if is_counter else environment_values,
        }
        brevity = -0.01 * len(rollout["messages"])
        assert rollout["rewards"] == pytest.approx({"brevity": brevity, **own_rewards}, nan_ok=True)
        assert rollout["reward"] == pytest.approx(brevity + environment_values)
    shown_by_command = run_ranks(
        1, "grpo_spmd.replay", str(tmp_path / "run"), "--step", "1", timeout_s=60
    )
    assert "differ: reward 0, advantage 0" in shown_by_command
    assert "tool content: '12'" in shown_by_command


def test_one_game_as_four_libraries_would_have_it(model: Path, tmp_path: Path) -> None:
    rollouts, _ = trained(
        tmp_path, model, {"gym": f"{CODE}/for_gym.py:any_of_four", "discount": 0.5}, [], {}
    )
    of = Counter[str]()
    for rollout in rollouts:
        assert rollout["status"] in ("ok", "truncated")
        texts = [
            message["content"] for message in rollout["messages"] if message["role"] == "assistant"
        ]
        turns = [turn for turn in rollout["turns"] if turn["sampled"]]
        worth: list[float | None] = [2.0**i * ("a" in text) for i, text in enumerate(texts)]
        if rollout["status"] == "truncated":  # the last turn was no step
            worth[-1:] = [None]
        assert [turn.get("reward") for turn in turns] == worth
        assert rollout["rewards"] == {
            "environment": sum(r * 0.5**i for i, r in enumerate(worth) if r is not None)
        }
        report = [
            message["content"].split()
            for message in rollout["messages"]
            if message["role"] == "user"
        ]
        assert [int(number) for _, number in report] == [len(text) for text in texts[:-1]]
        of.update(name for name, _ in report)
    assert set(of) == {"plain", "openenv", "skyrl", "swift"}


def test_an_agent_with_the_stock_client(model: Path, tmp_path: Path) -> None:
    agent = {"agent": f"{CODE}/for_openai.py:rollout", "max_turns": 6}
    folder = [str(tmp_path)] * 2
    rollouts, output = trained(
        tmp_path, model, agent, [], {"leaves": [True, False], "folder": folder}
    )
    assert output.count("`temperature` is ignored") == 1
    saw = Counter[tuple[int, ...]]()
    for line in (tmp_path / "seen.jsonl").read_text().splitlines():
        number, seen = json.loads(line)
        saw[(number, *sorted(tokens for _, tokens in seen))] += 1
    assert saw.total() == len(rollouts)
    for rollout in rollouts:
        lengths = sorted(len(turn["token_ids"]) for turn in rollout["turns"] if turn["sampled"])
        result = (rollout["columns"]["number"], *lengths)
        if not rollout["columns"]["leaves"]:
            assert len(lengths) == rollout["reward"]
            assert saw[result] > 0
            saw[result] -= 1
        else:  # the turn that it did not wait for may have been there in time
            assert len(lengths) - rollout["reward"] in (0, 1)
        # "x", "y" and "z" are conversations of their own; the first one begins with the prompt
        assert rollout["turns"][-1]["segment"] + 1 >= 4
    log = (tmp_path / "run/logs/environments_rank_0.log").read_text()
    assert "Traceback" not in log, log
