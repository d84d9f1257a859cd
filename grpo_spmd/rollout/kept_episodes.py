"""The rollout buffer of a run whose completions are episodes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from grpo_spmd.config.dump import config_to_dict
from grpo_spmd.config.environment import EnvironmentConfig
from grpo_spmd.config.schema import ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.observe.rollout_turns import episode_fields, read_episode
from grpo_spmd.records import FAILED_STATUSES, Completion, Episode, Prompt
from grpo_spmd.rollout.buffer import Kept, Key, Place, RolloutBuffer, Slot
from grpo_spmd.untrusted import UntrustedError

_log = logging.getLogger("grpo_spmd")
# What decides how an episode goes. Deadlines and processes do not: one that they ended is not kept.
_DECIDE = "tools", "factory", "gym", "agent", "max_turns", "max_tokens", "history", "discount"


def environment_id(environment: EnvironmentConfig, rewards: Sequence[RewardConfig] = ()) -> list[Any]:
    """What the config says of episodes and of `rewards`, those that look at environments, with the
    SHA-256 of each file that they name. What these files import or read in their turn is not looked at."""
    settings = config_to_dict(environment)
    decide = {name: settings[name] for name in _DECIDE}
    of_rewards = [config_to_dict(reward) for reward in rewards]
    return [decide, of_rewards, {name: _digest(name) for name in sorted({*_files([decide, of_rewards])})}]


def _files(settings: Any) -> Iterator[str]:
    """What of all texts in `settings` is "file.py:name"."""
    if isinstance(settings, str):
        path, _, name = settings.rpartition(":")
        if name and path.endswith(".py"):
            yield path
    elif isinstance(settings, Mapping | list | tuple):
        for inner in settings.values() if isinstance(settings, Mapping) else settings:
            yield from _files(inner)


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:  # who runs it refuses it
        return f"{error.strerror}"


def encode_episode(completion: Completion) -> bytes | None:
    """JSON that `decode_episode` makes the same of; None for an episode that is not kept: its environment failed, or
    its messages are no JSON (NaN, nested without end), so that it would come back as another."""
    assert completion.episode is not None
    if completion.episode.status in FAILED_STATUSES:
        return None
    try:
        fields = episode_fields(completion.episode)
        encoded = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
        return encoded if json.loads(encoded) == fields and decode_episode(encoded, completion.token_ids) else None
    except (TypeError, ValueError, RecursionError, UntrustedError):
        return None


def decode_episode(encoded: bytes, token_ids: Sequence[int]) -> Episode:
    """Raises UntrustedError for what is no episode of these tokens."""
    try:
        fields = json.loads(encoded)
        if not isinstance(fields, dict):
            raise ValueError(f"got {type(fields).__name__}")
        episode = read_episode(fields, token_ids)
    except (ValueError, RecursionError) as error:
        raise UntrustedError(f"an episode: {error}") from None
    if episode.status in FAILED_STATUSES:
        raise UntrustedError(f"an episode that is {episode.status} is not kept")
    return episode


class EpisodeBuffer(RolloutBuffer):
    """Keeps whole episodes, each as JSON beside the tokens that were sampled in it."""

    def __init__(
        self,
        run_dir: str,
        seed: int,
        model: ModelConfig,
        rollout: RolloutConfig,
        session: Session,
        environment: EnvironmentConfig,
        rewards: Sequence[RewardConfig],
    ) -> None:
        """Collective. `rewards`: those that look at environments, whose values an episode has with it."""
        super().__init__(run_dir, seed, model, rollout, session)
        decides = json.dumps([self._sampling_id, environment_id(environment, rewards)], sort_keys=True)
        self._sampling_id = hashlib.blake2b(decides.encode(), digest_size=16).hexdigest()
        self._episodes: dict[str, tuple[Any, list[int]]] = {}  # of the files that were opened: JSON, where each begins

    def find(self, step: int, weights_id: str, prompts: Sequence[Prompt], num_samples: int) -> dict[Slot, Place]:
        """Collective."""
        if step != self._step:
            self._episodes = {}
        return super().find(step, weights_id, prompts, num_samples)

    def read(self, place: Place) -> Completion:
        completion, name, row = super().read(place), place[0], place[-1]
        if name not in self._episodes:
            file = safe_open(self._step_folder / name, "np")
            starts = [0, *np.cumsum(file.get_tensor("episode_bytes")).tolist()]
            self._episodes[name] = file.get_slice("episodes"), starts
        encoded, starts = self._episodes[name]
        episode = decode_episode(encoded[starts[row] : starts[row + 1]].tobytes(), completion.token_ids)
        return dataclasses.replace(completion, episode=episode)

    def keep(self, prompt: Prompt, sample: int, completion: Completion) -> None:
        """Those that can be; another is sampled again where a run goes on."""
        if encode_episode(completion) is not None:
            super().keep(prompt, sample, completion)

    def _packed(self, completions: Sequence[Kept]) -> dict[str, npt.NDArray[Any]]:
        encoded = [encode_episode(completion) or b"" for _, _, completion in completions]
        return super()._packed(completions) | {
            "episodes": np.frombuffer(b"".join(encoded), np.uint8),
            "episode_bytes": np.array([len(one) for one in encoded], np.int64),
        }

    def _metadata(self) -> dict[str, str]:
        return super()._metadata() | {"format": "2"}

    def _read_file(self, path: Path) -> list[tuple[Key, Place]]:
        """Those of a file whose episodes are all whole; a place ends with the row."""
        if not (found := super()._read_file(path)):
            return []
        try:
            with safe_open(path, "np") as file:
                _check_episodes(*(file.get_tensor(name) for name in ("episodes", "episode_bytes", "token_ids", "rows")))
        except (OSError, SafetensorError, UntrustedError) as error:
            _log.warning("step %d: %s is not used: %s", self._step, path, error)
            return []
        return [(key, (*place, row)) for row, (key, place) in enumerate(found)]


def _check_episodes(
    episodes: npt.NDArray[Any], sizes: npt.NDArray[Any], token_ids: npt.NDArray[Any], rows: npt.NDArray[Any]
) -> None:
    """Each with its part of `token_ids`. Raises UntrustedError."""
    shapes = f"{episodes.dtype}{episodes.shape} {sizes.dtype}{sizes.shape}"
    is_sound = shapes == f"uint8({episodes.size},) int64({len(rows)},)"
    if not is_sound or (sizes < 0).any() or (sizes > episodes.size).any() or sizes.sum() != episodes.size:
        raise UntrustedError("its episodes do not fit its rows")
    ends, token_ends = np.cumsum(sizes).tolist(), np.cumsum(rows[:, 2]).tolist()
    for size, end, count, token_end in zip(sizes.tolist(), ends, rows[:, 2].tolist(), token_ends, strict=True):
        decode_episode(episodes[end - size : end].tobytes(), token_ids[token_end - count : token_end].tolist())
