"""What a model's files, installed packages, the hub and the disk show is said by --check: one line,
with the remedy."""

from __future__ import annotations

import http.server
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_spmd.checks import data
from grpo_spmd.checks.data import check_prompts_early, sample
from grpo_spmd.checks.explain import explain
from grpo_spmd.checks.machine import check_disk
from grpo_spmd.checks.memory import idle_keys
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config, load_config_with_sources
from grpo_spmd.config.schema import DataConfig, RewardConfig
from grpo_spmd.data import hub
from grpo_spmd.data.rows import PromptRow, read_rows
from grpo_spmd.engine.start import memory_taken_in_sleep, no_room_for_cache, refused_keys
from grpo_spmd.rewards.named import check_gold
from grpo_spmd.rewards.verifiers import SHIPPED
from tests.support.bad_inputs import check_exit_code
from tests.support.early_mistakes import MISTAKES, TEMPLATE, Mistake, good_folder, write_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ):
        monkeypatch.delenv(name, raising=False)
    good_folder()
    return tmp_path


def test_there_are_forty_and_the_unspoiled_folder_is_good(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(MISTAKES) >= 40
    assert len({item.name for item in MISTAKES}) == len(MISTAKES)
    assert check_exit_code(monkeypatch) == 0
    assert not Path("runs").exists()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_said_in_one_line_with_the_remedy(
    mistake: Mistake,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mistake.make(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", str(mistake.ranks))
    status = check_exit_code(monkeypatch, *mistake.overrides)
    displayed = capsys.readouterr()
    assert (status, displayed.out) == (2, "")
    (line,) = displayed.err.splitlines()
    assert line.startswith("error: ")
    assert "secret" not in line
    for piece in mistake.says:
        assert piece in line


# The hub, by a server that answers as it does


@contextmanager
def _answering(status: int, code: str = "", location: str = "") -> Iterator[tuple[str, list[Any]]]:
    requests: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            requests.append((self.path, self.headers.get("Authorization")))
            self.send_response(status)
            for name, value in (("X-Error-Code", code), ("Location", location)):
                if value:
                    self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "status", "code", "message"),
    [
        ("models", 200, "", None),
        ("models", 307, "", None),
        ("models", 429, "", None),  # the libraries wait and ask again
        ("models", 401, "GatedRepo", "org/x is gated: accept its terms on"),
        ("models", 403, "GatedRepo", "org/x is gated"),
        (
            "models",
            401,
            "RepoNotFound",
            "or it is private; check the name (set HF_TOKEN if it is private)",
        ),
        ("models", 404, "RepoNotFound", "org/x, or it is private"),
        ("models", 404, "EntryNotFound", "org/x has no config.json on the hub"),
        ("datasets", 404, "EntryNotFound", None),
        ("datasets", 401, "RepoNotFound", "/datasets/org/x, or it is private"),
        ("datasets", 403, "", "org/x is gated: accept its terms on"),
    ],
)
def test_the_hubs_answer_becomes_one_line(
    kind: Any,
    status: int,
    code: str,
    message: str | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with _answering(status, code, "http://127.0.0.1:9/elsewhere" if status == 307 else "") as (
        endpoint,
        requests,
    ):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        try:
            hub.check_reachable(kind, "org/x", "the.key")
            result = None
        except ConfigError as error:
            result = str(error)
    assert len(requests) == 1
    assert requests[0][1] is None
    assert (result is None) == (message is None)
    if result is not None and message is not None:
        assert result.startswith("the.key: ")
        assert message in result


def test_the_token_goes_along_and_other_ranks_ask_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "token").write_text("hf_made_up\n", encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(folder))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with _answering(200) as (endpoint, requests):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        hub.check_reachable("models", "org/x", "model.path")
        monkeypatch.setenv("LOCAL_RANK", "1")
        hub.check_reachable("models", "org/x", "model.path")
    assert requests == [("/org/x/resolve/main/config.json", "Bearer hf_made_up")]


def test_a_hub_that_takes_the_call_and_says_nothing_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(hub, "WAIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match="gives no answer"):
            hub.check_reachable("models", "org/x", "model.path")


def test_a_model_in_the_cache_is_looked_through_as_a_folder_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = folder / "hub" / "models--org--x"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    (cache / "snapshots").mkdir()
    Path("model").rename(cache / "snapshots" / ("0" * 40))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert check_exit_code(monkeypatch, "model.path=org/x") == 0
    assert (
        check_exit_code(monkeypatch, "model.path=org/x", "model.lora.target_modules=[query]") == 2
    )
    assert "'query' names no linear layer" in capsys.readouterr().err


def test_a_line_break_in_a_token_is_no_part_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _answering(200) as (endpoint, requests):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_made\r\n_up\n")
        hub.check_reachable("models", "org/x", "model.path")
    assert requests[0][1] == "Bearer hf_made_up"


# What rewards compare with


def test_a_column_that_the_trainers_argument_hides_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(*[{"answer": "1", "completions": "mine", "trainer_state": 3}] * 4)
    assert check_exit_code(monkeypatch, "rewards=[{name: gsm8k}]") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", as")[0] for line in lines] == [
        f"warning: data: no reward sees the column {name!r}"
        for name in ("completions", "trainer_state")
    ]


