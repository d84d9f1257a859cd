"""Reward models on real ranks: their scores beside those of plain transformers, and what the
running check sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.models import make_model, make_reward_model
from tests.support.ranks import run_worker
from tests.support.reward_texts import GROUP_SIZE, OTHER_TEMPLATE, give_chat_tokenizer, groups_of
from tests.support.workers.reward_models import BUDGETS, CASES, FAMILIES, FAULTS, plain_scores

Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward_models")
    make_model(folder / "policy", "qwen3", tied=True)
    for seed, family in enumerate(FAMILIES):
        # transformers takes the last token that is not the padding's: with one, without one, and
        # with one never read
        pad = {0: 0, 1: None}.get(seed % 3, 96)
        make_reward_model(folder / family, family, seed=seed, pad_token_id=pad)
    make_reward_model(folder / "qwen3-chat", "qwen3", vocab_size=272, pad_token_id=None)
    give_chat_tokenizer(folder / "qwen3-chat")
    names = {0: "harm", 1: "help", 2: "style"}
    make_reward_model(
        folder / "qwen3-labels", "qwen3", num_labels=3, id2label=names, pad_token_id=None
    )
    (folder / "other.jinja").write_text(OTHER_TEMPLATE)
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def found(folder: Path, request: pytest.FixtureRequest) -> Found:
    out = folder / f"ranks_{request.param}.json"
    run_worker(request.param, "reward_models", str(folder), str(out))
    rank_values: Found = json.loads(out.read_text())
    return rank_values


def ids_of(folder: Path, case: str) -> list[list[int] | None]:
    """What the model is to read of each rollout, by transformers' own rendering; None where it
    reads nothing."""
    family, kind, settings = CASES[case]
    policy = transformers.AutoTokenizer.from_pretrained(folder / "policy")
    pretrained = transformers.AutoTokenizer.from_pretrained(folder / family)
    template = OTHER_TEMPLATE if "template" in settings else None
    result: list[list[int] | None] = []
    for group in groups_of(kind, policy):
        for completion in group.completions:
            text = policy.decode(completion.token_ids, skip_special_tokens=True)
            if isinstance(group.prompt.text, str):
                same = family != "qwen3-chat"
                ids = (
                    group.prompt.token_ids + completion.token_ids
                    if same
                    else pretrained(group.prompt.text + text).input_ids
                )
            else:
                message = (
                    completion.episode.messages
                    if completion.episode
                    else [{"role": "assistant", "content": text}]
                )
                messages = [*group.prompt.text_before(completion), *message]
                ids = pretrained.apply_chat_template(
                    messages, chat_template=template, tokenize=True, return_dict=False
                )
            is_asked = completion.episode is None or bool(completion.episode.turns)
            max_length = settings.get("max_tokens", 10_000)
            cut = ids[-max_length:] if "on_long" in settings or len(ids) <= max_length else None
            result.append(cut if is_asked else None)
    return result


@pytest.mark.parametrize("case", list(CASES))
def test_scores_are_those_of_transformers(found: Found, folder: Path, case: str) -> None:
    requests = ids_of(folder, case)
    label = 1 if "label" in CASES[case][2] else 0
    expected = iter(
        plain_scores(folder / CASES[case][0], [ids for ids in requests if ids is not None], label)
    )
    for number, ids in enumerate(requests):
        status, value = found[case][str(number)]
        if ids is None:
            assert (status, value) == ("not_applicable", None), number
        else:
            assert (status, value) == ("ok", pytest.approx(next(expected), abs=1e-5)), number
    assert len(requests) == len(found[case]) == 10 * GROUP_SIZE
    if case in ("too long", "cut"):
        everything = {ids is None for ids in requests}
        assert everything == ({True, False} if case == "too long" else {False})


def test_the_budget_of_a_row_does_not_change_a_score(found: Found) -> None:
    full = found["qwen3"]
    for budget in BUDGETS[:-1]:
        small = found[f"qwen3/{budget}"]
        assert all(small[n][1] == pytest.approx(full[n][1], abs=2e-6) for n in full)


def test_ranks_do_not_change_a_score(folder: Path, found: Found) -> None:
    """Beside those of the other number of ranks, where they are there by now."""
    both = [json.loads(path.read_text()) for path in sorted(folder.glob("ranks_*.json"))]
    for case in CASES:
        for number, (_, value) in both[0][case].items():
            assert value is None or both[-1][case][number][1] == pytest.approx(value, abs=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_in_bfloat16_passes_the_running_check(
    found: Found, folder: Path, family: str
) -> None:
    """It has passed, in the worker; and the scores are as near to those in float32 as the check's
    mean allows."""
    values = found[f"{family} in bfloat16"].items()
    off = [abs(value - found[family][n][1]) / (1 + abs(value)) for n, (_, value) in values]
    assert 0 < sum(off) / len(off) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_running_check_sees(found: Found, fault: str, dtype: str) -> None:
    message = found["seen" if dtype == "float32" else "seen in bfloat16"][fault]
    if fault == "too long, scored":
        assert "a text of over 20" in message
    else:
        assert "gives other scores than transformers does" in message


def test_a_model_that_waits_in_host_memory_refuses_to_score(found: Found) -> None:
    assert "ParkedModel.fetch comes first" in found["not parked"]
