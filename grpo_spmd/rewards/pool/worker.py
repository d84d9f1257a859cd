"""What the reward pool's processes run: the rewards, imported once, and one call after the other.

python -m grpo_spmd.rewards.pool.worker SOCKET_FD PARENT_PID      (by pool.py; nursery.py says the
rest)
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Any

from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.named import unpack
from grpo_spmd.rewards.pool.nursery import MAX_ERROR_CHARS, Answer, Worker, run_nursery
from grpo_spmd.rewards.protocol import Reward, RewardFacts, load_rewards
from grpo_spmd.rewards.trl import (
    BrokenContractError,
    CallLog,
    FailedCallError,
    TrainerState,
    as_number,
    values_of,
)
from grpo_spmd.rewards.verifiers import load_math_verify

_WARM = {
    "math": load_math_verify
}  # a shipped reward's import at its first call: 2 s, which would count as the call's


def load(setup: dict[str, Any]) -> tuple[list[dict[str, Any]], Callable[[Worker], Answer]]:
    """In the nursery:

    what the pool is told of the rewards, and what answers its calls in a worker.
    """
    if (functions := setup.get("functions")) is not None:
        unpack(functions)
    configs = [RewardConfig(**reward) for reward in setup["rewards"]]
    rewards = load_rewards(configs, setup["timeout_s"])
    for config in configs:
        if config.is_shipped and config.name in _WARM:
            _WARM[config.name]()

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        reply = call_reward(rewards[message["reward"]], message["keywords"], message.get("state"))
        return {**reply, "seconds": time.perf_counter() - start}

    names = [field.name for field in fields(RewardFacts)]
    return [{name: getattr(reward, name) for name in names} for reward in rewards], lambda _: answer


def call_reward(
    reward: Reward, keywords: dict[str, Any], state: dict[str, Any] | None = None
) -> dict[str, Any]:
    """{"values": one a completion: a finite number, None (does not apply), or a string that says
    why it is unusable}, with what the function logged (trl.CallLog.reply); or {"failed": what the
    function did, with the traceback}, {"broken": what is wrong whatever the completions are},
    {"quit": True} where the user left the debugger. With "again", "wait_s" and "status" what failed
    was a FailedCallError.
    """
    expected, log = len(keywords["prompts"]), CallLog(len(keywords["prompts"]))
    try:
        values = reward.function(
            **keywords | values_of(reward.takes, TrainerState(**state or {}), log)
        )
        if inspect.isawaitable(values):
            values = asyncio.run(_finish(values))
        wrong = f"must return a list of numbers or None; got {type(values).__name__}"
        is_list = hasattr(values, "__len__") and hasattr(values, "__iter__")
        if isinstance(values, str | bytes | dict | set) or not is_list:
            return {"failed": wrong}
        try:
            values = list(values)
        except TypeError:  # a tensor without dimensions
            return {"failed": f"{wrong} without a length"}
        if len(values) != expected:
            return {"broken": f"returned {len(values)} values for {expected} completions"}
        return {"values": [_as_reward(value) for value in values], **log.reply()}
    except FailedCallError as error:
        return {
            "failed": str(error),
            "again": error.may_retry,
            "wait_s": error.wait_s,
            "status": error.status,
        }
    except BrokenContractError as error:
        return {"broken": str(error)}
    except bdb.BdbQuit:
        return {"quit": True}
    except (
        BaseException
    ) as error:  # SystemExit and KeyboardInterrupt too: the function fails, not the worker
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # this frame says nothing
        what = traceback.format_exception_only(error)[-1].strip()[:500]
        return {
            "failed": f"raised {what}\n{''.join(traceback.format_exception(error))[-MAX_ERROR_CHARS:]}"
        }


async def _finish(values: Awaitable[Any]) -> Any:
    return await values


def _as_reward(value: Any) -> float | str | None:
    number = None if value is None else as_number(value)
    return (
        number
        if number is None or (isinstance(number, float) and math.isfinite(number))
        else f"returned {number}"
    )


if __name__ == "__main__":
    run_nursery(load)
