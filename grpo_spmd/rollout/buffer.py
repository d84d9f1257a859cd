"""Finished completions on disk until their step is saved, so that a run that was stopped does not sample them again.

    <run_dir>/rollout_buffer/step_000012/<sha256 of the file>.safetensors

One is used only for the same prompt, place and sampling settings, and for weights that are the same to the bit
(`weights_id`): those of the step that was resumed from, and of later ones where they came about in the same way, as on
a CPU. A process that dies leaves a file complete or absent; one that a crash of the machine tore does not have the name
that its contents call for, and is ignored.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from grpo_spmd.config.describe import config_to_dict
from grpo_spmd.config.schema import EnvironmentConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.files import UntrustedError, open_regular
from grpo_spmd.observe.rollout_reader import episode_fields, read_episode
from grpo_spmd.records import FAILED_STATUSES, Completion, Episode, Prompt

_log = logging.getLogger("grpo_spmd")
_FOLDER = "rollout_buffer"
_FINISH_REASONS = ("stop", "length")
_WRITE_EVERY_S = 60.0  # what a kill that gives no warning may lose
Key = tuple[int, int, str]  # position in the prompt stream, sample, digest of the prompt's tokens
Place = tuple[
    str, int, int, int, *tuple[int, ...]
]  # file name, first token in it, number of tokens, finish reason
Kept = tuple[Prompt, int, Completion]  # and the sample in the middle
Slot = tuple[int, int]  # of the step: slot of the prompt, sample


class RolloutBuffer:
    """What this rank keeps, and what all ranks kept before the run was stopped. Trouble with the disk only warns."""

    def __init__(
        self, run_dir: str, seed: int, model: ModelConfig, rollout: RolloutConfig, session: Session
    ) -> None:
        """Collective."""
        self._folder, self._session = Path(run_dir, _FOLDER), session
        settings = config_to_dict(rollout)
        sampling = {
            name: settings[name] for name in ("temperature", "max_completion_tokens", "engine")
        }
        decides = json.dumps(
            [seed, model.path, model.dtype, config_to_dict(model.lora), sampling], sort_keys=True
        )
        self._sampling_id = hashlib.blake2b(decides.encode(), digest_size=16).hexdigest()
        self._step, self._weights_id = -1, ""
        self._found: dict[Key, Place] = {}  # of this step, equal on all ranks
        self._files: dict[
            str, tuple[Any, Any]
        ] = {}  # token ids and logprobs of those that were opened
        self._pending: list[Kept] = []
        self._last_write = time.monotonic()
        self._steps_on_disk: set[int] = set(on_rank0(lambda _: steps_on_disk(run_dir), None))

    def find(
        self, step: int, weights_id: str, prompts: Sequence[Prompt], num_samples: int
    ) -> dict[Slot, Place]:
        """Collective, on the first call of a step. Where the completions of these weights are that need not be sampled;
        equal on all ranks, since it decides who samples what."""
        if step != self._step:
            self._step, self._weights_id, self._pending, self._found, self._files = (
                step,
                weights_id,
                [],
                {},
                {},
            )
            if step in self._steps_on_disk:
                # Each rank reads some of the files. One that it does not see yet on a shared disk is merely not used.
                of_ranks: list[list[Any]] = on_rank0(list, self._read_own_files())
                self._found = {
                    tuple(key): tuple(place) for found in of_ranks for key, place in found
                }
                _log.info(
                    "step %d: %d completions were sampled before the run was stopped",
                    step,
                    len(self._found),
                )
        places: dict[Slot, Place] = {}
        for slot, prompt in enumerate(prompts if self._found else ()):
            digest = prompt_digest(prompt)
            keys = [(prompt.position, sample, digest) for sample in range(num_samples)]
            places |= {
                (slot, sample): self._found[key]
                for sample, key in enumerate(keys)
                if key in self._found
            }
        return places

    def read(self, place: Place) -> Completion:
        """One that `find` found."""
        name, start, num_tokens, finish_reason, *_ = place
        if name not in self._files:
            file = safe_open(self._step_folder / name, "np")
            self._files[name] = (file.get_slice("token_ids"), file.get_slice("logprobs"))
        token_ids, logprobs = (
            rows[start : start + num_tokens].tolist() for rows in self._files[name]
        )
        return Completion(token_ids, logprobs, _FINISH_REASONS[finish_reason])

    def keep(self, prompt: Prompt, sample: int, completion: Completion) -> None:
        """Keep a completion of the step of the last `find`; written within a minute, if generation goes on."""
        self._pending.append((prompt, sample, completion))
        if time.monotonic() - self._last_write > _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Write what was kept since the last time, if anything."""
        pending, self._pending, self._last_write = self._pending, [], time.monotonic()
        if not pending:
            return
        payload = save(self._packed(pending), self._metadata())
        name = f"{hashlib.sha256(payload).hexdigest()}.safetensors"
        temporary = self._step_folder / f"{name}.tmp"
        try:
            self._step_folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(self._step_folder).free < 10 * len(payload):
                raise OSError("the disk is nearly full")  # checkpoints need it more
            temporary.write_bytes(payload)
            temporary.replace(self._step_folder / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            _log.warning(
                "step %d: %d completions are not kept on disk (%s)", self._step, len(pending), error
            )

    def _packed(self, completions: Sequence[Kept]) -> dict[str, npt.NDArray[Any]]:
        return _pack(completions)

    @property
    def _step_folder(self) -> Path:
        return self._folder / _step_name(self._step)

    def _metadata(self) -> dict[str, str]:
        """What a file says of its completions, and must say so that they are used."""
        step, weights, sampling = str(self._step), self._weights_id, self._sampling_id
        return {"format": "1", "step": step, "weights_id": weights, "sampling_id": sampling}

    def _read_own_files(self) -> list[tuple[Key, Place]]:
        rank, num_ranks = self._session.rank, self._session.world_size
        paths = sorted(self._step_folder.glob("*.safetensors"))
        own = [path for path in paths if zlib.crc32(path.name.encode()) % num_ranks == rank]
        return [entry for path in own for entry in self._read_file(path)]

    def _read_file(self, path: Path) -> list[tuple[Key, Place]]:
        """Its completions, if it is whole and of this policy."""
        try:
            with open_regular(path) as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != path.stem:
                    raise OSError("its contents are damaged")
            with safe_open(path, "np") as file:
                if file.metadata() != self._metadata():
                    text = "step %d: %s was sampled from other weights or with other settings, and is not used"
                    _log.info(text, self._step, path.name)
                    return []
                arrays = [
                    file.get_tensor(name) for name in ("rows", "prompts", "token_ids", "logprobs")
                ]
                rows, prompts, n, m = *arrays[:2], len(arrays[0]), len(arrays[2])
                as_packed = [f"int64({n}, 4)", f"uint8({n}, 16)", f"int32({m},)", f"float64({m},)"]
                is_sound = [
                    f"{array.dtype}{array.shape}" for array in arrays
                ] == as_packed and rows[:, 2].sum() == m
                is_sound = is_sound and all((array >= 0).all() for array in arrays[:3])
                if not is_sound or (rows > [1 << 62, 1 << 31, m, len(_FINISH_REASONS) - 1]).any():
                    raise UntrustedError("its rows do not fit its tokens")
        except (OSError, SafetensorError, KeyError, TypeError, UntrustedError) as error:
            _log.warning("step %d: %s is not used: %s", self._step, path, error)
            return []
        found, ends = list[tuple[Key, Place]](), np.cumsum(rows[:, 2]).tolist()
        for (position, sample, num_tokens, reason), prompt, end in zip(
            rows.tolist(), prompts, ends, strict=True
        ):
            place = path.name, end - num_tokens, num_tokens, reason
            found.append(((position, sample, prompt.tobytes().hex()), place))
        return found


def steps_on_disk(run_dir: str | Path) -> list[int]:
    """The steps of which completions are kept."""
    found = Path(run_dir, _FOLDER).glob("step_*")
    return sorted(
        int(path.name[5:]) for path in found if path.name[5:].isdecimal() and not path.is_symlink()
    )


def forget_until(run_dir: str | Path, step: int) -> None:
    """On one rank: remove what is kept of steps up to `step`, once its checkpoint is complete. Errors only warn."""

    def warn(_: object, path: str, error: Any) -> None:
        _log.warning("%s could not be removed: %s", path, error[1])

    for old in steps_on_disk(run_dir):
        if old <= step:
            shutil.rmtree(Path(run_dir, _FOLDER, _step_name(old)), onerror=warn)


def prompt_digest(prompt: Prompt) -> str:
    """16 bytes in hex, of the prompt's tokens."""
    return hashlib.blake2b(
        np.asarray(prompt.token_ids, np.int32).tobytes(), digest_size=16
    ).hexdigest()


def _pack(completions: Sequence[Kept]) -> dict[str, npt.NDArray[Any]]:
    """Tokens one completion after the other; for each a row (position, sample, number of tokens, finish reason) in
    `rows` and a digest in `prompts`."""
    token_ids, logprobs = array("i"), array("d")
    rows, digests = list[list[int]](), dict[int, bytes]()  # of a prompt, by its position
    for prompt, sample, completion in completions:
        token_ids.fromlist(completion.token_ids)  # a quarter of the time of numpy's way from a list
        logprobs.fromlist(completion.logprobs)
        reason = _FINISH_REASONS.index(completion.finish_reason)
        rows.append([prompt.position, sample, len(completion.token_ids), reason])
        if prompt.position not in digests:
            digests[prompt.position] = bytes.fromhex(prompt_digest(prompt))
    prompts = b"".join(digests[prompt.position] for prompt, *_ in completions)
    return {
        "token_ids": np.frombuffer(token_ids, np.int32),
        "logprobs": np.frombuffer(logprobs, np.float64),
        "rows": np.array(rows, np.int64),
        "prompts": np.frombuffer(prompts, np.uint8).reshape(-1, 16),
    }


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


# The rollout buffer of a run whose completions are episodes.


# What decides how an episode goes. Deadlines and processes do not: one that they ended is not kept.
_DECIDE = "tools", "factory", "gym", "agent", "max_turns", "max_tokens", "history", "discount"


def environment_id(
    environment: EnvironmentConfig, rewards: Sequence[RewardConfig] = ()
) -> list[Any]:
    """What the config says of episodes and of `rewards`, those that look at environments, with the
    SHA-256 of each file that they name. What these files import or read in their turn is not looked at."""
    settings = config_to_dict(environment)
    decide = {name: settings[name] for name in _DECIDE}
    of_rewards = [config_to_dict(reward) for reward in rewards]
    return [
        decide,
        of_rewards,
        {name: _digest(name) for name in sorted({*_files([decide, of_rewards])})},
    ]


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
        return (
            encoded
            if json.loads(encoded) == fields and decode_episode(encoded, completion.token_ids)
            else None
        )
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
        decides = json.dumps(
            [self._sampling_id, environment_id(environment, rewards)], sort_keys=True
        )
        self._sampling_id = hashlib.blake2b(decides.encode(), digest_size=16).hexdigest()
        self._episodes: dict[
            str, tuple[Any, list[int]]
        ] = {}  # of the files that were opened: JSON, where each begins

    def find(
        self, step: int, weights_id: str, prompts: Sequence[Prompt], num_samples: int
    ) -> dict[Slot, Place]:
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
        episode = decode_episode(
            encoded[starts[row] : starts[row + 1]].tobytes(), completion.token_ids
        )
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
                _check_episodes(
                    *(
                        file.get_tensor(name)
                        for name in ("episodes", "episode_bytes", "token_ids", "rows")
                    )
                )
        except (OSError, SafetensorError, UntrustedError) as error:
            _log.warning("step %d: %s is not used: %s", self._step, path, error)
            return []
        return [(key, (*place, row)) for row, (key, place) in enumerate(found)]


def _check_episodes(
    episodes: npt.NDArray[Any],
    sizes: npt.NDArray[Any],
    token_ids: npt.NDArray[Any],
    rows: npt.NDArray[Any],
) -> None:
    """Each with its part of `token_ids`. Raises UntrustedError."""
    shapes = f"{episodes.dtype}{episodes.shape} {sizes.dtype}{sizes.shape}"
    is_sound = shapes == f"uint8({episodes.size},) int64({len(rows)},)"
    if (
        not is_sound
        or (sizes < 0).any()
        or (sizes > episodes.size).any()
        or sizes.sum() != episodes.size
    ):
        raise UntrustedError("its episodes do not fit its rows")
    ends, token_ends = np.cumsum(sizes).tolist(), np.cumsum(rows[:, 2]).tolist()
    for size, end, count, token_end in zip(
        sizes.tolist(), ends, rows[:, 2].tolist(), token_ends, strict=True
    ):
        decode_episode(
            episodes[end - size : end].tobytes(), token_ids[token_end - count : token_end].tolist()
        )
