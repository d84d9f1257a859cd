"""A teacher behind a vLLM server in one process: what of an answer is taken, who does not answer in
time, what is
refused before a model is built."""

from __future__ import annotations

import copy
import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_spmd.checks.explain import explain
from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config, load_config_with_sources
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.learn.assemble import episode_rollout, pack_rollouts
from grpo_spmd.learn.contexts import row_contexts
from grpo_spmd.model.config_json import read_model
from grpo_spmd.model.logprobs import MIN_LOGPROB
from grpo_spmd.records import Rollout, Segment, TeacherSignal
from grpo_spmd.rewards.client import PositionLogprobs, PromptLogprobs, ServerCalls
from grpo_spmd.rewards.pool import call_limits
from grpo_spmd.rewards.pool.call_limits import CallLimits
from grpo_spmd.rewards.trl import FailedCallError
from grpo_spmd.signals.served_teacher import compact_answer, rest_logprob
from grpo_spmd.signals.teacher import TeacherRequest, teacher_contexts
from tests.support.learn import taught
from tests.support.models import make_model, write_config
from tests.support.stub_server import SECRET, StubServer, stub_server
from tests.support.stub_vllm import NAME, answers

IDS = [5, 6, 7, 8]
LOGPROBS = {6: -5.6, 7: -4.9, 8: -0.25}


def served_answer(ids: list[int] = IDS, top_k: int = 0) -> dict[str, Any]:
    """As vLLM answers, with made-up numbers: token 40 is the likeliest everywhere, then 41; 8 is
    among both."""
    positions: list[Any] = [None]
    for token_id in ids[1:]:
        top = [(40, -1.0), (41, -2.0)] if token_id != 8 else [(8, -0.25), (40, -2.5)]
        logprobs = {token_id: LOGPROBS[token_id]} | dict(top[:top_k])
        ranks = {token_id: 50} | {i: rank for rank, (i, _) in enumerate(top[:top_k], 1)}
        message = {
            i: {"logprob": value, "rank": ranks[i], "decoded_token": "x"}
            for i, value in logprobs.items()
        }
        positions.append({str(i): item for i, item in message.items()})
    return {"choices": [{"prompt_logprobs": positions, "prompt_token_ids": ids}]}


def ask(
    server: StubServer, top_k: int = 0, limit_s: float = 5.0, **more: Any
) -> list[PositionLogprobs]:
    url = server.url.replace("/score", "/v1/completions")
    return PromptLogprobs(url, more.get("headers", {}), NAME).ask(IDS, top_k, limit_s)


def test_what_is_asked_and_what_is_taken() -> None:
    with stub_server(lambda body: served_answer(top_k=body["prompt_logprobs"])) as server:
        assert ask(server) == [
            PositionLogprobs(-5.6, []),
            PositionLogprobs(-4.9, []),
            PositionLogprobs(-0.25, []),
        ]
        top = [(40, -1.0), (41, -2.0)]
        assert ask(server, 2) == [
            PositionLogprobs(-5.6, top),
            PositionLogprobs(-4.9, top),
            PositionLogprobs(-0.25, [(8, -0.25), (40, -2.5)]),
        ]
        initial = server.asked[0].body
    assert initial == {
        "model": NAME, "prompt": IDS, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0,
        "add_special_tokens": False, "return_token_ids": True, "stream": False,
    }  # fmt: skip