def test_a_few_rows_without_gold_are_a_warning_of_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(*[{"answer": answer} for answer in ("1", "none", None, "4")])
    assert check_exit_code(monkeypatch, "rewards=[{name: gsm8k}]") == 0
    message = (
        "train.jsonl:2: rewards.0: 'gsm8k' finds no number in 'answer' ('none'), as in 2 "
        "of 4 rows: their"
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {message}")
    # null says that a reward does not apply, where another one does
    assert (
        check_exit_code(monkeypatch, "rewards=[{name: gsm8k}, {name: format, args: {pattern: .}}]")
        == 0
    )
    assert "as in 1 of 4 rows" in capsys.readouterr().err
    write_rows(*[{"answer": answer} for answer in ("1", None, None, "4")])
    assert (
        check_exit_code(monkeypatch, "rewards=[{name: gsm8k}, {name: format, args: {pattern: .}}]")
        == 0
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("reward", ["countdown", "exact", "gsm8k"])
def test_gold_that_is_read_early_is_what_the_verifier_reads(reward: str) -> None:
    args: dict[str, Any] = {"answer_tag": None} if reward == "countdown" else {}
    golds: list[Any] = [
        None,
        "",
        " ",
        "[]",
        "x",
        "7",
        "a1b 2",
        "1.",
        7,
        7.5,
        -3,
        [],
        ["3", 8],
        [1.5],
        "[1",
        {},
        True,
    ]
    for gold in golds:
        columns = dict.fromkeys(("answer", "nums"), gold) | {"target": 5 if gold == "7" else gold}
        try:
            scores: list[Any] = SHIPPED[reward](
                ["7"], **{name: [value] for name, value in columns.items()}, **args
            )
        except Exception:
            scores = ["raised"]
        try:
            result = [*check_gold([RewardConfig(name=reward)], [PromptRow("p", columns, "x:1")])]
            assert result == []
            read = "scored"
        except ConfigError as error:
            read = "raised" if "cannot read" in str(error) else "none"
        expected = {None: "none", "raised": "raised"}.get(scores[0], "scored")
        assert (read, gold) == (expected, gold) or (reward, read) == ("exact", "none")


# Lengths of chat prompts, against transformers


TEMPLATES = [
    TEMPLATE,
    "{{ bos_token }}{% for message in messages %}\n  {% if loop.first %}\n[{{ message.role }}]\n "
    " {% endif %}\n"
    "{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt "
    "%}a{% endif %}",
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
    "m.content %}"
    "{{ p.text }}{% endfor %}{% endif %}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    "{{ {'a': 'é<'} | tojson }}{% if tools %}never{% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("as_file", [False, True])
def test_the_early_length_is_that_of_transformers(
    template: str, as_file: bool, folder: Path
) -> None:
    from transformers import AutoTokenizer

    settings = {
        "eos_token": "<unk>",
        "bos_token": {"content": "<", "__type": "AddedToken"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if as_file:
        Path("model/chat_template.jinja").write_text(template, encoding="utf-8")
    else:
        settings["chat_template"] = template
    Path("model/tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    messages = [
        {"role": "user", "content": " ab c "},
        {"role": "user", "content": [{"type": "text", "text": "de"}]} if "p.text" in template else
        {"role": "user", "content": "de"},
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=False)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    rows = [PromptRow(messages, {}, "x:1")]
    check_prompts_early(rows, DataConfig(train="x", max_prompt_tokens=expected), Path("model"))
    with pytest.raises(ConfigError, match=f"x:1: the prompt has {expected} tokens"):
        check_prompts_early(
            rows, DataConfig(train="x", max_prompt_tokens=expected - 1), Path("model")
        )


def test_a_template_that_only_transformers_understands_is_left_to_it(folder: Path) -> None:
    rows = [PromptRow([{"role": "user", "content": "a" * 99}], {}, "x:1")]
    for template in (
        "{% generation %}{{ messages }}{% endgeneration %}",
        "{{ messages.nothing.there }}",
    ):
        Path("model/tokenizer_config.json").write_text(
            json.dumps({"chat_template": template}), encoding="utf-8"
        )
        check_prompts_early(rows, DataConfig(train="x", max_prompt_tokens=4), Path("model"))


def test_of_many_rows_the_longest_and_each_nth_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_CHARACTER_BUDGET", 1000)
    rows = [
        PromptRow("x" * (100 if number in (7, 5003) else 1), {}, f"f:{number}")
        for number in range(10_000)
    ]
    selected = [int(row.where[2:]) for row in sample(rows)]
    assert {7, 5003} <= set(selected)
    assert selected == sorted(set(selected))
    assert 500 <= len(selected) <= 1000
    assert max(new - old for old, new in itertools.pairwise(selected)) <= 21
    assert sample(rows[:10]) == rows[:10]


# The disk: 12 bytes a parameter that trains, and the export


def test_room_is_counted_for_what_is_kept_at_one_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    # embedding 40 x 16; a layer: q, o of 128 x 16, k, v of 64 x 16, gate, up, down of 24 x 16,
    # norms 16, 16, 32, 32
    parameters = 40 * 16 + 2 * (2 * 2048 + 2 * 1024 + 3 * 384 + 96) + 16
    usage = shutil.disk_usage(".")

    def fits(free: int, *overrides: str) -> bool:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        try:
            check_disk(load_config("config.yaml", ["model.lora.rank=0", *overrides]))
        except ConfigError:
            return False
        return True

    for saves, overrides in (
        (1, ["checkpoint.every_steps=0"]),
        (3, ["checkpoint.every_steps=1", "checkpoint.keep=2"]),
        (
            4,
            ["checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.best_metric=reward/mean"],
        ),
        (
            2,
            ["checkpoint.every_steps=100", "checkpoint.keep=9"],
        ),  # at step 100, which is the last too
    ):
        needed = saves * 12 * parameters + 2 * parameters
        assert fits(needed, *overrides)
        assert not fits(needed - 1, *overrides)
    # rank 4 on q_proj of two layers: A 4 x 16, B 128 x 4
    assert fits(12 * 1152 + 2 * 1152, "checkpoint.every_steps=0", "model.lora.rank=4")
    assert not fits(12 * 1152 + 2 * 1152 - 1, "checkpoint.every_steps=0", "model.lora.rank=4")


# Paths


def test_the_home_folder_is_put_in_for_a_tilde(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    paths = [
        "run_dir=~/run",
        "model.path=~/model",
        "data.train=~/train.jsonl",
        "data.eval={a: ~/b.jsonl}",
    ]
    paths += ["rewards=[{function: '~/r.py:fn'}]", "checkpoint.resume=~/old", "eval.every_steps=1"]
    config = load_config("~/config.yaml", paths)
    assert (config.run_dir, config.model.path) == (f"{folder}/run", f"{folder}/model")
    assert (config.data.train, config.data.eval_sets) == (
        f"{folder}/train.jsonl",
        {"a": f"{folder}/b.jsonl"},
    )
    assert (config.rewards[0].function, config.checkpoint.resume) == (
        f"{folder}/r.py:fn",
        f"{folder}/old",
    )
    assert load_config("config.yaml", ["data.train=a~b.jsonl"]).data.train == "a~b.jsonl"


def test_a_mark_at_the_start_of_a_file_is_no_part_of_it(folder: Path) -> None:
    Path("marked.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [row.prompt for row in read_rows(DataConfig(train="marked.jsonl"))] == ["a", "b"]


# vLLM's words about its KV cache, in ours


@pytest.mark.parametrize(
    ("error", "device", "message"),
    [
        (
            "To serve at least one request with the model's max seq len (5120), (0.28 GiB KV "
            "cache is needed, which is "
            "larger than the available KV cache memory (0.06 GiB). Based on the available "
            "memory, the estimated "
            "maximum model length is 1088. Try increasing `gpu_memory_utilization` (which also "
            "controls CPU memory on "
            "the CPU backend) or decreasing `max_model_len` when initializing the engine.",
            "cuda",
            "rollout: one rollout of 5120 tokens (data.max_prompt_tokens + "
            "rollout.max_completion_tokens) takes "
            "0.28 GiB of KV cache, but only 0.06 GiB are available; "
            "raise rollout.gpu_memory_utilization or "
            "rollout.tensor_parallel_size, or shorten the rollouts",
        ),
        (
            "Available memory on node 0 (3.1/24.0 GiB) on kv cache allocation is less than "
            "requested memory for kv "
            "(9.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU "
            "memory.",
            "cpu",
            "lower rollout.engine.kv_cache_memory_bytes",
        ),
        (
            "No available memory for the cache blocks. Try increasing it.",
            "cuda",
            "raise rollout.gpu_memory_utilization",
        ),
        ("Unknown architecture Foo", "cuda", None),
    ],
)
def test_vllms_words_about_memory_name_our_keys(
    error: str, device: str, message: str | None
) -> None:
    result = no_room_for_cache(error, device)
    assert (result is None) == (message is None)
    if result is not None and message is not None:
        assert message in result
        assert "--" not in result.split("GiB)")[-1]
        assert "max_model_len" not in result


def test_a_sleep_that_frees_nothing_is_told_as_memory_of_another_process() -> None:
    gib = 2**30
    error = "Memory usage increased after sleeping."
    line = memory_taken_in_sleep(error, (60 * gib, 61 * gib), 40 * gib)
    assert line is not None
    assert "its pool of 40.0 GiB" in line
    assert "grew from 60.0 to 61.0 GiB: another process took more" in line
    assert "CUDA_VISIBLE_DEVICES" in line
    assert "\n" not in line
    # Any other assertion of vLLM's stays what it is.
    assert memory_taken_in_sleep("free memory before sleep", (0, 0), 0) is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "1 validation error for CacheConfig\nblock_size\n  Value error, 7 is no size "
            "[type=value_error, "
            "input_value=7, input_type=int]\n    For further information visit "
            "https://errors.pydantic.dev/2/v",
            "rollout.engine: vLLM did not start with block_size: ValueError: block_size Value "
            "error, 7 is no size",
        ),
        ("", "with block_size: ValueError: no reason given; take them out one by one"),
        ("x" * 999, f"with block_size: ValueError: {'x' * 300}...; take"),
    ],
)
def test_vllms_words_about_its_arguments_are_one_line(error: str, message: str) -> None:
    assert message in refused_keys({"block_size": 7}, ValueError(error))


@pytest.mark.parametrize("with_keys", [False, True])
def test_only_where_keys_were_given_are_they_the_reason(
    with_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_spmd.config.schema import ModelConfig, RolloutConfig
    from grpo_spmd.engine import start

    options: dict[str, Any] = {}

    class Fails:
        def __init__(self, **kwargs: Any) -> None:
            options.update(kwargs)
            raise KeyError("FOO")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Fails))
    for name in (
        "refuse_unshareable_segments",
        "keep_caches_on_node",
        "_name_shared_memory_after_job",
    ):
        monkeypatch.setattr(start, name, lambda *_: None)
    session: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"), world_size=1, attempt=0)
    monkeypatch.setattr(start, "read_model_config", lambda folder: {})
    monkeypatch.setattr(start, "checkpoint_folder", Path)
    monkeypatch.setattr(start, "load_config", lambda path: SimpleNamespace())
    monkeypatch.setattr(start, "total_bytes", lambda device: 80 << 30)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a card")
    keys = {"attention_backend": "FOO", "max_num_seqs": 5} if with_keys else {}
    rollout = RolloutConfig(engine=keys)
    with pytest.raises(ConfigError if with_keys else KeyError) as result:
        start.start_vllm(ModelConfig(path="x"), rollout, 8, session=session, num_sequences=300)
    assert options["max_num_seqs"] == (5 if with_keys else 300)
    if with_keys:
        text = "vLLM did not start with attention_backend, max_num_seqs: KeyError: 'FOO'"
        assert text in str(result.value)


def test_keys_that_another_leaves_without_effect_are_worth_a_look(folder: Path) -> None:
    inputs = [
        "loss.kl_estimator=k1",
        "eval.temperature=1.0",
        "advantage.estimator=rloo",
        "advantage.normalize_std=batch",
    ]
    config, sources = load_config_with_sources("config.yaml", inputs)
    result = [*idle_keys(config, sources)]
    assert result == [
        "loss.kl_estimator does nothing: loss.kl_coef is 0",
        "advantage.normalize_std does nothing: advantage.estimator is rloo",
        "eval.temperature does nothing: eval.every_steps is 0",
    ]
    assert result[0] in "\n".join(explain(config, sources, None, 4, 1))
    assert [
        *idle_keys(
            *load_config_with_sources("config.yaml", ["loss.kl_estimator=k1", "loss.kl_coef=0.1"])
        )
    ] == []


def test_that_lora_is_off_may_be_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_exit_code(monkeypatch, "model.lora.rank=0") == 0


def test_braces_that_are_no_column_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(*[{"q": "ab", "answer": "x"}] * 4)
    template = "data.prompt_template='{q} { b } {\"q\": 1} \\\\boxed{answer}'"
    assert (
        check_exit_code(
            monkeypatch,
            template,
            "data.max_prompt_tokens=60",
            "training.max_tokens_per_micro_batch=96",
            "rollout.max_completion_tokens=4",
        )
        == 0
    )
