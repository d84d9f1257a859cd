"""One game as four libraries would have it: Gym over messages, OpenEnv, SkyRL Gym, ms-swift. Each
text of the policy is
worth 1 where it has an "a" in it, in the second turn 2 and in the third, which is the last, 4."""

import multiprocessing
from dataclasses import dataclass
from typing import Any


def worth(turn: int, text: str) -> float:
    return 2.0**turn * ("a" in text)


class PlainGym:
    def reset(self, prompt: Any, **row: Any) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "plain", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return f"plain {len(action)}", worth(self.turn - 1, action), self.turn == 3, False, {}


@dataclass
class Action:
    message: str


@dataclass
class Observation:
    text: str


@dataclass
class StepResult:
    observation: Observation
    reward: float | None = None
    done: bool = False


class OpenEnvClient:
    async def reset(self, **kwargs: Any) -> StepResult:
        self.turn = 0
        return StepResult(Observation("openenv"))

    async def step(self, action: Action) -> StepResult:
        self.turn += 1
        result = Observation(f"openenv {len(action.message)}")
        return StepResult(result, worth(self.turn - 1, action.message), self.turn == 3)


class SkyRLEnv:
    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.turn = 0
        return [*prompt, {"role": "user", "content": "skyrl"}], {}

    def step(self, action: str) -> dict[str, Any]:
        self.turn += 1
        result = [{"role": "user", "content": f"skyrl {len(action)}"}]
        reward = worth(self.turn - 1, action)
        return {"observations": result, "reward": reward, "done": self.turn == 3, "metadata": {}}

    def close(self) -> None:
        pass


Messages = list[dict[str, Any]]


class SwiftEnv:
    async def reset(self, config: Any) -> tuple[str, dict[str, Any], str]:
        self.turn = 0
        return "swift", {}, ""

    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        text = action[-1]["content"]
        self.turn += 1
        return f"swift {len(text)}", worth(self.turn - 1, text), self.turn == 3, {}


_num_made = multiprocessing.Value(
    "i", 0
)  # by all workers, which are forked from where this is imported


def any_of_four() -> Any:
    """The next one, that four workers have four."""
    with _num_made.get_lock():
        number = _num_made.value
        _num_made.value += 1
    return (PlainGym, OpenEnvClient, SkyRLEnv, SwiftEnv)[number % 4]()