def _places(change: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    def answer(body: Any) -> Any:
        result = served_answer(top_k=body["prompt_logprobs"])
        result["choices"][0]["prompt_logprobs"] = change(result["choices"][0]["prompt_logprobs"])
        del result["choices"][0]["prompt_token_ids"]
        return result

    return answer


def _value(value: Any) -> Callable[[Any], Any]:
    def change(positions: list[Any]) -> list[Any]:
        positions[2]["7"]["logprob"] = value
        return positions

    return _places(change)


OTHERS = served_answer([5, 6, 7, 8])
OTHERS["choices"][0]["prompt_token_ids"] = [5, 6, 7, 9]
SPOILT: list[tuple[str, Callable[[Any], Any], str]] = [
    (
        "shifted",
        _places(lambda places: [None, *places[2:], places[1]]),
        "without the prompt's own token",
    ),
    ("another's", lambda body: OTHERS, "for another prompt than the request's"),
    ("short", _places(lambda places: places[:-1]), "3 prompt_logprobs for 4 tokens"),
    ("long", _places(lambda places: [*places, places[1]]), "5 prompt_logprobs for 4 tokens"),
    ("none", _places(lambda _: None), "prompt_logprobs of an unexpected form"),
    (
        "a null inside",
        _places(lambda places: [*places[:2], None, places[3]]),
        "without the prompt's own token",
    ),
    ("NaN", _value(math.nan), "Expected `float` > -9999"),
    ("infinite", _value(-math.inf), "Expected `float` > -9999"),
    ("vLLM's minus infinity", _value(-9999.0), "Expected `float` > -9999"),
    ("above 0", _value(0.1), "Expected `float` <= 0.0001"),
    ("text", _value("-1"), "Expected `float`"),
    ("true", _value(True), "Expected `float`"),
    (
        "no token's id",
        _places(lambda places: [*places[:2], places[2] | {"9" * 5000: {}}, places[3]]),
        "an unexpected form",
    ),
    (
        "an id twice",
        _places(lambda places: [*places[:2], places[2] | {"07": places[2]["7"]}, places[3]]),
        "form",
    ),
    ("a reward", lambda body: {"score": 1}, "prompt_logprobs of an unexpected form"),
    ("a list", lambda body: [1, 2], "prompt_logprobs of an unexpected form"),
]


@pytest.mark.parametrize(
    ("answer", "reason"), [row[1:] for row in SPOILT], ids=[row[0] for row in SPOILT]
)
def test_what_is_no_answer_to_these_tokens_is_refused(
    answer: Callable[[Any], Any], reason: str
) -> None:
    with stub_server(answer) as server, pytest.raises(FailedCallError) as failed:
        ask(server)
    assert str(failed.value).startswith("answered ")
    assert reason in str(failed.value)
    assert failed.value.may_retry


@pytest.mark.parametrize("change", ["model", "vocabulary", "a part of a letter"])
def test_a_server_that_becomes_another_is_not_believed(change: str) -> None:
    def answer(body: Any) -> Any:
        result = {"model": NAME, **served_answer()}
        if len(server.asked) > 1:
            if change == "model":
                result["model"] = "other"
            else:
                token = result["choices"][0]["prompt_logprobs"][2]["7"]
                token["decoded_token"] = (
                    "y" if change == "vocabulary" else "\N{REPLACEMENT CHARACTER}"
                )
        return result

    with stub_server(answer) as server:
        client = PromptLogprobs(server.url.replace("/score", "/v1/completions"), {}, NAME)
        initial = client.ask(IDS, 0, 5.0)
        # vLLM writes a part of a letter as its neighbours make it.
        if change == "a part of a letter":
            assert client.ask(IDS, 0, 5.0) == initial
            return
        with pytest.raises(FailedCallError, match=f"another {change} than before"):
            client.ask(IDS, 0, 5.0)


def test_what_is_kept_of_a_token_is_8_bytes_for_each_of_the_likeliest() -> None:
    positions = [
        PositionLogprobs(-5.6, [(40, -1.0), (41, -2.0)]),
        PositionLogprobs(-0.25, [(8, -0.25), (40, -2.5)]),
    ]
    ids, logprobs = compact_answer(positions, 2, 96)
    assert ids.tolist() == [[40, 41], [8, 40]]
    rests = [
        math.log(1 - math.exp(-1) - math.exp(-2)),
        math.log(1 - math.exp(-0.25) - math.exp(-2.5)),
    ]
    assert logprobs.tolist() == [
        pytest.approx([-1.0, -2.0, rests[0]]),
        pytest.approx([-0.25, -2.5, rests[1]]),
    ]
    assert (ids.nbytes, logprobs.nbytes) == (2 * 2 * 4, 2 * 3 * 4)
    ids, logprobs = compact_answer(positions, 0, 96)
    assert (ids.shape, logprobs.tolist()) == ((2, 0), [[pytest.approx(-5.6)], [-0.25]])


@pytest.mark.parametrize("spoilt", ["too few", "too many", "not the likeliest", "more than all"])
def test_the_likeliest_tokens_are_those(spoilt: str) -> None:
    def change(positions: list[Any]) -> list[Any]:
        single = positions[1]
        if spoilt == "too few":
            del single["41"]
        elif spoilt == "too many":
            single["42"] = {"logprob": -3.0}
        elif spoilt == "not the likeliest":
            single["6"]["logprob"] = -1.5
        else:
            single["41"]["logprob"] = -0.1
        return positions

    with stub_server(_places(change)) as server, pytest.raises(FailedCallError) as failed:
        ask(server, 2)
    assert (
        "add up to more than 1" if spoilt == "more than all" else "tokens at a position"
    ) in str(failed.value)


WAYS = (
    "429",
    "500",
    "drop",
    "half",
    "text",
    "404",
    "redirect",
    "gzip",
    "huge",
    "declared",
    "deep",
    "hang",
    "drip",
)


@pytest.mark.parametrize("method", WAYS)
def test_whoever_does_not_answer_is_left_after_the_limit_without_a_secret(method: str) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    with (
        stub_server(lambda body: served_answer(), lambda body: method) as server,
        pytest.raises(FailedCallError) as failed,
    ):
        ask(server, limit_s=0.5, headers=headers)
    assert SECRET not in str(failed.value)
    assert "\n" not in str(failed.value)
    assert server.asked[0].headers["authorization"] == f"Bearer {SECRET}"


def _made(server: StubServer, ways: list[str], **limits: Any) -> ServerCalls:
    """One job for each way; what is asked begins with the job's number."""
    config = RewardConfig(url="", **{"timeout_s": 1.5, "retries": 2, "max_concurrent": 4, **limits})
    client = PromptLogprobs(server.url.replace("/score", "/v1/completions"), {}, NAME)
    jobs = [(0, partial(client.ask, [job, 6], 0)) for job in range(len(ways))]
    calls = ServerCalls(CallLimits([config], 10.0, 0, 1), jobs)
    while calls.run_for(0.1):
        pass
    return calls


def _of_job(ways: list[str]) -> Iterator[StubServer]:
    def answer(body: Any) -> Any:
        token = {"6": {"logprob": -1.0 - body["prompt"][0], "rank": 1}}
        return {"choices": [{"prompt_logprobs": [None, token]}]}

    with stub_server(answer, lambda body: ways[body["prompt"][0]]) as server:
        yield server


def test_every_way_to_fail_costs_its_own_rollout_alone() -> None:
    ways = [
        "429",
        "ok",
        "429_after",
        "500",
        "503",
        "slow",
        "drop",
        "half",
        "nan_once",
        "late",
        "429_long",
        "text",
    ]
    ways += ["404", "hang", "drip", "huge", "gzip", "redirect", "ok"]
    for server in _of_job(ways):
        calls = _made(server, ways)
        gone = {"429_long", "text", "404", "hang", "drip", "huge", "gzip", "redirect"}
        assert {ways[job] for job in calls.errors} == gone
        correct = {job: -1.0 - job for job, method in enumerate(ways) if method not in gone}
        assert {
            job: position.logprob for job, (position,) in calls.answers.items()
        } == correct  # each its own
        assert server.most_at_once <= 4 + 2  # a line that was cut is noticed there a little later
        requests = Counter(ways[item.body["prompt"][0]] for item in server.asked)
        assert requests["404"] == requests["redirect"] == requests["gzip"] == requests["huge"] == 1
        assert requests["text"] == 3
        assert calls.num_retries == len(server.asked) - len(ways)


def test_a_lookup_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can cut the lookup of a name."""
    comes, lookup = threading.Event(), socket.getaddrinfo

    def hang(host: Any, *rest: Any, **options: Any) -> Any:
        return comes.wait(60) if host == "nowhere.test" else lookup(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    client = PromptLogprobs("http://nowhere.test/v1/completions", {}, NAME)
    limits = CallLimits([RewardConfig(url="", timeout_s=0.2, retries=0)], 10.0, 0, 1)
    calls = ServerCalls(limits, [(0, partial(client.ask, IDS, 0)), (0, lambda limit_s: 5)])
    while calls.run_for(0.1):
        pass
    error = "did not answer: TimeoutError (http://nowhere.test/v1/completions)"
    assert (calls.answers, calls.errors) == ({1: 5}, {0: error})
    comes.set()
    assert not calls.run_for(0.1)


def test_a_server_that_is_gone_is_not_asked_of_every_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20 in a row, at the most one that was under way, and one to see."""
    monkeypatch.setattr(call_limits, "_PAUSE_S", 0.2)
    ways = ["404"] * 64
    for server in _of_job(ways):
        calls = _made(server, ways, max_concurrent=2)
        assert len(calls.errors) == 64
        assert 21 <= len(server.asked) <= 22


def test_what_is_wrong_with_us_is_no_servers_failure() -> None:
    def wrong(limit_s: float) -> None:
        raise KeyError("ours")

    calls = ServerCalls(CallLimits([RewardConfig(url="")], 10.0, 0, 1), [(0, wrong)])
    with pytest.raises(KeyError, match="ours"):
        calls.run_for(5.0)


def test_tokens_without_an_answer_are_taught_nothing_and_are_in_no_mean() -> None:
    """coef 0.5, as unit/test_teacher.py has it: 1 - 0.5 * 2 = 0; the second token was not
    answered."""
    mask, answered = torch.tensor([True, True, True]), torch.tensor([True, False, True])
    old, teacher = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-3.0, 0.0, -1.5])
    signal = TeacherSignal(0.5, teacher, answered_mask=answered)
    advantages, _, metrics = taught(signal, torch.ones(3), old, mask)
    assert advantages.tolist() == [0.0, 1.0, 0.75]
    assert metrics["teacher/kl"].value == pytest.approx((2.0 + 0.5) / 2)
    separate, weights = torch.tensor([1.0, 100.0, 3.0]), torch.full((3,), 0.1)
    signal = TeacherSignal(0.5, answered_mask=answered)
    _, term, metrics = taught(signal, old, old, mask, divergence=separate, weights=weights)
    assert float(term) == pytest.approx(0.5 * 0.1 * (1.0 + 3.0))
    assert metrics["teacher/kl"].value == pytest.approx(2.0)


