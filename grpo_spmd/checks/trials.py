"""Trials before a run: calls users' code once, connects to reward servers, and shows a prompt.

Reward functions are called for the first row, and the environment begins an episode of it. Both run
in processes of their own, as in the run, so that this process does not import users' code and no
GPU is touched. No model is needed, and nothing is written.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_spmd.checks.data import PromptView, view_prompts
from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.config.errors import ConfigError, say
from grpo_spmd.config.rules import check_known_rewards
from grpo_spmd.config.schema import Config, EnvironmentConfig, RewardConfig
from grpo_spmd.data.rows import PromptRow, columns_of, key_and_source
from grpo_spmd.model.config_json import local_folder
from grpo_spmd.records import Fields
from grpo_spmd.rewards.named import pack
from grpo_spmd.rewards.pool.processes import HowItFailed, ProcessPool, WorkerProcess
from grpo_spmd.rewards.protocol import Reward
from grpo_spmd.rewards.trl import NO_LIST, NO_NUMBER, TrainerState

# Columns that may have the right answer. It is tried as a completion, beside an empty one.
_GOLD_COLUMNS = ("answer", "solution", "label", "ground_truth")
_CONNECT_S = 3.0
_PACKAGE = str(Path(__file__).parents[1])
_MAX_SHOWN_CHARS = 400
_FRAME = re.compile(r'File "(.+)", line (\d+)')
_PORTS = {"http": 80, "https": 443}


def try_and_tell(config: Config, inputs: Inputs, tell: Callable[[str], object]) -> str:
    """Makes all trials on rank 0, prints warnings, and returns a line that says what was checked.

    Other ranks do nothing and return "". `tell` gets lines about what the run will show its model.
    Raises ConfigError for what can never work.
    """
    if os.environ.get("RANK", "0") != "0":
        return ""
    folder = local_folder(config.model.path)
    view = view_prompts(inputs.rows, folder, config.data.chat_template_kwargs)
    if config.environment.is_on and view.has_template is False:
        raise ConfigError(
            f"environment: {config.model.path} has no chat template, which a conversation needs; "
            "give the model's folder one (chat_template.jinja)"
        )
    if config.data.on_long_prompt == "drop" and view.shortest > config.data.max_prompt_tokens:
        raise ConfigError(
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}): the shortest prompts have "
            f"{view.shortest} tokens, and data.on_long_prompt: drop would leave none; raise it"
        )
    warnings = _try(config, inputs)
    if view.problem:
        row = inputs.rows[0].where
        warnings.append(f"model.path: its chat template fails for {row}: {view.problem}")
    is_chat = config.environment.is_on or not isinstance(inputs.rows[0].prompt, str)
    if is_chat and view.open_end is not None:
        token, token_id = view.open_end
        warnings.append(
            f"model.path: its chat template ends a turn with {token!r}, at which no completion "
            f"stops, so that all may run to rollout.max_completion_tokens; add {token_id} to "
            f"eos_token_id in {local_folder(config.model.path)}/generation_config.json"
        )
    for line in _notes(config, inputs, view):
        tell(line)
    for line in warnings:
        say(f"warning: {line}")
    return _summary(config, inputs, view)


def _try(config: Config, inputs: Inputs) -> list[str]:
    """Returns warnings from trying the user's rewards, environment and servers once each.

    Each is called as a run would call it, on row 1 of the data, in a process of its own. Raises
    ConfigError for a mistake with which no run could work, such as a wrong type of reward.
    """
    warnings = [*_find_silent_servers(config)]
    called: dict[str, tuple[RewardConfig, Reward]] = {}
    written: set[str] = set()
    # Rewards that look at the environment's objects are called in its process.
    environment_rewards: list[RewardConfig] = []
    for (index, reward), loaded in zip(_pool_rewards(config), inputs.rewards, strict=True):
        if loaded.looks_at_environments:
            environment_rewards.append(reward)
        # Shipped verifiers need no trial, and checks/inputs.py has checked the rows for them.
        elif reward.function is not None:
            called[f"rewards.{index}"] = reward, loaded
    if called:
        setup = {"timeout_s": config.reward_pool.timeout_s, "secrets": {}}
        configs = [reward for reward, _ in called.values()]
        with Trial("grpo_spmd.rewards.pool.worker", setup, configs) as trial:
            trial.load()
            for number, (key, (reward, loaded)) in enumerate(called.items()):
                seconds = reward.timeout_s or config.reward_pool.timeout_s
                ask = partial(trial.ask, seconds=seconds)
                warnings += _try_reward(
                    ask, number, key, reward=loaded, inputs=inputs, written=written
                )
    # A reward that failed here may still write a column in the run.
    if not warnings:
        _check_teacher_template(config, inputs.columns | written)
    if config.environment.is_on:
        warnings += _try_environment(config, inputs, environment_rewards)
    return warnings


def _summary(config: Config, inputs: Inputs, view: PromptView) -> str:
    """Returns a line that says what was checked."""
    longest = f" (longest {view.longest} tokens)" if view.longest else ""
    parts = ["model", f"{len(inputs.rows):,} prompts{longest}"]
    parts += [f"{len(rows):,} of data.eval.{name}" for name, rows in inputs.eval_rows.items()]
    number = len(config.rewards)
    parts.append(f"{number} reward{'s' * (number != 1)}")
    is_on = {
        "environment": config.environment.is_on,
        "teacher": config.teacher.is_on,
        "critic": config.critic.path is not None,
    }
    parts += [name for name, value in is_on.items() if value]
    return f"checked: {', '.join(parts)}"


def _check_teacher_template(config: Config, columns: set[str]) -> None:
    """Raises ConfigError if teacher.prompt_template names a column that no data or reward provides.

    `columns` are those of the data, and those that rewards wrote in the trial."""
    missing = columns_of(config.teacher.prompt_template or "") - columns - {"prompt"}
    if missing:
        raise ConfigError(
            f"teacher.prompt_template names {', '.join(sorted(missing))}, which is no column of "
            "the data, and no reward function writes it: log_extra(name, one text a completion); "
            "{prompt} is the policy's own prompt"
        )


def _notes(config: Config, inputs: Inputs, view: PromptView) -> Iterator[str]:
    """Yields a line with the first prompt as the model sees it, and notes on likely mistakes."""
    text = view.text
    if len(text) > _MAX_SHOWN_CHARS:
        half = _MAX_SHOWN_CHARS // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    size = f", {view.num_tokens} tokens" if view.num_tokens else ""
    yield f"prompt 1 of {len(inputs.rows):,}{size}: {text!r}"
    is_plain = isinstance(inputs.rows[0].prompt, str)
    if is_plain and view.has_template and not config.environment.is_on:
        yield (
            "note: the prompts are plain text, though the model has a chat template: "
            "data.as_chat: true shows them as a user's messages"
        )
    source = key_and_source(config.data, None)[1]
    for name, rows in inputs.eval_rows.items():
        if key_and_source(config.data, name)[1] == source or _are_same(rows, inputs.rows):
            yield f"note: data.eval.{name} is data.train: it measures what was learned by heart"


def _are_same(rows: Sequence[PromptRow], other_rows: Sequence[PromptRow]) -> bool:
    """Returns True if both data sets have the same prompts and columns, row by row."""
    if len(rows) != len(other_rows):
        return False
    pairs = zip(rows, other_rows, strict=True)
    return all(row.prompt == other.prompt and row.columns == other.columns for row, other in pairs)


def _pool_rewards(config: Config) -> Iterator[tuple[int, RewardConfig]]:
    """Returns (index in `rewards`, reward) of each reward that the reward pool computes."""
    return ((index, reward) for index, reward in enumerate(config.rewards) if reward.uses_pool)


def _find_silent_servers(config: Config) -> Iterator[str]:
    """Yields a warning for each reward server that accepts no connection. Sends no request."""
    for index, reward in _pool_rewards(config):
        if reward.url is None:
            continue
        address = urlsplit(reward.url)
        host, port = address.hostname or "", address.port or _PORTS.get(address.scheme, 80)
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError as error:
            yield (
                f"rewards.{index}.url: nobody answers at {host}:{port} "
                f"({error.strerror or error}); start the server before the first step ends"
            )


class Trial(ProcessPool):
    """A worker process in which users' code is called once before the run.

    It is a process of the same kind as those of the run's reward pool or environments, and runs one
    call after the other."""

    _what = "reward"

    def __init__(self, module: str, setup: Fields, rewards: Sequence[RewardConfig]) -> None:
        """Starts the process `python -m module`, which loads `rewards`; `setup` is data for it."""
        self._folder = tempfile.TemporaryDirectory()
        self._reply: Fields = {}
        if module == "grpo_spmd.episodes.worker":
            self._what = "environment"
        super().__init__(
            module,
            setup,
            rewards,
            Path(self._folder.name, "log"),
            # breakpoint() does nothing here: it is meant for the run.
            variables={"PYTHONBREAKPOINT": "0"},
        )

    def close(self) -> None:
        """Ends the process, and removes the folder of its log."""
        super().close()
        self._folder.cleanup()

    def load(self) -> Any:
        """Returns what the worker process reports of the user's code, once it has imported it.

        The facts are those of rewards (names, arguments) or of the environment (its kind, the
        rewards that it gives). Raises ConfigError if the code cannot be imported.
        """
        return self._wait_until_ready()

    def ask(self, message: Fields, seconds: float) -> Fields:
        """Makes a call and returns its reply, or {"failed": REASON} if there is none in
        `seconds`."""
        self._reply = {}
        worker = next(iter(self._workers.values()), None) or self._spawn()
        with suppress(OSError):
            self._give(worker, message, message, seconds)
        while not self._reply:
            self._listen(0.5)
        return self._reply

    def _answered(self, worker: WorkerProcess, reply: Fields) -> None:
        """Keeps the worker's reply for `ask`, and marks the worker as idle."""
        self._reply = reply
        self._release(worker)

    def _failed(self, worker: WorkerProcess, call: Any, kind: HowItFailed, reason: str) -> None:
        """Keeps the reason for `ask`, after the worker's call has failed."""
        self._reply = {"failed": reason}

    def _too_long(self, worker: WorkerProcess) -> str:
        """Returns the reason of failure of a call whose deadline has passed."""
        return "took longer than its time limit"

    def _ended(self, reason: str) -> ConfigError:
        """Returns the error to raise if users' code cannot be loaded, as one line.

        `reason` may have several lines, the last ones of a traceback."""
        # The first line says what could not be loaded, and the traceback's last line says why.
        head, _, rest = reason.strip().partition("\n")
        if rest:
            return ConfigError(f"{head} {rest.splitlines()[-1]}{_place(rest)}")
        # A ConfigError from the pool's process already names the key.
        prefix = f"the {self._what}s cannot be imported in the {self._what} pool: "
        return ConfigError(head.removeprefix(prefix))


