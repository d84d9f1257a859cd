"""What grpo_spmd.run makes of its arguments, before anything is started; and functions on their way
to the nursery."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.distributed as dist
import yaml

import grpo_spmd
from grpo_spmd import api
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config, load_config_with_sources
from grpo_spmd.config.schema import Config, RewardConfig, RewardPoolConfig, WatchdogConfig
from grpo_spmd.data.rows import read_rows
from grpo_spmd.distributed.embedded_run import embedded_run
from grpo_spmd.distributed.session import start_session
from grpo_spmd.files import hold_standard_streams
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards import named
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import load_rewards
from tests.support.models import write_config
from tests.support.processes import ROOT, run_command


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class Threshold:
    def __init__(self, minimum: int) -> None:
        self.least = minimum

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) >= self.least) for text in completions]


def made(*args: Any, **kwargs: Any) -> tuple[Config, dict[str, Any]]:
    """The config that a call comes to, and what each reward's function is."""
    seen: list[tuple[Config, dict[str, Any]]] = []

    def train(config: Config) -> Any:
        seen.append((config, dict(named._registered)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_train", train)
        grpo_spmd.run(*args, **kwargs)
    return seen[0]


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_and_datasets_are_data_of_a_run(tmp_path: Path) -> None:
    tree = yaml.safe_load(write_config(tmp_path, tmp_path).read_text())
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "answer": 2},
        {"prompt": [{"role": "user", "content": "é"}]},
    ]
    held = datasets.Dataset.from_list([{"prompt": "2+2=", "answer": 4}])
    seen: list[Any] = []

    def train(config: Config) -> None:
        seen.append(config.data)
        seen.append([(row.prompt, row.columns) for row in read_rows(config.data)])
        for name in config.data.eval_sets:
            seen.append((name, [row.columns for row in read_rows(config.data, name)]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_train", train)
        evaluation = {"every_steps": 1}
        data: dict[str, Any] = {
            "train": rows,
            "eval": {"held": held, "file": str(tmp_path / "x.jsonl")},
        }
        (tmp_path / "x.jsonl").write_text('{"prompt": "3+3=", "answer": 6}\n')
        grpo_spmd.run(tree, data=data, eval=evaluation)
        grpo_spmd.run(tree, **{"data.train": held, "data.eval": rows[:1]}, eval=evaluation)
    read = [(rows[0]["prompt"], {"answer": 2}), (rows[1]["prompt"], {})]
    assert seen[1:4] == [read, ("held", [{"answer": 4}]), ("file", [{"answer": 6}])]
    assert seen[5:] == [[("2+2=", {"answer": 4})], ("eval", [{"answer": 2}])]
    # Nothing stays behind, and the caller's own rows are as they were.
    assert not Path(seen[0].train).exists()
    assert data["train"] is rows
    assert "answer" in rows[0]


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ({"data": {"train": [{"prompt": b"x"}]}}, "Object of type bytes is not JSON serializable"),
        ({"data": {"train": 3}}, "give a list or Dataset of rows"),
        ({"environment": {"factory": Threshold}}, "environment.factory is a Python object"),
        ({"environment": {"tools": [length]}}, 'for a class or function "file.py:name"'),
        ({"model": {"path": torch.nn.Linear(1, 1)}}, "for a model its folder or hub id"),
        ({"model": torch.nn.Linear(1, 1)}, "model is a Python object"),
    ],
)
def test_an_object_that_cannot_be_taken_is_refused_with_a_remedy(
    override: dict[str, Any], error: str, tmp_path: Path
) -> None:
    assert error in refusal(str(write_config(tmp_path, tmp_path)), **override)


def test_a_file_a_mapping_and_dotted_keys_come_to_the_same_config(tmp_path: Path) -> None:
    path = write_config(tmp_path, tmp_path)
    tree = yaml.safe_load(path.read_text())
    overrides = ["optimizer.lr=1e-6", "rollout.engine.max_num_seqs=4", "seed=3"]
    # As a run on this machine decides what auto stands for.
    expected, _ = load_config_with_sources(path, overrides, on_cpu=True)
    dotted = {"optimizer.lr": "1e-6", "rollout.engine.max_num_seqs": 4, "seed": 3}
    assert made(str(path), **dotted)[0] == expected
    assert (
        made(path, optimizer={"lr": 1e-6}, rollout={"engine": {"max_num_seqs": 4}}, seed=3)[0]
        == expected
    )
    assert made({**tree, **dotted})[0] == expected
    assert (
        made(tree, **{"rollout.engine": {"max_num_seqs": 4}}, optimizer={"lr": 1e-6}, seed=3)[0]
        == expected
    )
    # Paths and tuples are taken for what YAML has in their place; and nothing is written into the
    # caller's mapping.
    tree["run_dir"], old = (
        Path(tree["run_dir"]),
        yaml.safe_dump(yaml.safe_load(path.read_text())),
    )
    assert made(tree, optimizer={"betas": (0.5, 0.6)})[0].optimizer.betas == (0.5, 0.6)
    assert yaml.safe_dump({**tree, "run_dir": str(tree["run_dir"])}) == old