def test_contexts_of_a_row_by_hand() -> None:
    """Rollout 4 has two segments, rollout 9 one turn. A teacher sees its own prompt."""
    first_values = Segment(
        np.array([1, 2, 3, 4, 5, 6, 7], np.int32), np.array([0, 0, 1, 1, 0, 1, 0], np.bool_)
    )
    second_values = Segment(np.array([1, 2, 8, 9], np.int32), np.array([0, 0, 0, 1], np.bool_))
    episode = episode_rollout(4, 0.0, True, (first_values, second_values), [0.0] * 4)
    row = pack_rollouts(
        [episode, Rollout(9, 0.0, True, [11], [12, 13], [0.0] * 2)], torch.device("cpu")
    )
    result = [
        (c.rollout_id, c.token_ids.tolist(), c.sampled_at.tolist(), c.tokens.tolist())
        for c in row_contexts(row)
    ]
    assert result == [
        (4, [1, 2, 3, 4, 5, 6, 7], [2, 3, 5], [0, 1, 2]),
        (4, [1, 2, 8, 9], [3], [3]),
        (9, [11, 12, 13], [1, 2], [4, 5]),
    ]
    requests = {4: TeacherRequest("a"), 9: TeacherRequest("b", [7, 7, 7])}
    [shown] = teacher_contexts(row, requests, "b")
    assert (shown.token_ids.tolist(), shown.sampled_at.tolist(), shown.tokens.tolist()) == (
        [7, 7, 7, 12, 13],
        [3, 4],
        [4, 5],
    )
    # A rank with nothing to train on.
    assert row_contexts(pack_rollouts([], torch.device("cpu"))) == []


