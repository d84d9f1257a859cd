"""This module is the program of the reward pool's nursery and workers: it imports the rewards once
and calls them.

python -m grpo_spmd.rewards.pool.worker SOCKET_FD SETUP_FD PARENT_PID    (see nursery.py)
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
import sysconfig
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_spmd.config.errors import cut_middle
from grpo_spmd.records import Fields
from grpo_spmd.rewards.named import unpack
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
# The paths of files that are not the user's begin like this: this package, the standard library.
_OTHERS_FILES = (
    str(Path(__file__).parents[2]) + "/",
    sysconfig.get_path("stdlib") + "/",
    "<frozen ",
)


def load(setup: Fields) -> tuple[list[Fields], Callable[[Worker], Answer]]:
    """Imports the rewards in the nursery (see nursery.Load).

    Returns the fields of RewardFacts for the pool, and a function that returns a worker's Answer.
    """
    configs = setup["rewards"]
    rewards = load_rewards(configs, setup["timeout_s"], variables=setup["secrets"])
    # Import math-verify now: that takes 2 s, which would otherwise count as time of the first call.
    if any(config.is_shipped and config.name == "math" for config in configs):
        load_math_verify()

    def answer(message: Fields) -> Fields:
        """Calls the reward that the pool's message names and returns the reply (call_reward)."""
        start = time.perf_counter()
        rows = [unpack(row) for row in message["rows"]]
        keywords = {name: [row[name] for row in rows] for name in rows[0]}
        reply = call_reward(rewards[message["reward"]], keywords, message["state"])
        return {**reply, "seconds": time.perf_counter() - start}

    names = [field.name for field in fields(RewardFacts)]
    return [{name: getattr(reward, name) for name in names} for reward in rewards], lambda _: answer


def call_reward(reward: Reward, keywords: Fields, state: TrainerState | None = None) -> Fields:
    """Calls a reward function and returns the reply for the pool (pool._Reply).

    The reply is one of:
    * {"values": [...]}: for each completion a finite number, None (does not apply), or a string
      that says why the value is unusable; beside it what the function logged (trl.CallLog.reply).
    * {"failed": what happened, with the traceback}: the function raised or returned no list.
    * {"failed": ..., "failure": the fields of a FailedCallError}: a server could not be asked.
    * {"broken": what is wrong}: a fault that no completion can have caused.
    * {"quit": True}: the user left the debugger.
    """
    num_completions = len(keywords["prompts"])
    log = CallLog(num_completions)
    # TRL's extra arguments. `environments` is None, as the reward pool has none.
    extra = {
        "trainer_state": state or TrainerState(),
        "log_metric": log.metric,
        "log_extra": log.extra,
        "environments": None,
    }
    try:
        values = reward.function(**keywords | {name: extra[name] for name in reward.takes})
        if inspect.isawaitable(values):
            values = asyncio.run(_finish(values))
        try:
            # len() raises TypeError for a generator and for a tensor without dimensions.
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
    # This catches SystemExit and KeyboardInterrupt, too: the call fails, but the worker goes on.
    except BaseException as error:
        return reply_to_error(error)


def reply_to_error(error: BaseException) -> Fields:
    """Returns the reply (see call_reward) for an exception that the user's code raised."""
    if isinstance(error, BrokenContractError):
        return {"broken": str(error)}
    if isinstance(error, bdb.BdbQuit):
        return {"quit": True}
    return {"failed": f"raised {describe_error(error)}"}


def describe_error(error: BaseException) -> str:
    """Returns one line with the exception that the user's code raised and where, then its
    traceback.

    The traceback begins with the user's first frame.
    """
    place = ""
    # Leave out the outer frames, of this package and asyncio, which called the user's code.
    frames = []
    entry = error.__traceback__
    while entry is not None:
        if _is_users(entry):
            frames.append(entry)
        entry = entry.tb_next
    if frames:
        error = error.with_traceback(frames[0])
        file = Path(frames[-1].tb_frame.f_code.co_filename).name
        place = f" ({file}:{frames[-1].tb_lineno})"
    # Of a SyntaxError the first lines, which are indented, show the place; notes come last.
    lines = traceback.format_exception_only(error)
    reason = " ".join(next(line for line in lines if line[0] != " ").split())
    report = "".join(traceback.format_exception(error))
    reason = cut_middle(reason, _MAX_REASON_CHARS)
    return f"{reason}{place}\n{cut_middle(report, MAX_ERROR_CHARS)}"


def _is_users(entry: TracebackType) -> bool:
    """Returns True for a frame of a file that is not of this package, the standard library or an
    installed package."""
    file = entry.tb_frame.f_code.co_filename
    # Debian's Python, which NVIDIA's images have, installs packages into dist-packages.
    is_installed = "/site-packages/" in file or "/dist-packages/" in file
    return not file.startswith(_OTHERS_FILES) and not is_installed


async def _finish(values: Awaitable[Any]) -> Any:
    """Returns the result of an awaitable, as the coroutine that asyncio.run needs."""
    return await values


if __name__ == "__main__":
    run_nursery(load)