def test_rewards_may_be_functions_pairs_and_entries_in_one_list(tmp_path: Path) -> None:
    entries: list[Any] = [
        length,
        (Threshold(3), 0.5),
        {"name": "exact", "weight": 2},
        functools.partial(length, extra=1),
        lambda completions, **_: [0.0] * len(completions),
        {"function": length, "name": "again", "weight": 3.0},
    ]
    entries[3] = {"function": entries[3], "name": "bound"}
    config, functions = made(write_config(tmp_path, tmp_path), entries)
    message = [(reward.name, reward.weight, reward.function) for reward in config.rewards]
    local = f"{named.PYTHON_MARK}{__name__}"
    assert message == [
        ("length", 1.0, f"{local}.length"),
        ("Threshold", 0.5, f"{local}.Threshold"),
        ("exact", 2.0, None),
        ("bound", 1.0, f"{local}.length#3"),
        (
            "reward_4",
            1.0,
            f"{local}.test_rewards_may_be_functions_pairs_and_entries_in_one_list.<locals>.<lambda>",
        ),
        ("again", 3.0, f"{local}.length#5"),
    ]
    assert [functions[spec] for _, _, spec in message if spec] == [
        length, entries[1][0], entries[3]["function"], entries[4], length,
    ]  # fmt: skip
    assert named._registered == {}


def test_what_cannot_be_a_call_is_one_line(tmp_path: Path) -> None:
    path = write_config(tmp_path, tmp_path)
    assert refusal(3) == "config must be the path of a YAML file or a mapping; got int"
    assert "cannot read" in refusal(tmp_path / "none.yaml")
    assert refusal(path, length) == "rewards must be a list, as in rewards=[fn]; got function"
    assert refusal(path, ["gsm8k"]) == (
        "rewards.0 must be a function, a pair (function, weight), or an entry as in YAML; got "
        "'gsm8k'"
    )
    assert (
        refusal(path, [length, Threshold])
        == "rewards.1: Threshold is a class; give an object of it"
    )
    assert "optimizer.lr must be a number" in refusal(path, [length], optimizer={"lr": "x"})
    assert "optimizer.lr" in refusal(path, [length], learning_rate=1e-6)
    assert refusal(path, **{"seed.x": 1}) == "seed must be a whole number >= 0; got {'x': 1}"
    assert "rewards.1.weight must be a number" in refusal(path, [length, (length, "much")])


def test_a_function_without_its_process_says_what_to_do(tmp_path: Path) -> None:
    """As a resume by the command line meets it, in the config.yaml of the run."""
    config = load_config(
        write_config(tmp_path, tmp_path, rewards=[{"name": "a", "function": "<python>:__main__.a"}])
    )
    with pytest.raises(ConfigError) as caught:
        load_rewards(config.rewards)
    assert str(caught.value) == (
        "rewards.0.function: __main__.a was a Python function given to grpo_spmd.run, which no "
        "command can call; go on "
        'with grpo_spmd.run, or put it into a file: rewards: [{function: "file.py:a"}]'
    )


class _Tokenizer:
    def batch_decode(self, token_ids: list[list[int]], **_: Any) -> list[str]:
        return ["x" * len(ids) for ids in token_ids]


@contextlib.contextmanager
def pool_of(functions: list[Callable[..., Any]], folder: Path) -> Iterator[RewardPool]:
    by_spec = {
        f"{named.PYTHON_MARK}{number}": function for number, function in enumerate(functions)
    }
    configs = [
        RewardConfig(name=f"r{number}", function=spec) for number, spec in enumerate(by_spec)
    ]
    options = RewardPoolConfig(num_workers=2, timeout_s=2.0)
    with (
        named.registered(by_spec),
        RewardPool(configs, options, folder / "log", columns=["answer"]) as pool,
    ):
        yield pool


def scores(pool: RewardPool) -> ScoredRollouts:
    completions = [Completion([1] * n, [0.0] * n, "stop") for n in (1, 3)]
    return pool.score(
        [RolloutGroup(0, Prompt(0, 0, [1], "p", {"answer": 5}), completions)], _Tokenizer()
    )