def test_what_is_left_of_1_is_known_to_rounding() -> None:
    assert rest_logprob([math.log(0.5), math.log(0.25)], 97) == pytest.approx(math.log(0.25))
    assert rest_logprob([math.log(0.5), math.log(0.5)], 97) == pytest.approx(math.log(2.0**-23))
    assert rest_logprob([math.log(0.5), math.log(0.5)], 2) == MIN_LOGPROB  # there are no others


# Before a model is built


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("served")
    return [
        make_model(folder / "a", "qwen3", tied=True),
        make_model(folder / "b", "qwen3", tied=True, seed=1),
    ]


URL = "http://127.0.0.1:8000/v1/completions"


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (
            ["teacher.path=here", f"teacher.url={URL}"],
            "teacher has both path and url, and only one can be used",
        ),
        (
            ["teacher.path=here", "teacher.model=x"],
            "teacher.model is of a url; set teacher.url, or take it out",
        ),
        (
            ["teacher.path=here", "teacher.retries=1"],
            "teacher.retries is of a url; set teacher.url, or take it out",
        ),
        (["teacher.retries=1"], "teacher.retries is of a url; set teacher.url"),
        (
            [f"teacher.url={URL}", "teacher.loss=full"],
            "teacher.loss: full needs the whole distribution",
        ),
        (
            [f"teacher.url={URL}", "rollout.temperature=0.7"],
            "rollout.temperature (0.7) must be 1 with teacher.url",
        ),
        (["teacher.url=http://127.0.0.1:8000"], "teacher.url must be the address of completions"),
        (
            ["teacher.url=http://127.0.0.1:8000/v1/chat/completions"],
            "teacher.url must be the address of completions",
        ),
        (["teacher.url=127.0.0.1:8000/v1/completions"], "teacher.url must be an address such as"),
        ([f"teacher.url={{a/b: {URL}}}"], "teacher.url.a/b must be the address"),
        (["teacher.url=http://me:s3cret@h/v1/completions"], "teacher.url holds a password"),
        (["teacher.url=http://me:s3cret@h/v1"], "teacher.url holds a password"),
        (
            [f"teacher.url={URL}", "teacher.headers_env={X-Key: hf_s3cret}"],
            "teacher.headers_env.X-Key must be",
        ),
        (
            [f"teacher.url={URL}", "teacher.headers_env={Authorization: NOT_SET}"],
            "variable NOT_SET is not set",
        ),
        (
            [f"teacher.url={URL}", "teacher.max_concurrent=1"],
            "teacher.max_concurrent (1) must be >= the number of",
        ),
        (
            [f"teacher.url={{a: {URL}, b: {URL}}}"],
            "the column teacher must name one of teacher.url: a, b",
        ),
        (
            [f"teacher.url={URL}", "teacher.max_concurrent=0"],
            "teacher.max_concurrent must be a whole number >= 1",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, folders: list[Path], overrides: list[str], refused: str
) -> None:
    path = write_config(tmp_path, folders[0])

    def check() -> None:
        config, sources = load_config_with_sources(path, overrides)
        check_inputs(config, num_ranks=2, to_run=False, sources=sources)

    with pytest.raises(ConfigError) as error:
        check()
    assert refused in str(error.value)
    assert "\n" not in str(error.value)
    assert "s3cret" not in str(error.value)


