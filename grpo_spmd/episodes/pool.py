"""This module manages the worker processes in which a rank's environments run.

Each worker runs one episode at a time, and an episode stays in its worker. Each call has a
deadline, and so have all calls of an episode together. A worker that exceeds one is killed together
with all processes that it started.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from grpo_spmd.config.errors import ConfigError, cut_middle
from grpo_spmd.config.schema import EnvironmentConfig, RewardConfig
from grpo_spmd.engine.requests import ConversationId
from grpo_spmd.episodes.endpoint import Endpoint
from grpo_spmd.records import Fields, Message
from grpo_spmd.rewards.pool.processes import HowItFailed, ProcessPool, WorkerProcess, allow_workers
from grpo_spmd.rewards.trl import RewardError

_log = logging.getLogger("grpo_spmd")

Method = Literal["begin", "act", "end"]


@dataclass(frozen=True)
class EnvironmentFacts:
    """The facts about the user's environments and rewards, reported at the start by the nursery:
    the process that imports the user's code and forks workers."""

    kind: Literal["tools", "gym", "agent"]
    weights: dict[str, float]
    """The weights of rewards by name: first the environment's own, then those of reward functions
    that take `environments`."""
    tools: list[Fields]
    """The JSON schemas of all tools."""


@dataclass(frozen=True)
class Reply:
    """The result of a call to an environment that succeeded."""

    method: Method
    values: Fields
    """The fields of the form that _FORMS has for this method."""
    seconds: float


@dataclass(frozen=True)
class Failure:
    """The result of a call to an environment that failed, which ends the attempt at the episode."""

    status: str
    """"env_error" or "env_timeout"."""
    error: str
    seconds: float


@dataclass
class _LiveEpisode:
    """An episode that has begun in a worker process."""

    worker: WorkerProcess
    used_s: float = 0.0
    """The seconds of its finished calls."""


@dataclass
class _Call:
    """A call to an environment that a worker is running."""

    conversation: ConversationId
    method: Method
    serial: int
    location: str
    """What of the user's code is running, such as "reset()" or "tool 'add'", for reports."""
    start: float = field(default_factory=time.monotonic)