def test_functions_of_every_kind_score_in_other_processes(tmp_path: Path) -> None:
    """By value where only this process knows them: this module's are imported by name, `made_up`'s
    cannot be."""
    bonus, own_pid = 0.25, str(threading.get_native_id())
    module = type(sys)("made_up")
    text = "FACTOR = 2.0\ndef helper(n): return FACTOR * n\n"
    text += "def reward(completions, **_): return [helper(len(text)) for text in completions]"
    exec(text, module.__dict__)
    sys.modules["made_up"] = module

    def closure(completions: list[str], answer: list[int], **_: Any) -> list[float]:
        import os

        assert str(os.getpid()) != own_pid
        return [bonus + number for number in answer]

    async def waits(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    def scaled(completions: list[str], by: float, **_: Any) -> list[float]:
        return [by * len(text) for text in completions]

    functions = [
        length,
        Threshold(2),
        closure,
        waits,
        functools.partial(scaled, by=0.5),
        module.reward,
    ]
    try:
        with pool_of(functions, tmp_path) as pool:
            assert list(scores(pool).by_name.values()) == [
                [1.0, 3.0], [0.0, 1.0], [5.25, 5.25], [1.0, 1.0], [0.5, 1.5], [2.0, 6.0],
            ]  # fmt: skip
    finally:
        del sys.modules["made_up"]


def test_a_function_that_hangs_is_killed_and_counted(tmp_path: Path) -> None:
    def hangs(completions: list[str], **_: Any) -> list[float]:
        while len(completions) != 1 or len(completions[0]) == 3:
            pass
        return [1.0]

    with pool_of([hangs], tmp_path) as pool:
        pool._limits._limits[0].timeout_s = 2.0
        assert scores(pool).statuses == {"r0": ["ok", "timeout"]}


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(completions: list[str], **_: Any) -> list[float]:
        with lock:
            return [0.0 for _ in completions]

    with pytest.raises(ConfigError) as caught, pool_of([length, locked], tmp_path):
        pass
    message = str(caught.value)
    assert message.startswith(
        "rewards.1: 1 cannot be handed to the processes that score (TypeError: cannot pickle "
    )
    assert message.endswith("; create the object that it uses inside the function")


def test_the_package_is_imported_without_torch_and_run_is_the_function() -> None:
    code = (
        "import sys, grpo_spmd; assert not {'torch', 'numpy', 'transformers', 'yaml', "
        "'asyncio'} & set(sys.modules)"
    )
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    # A module of that name would take the function's place as soon as it was imported.
    assert importlib.util.find_spec("grpo_spmd.run") is None


def test_streams_without_a_descriptor_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's: only what the interpreter itself made of a closed descriptor is replaced."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    hold_standard_streams()
    assert sys.stdout is out
    code = "import sys, io, os; os.close(1); sys.stdout = s = io.StringIO(); "
    code += (
        "from grpo_spmd.files import hold_standard_streams as h; h(); assert sys.stdout is "
        "s; os.fstat(1)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def _as_guest_of_this_process(block: Callable[[], None]) -> tuple[str, str]:
    """What is raised, when what was there before is there again; and what `release` found."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGURG)
    old, released = [signal.getsignal(number) for number in numbers], list[str]()

    def release() -> None:
        released.append("group" if dist.is_initialized() else "no group")
        api._release()

    with (
        pytest.raises((RuntimeError, ConfigError, KeyboardInterrupt)) as caught,
        embedded_run(release),
    ):
        block()
    assert [signal.getsignal(number) for number in numbers] == old
    assert not dist.is_initialized()
    assert "MASTER_PORT" not in os.environ
    assert caught.value.__cause__ is None
    assert not [thread for thread in threading.enumerate() if thread.name == "doctor"]
    return f"{type(caught.value).__name__}: {caught.value}", released[0]


# The doctor's thread ends by SystemExit, which pytest tells of.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_any_kind_is_raised_and_nothing_of_the_session_stays(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    limits = WatchdogConfig(phase_timeouts_s={"start": 3.0})

    def breaks() -> None:
        start_session()
        raise ValueError("the engine broke")

    def leaves() -> None:
        start_session()
        sys.exit(0)

    def refuses() -> None:
        start_session()
        raise ConfigError("model.path: seen only now")

    def is_interrupted() -> None:
        start_session()
        raise KeyboardInterrupt

    def hangs() -> None:
        start_session(watchdog=limits)
        time.sleep(60)

    failure, group = _as_guest_of_this_process(breaks)
    assert failure.startswith("RuntimeError: ")
    assert "ValueError: the engine broke" in failure
    assert group == "group"
    assert "SystemExit" in _as_guest_of_this_process(leaves)[0]
    assert _as_guest_of_this_process(refuses)[0] == "ConfigError: model.path: seen only now"
    assert _as_guest_of_this_process(is_interrupted)[0] == "KeyboardInterrupt: "
    old = time.monotonic()
    assert "took longer than its limit of 3 s" in _as_guest_of_this_process(hangs)[0]
    assert time.monotonic() - old < 50
    assert "Traceback" not in capfd.readouterr().err  # it is the exception's, and shown once


def test_only_the_main_thread_may_run(tmp_path: Path) -> None:
    result: list[BaseException] = []

    def call() -> None:
        try:
            with embedded_run(lambda: None):
                pass
        except ConfigError as error:
            result.append(error)

    thread = threading.Thread(target=call, name="cell")
    thread.start()
    thread.join()
    assert (
        "must be called in the main thread, the only one that hears signals; this is cell"
        in str(result[0])
    )
