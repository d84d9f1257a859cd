"""The processes of a rank's environments: one episode at a time in each, a deadline for each call and for all of an
episode's, and a hard kill. An episode keeps its process; what is left of one that was killed is hunted down."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig, RewardConfig
from grpo_spmd.engine.requests import ConversationId
from grpo_spmd.rewards.pool.nursery import encode_frame
from grpo_spmd.rewards.pool.processes import HowItFailed, ProcessPool, WorkerProcess, allow_workers
from grpo_spmd.rewards.trl import RewardError

What = Literal["begin", "act", "end"]
_MAX_FRAME_BYTES = 256 << 20  # more than messages of max_chars can be
_STATUSES: dict[HowItFailed, Literal["env_error", "env_timeout"]] = {
    "error": "env_error",
    "timeout": "env_timeout",
}


@dataclass(frozen=True)
class EnvironmentFacts:
    """What the user's code is, as its nursery tells."""

    kind: Literal["tools", "gym", "agent"]
    reward_names: list[str]
    weights: list[float]
    tools: list[dict[str, Any]]  # JSON schemas


@dataclass(frozen=True)
class Reply:
    what: What
    values: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Failure:
    status: Literal["env_error", "env_timeout"]
    why: str
    seconds: float


@dataclass
class _Live:
    """An episode with a worker."""

    worker: WorkerProcess
    used_s: float = 0.0  # by its calls so far
    died: str = ""  # how its worker did, between two calls


@dataclass
class _Call:
    place: ConversationId
    what: What
    serial: int
    at: str  # what is running, for people
    began: float = field(default_factory=time.monotonic)
    is_debugged: bool = False  # then its time is people's