class EnvironmentPool(ProcessPool):
    """The worker processes of one rank in which environments run, one episode at a time in each.

    Only the thread that made the pool may use it.
    """

    _what = "environment"
    # A worker's reply with messages of at most `max_chars` characters always fits into this.
    _max_frame_bytes = 256 << 20

    def __init__(
        self,
        environment: EnvironmentConfig,
        rewards: Sequence[RewardConfig],
        log_file: Path,
        *,
        check: Callable[[], None] = lambda: None,
        max_chars: int = 10_000_000,
        secrets: Collection[str] = (),
    ) -> None:
        """Starts the nursery, which imports the user's code while the caller continues.

        `rewards` are those whose functions take `environments`. A worker does not send messages of
        more than `max_chars` characters. The other arguments are as in ProcessPool.
        """
        allow_workers(environment.num_workers, "environment.num_workers")
        super().__init__(
            "grpo_spmd.episodes.worker",
            {"environment": environment, "max_chars": max_chars},
            rewards,
            log_file,
            check=check,
            # Without a fixed hash seed, sets of strings would have another order in each process,
            # and an environment might make other choices.
            variables={"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")},
            secrets=secrets,
        )
        self._config = environment
        self._facts: EnvironmentFacts | None = None
        # The episodes that no worker has begun yet, with the message that begins each.
        self._waiting: deque[tuple[ConversationId, Fields]] = deque()
        # The episodes that run in a worker.
        self._live: dict[ConversationId, _LiveEpisode] = {}
        # The results that `poll` has not returned yet.
        self._replies: list[tuple[ConversationId, Reply | Failure]] = []
        # By number of a worker that ended between two calls: how it ended.
        self._ends: dict[int, str] = {}
        self._num_calls = 0
        self._warned = set[str]()
        # Returns the seconds that an agent has waited for the engine; 0 if there are no agents.
        self._engine_s: Callable[[ConversationId], float] = lambda conversation: 0.0

    @property
    def facts(self) -> EnvironmentFacts:
        """Returns the facts about the user's code. The first call waits for the nursery.

        Raises ConfigError if the code cannot be loaded.
        """
        if self._facts is None:
            self._facts = EnvironmentFacts(**self._wait_until_ready())
        return self._facts

    def connect(self, endpoint: Endpoint) -> None:
        """Lets `poll` return early when agents have sent requests to the endpoint.

        The time in which agents wait there does not count against their episodes' deadlines.
        """
        self._selector.register(endpoint, 1)
        self._engine_s = endpoint.engine_s

    def begin(
        self,
        conversation: ConversationId,
        row: Fields,
        seed: int,
        access: dict[str, str] | None = None,
    ) -> None:
        """Begins an episode as soon as a worker is free.

        The worker seeds `random` and numpy with `seed` before the episode. `access` has the
        endpoint's address and key, which an agent needs to request turns; None without an agent.
        """
        assert conversation not in self._live, f"the episode of {conversation} is under way"
        self._waiting.append((conversation, {"row": row, "seed": seed, "access": access or {}}))
        self._dispatch()

    def act(self, conversation: ConversationId, message: Message) -> None:
        """Sends the policy's turn to the environment. As for every call, `poll` later returns a
        Reply or a Failure."""
        calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        location = f"tool {calls[0]!r:.100}" if calls else "step()"
        self._send_call(conversation, "act", {"message": message}, location)

    def end(self, conversation: ConversationId, arguments: Fields) -> None:
        """Asks the worker for the episode's rewards.

        `arguments` are the arguments of a reward function, for this one completion.
        """
        columns = {name: [value] for name, value in arguments.items()}
        self._send_call(conversation, "end", {"columns": columns}, "its rewards")

    def release(self, conversation: ConversationId) -> None:
        """Ends an episode after its last call; its worker is free for the next one."""
        del self._live[conversation]
        self._dispatch()

    def drop(self, conversation: ConversationId) -> None:
        """Ends an episode, whether it waits for a worker or runs; a worker that runs it is
        killed."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != conversation)
        # A reply of the episode may be waiting for `poll`.
        self._replies = [entry for entry in self._replies if entry[0] != conversation]
        episode = self._live.pop(conversation, None)
        if episode is not None and episode.worker.number in self._workers:
            self._discard(episode.worker)

    def poll(self, timeout_s: float) -> list[tuple[ConversationId, Reply | Failure]]:
        """Returns the results of calls. If there are none, it waits for at most `timeout_s`
        seconds.

        Raises RewardError if the nursery was killed, if the user left the debugger, or if the
        user's code has a fault that does not depend on the episode.
        """
        self._dispatch()
        if self.facts.kind == "agent":
            self._extend_deadlines()
        self._listen(0.0 if self._replies else timeout_s)
        self._dispatch()
        replies = self._replies
        self._replies = []
        return replies

    def where(self) -> str:
        """Describes the call that has run for the longest time; returns "" if none is running.

        It is part of reports that say what this rank is waiting for. Any thread may call it.
        """
        # Copied first, since the pool's own thread may add or remove workers meanwhile.
        calls: list[_Call] = [worker.call for worker in list(self._workers.values()) if worker.call]
        if not calls:
            return ""
        call = min(calls, key=lambda call: call.start)
        episode = "/".join(map(str, call.conversation))
        seconds = time.monotonic() - call.start
        return f"{call.location} of episode {episode} has run for {seconds:.0f} s"

    def _extend_deadlines(self) -> None:
        """Extends the deadlines of agents by the time that they have waited for the engine."""
        for conversation, episode in self._live.items():
            worker = episode.worker
            # A call that has reached a breakpoint has no deadline any more.
            if worker.call and worker.deadline < math.inf and not worker.has_hung_up:
                # An agent's call includes its waits for the engine, which must not count.
                elapsed_s = time.monotonic() - worker.call.start
                remaining_s = self._config.timeout_s + self._engine_s(conversation) - elapsed_s
                self._take_on(worker, worker.call, remaining_s)

    def _dispatch(self) -> None:
        """Begins waiting episodes in idle workers, and in new ones up to `num_workers`."""
        while self._waiting:
            taken = {episode.worker.number for episode in self._live.values()}
            idle = [worker for worker in self._workers.values() if worker.number not in taken]
            if not idle and len(self._workers) >= self._config.num_workers:
                return
            conversation, message = self._waiting.popleft()
            worker = idle[0] if idle else self._spawn()
            self._live[conversation] = _LiveEpisode(worker)
            location = "rollout()" if message["access"] else "reset()"
            is_new = not idle
            # An idle worker may have died. Then the episode waits for another worker.
            if not self._send_call(conversation, "begin", message, location, is_new_worker=is_new):
                self._discard(self._live.pop(conversation).worker)
                self._waiting.appendleft((conversation, message))

    def _send_call(
        self,
        conversation: ConversationId,
        method: Method,
        message: Fields,
        location: str,
        *,
        is_new_worker: bool = True,
    ) -> bool:
        """Sends a call to an episode's worker.

        Returns False if an idle worker had died before it got the episode's first call, so that the
        caller may use another worker. Other failures become a Failure, and the result is True.
        """
        episode = self._live[conversation]
        # The serial number distinguishes the answer to this call from late or forged answers.
        self._num_calls += 1
        call = _Call(conversation, method, self._num_calls, location)
        fields = {"method": method, "serial": call.serial, **message}
        seconds = max(self._config.timeout_s - episode.used_s, 0.0)
        # An agent's only call is its whole episode, so it has no deadline for a single call.
        if not message.get("access"):
            seconds = min(self._config.call_timeout_s, seconds)
        try:
            self._give(episode.worker, call, fields, seconds)
        except OSError:
            # The worker has died, or did not read its socket in time.
            if method == "begin" and not is_new_worker:
                return False
            if episode.worker.number in self._workers:
                self._discard(episode.worker)
            # The nursery may not have reported yet how the process ended.
            end = self._ends.get(episode.worker.number, "has ended, or is stopped")
            reason = f"does not take a call: its process {end}"
            self._failed(episode.worker, call, "error", reason)
        return True

    def _seconds(self, call: _Call) -> float:
        """Returns the seconds since the call began, without an agent's waits for the engine."""
        return max(time.monotonic() - call.start - self._engine_s(call.conversation), 0.0)

    def _answered(self, worker: WorkerProcess, reply: Fields) -> None:
        """Handles a worker's message: the name of a tool that it calls now, or its final answer."""
        call: _Call = worker.call
        tool = reply.get("tool")
        if isinstance(tool, str):
            call.location = f"tool {tool!r:.100}"
        # The user's code may write to the socket, so only the answer to this very call counts.
        elif reply.get("serial") != call.serial:
            self._fail(worker, "error", "answered another call than it was asked")
        elif "quit" in reply:
            raise RewardError("the debugger was left in an environment")
        elif "broken" in reply:
            raise RewardError(f"environment: {reply['broken']!s:.4000}")
        elif "values" in reply:
            self._add_values(worker, call, reply["values"])
        else:
            self._fail(worker, "error", cut_middle(str(reply.get("failed")), 8_000))

    def _warn_once(self, kind: str, text: str) -> None:
        """Logs a warning, unless this pool has logged one of the same `kind` before."""
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("%s", cut_middle(text, 1_000))

    def _add_values(self, worker: WorkerProcess, call: _Call, values: Any) -> None:
        """Checks the values of a successful call, and adds a Reply for `poll` to return."""
        seconds = self._seconds(call)
        # An agent's only call also ends the episode, so its values have the form of "end".
        method: Method = "end" if self.facts.kind == "agent" else call.method
        try:
            fields = msgspec.structs.asdict(msgspec.convert(values, _FORMS[method]))
            # These faults do not stop the run, so only a warning can show them.
            if fields.get("lost"):
                self._warn_once("lost", fields["lost"])
            if fields.get("first_error"):
                self._warn_once(
                    "tool",
                    f"{fields['first_error']}; the policy is given the error, and "
                    f"environment/tool_error_frac counts them; traceback: {self._log_file}",
                )
            messages = fields.get("messages")
            if isinstance(messages, list):
                # reset() may return blocks of text instead of messages.
                if method == "begin":
                    messages = [
                        item for item in messages if isinstance(item, dict) and "role" in item
                    ]
                msgspec.convert(messages, list[_MessageForm])
        except ValueError as error:
            self._fail(worker, "error", f"sent a malformed reply: {error!s:.300}")
            return
        # Time at a breakpoint does not count against the episode's deadline.
        if worker.deadline < math.inf:
            self._live[call.conversation].used_s += seconds
        self._release(worker)
        self._replies.append((call.conversation, Reply(call.method, fields, seconds)))

    def _failed(
        self, worker: WorkerProcess, call: _Call | None, kind: HowItFailed, reason: str
    ) -> None:
        """Adds a Failure for `poll` to return, now or at the next call of the worker's episode."""
        if call is None:
            # The next call of the worker's episode reports the failure.
            self._ends[worker.number] = reason
        else:
            self._live.pop(call.conversation, None)
            failure = Failure(f"env_{kind}", f"{call.location} {reason}", self._seconds(call))
            self._replies.append((call.conversation, failure))

    def _too_long(self, worker: WorkerProcess) -> str:
        """Returns the reason of failure for a call whose deadline has passed (ProcessPool)."""
        return (
            f"took longer than environment.call_timeout_s={self._config.call_timeout_s:g}, or with "
            f"all calls of its episode longer than environment.timeout_s={self._config.timeout_s:g}"
        )

    def _ended(self, reason: str) -> Exception:
        """Returns the exception for a nursery that ended: a ConfigError until it was ready."""
        return RewardError(reason) if self._facts is not None else ConfigError(reason)