def _place(report: str) -> str:
    """Returns the place in users' code that a traceback names last, as " (FILE:LINE)"; "" if it
    names none."""
    places = [place for place in _FRAME.findall(report) if not place[0].startswith(_PACKAGE)]
    return f" ({places[-1][0]}:{places[-1][1]})" if places else ""


def _try_reward(
    ask: Callable[[Fields], Fields],
    number: int,
    key: str,
    *,
    reward: Reward,
    inputs: Inputs,
    written: set[str],
) -> Iterator[str]:
    """Yields a warning if a reward function fails for the first row of the data.

    Raises ConfigError if the function returns a wrong type. `ask` makes a call in the trial's
    process, where `number` is the function's index; `key` is its config key. The columns that the
    function writes with log_extra are added to `written`.
    """
    row = inputs.rows[0]
    gold = next((row.columns[name] for name in _GOLD_COLUMNS if name in row.columns), None)
    texts = ["", *([str(gold)] if isinstance(gold, str | int | float) else [])]
    columns = dict.fromkeys([*inputs.columns, *reward.needs]) | row.columns
    batches = [[text] for text in texts] if reward.one_at_a_time else [texts]
    for batch in batches:
        is_text = isinstance(row.prompt, str)
        completions = [t if is_text else [{"role": "assistant", "content": t}] for t in batch]
        rows = [
            pack(
                columns
                | {
                    "prompts": row.prompt,
                    "completions": completion,
                    "completion_ids": [*range(len(text))],
                }
            )
            for text, completion in zip(batch, completions, strict=True)
        ]
        reply = ask({"reward": number, "rows": rows, "state": TrainerState()})
        written.update(reply.get("extra", {}))
        name = f"{key}: {reward.name!r}"
        if "broken" in reply:
            raise ConfigError(f"{name} {reply['broken']}")
        failures = [reply["failed"]] if "failed" in reply else reply.get("values", ())
        for failure in failures:
            if not isinstance(failure, str):
                continue
            report = failure.partition("\n")[0]
            if failure.startswith(NO_LIST) or NO_NUMBER in failure:
                raise ConfigError(
                    f"{name} {report}; a reward function is fn(prompts, completions, "
                    "completion_ids, **columns), lists in, a list of numbers out"
                )
            shown = " and ".join(f"{text[:60]!r}" for text in batch)
            yield f"{name} {report}, for the completion {shown} of {row.where}"
            break


