"""Prompt sets, the chat template, the length policy, and the stream of prompts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from grpo_spmd.checks.data import check_prompts_early, view_prompts
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.data.prompts import PromptStream
from grpo_spmd.data.rows import PromptRow, check_enough_rows, read_rows
from grpo_spmd.data.tokens import build_prompts
from grpo_spmd.model.config_json import load_tokenizer
from grpo_spmd.proofs import batch_check
from grpo_spmd.records import Prompt, RolloutGroup, ScoredRollouts

ROLES = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt "
    "%}[assistant] {% endif %}"
)
REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
)


def _config(
    train: str = "x.jsonl", num_prompts: int = 1, model_path: str = "m", **data: Any
) -> Config:
    return Config(
        run_dir="r",
        model=ModelConfig(path=model_path),
        data=DataConfig(train=train, **data),
        rollout=RolloutConfig(num_prompts_per_step=num_prompts),
        rewards=(RewardConfig(name="exact"),),
    )


def _jsonl(tmp_path: Path, *records: Any) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def _raw_tokenizer() -> Any:
    """Words and punctuation marks are tokens; id 1 is what begins a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [
        "<unk>",
        "<bos>",
        "[",
        "]",
        "user",
        "assistant",
        "system",
        "be",
        "brief",
        "hello",
        "world",
        "a",
        "b",
        "c",
    ]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return tokenizer


def _built(config: Config, tokenizer: Any) -> Sequence[Prompt]:
    return build_prompts(
        read_rows(config.data), tokenizer, config.data, config.rollout.num_prompts_per_step
    )


def _tokenizer(chat_template: str | None = None) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_raw_tokenizer(), unk_token="<unk>", chat_template=chat_template
    )


def _refusal(check: Callable[[], Any]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def _words(tokenizer: Any, prompt: Prompt) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(prompt.token_ids))


# Reading


def test_jsonl_row_keeps_prompt_columns_and_line(tmp_path: Path) -> None:
    train = _jsonl(tmp_path, {"prompt": "a", "answer": 1, "nums": [1, 2]})
    assert list(read_rows(DataConfig(train=train))) == [
        PromptRow("a", {"answer": 1, "nums": [1, 2]}, f"{train}:1")
    ]


def test_jsonl_counts_blank_lines_in_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"prompt": "a"}\r\n   \n{"prompt": "b"}', encoding="utf-8")
    assert [(row.prompt, row.where) for row in read_rows(DataConfig(train=str(path)))] == [
        ("a", f"{path}:2"),
        ("b", f"{path}:4"),
    ]


def test_jsonl_line_ends_only_at_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8"
    )  # str.splitlines would cut here twice
    assert [row.prompt for row in read_rows(DataConfig(train=str(path)))] == ["a\u2028b\x85c"]


def test_prompt_key_chooses_the_column(tmp_path: Path) -> None:
    train = _jsonl(tmp_path, {"question": "q", "prompt": "not this"})
    (row,) = read_rows(DataConfig(train=train, prompt_key="question"))
    assert (row.prompt, row.columns) == ("q", {"prompt": "not this"})


def test_parquet_and_jsonl_of_the_same_records_read_alike(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "answer": 1, "nums": [1, 2], "info": {"level": "x"}},
        {"prompt": "é", "answer": None, "nums": [], "info": {"level": "y"}},
    ]
    parquet = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), parquet)
    from_parquet, from_jsonl = (
        read_rows(DataConfig(train=str(parquet))),
        read_rows(DataConfig(train=_jsonl(tmp_path, *records))),
    )
    assert [(r.prompt, r.columns) for r in from_parquet] == [
        (r.prompt, r.columns) for r in from_jsonl
    ]
    assert [r.where for r in from_parquet] == [f"{parquet}:row 0", f"{parquet}:row 1"]