class EnvironmentPool(ProcessPool):
    """For the thread that made it alone."""

    _what = "environment"
    _max_frame_bytes = _MAX_FRAME_BYTES

    def __init__(
        self,
        environment: EnvironmentConfig,
        rewards: Sequence[RewardConfig],
        log_file: Path,
        *,
        check: Callable[[], None] = lambda: None,
        max_chars: int = 10_000_000,
    ) -> None:
        """Start the nursery, which imports the user's code while the caller goes on. `rewards`: those whose functions
        take `environments`. `max_chars`: of a result, beyond which it is not brought here. Files are as in
        ProcessPool."""
        allow_workers(environment.num_workers, "environment.num_workers")
        setup = {"environment": asdict(environment), "max_chars": max_chars}
        module = "grpo_spmd.episodes.worker"
        # The order of a set of texts would be another in each process, and an environment's choice with it.
        variables = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        super().__init__(module, setup, rewards, log_file, check=check, variables=variables)
        self._config = environment
        self._facts: EnvironmentFacts | None = None
        self._waiting: deque[tuple[ConversationId, dict[str, Any]]] = deque()  # to begin
        self._live: dict[ConversationId, _Live] = {}
        self._idle: list[WorkerProcess] = []
        self._came: list[tuple[ConversationId, Reply | Failure]] = []
        self._num_calls = 0
        self._engine_s: Callable[[ConversationId], float] = lambda place: 0.0

    @property
    def facts(self) -> EnvironmentFacts:
        """Waits for the nursery, once. Raises ConfigError."""
        if self._facts is None:
            self._facts = EnvironmentFacts(**self._wait_until_ready())
        return self._facts

    def add_file(self, fileno: int) -> None:
        """`poll` returns early where there is something to read in it."""
        self._selector.register(fileno, 1)

    def excuse(self, engine_s: Callable[[ConversationId], float]) -> None:
        """`engine_s` says how long an agent's episode has waited for the engine so far, which is not its time."""
        self._engine_s = engine_s

    def begin(
        self,
        place: ConversationId,
        row: dict[str, Any],
        seed: int,
        extra: dict[str, str] | None = None,
    ) -> None:
        """An episode, as soon as a worker is free; `random` and numpy's are seeded in it. `extra`: an agent's."""
        assert place not in self._live, f"the episode of {place} is under way"
        self._waiting.append((place, {"row": row, "seed": seed, "extra": extra or {}}))
        self._dispatch()

    def act(self, place: ConversationId, message: dict[str, Any]) -> None:
        """What the policy said. A reply or a failure comes of it, as of everything that is asked."""
        calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        self._ask(
            place,
            "act",
            {"message": json.dumps(message)},
            f"tool {calls[0]!r:.100}" if calls else "step()",
        )

    def end(self, place: ConversationId, given: dict[str, Any]) -> None:
        """Ask for its rewards; `given` are the keyword lists of a reward function for this one completion."""
        said = {name: given[name] for name in ("completions", "completion_ids") if name in given}
        columns = {name: values for name, values in given.items() if name not in said}
        self._ask(place, "end", {"given": columns, "said": json.dumps(said)}, "its rewards")

    def release(self, place: ConversationId) -> None:
        """It is over, and its worker free for the next."""
        live = self._live.pop(place)
        if not live.died:
            self._idle.append(live.worker)
        self._dispatch()

    def drop(self, place: ConversationId) -> None:
        """It is over, whatever it was at: its worker is killed."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != place)
        self._came = [entry for entry in self._came if entry[0] != place]
        live = self._live.pop(place, None)
        if live is not None and not live.died:
            self._discard(live.worker)

    def poll(self, timeout_s: float) -> list[tuple[ConversationId, Reply | Failure]]:
        """What has come of what was asked; where nothing has, waits at most `timeout_s` for something. Raises
        RewardError: the nursery was killed, the user left the debugger, or code that no episode is to blame for."""
        self._dispatch()
        for place, live in self._live.items() if self.facts.kind == "agent" else ():
            if isinstance(call := live.worker.call, _Call) and not (
                call.is_debugged or live.worker.has_hung_up
            ):
                left = (
                    self._config.timeout_s + self._engine_s(place) - (time.monotonic() - call.began)
                )
                self._take_on(live.worker, call, left)
        self._listen(0.0 if self._came else timeout_s)
        self._dispatch()
        came, self._came = self._came, []
        return came

    def where(self) -> str:
        """What has run longest, for whoever asks why this rank waits; any thread may."""
        calls = [
            worker.call for worker in list(self._workers.values()) if isinstance(worker.call, _Call)
        ]
        if not calls:
            return ""
        first = min(calls, key=lambda call: call.began)
        episode = "/".join(map(str, first.place))
        return f"{first.at} of episode {episode} has run for {time.monotonic() - first.began:.0f} s"

    def _dispatch(self) -> None:
        while self._waiting and (self._idle or len(self._workers) < self._config.num_workers):
            place, message = self._waiting.popleft()
            is_new = not self._idle
            self._live[place] = _Live(self._spawn() if is_new else self._idle.pop())
            at = "rollout()" if message["extra"] else "reset()"
            if not self._ask(place, "begin", message, at, is_new=is_new):
                self._discard(self._live.pop(place).worker)
                self._waiting.appendleft((place, message))

    def _ask(
        self,
        place: ConversationId,
        what: What,
        message: dict[str, Any],
        at: str,
        *,
        is_new: bool = True,
    ) -> bool:
        """Whether it could be: False where a worker has gone, unseen, that has done nothing for this episode yet."""
        live, config = self._live[place], self._config
        if live.died:
            del self._live[place]
            self._came.append((place, Failure("env_error", live.died, 0.0)))
            return True
        self._num_calls += 1
        call = _Call(place, what, self._num_calls, at)
        frame = encode_frame(
            {"what": what, "place": place, "serial": call.serial, **message}, "an environment"
        )
        left = max(config.timeout_s - live.used_s, 0.0)
        try:  # an agent's one call is its whole episode
            self._give(
                live.worker,
                call,
                frame,
                left if message.get("extra") else min(config.call_timeout_s, left),
            )
        except OSError:  # it has died, or does not read
            if what == "begin" and not is_new:
                return False
            self._fail(
                live.worker, "error", "does not take a call: its process has ended, or is stopped"
            )
        return True

    def _take(self, worker: WorkerProcess, reply: dict[str, Any]) -> None:
        if "breakpoint" in reply and isinstance(worker.call, _Call):
            worker.call.is_debugged = True
        super()._take(worker, reply)

    def _seconds(self, call: _Call) -> float:
        """That the user's code took, waiting for the engine left out."""
        return max(time.monotonic() - call.began - self._engine_s(call.place), 0.0)

    def _answered(self, worker: WorkerProcess, reply: dict[str, Any]) -> None:
        call = worker.call
        assert isinstance(call, _Call)
        if isinstance(at := reply.get("at"), str):
            call.at = f"tool {at!r:.100}"
            return
        if (reply.get("place"), reply.get("serial")) != ([*call.place], call.serial):
            self._fail(worker, "error", "answered another call than it was asked")
        elif "quit" in reply:
            raise RewardError("the debugger was left in an environment")
        elif "broken" in reply:
            raise RewardError(f"environment: {reply['broken']!s:.4000}")
        elif "values" in reply:
            seconds = self._seconds(call)
            try:
                values = checked(call.what, reply["values"], is_agent=self.facts.kind == "agent")
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                self._fail(worker, "error", f"answered with what is no reply: {error!s:.300}")
                return
            self._release(worker)
            self._live[call.place].used_s += 0.0 if call.is_debugged else seconds
            self._came.append((call.place, Reply(call.what, values, seconds)))
        else:
            self._fail(worker, "error", str(reply.get("failed"))[:8000])

    def _failed(self, worker: WorkerProcess, call: Any, how: HowItFailed, why: str) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
        if isinstance(call, _Call):
            self._live.pop(call.place, None)
            seconds = self._seconds(call)
            self._came.append((call.place, Failure(_STATUSES[how], f"{call.at} {why}", seconds)))
            return
        for live in self._live.values():
            if live.worker is worker:
                live.died = f"its process ended between two calls: {why}"

    def _too_long(self, worker: WorkerProcess) -> str:
        call, config = worker.call, self._config
        assert isinstance(call, _Call)
        whole = self._live[call.place].used_s + self._seconds(call)
        if whole >= config.timeout_s:
            return f"took longer than environment.timeout_s={config.timeout_s:g}, with all calls of its episode"
        return f"took longer than environment.call_timeout_s={config.call_timeout_s:g}"

    def _ended(self, why: str) -> Exception:
        return RewardError(why) if self._facts is not None else ConfigError(why)


