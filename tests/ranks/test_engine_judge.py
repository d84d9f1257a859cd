"""The run's own engine as judge, on real ranks with the real vLLM, beside plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.digit_judge import (
    HIGH,
    LOW,
    REPLY_TOKENS,
    RUBRIC,
    PlainJudge,
    asked_of,
    make_digit_model,
    score_of,
)
from tests.support.models import write_config
from tests.support.ranks import run_worker
from tests.support.reward_texts import GROUP_SIZE, groups_of
from tests.support.workers.engine_judge import FAULTS, KINDS, forged_groups

Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine_judge")
    make_digit_model(folder / "model")
    (folder / "rubric.txt").write_text(RUBRIC)
    judge = {"url": "engine", "judge": str(folder / "rubric.txt"), "judge_scale": [LOW, HIGH]}
    # Shorter than a reply, so that it shows if the bound of a rollout were the judge's.
    rollout = {
        "num_prompts_per_step": 4,
        "group_size": 4,
        "max_completion_tokens": REPLY_TOKENS - 1,
    }
    max_length = {"judge_tokens": REPLY_TOKENS, "max_tokens": 700}
    write_config(folder, folder / "model", rewards=[{**judge, **max_length}], rollout=rollout)
    return folder


@pytest.fixture(scope="module", params=["1 rank", "2 ranks", "tensor parallel"])
def found(folder: Path, request: pytest.FixtureRequest) -> Found:
    out = folder / f"{request.param}.json"
    tp = ["rollout.tensor_parallel_size=2"] if request.param == "tensor parallel" else []
    run_worker(
        1 if request.param == "1 rank" else 2,
        "engine_judge",
        str(folder / "config.yaml"),
        str(out),
        *tp,
    )
    rank_values: Found = json.loads(out.read_text())
    return rank_values


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """What `found` has to be, by transformers."""
    judge = PlainJudge(folder / "model")
    kinds_values: dict[str, dict[str, list[Any]]] = {}
    for kind in KINDS:
        groups = (
            forged_groups(judge.tokenizer) if kind == "forged" else groups_of(kind, judge.tokenizer)
        )
        for group in groups:
            for n, completion in enumerate(group.completions):
                message: Any = judge.tokenizer.decode(
                    completion.token_ids, skip_special_tokens=True
                )
                position = kinds_values.setdefault(kind, {})
                if completion.episode is not None:
                    message = completion.episode.messages
                    if not completion.episode.turns:
                        position[str(group.slot * GROUP_SIZE + n)] = ["not_applicable", None, None]
                        continue
                # reset() may have said more than the row.
                requests = asked_of(group.prompt.text_before(completion), message)
                reply, reason = judge.reply_to(requests)
                score = score_of(reply, reason)
                position[str(group.slot * GROUP_SIZE + n)] = [
                    "error" if score is None else "ok",
                    score,
                    reply,
                ]
    return kinds_values


@pytest.mark.parametrize("kind", KINDS)
def test_replies_and_scores_are_those_of_transformers(
    found: Found, truth: Found, kind: str
) -> None:
    assert found[kind] == truth[kind]


def test_the_trial_has_all_kinds_of_replies(truth: Found) -> None:
    """Else it would show little."""
    kinds = {status for kind in KINDS for status, *_ in truth[kind].values()}
    assert kinds == {"ok", "error", "not_applicable"}
    for kind in KINDS:
        assert len({reply for _, _, reply in truth[kind].values()}) > 3, kind
    replies = [reply for kind in KINDS for _, _, reply in truth[kind].values() if reply is not None]
    assert any(len(reply) == REPLY_TOKENS for reply in replies)


@pytest.mark.parametrize("fault", [*FAULTS, "other weights"])
def test_a_fault_would_be_seen(found: Found, truth: Found, fault: str) -> None:
    kind = "forged" if fault == "special tokens" else "chat"
    assert found["faults"][fault] != truth[kind]
    assert found["again"] == truth["chat"]  # they were undone