def _check(tmp_path: Path, folder: Path, server: StubServer, *overrides: str) -> None:
    url = server.url.replace("/score", "/v1/completions")
    path = write_config(tmp_path, folder, run_dir=str(tmp_path / "run"))
    more = [f"teacher.url={url}", "teacher.retries=0", "rewards=[]"]
    check_inputs(load_config(path, [*more, *overrides]), num_ranks=1)


def test_a_server_is_asked_once_before_a_model_is_built(
    tmp_path: Path, folders: list[Path]
) -> None:
    with stub_server(answers(folders[1])) as server:
        _check(tmp_path, folders[0], server)
        _check(
            tmp_path,
            folders[0],
            server,
            "teacher.loss=topk",
            "teacher.top_k=20",
            f"teacher.model={NAME}",
        )
        assert [item.body and item.body["prompt_logprobs"] for item in server.asked] == [
            None,
            0,
            None,
            20,
        ]
        assert server.asked[1].body["model"] == NAME


def _limited(folder: Path, maximum: int) -> tuple[Callable[[Any], Any], Callable[[Any], str]]:
    return answers(
        folder
    ), lambda body: "400" if body is not None and body["prompt_logprobs"] > maximum else "ok"


def test_what_a_server_is_refused_for(tmp_path: Path, folders: list[Path]) -> None:
    def refused(
        answer: Callable[[Any], Any], *overrides: str, behave: Callable[[Any], str] = lambda _: "ok"
    ) -> str:
        with stub_server(answer, behave) as server, pytest.raises(ConfigError) as error:
            _check(tmp_path, folders[0], server, *overrides)
        assert "\n" not in str(error.value)
        return str(error.value)

    correct = answers(folders[1])
    top = ["teacher.loss=topk", "teacher.top_k=32"]
    several = {"data": [{"id": "x"}, {"id": "y"}]}
    message = refused(correct, *top, behave=_limited(folders[1], 20)[1])
    assert "does not take 32 prompt_logprobs of tokens of" in message
    assert "started with --max-logprobs of at least teacher.top_k" in message
    assert "greater than max allowed: 20" in message
    assert (
        "teacher.model must be one that the server has, and is needed where a server has several "
        "(teacher.url has tiny); got big" in refused(correct, "teacher.model=big")
    )
    assert "is needed where a server has several (teacher.url has x, y)" in refused(
        lambda body: several
    )
    # The longest rollout has 16 + 12 tokens.
    assert "start it with --max-model-len 29" in refused(answers(folders[1], max_tokens=28))
    assert "does not take 0 prompt_logprobs of tokens of" in refused(
        correct, behave=lambda body: "ok" if body is None else "400"
    )
    assert "the server answered 404" in refused(correct, behave=lambda body: "404")
    assert "it must be vLLM's, with" in refused(
        lambda body: correct(None) if body is None else {"choices": []}
    )
    second = make_model(tmp_path / "other", "qwen3", tied=True)
    tokens = json.loads((second / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["3"], vocab["4"] = vocab["4"], vocab["3"]
    (second / "tokenizer.json").write_text(json.dumps(tokens))
    number = min(vocab["3"], vocab["4"])
    assert (
        f"another vocabulary than {folders[0]}: token {number} is '4' there, and '3' in"
        in refused(answers(second))
    )


def test_a_recipe_that_needs_a_teacher_takes_a_server(tmp_path: Path, folders: list[Path]) -> None:
    path = write_config(tmp_path, folders[0])
    assert load_config(path, ["algorithm=opd", f"teacher.url={URL}"]).teacher.names == [""]
    with pytest.raises(ConfigError, match="algorithm: opd needs"):
        load_config(path, ["algorithm=opd"])


def test_nobody_is_there(tmp_path: Path, folders: list[Path]) -> None:
    with stub_server(lambda body: 1) as server:
        pass
    with pytest.raises(
        ConfigError, match=r"teacher.url: the server did not answer: .*; start it, correct the"
    ):
        _check(tmp_path, folders[0], server)
    path = write_config(tmp_path, folders[0])
    check_inputs(
        load_config(path, [f"teacher.url={URL}"]), num_ranks=1, to_run=False
    )  # is not asked


def test_explain_counts_no_model_and_config_yaml_names_the_variables(
    tmp_path: Path, folders: list[Path]
) -> None:
    path = write_config(tmp_path, folders[0])
    inputs = [f"teacher.url={URL}", "teacher.headers_env={Authorization: MY_TOKEN}"]
    config, sources = load_config_with_sources(path, inputs)
    facts = read_model(config.model.path)
    assert facts is not None
    lines = explain(config, sources, facts, 2, 32)
    assert any(
        "teacher " in line and " 0 B" in line and f"{URL} is asked of 16 rollouts" in line
        for line in lines
    )
    assert any("extra passes of teachers" in line and " 0 " in line for line in lines)
    flat = flatten_config(config)
    assert (flat["teacher.url"], flat["teacher.headers_env.Authorization"]) == (URL, "MY_TOKEN")
    named = copy.deepcopy(load_config(path, [f"teacher.url={{token_a: {URL}}}"]))
    assert flatten_config(named)["teacher.url.token_a"] == URL