def checked(what: What, values: Any, *, is_agent: bool = False) -> dict[str, Any]:
    """A reply's values, if they are such as a driver gives; user code may have written them. Raises ValueError and what
    else a wrong shape leads to."""
    if what == "end" or is_agent:
        rewards = values["rewards"]
        for name, value in rewards.items():
            if value is not None and not isinstance(value, str) and not math.isfinite(value):
                raise ValueError(f"the reward {name!r:.80} is {value!r:.80}")
        return {"rewards": dict(rewards)}
    if what == "begin":
        found, tools = values.get("messages"), values["tools"]
        if found is not None and not isinstance(found, str | list):
            raise ValueError(f"reset() gave {type(found).__name__}, and not text, messages or None")
        for message in found if isinstance(found, list) else ():
            if "role" in message:  # else a block of text
                _check_message(message)
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("its tools are no list of schemas")
        return {"messages": found, "tools": tools}
    for message in values["messages"]:
        _check_message(message)
    reward, counts = values["reward"], [values["num_calls"], values["num_invalid"]]
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the reward {reward!r:.80} is no finite number")
    if not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError(f"it counts {counts!r:.80} calls")
    too_long = values.get("too_long")
    return {
        "messages": list(values["messages"]), "reward": reward, "done": bool(values["done"]),
        "num_calls": counts[0], "num_invalid": counts[1], "too_long": int(too_long) if too_long else None,
    }  # fmt: skip


def _check_message(message: Any) -> None:
    """Raises ValueError, or what else a wrong shape leads to, for what templates cannot be given."""
    calls, content = message.get("tool_calls"), message.get("content")
    is_sound = isinstance(message["role"], str) and (
        content is None or isinstance(content, str | list)
    )
    if not is_sound or not (
        calls is None or (isinstance(calls, list) and all(isinstance(one, dict) for one in calls))
    ):
        raise ValueError(f"{message!r:.200} is no message")