def trial_of_environment(
    environment: EnvironmentConfig, rewards: Sequence[RewardConfig] = ()
) -> Trial:
    """Returns a worker process in which the user's environment can be tried before the run.

    `rewards` are the reward functions that take the argument `environments`."""
    # A generous bound of the characters that reset() may give.
    setup = {"environment": environment, "max_chars": 10_000_000}
    return Trial("grpo_spmd.episodes.worker", setup, rewards)


def _try_environment(
    config: Config, inputs: Inputs, rewards: Sequence[RewardConfig]
) -> Iterator[str]:
    """Yields a warning if the environment cannot begin an episode of the first row of the data.

    `rewards` are the reward functions that take the argument `environments`. Raises ConfigError if
    the environment cannot be loaded, or if nothing gives a reward."""
    with trial_of_environment(config.environment, rewards) as trial:
        facts = trial.load()
        weights = {reward.name: reward.weight for reward in inputs.rewards}
        check_known_rewards(config, weights | facts["weights"])
        # An agent runs its whole episode in one call, which needs a model.
        if facts["kind"] == "agent":
            return
        row = inputs.rows[0]
        call = {
            "method": "begin",
            "serial": 0,
            "seed": config.seed,
            "row": {**dict.fromkeys(inputs.columns), **row.columns, "prompt": row.prompt},
        }
        reply = trial.ask(call, config.environment.call_timeout_s)
        if "broken" in reply:
            raise ConfigError(f"environment: {reply['broken']}")
        if "failed" in reply:
            report = reply["failed"].partition("\n")[0]
            yield f"environment: an episode of {row.where} cannot begin: it {report}"