# The forms of a reply's values. They are checked, because the user's code runs in the process that
# sends them and may have written anything.


class _MessageForm(msgspec.Struct):
    """The form that chat templates need a message to have."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Fields] | None = None


class _BeginValues(msgspec.Struct):
    """The answer to the call that begins an episode: its tools, and what reset() has returned."""

    tools: list[Fields]
    messages: str | list[Any] | None = None


_Count = Annotated[int, msgspec.Meta(ge=0)]
# The bounds also refuse NaN.
_Reward = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


class _ActValues(msgspec.Struct):
    """The environment's answer to one turn of the policy."""

    messages: list[Message]
    reward: _Reward | None
    done: bool
    num_calls: _Count
    num_invalid: _Count
    """The calls of an unknown tool, or with arguments that do not fit the tool."""
    num_errors: _Count = 0
    """The calls in which the tool raised."""
    first_error: str = ""
    too_long: int | None = None
    """The number of characters of messages that were too long to be sent."""


class _EndValues(msgspec.Struct):
    """The rewards of an episode by name; a string says why a reward is unusable."""

    rewards: dict[str, _Reward | str | None]
    lost: str = ""
    """A warning that what a reward function logs is lost."""


_FORMS = {"begin": _BeginValues, "act": _ActValues, "end": _EndValues}