def test_a_folder_of_parquet_files_is_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    """By the loader and by the proof, which reads it again for itself."""
    folder = tmp_path / "train.parquet"
    folder.mkdir()
    for name, start in (("1.parquet", 3), ("0.parquet", 0)):
        records = [
            {"prompt": f"p{start + number}", "answer": start + number} for number in range(3)
        ]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(records), folder / name, row_group_size=2
        )
    rows = read_rows(DataConfig(train=str(folder)))
    assert [(row.prompt, row.columns["answer"]) for row in rows] == [
        (f"p{number}", number) for number in range(6)
    ]
    proved = batch_check._read_rows(str(folder), [4, 1])
    assert {number: row["prompt"] for number, row in proved.items()} == {4: "p4", 1: "p1"}
    alone = batch_check._read_rows(str(folder / "0.parquet"), [2, 0])
    assert {number: row["prompt"] for number, row in alone.items()} == {2: "p2", 0: "p0"}


def test_parquet_chat_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": messages}]), tmp_path / "t.parquet"
    )
    (row,) = read_rows(DataConfig(train=str(tmp_path / "t.parquet")))
    assert row.prompt == messages


def test_hub_data_set_from_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "train.jsonl").write_text(
        '{"prompt": "a", "answer": 1}\n{"prompt": "b", "answer": 2}\n', encoding="utf-8"
    )
    rows = read_rows(DataConfig(train=f"hub:{folder}::train"))
    assert [(r.prompt, r.columns, r.where) for r in rows] == [
        ("a", {"answer": 1}, f"hub:{folder}::train:row 0"),
        ("b", {"answer": 2}, f"hub:{folder}::train:row 1"),
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hub:org/set:main:test", ("org/set", "main", "test")),
        ("hub:set::train[:9]", ("set", None, "train[:9]")),
    ],
)
def test_hub_name_is_repo_subset_split(
    source: str, expected: tuple[str, str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    requests: list[tuple[str, str | None, str]] = []

    def load_dataset(repo: str, subset: str | None, split: str) -> list[dict[str, Any]]:
        requests.append((repo, subset, split))
        return [{"prompt": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the hub itself is not asked
    assert len(read_rows(DataConfig(train=source))) == 1
    assert requests == [expected]


@pytest.mark.parametrize(
    "error", [ConnectionError("no network\nat all"), ValueError("Bad split: x"), AssertionError()]
)
def test_hub_failure_is_one_line_with_the_source(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def load_dataset(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # the hub itself is not asked
    with pytest.raises(ConfigError) as caught:
        read_rows(DataConfig(train="hub:org/set::train"))
    assert str(caught.value).startswith(
        f"data.train: cannot load hub:org/set::train: {type(error).__name__}"
    )
    assert "\n" not in str(caught.value)


# Chat


def test_as_chat_makes_a_string_one_user_message(tmp_path: Path) -> None:
    (row,) = read_rows(DataConfig(train=_jsonl(tmp_path, {"prompt": "hello"}), as_chat=True))
    assert row.prompt == [{"role": "user", "content": "hello"}]


def test_system_prompt_comes_before_a_string(tmp_path: Path) -> None:
    (row,) = read_rows(
        DataConfig(train=_jsonl(tmp_path, {"prompt": "hello"}), system_prompt="be brief")
    )
    assert row.prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]


def test_system_prompt_does_not_replace_one_in_the_data(tmp_path: Path) -> None:
    local = [{"role": "system", "content": "own"}, {"role": "user", "content": "u"}]
    without = [{"role": "user", "content": "u"}]
    train = _jsonl(tmp_path, {"prompt": local}, {"prompt": without})
    initial, second = read_rows(DataConfig(train=train, system_prompt="be brief"))
    assert initial.prompt == local
    assert second.prompt == [{"role": "system", "content": "be brief"}, *without]


def test_messages_go_through_the_template_with_a_generation_prompt(tmp_path: Path) -> None:
    tokenizer = _tokenizer(ROLES)
    config = _config(_jsonl(tmp_path, {"prompt": "hello world"}), system_prompt="be brief")
    (prompt,) = _built(config, tokenizer)
    # the template writes special tokens itself, so that no <bos> is put before it
    assert _words(tokenizer, prompt) == "[ system ] be brief [ user ] hello world [ assistant ]"


def test_variables_reach_the_chat_template_of_prompts_checks_and_proof(tmp_path: Path) -> None:
    template = f"{ROLES}{{% if enable_thinking is false %}}be brief{{% endif %}}"
    model = tmp_path / "model"
    _tokenizer(template).save_pretrained(model)
    variables = {"enable_thinking": False}
    data: dict[str, Any] = {"as_chat": True, "chat_template_kwargs": variables}
    config = _config(_jsonl(tmp_path, {"prompt": "a"}), max_prompt_tokens=9, **data)
    tokenizer = load_tokenizer(str(model), variables)
    (prompt,) = _built(config, tokenizer)
    # As by hand: 3 tokens of each role, the word, and the 2 of the template's own branch.
    assert _words(tokenizer, prompt) == "[ user ] a [ assistant ] be brief"
    rows = read_rows(config.data)
    assert view_prompts(rows, model, variables).text == "[user] a [assistant] be brief"
    check_prompts_early(rows, config.data, model)
    short = dataclasses.replace(config.data, max_prompt_tokens=8)
    with pytest.raises(ConfigError, match="the prompt has 9 tokens"):
        check_prompts_early(rows, short, model)
    # The proof renders by itself: a tokenizer that lost the variables makes other tokens.
    for loaded, is_right in ((tokenizer, True), (load_tokenizer(str(model)), False)):
        groups = [RolloutGroup(0, _built(config, loaded)[0], [])]
        result = batch_check.check_data(groups, ScoredRollouts(), loaded, config.data)
        assert (result.errors == []) is is_right, result.errors


def test_a_variable_that_no_template_reads_is_refused(tmp_path: Path) -> None:
    _tokenizer(f"{ROLES}{{{{ enable_thinking }}}}").save_pretrained(tmp_path / "model")
    rows = read_rows(DataConfig(train=_jsonl(tmp_path, {"prompt": "a"}), as_chat=True))
    view = view_prompts(rows, tmp_path / "model", {"enable_thinking": 1})
    assert view.text == "[user] a [assistant] 1"
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.enable_thinkin: .* no such"):
        view_prompts(rows, tmp_path / "model", {"enable_thinkin": False})


def test_plain_prompt_gets_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = _tokenizer(ROLES)
    config = _config(_jsonl(tmp_path, {"prompt": "hello world"}))
    (prompt,) = _built(config, tokenizer)
    assert _words(tokenizer, prompt) == "<bos> hello world"


def test_built_prompt_keeps_what_the_reward_functions_get(tmp_path: Path) -> None:
    config = _config(_jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b", "answer": 5}))
    _, prompt = _built(config, _tokenizer())
    assert (prompt.row, prompt.text, prompt.columns) == (1, "b", {"answer": 5})


def test_messages_without_a_template_are_refused_with_their_line(tmp_path: Path) -> None:
    train = _jsonl(tmp_path, {"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]})
    config = _config(train)
    with pytest.raises(ConfigError, match=r"train\.jsonl:2: .* no chat template"):
        _built(config, _tokenizer())


@pytest.mark.parametrize("has_template", [True, False])
def test_early_template_check_agrees_with_the_tokenizer(has_template: bool, tmp_path: Path) -> None:
    _tokenizer(ROLES if has_template else None).save_pretrained(tmp_path / "model")
    config = _config(
        _jsonl(tmp_path, {"prompt": "a"}), as_chat=True, model_path=f"{tmp_path}/model"
    )
    rows = read_rows(config.data)
    early = _refusal(lambda: check_prompts_early(rows, config.data, Path(config.model.path)))
    assert early == _refusal(lambda: _built(config, _tokenizer(ROLES if has_template else None)))
    assert (early is None) == has_template


def test_template_inside_the_tokenizer_settings_is_found_early(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": ROLES}), encoding="utf-8"
    )
    config = _config(_jsonl(tmp_path, {"prompt": "a"}), as_chat=True, model_path=str(tmp_path))
    assert (
        _refusal(
            lambda: check_prompts_early(
                read_rows(config.data), config.data, Path(config.model.path)
            )
        )
        is None
    )


def test_messages_that_the_template_refuses_name_their_line(tmp_path: Path) -> None:
    train = _jsonl(
        tmp_path,
        {"prompt": [{"role": "user", "content": "b"}]},
        {"prompt": [{"role": "system", "content": "b"}]},
    )
    config = _config(train)
    with pytest.raises(
        ConfigError,
        match=r"train\.jsonl:2: the chat template refused the messages: .*no system here",
    ):
        _built(config, _tokenizer(REFUSING))


# Length


def test_limit_is_the_longest_prompt_that_is_allowed(tmp_path: Path) -> None:
    config = _config(_jsonl(tmp_path, {"prompt": "a b"}), max_prompt_tokens=3)  # <bos> a b
    assert len(_built(config, _tokenizer())) == 1


def test_long_prompt_is_refused_with_line_and_both_numbers(tmp_path: Path) -> None:
    config = _config(_jsonl(tmp_path, {"prompt": "a"}, {"prompt": "a b c"}), max_prompt_tokens=3)
    with pytest.raises(
        ConfigError,
        match=r"train\.jsonl:2: the prompt has 4 tokens, over data\.max_prompt_tokens=3",
    ):
        _built(config, _tokenizer())


def test_long_prompts_are_dropped(tmp_path: Path) -> None:
    config = _config(
        _jsonl(
            tmp_path, *({"prompt": p, "answer": len(p)} for p in ["a", "a b c", "bb", "c c c c"])
        ),
        max_prompt_tokens=3,
        on_long_prompt="drop",
    )
    prompts = _built(config, _tokenizer())
    assert [(p.row, p.text, p.columns) for p in prompts] == [
        (0, "a", {"answer": 1}),
        (2, "bb", {"answer": 2}),
    ]


def test_too_few_prompts_after_dropping_says_how_many_were_dropped(tmp_path: Path) -> None:
    train = _jsonl(tmp_path, {"prompt": "a"}, {"prompt": "a b c"})
    config = _config(train, num_prompts=2, max_prompt_tokens=3, on_long_prompt="drop")
    with pytest.raises(
        ConfigError,
        match=r"1 usable prompts \(1 longer than .*=3 were dropped\).*num_prompts_per_step=2",
    ):
        _built(config, _tokenizer())


@pytest.mark.parametrize("limit", [3, 4])
def test_early_length_check_agrees_with_the_tokenizer(limit: int, tmp_path: Path) -> None:
    _raw_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = _config(
        _jsonl(tmp_path, {"prompt": "a b c"}), model_path=str(tmp_path), max_prompt_tokens=limit
    )
    rows = read_rows(config.data)
    early = _refusal(lambda: check_prompts_early(rows, config.data, Path(config.model.path)))
    assert early == _refusal(lambda: _built(config, _tokenizer()))
    assert (early is None) == (limit == 4)


@pytest.mark.parametrize(("num_rows", "enough"), [(3, False), (4, True), (5, True)])
def test_one_step_must_be_full(num_rows: int, enough: bool) -> None:
    config = _config(num_prompts=4)
    if enough:
        check_enough_rows(num_rows, config.data, config.rollout.num_prompts_per_step)
    else:
        with pytest.raises(ConfigError, match=r"has 3 usable prompts, .*num_prompts_per_step=4"):
            check_enough_rows(num_rows, config.data, config.rollout.num_prompts_per_step)


# Held-out sets


def test_held_out_set_is_read_as_the_training_set_is(tmp_path: Path) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"q": "hello", "answer": 1}\n\n{"q": "world"}\n', encoding="utf-8")
    config = _config(
        "train.jsonl",
        num_prompts=64,
        prompt_key="q",
        system_prompt="be brief",
        eval={"x": str(held_out)},
    )
    rows = read_rows(config.data, "x")
    assert [(row.columns, row.where) for row in rows] == [
        ({"answer": 1}, f"{held_out}:1"),
        ({}, f"{held_out}:3"),
    ]
    tokenizer = _tokenizer(ROLES)
    initial, _ = build_prompts(
        rows, tokenizer, config.data, 64, "x"
    )  # two prompts, though a step takes 64
    assert _words(tokenizer, initial) == "[ system ] be brief [ user ] hello [ assistant ]"


def test_held_out_set_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    train = _jsonl(tmp_path, {"prompt": "a b c"})
    config = _config(train, max_prompt_tokens=3, on_long_prompt="drop", eval={"x": train})
    with pytest.raises(
        ConfigError,
        match=r"data\.eval\.x: .* has 0 usable prompts \(1 longer than data\.max_prompt_tokens=3",
    ):
        build_prompts(read_rows(config.data, "x"), _tokenizer(), config.data, 64, "x")


# The stream


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(row, row, [row], str(row), {"row": row}) for row in range(count)]


def _rows(stream: PromptStream, start: int, stop: int) -> list[int]:
    stream.position = start
    return [prompt.row for prompt in stream.take(stop - start)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_prompt_comes_exactly_once_an_epoch(shuffle: bool) -> None:
    stream = PromptStream(_prompts(11), seed=0, shuffle=shuffle)
    rows = [
        prompt.row for _ in range(11) for prompt in stream.take(5)
    ]  # five epochs, whose ends fall within steps
    for epoch in range(5):
        assert sorted(rows[11 * epoch : 11 * (epoch + 1)]) == list(range(11))


def test_prompt_is_a_function_of_seed_and_position_alone() -> None:
    in_order = _rows(PromptStream(_prompts(7), seed=3, shuffle=True), 0, 28)
    backwards = PromptStream(_prompts(7), seed=3, shuffle=True)
    assert [
        _rows(backwards, position, position + 1)[0] for position in reversed(range(28))
    ] == in_order[::-1]
    # steps of any sizes deal out the same stream, none twice and none left out
    uneven = PromptStream(_prompts(7), seed=3, shuffle=True)
    assert [prompt.row for size in (4, 1, 0, 9, 14) for prompt in uneven.take(size)] == in_order
    assert uneven.position == 28


def test_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    # a run that resumes elsewhere must go on with the same prompts
    assert _rows(PromptStream(_prompts(6), seed=0, shuffle=True), 0, 12) == [
        0,
        5,
        1,
        4,
        3,
        2,
        2,
        0,
        1,
        5,
        3,
        4,
    ]


def test_each_epoch_has_another_order() -> None:
    rows = _rows(PromptStream(_prompts(20), seed=0, shuffle=True), 0, 60)
    assert len({tuple(rows[start : start + 20]) for start in (0, 20, 40)}) == 3


def test_each_seed_has_another_order() -> None:
    orders = {
        tuple(_rows(PromptStream(_prompts(20), seed=seed, shuffle=True), 0, 20))
        for seed in range(5)
    }
    assert len(orders) == 5


def test_neighbouring_seeds_and_epochs_are_not_confused() -> None:
    # "1/11" and "11/1": seed 1, epoch 11 is not seed 11, epoch 1
    rows = _rows(PromptStream(_prompts(20), seed=1, shuffle=True), 220, 240)
    eleven = _rows(PromptStream(_prompts(20), seed=11, shuffle=True), 20, 40)
    assert rows != eleven


def test_unshuffled_stream_keeps_the_order_of_the_file() -> None:
    assert _rows(PromptStream(_prompts(3), seed=5, shuffle=False), 0, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_dealt_prompt_knows_its_position_and_keeps_the_rest() -> None:
    prompts = _prompts(3)
    stream = PromptStream(
        prompts, seed=0, shuffle=False, position=4
    )  # as a run that resumes begins
    dealt = stream.take(2)
    assert dealt == [
        dataclasses.replace(prompts[1], position=4),
        dataclasses.replace(prompts[2], position=5),
    ]


def test_a_template_takes_columns_and_leaves_other_braces_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"nums": [3, 8], "answer": 24, "empty": null}\n')

    def prompt_of(template: str) -> str:
        row = read_rows(DataConfig(train=str(file), prompt_template=template))[0]
        assert row.columns == {
            "nums": [3, 8],
            "answer": 24,
            "empty": None,
        }  # the reward gets all of them
        return str(row.prompt)

    assert prompt_of("Use {nums}.") == "Use [3, 8]."
    # Not the gold answer into the prompt, and no broken LaTeX:
    assert (
        prompt_of(r"Use {nums}, end with \boxed{answer}, \boxed{} or {a b}.")
        == r"Use [3, 8], end with \boxed{answer}, \boxed{} or {a b}."
    )
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl:1: the column 'empty' \(data\.prompt_template\) is null"
    ):
        prompt_of("{nums} {empty}")


def test_the_early_check_of_lengths_counts_no_padding(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=512)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [PromptRow("a a", {}, "x:1")]
    check_prompts_early(rows, DataConfig(train="x.jsonl", max_prompt_tokens=2), tmp_path)
    with pytest.raises(ConfigError, match="x:1: the prompt has 2 tokens"):
        check_prompts_early(rows, DataConfig(train="x.jsonl", max_prompt_tokens=1), tmp_path)
