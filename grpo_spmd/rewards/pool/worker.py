"""This module is the program of the reward pool's processes: it imports the rewards once and serves
calls.

python -m grpo_spmd.rewards.pool.worker SOCKET_FD SETUP_FD PARENT_PID    (see nursery.py)
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_spmd.config.errors import cut_middle
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.pool.nursery import MAX_ERROR_CHARS, Answer, Worker, run_nursery
from grpo_spmd.rewards.protocol import Reward, RewardFacts, load_rewards
from grpo_spmd.rewards.trl import (
    NO_LIST,
    BrokenContractError,
    CallLog,
    FailedCallError,
    TrainerState,
    as_reward,
)
from grpo_spmd.rewards.verifiers import load_math_verify

_MAX_REASON_CHARS = 500
# An error may have others as its causes.
_MAX_CAUSES = 32
# Beginnings of the files that no user wrote: this package and the standard library.
_OTHERS_FILES = (
    str(Path(__file__).parents[2]) + "/",
    sysconfig.get_path("stdlib") + "/",
    "<frozen ",
)


def load(setup: dict[str, Any]) -> tuple[list[dict[str, Any]], Callable[[Worker], Answer]]:
    """Runs in the nursery. Returns RewardFacts for the pool, and a function that makes a
    worker's answers."""
    configs = [RewardConfig(**reward) for reward in setup["rewards"]]
    rewards = load_rewards(configs, setup["timeout_s"], variables=setup["secrets"])
    # Its import at the first call takes 2 s, which would count as the call's.
    if any(config.is_shipped and config.name == "math" for config in configs):
        load_math_verify()

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        reply = call_reward(rewards[message["reward"]], message["keywords"], message.get("state"))
        return {**reply, "seconds": time.perf_counter() - start}

    names = [field.name for field in fields(RewardFacts)]
    return [{name: getattr(reward, name) for name in names} for reward in rewards], lambda _: answer


def call_reward(
    reward: Reward, keywords: dict[str, Any], state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the pool's reply (pool._Reply), as one of:

    * {"values": ...}, one a completion: a finite number, None (does not apply), or a text that says
      why it is unusable; with what the function logged (trl.CallLog.reply).
    * {"failed": what the function did, with the traceback}.
    * {"failed": ..., "failure": the fields of a FailedCallError}.
    * {"broken": what is wrong whatever the completions are}.
    * {"quit": True}: the user left the debugger.
    """
    num_completions = len(keywords["prompts"])
    log = CallLog(num_completions)
    # TRL's extra arguments: the reward pool has no environments.
    extra = {
        "trainer_state": TrainerState(**state or {}),
        "log_metric": log.metric,
        "log_extra": log.extra,
        "environments": None,
    }
    try:
        values = reward.function(**keywords | {name: extra[name] for name in reward.takes})
        if inspect.isawaitable(values):
            values = asyncio.run(_finish(values))
        try:
            # A generator has no length, nor has a tensor without dimensions.
            is_list = len(values) >= 0 and not isinstance(values, str | bytes | dict | set)
        except TypeError:
            is_list = False
        if not is_list:
            return {"failed": f"{NO_LIST}; got {type(values).__name__}"}
        values = list(values)
        if len(values) != num_completions:
            return {"broken": f"returned {len(values)} values for {num_completions} completions"}
        return {"values": [as_reward(value) for value in values], **log.reply()}
    except FailedCallError as error:
        return {"failed": error.message, "failure": asdict(error)}
    # SystemExit and KeyboardInterrupt too: the function fails, not the worker.
    except BaseException as error:
        return reply_to_error(error)


def reply_to_error(error: BaseException) -> dict[str, Any]:
    """Returns the reply for what a user's code has raised, as call_reward does."""
    if isinstance(error, BrokenContractError):
        return {"broken": str(error)}
    if isinstance(error, bdb.BdbQuit):
        return {"quit": True}
    return {"failed": f"raised {describe_error(error)}"}


def describe_error(error: BaseException) -> str:
    """Returns the exception that a user's code has raised, with its place, in one line; below it
    the traceback, which begins with the user's first frame."""
    place = ""
    causes: list[BaseException | None] = [error]
    for cause in causes:
        if cause is not None and len(causes) < _MAX_CAUSES:
            causes += [cause.__cause__, cause.__context__]
        # Our own frames and those of asyncio, which call the user's code, say nothing to the user.
        frames = [] if cause is None else [*_frames(cause.__traceback__)]
        indices = [i for i, frame in enumerate(frames) if _is_users(frame)]
        if cause is not None and indices:
            cause.__traceback__ = frames[indices[0]]
            innermost = frames[indices[-1]]
            file = Path(innermost.tb_frame.f_code.co_filename).name
            place = place or f" ({file}:{innermost.tb_lineno})"
    summary = traceback.TracebackException(type(error), error, None)
    # Notes come after the message, and would be taken for it. They stay in the traceback.
    summary.__notes__ = None
    reason = " ".join([*summary.format_exception_only()][-1].split())
    report = "".join(traceback.format_exception(error))
    reason = cut_middle(reason, _MAX_REASON_CHARS)
    return f"{reason}{place}\n{cut_middle(report, MAX_ERROR_CHARS)}"


def _frames(traceback_: TracebackType | None) -> Iterator[TracebackType]:
    while traceback_ is not None:
        yield traceback_
        traceback_ = traceback_.tb_next


def _is_users(entry: TracebackType) -> bool:
    """Returns True for a frame outside of this package, the standard library and what pip
    installed."""
    file = entry.tb_frame.f_code.co_filename
    # Debian's Python, and NVIDIA's images with it, installs into dist-packages.
    is_installed = "/site-packages/" in file or "/dist-packages/" in file
    return not file.startswith(_OTHERS_FILES) and not is_installed


async def _finish(values: Awaitable[Any]) -> Any:
    return await values


if __name__ == "__main__":
    run_nursery(load)
