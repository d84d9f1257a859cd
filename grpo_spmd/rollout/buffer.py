"""This module keeps finished completions on disk until their step is saved.

A resumed run does not sample these completions again.

    <run_dir>/rollout_buffer/step_000012/<sha256 of the file>.safetensors

A completion is used again only for the same prompt, sample and sampling settings, and for
bit-identical weights (`weights_id`). These are the weights of the step from which the run resumed.
They are those of later steps too where training is deterministic, as on a CPU. A process that dies
leaves a file complete or absent. A file that a crash of the machine tore does not match the hash in
its name, and is ignored.
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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from grpo_spmd.config.describe import config_to_dict
from grpo_spmd.config.schema import EnvironmentConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.files import UntrustedError, open_regular
from grpo_spmd.observe.rollout_record import episode_fields, read_episode
from grpo_spmd.records import FAILED_STATUSES, Completion, Episode, Prompt

_log = logging.getLogger("grpo_spmd")
_FOLDER = "rollout_buffer"
_FINISH_REASONS = ("stop", "length")
# Seconds between two writes: a kill without warning loses at most this much work.
_WRITE_EVERY_S = 60.0
# The settings that decide the content of an episode. Deadlines and process counts do not.
_EPISODE_SETTINGS = (
    "tools", "factory", "gym", "agent", "max_turns", "max_tokens", "history", "discount",
)  # fmt: skip
Array = npt.NDArray[Any]
# Position in the prompt stream, sample number, digest of the prompt's tokens.
Key = tuple[int, int, str]
# Slot of the prompt in the step, sample number.
Slot = tuple[int, int]
# Prompt, sample number, completion.
Sampled = tuple[Prompt, int, Completion]


class StoredCompletion(NamedTuple):
    """The place of a finished completion on disk."""

    file: str
    # The index of its first token in the file.
    start: int
    num_tokens: int
    # An index in _FINISH_REASONS.
    finish_reason: int
    row: int


class RolloutBuffer:
    """Keeps the completions of this rank on disk during a step.

    When a stopped run resumes, every rank finds what any of the ranks had kept.

    An error of the disk gives a warning and nothing else.
    """

    _array_names: tuple[str, ...] = ("rows", "prompts", "token_ids", "logprobs")
    _format = "1"

    def __init__(
        self, run_dir: str, seed: int, model: ModelConfig, rollout: RolloutConfig, session: Session
    ) -> None:
        """Collective. Looks up on rank 0 which steps have files on disk."""
        self._folder = Path(run_dir, _FOLDER)
        self._session = session
        settings = config_to_dict(rollout)
        sampling = {
            name: settings[name] for name in ("temperature", "max_completion_tokens", "engine")
        }
        self._sampling_id = _json_digest(
            [seed, model.path, model.dtype, config_to_dict(model.lora), sampling]
        )
        self._step = -1
        self._weights_id = ""
        # The stored completions of this step, equal on all ranks.
        self._stored: dict[Key, StoredCompletion] = {}
        # By file name and array name: lazily read slices.
        self._open_files: dict[str, dict[str, Any]] = {}
        self._pending: list[Sampled] = []
        self._last_write = time.monotonic()
        self._steps_on_disk: set[int] = set(on_rank0(lambda _: steps_on_disk(run_dir), None))

    def find(
        self, step: int, weights_id: str, prompts: Sequence[Prompt], num_samples: int
    ) -> dict[Slot, StoredCompletion]:
        """Returns by (slot, sample) the stored completions of these weights, which need not be
        sampled.

        Collective on the first call of a step. The result is equal on all ranks, because it decides
        which rank samples what.
        """
        if step != self._step:
            self._begin_step(step, weights_id)
        if not self._stored:
            return {}
        stored: dict[Slot, StoredCompletion] = {}
        for slot, prompt in enumerate(prompts):
            digest = prompt_digest(prompt)
            for sample in range(num_samples):
                entry = self._stored.get((prompt.position, sample, digest))
                if entry is not None:
                    stored[slot, sample] = entry
        return stored

    def _begin_step(self, step: int, weights_id: str) -> None:
        """Forgets the previous step and reads the stored completions of `step`.

        Collective if completions of the step are on disk.
        """
        self._step = step
        self._weights_id = weights_id
        self._pending = []
        self._stored = {}
        self._open_files = {}
        if step not in self._steps_on_disk:
            return
        # Each rank reads some of the files. A file that a shared disk does not show yet is merely
        # not used.
        by_rank: list[list[Any]] = on_rank0(list, self._read_local_files())
        for entries in by_rank:
            self._stored |= {tuple(key): StoredCompletion(*entry) for key, entry in entries}
        _log.info(
            "step %d: %d completions were sampled before the run was stopped",
            step,
            len(self._stored),
        )

    def read(self, stored: StoredCompletion) -> Completion:
        """Returns a completion that `find` has listed."""
        slices = self._open_slices(stored.file)
        end = stored.start + stored.num_tokens
        return Completion(
            slices["token_ids"][stored.start : end].tolist(),
            slices["logprobs"][stored.start : end].tolist(),
            _FINISH_REASONS[stored.finish_reason],
        )

    def _open_slices(self, name: str) -> dict[str, Any]:
        """Returns the arrays of a file by name; only the requested slices are read."""
        if name not in self._open_files:
            file = safe_open(self._step_folder / name, "np")
            self._open_files[name] = {key: file.get_slice(key) for key in self._array_names}
        return self._open_files[name]

    def keep(self, prompt: Prompt, sample: int, completion: Completion) -> None:
        """Keeps a completion of the current step (that of the last `find`).

        It is written within a minute, as long as generation goes on.
        """
        self._pending.append((prompt, sample, completion))
        if time.monotonic() - self._last_write > _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Writes the completions kept since the last write, if there are any."""
        pending = self._pending
        self._pending = []
        self._last_write = time.monotonic()
        if not pending:
            return
        payload = save(self._pack(pending), self._metadata())
        name = f"{hashlib.sha256(payload).hexdigest()}.safetensors"
        temporary = self._step_folder / f"{name}.tmp"
        try:
            self._step_folder.mkdir(parents=True, exist_ok=True)
            # Checkpoints need the free space more than this buffer does.
            if shutil.disk_usage(self._step_folder).free < 10 * len(payload):
                raise OSError("the disk is nearly full")
            # The file gets its final name only when it is complete.
            temporary.write_bytes(payload)
            temporary.replace(self._step_folder / name)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            _log.warning(
                "step %d: %d completions are not kept on disk (%s)", self._step, len(pending), error
            )

    def _pack(self, sampled: Sequence[Sampled]) -> dict[str, Array]:
        """Returns the arrays of a file; the tokens of all completions are concatenated.

        `rows` has one row for each completion: position, sample, number of tokens, index of the
        finish reason. `prompts` has the digest of its prompt.
        """
        token_ids = array("i")
        logprobs = array("d")
        rows: list[list[int]] = []
        # The digest of each prompt, by position.
        digests: dict[int, bytes] = {}
        for prompt, sample, completion in sampled:
            # array.fromlist takes a quarter of the time that numpy takes for a list.
            token_ids.fromlist(completion.token_ids)
            logprobs.fromlist(completion.logprobs)
            reason = _FINISH_REASONS.index(completion.finish_reason)
            rows.append([prompt.position, sample, len(completion.token_ids), reason])
            if prompt.position not in digests:
                digests[prompt.position] = bytes.fromhex(prompt_digest(prompt))
        prompts = b"".join(digests[prompt.position] for prompt, *_ in sampled)
        return {
            "token_ids": np.frombuffer(token_ids, np.int32),
            "logprobs": np.frombuffer(logprobs, np.float64),
            "rows": np.array(rows, np.int64),
            "prompts": np.frombuffer(prompts, np.uint8).reshape(-1, 16),
        }

    @property
    def _step_folder(self) -> Path:
        return self._folder / _step_name(self._step)

    def _metadata(self) -> dict[str, str]:
        """Returns the metadata that a file must have so that its completions are used."""
        return {
            "format": self._format,
            "step": str(self._step),
            "weights_id": self._weights_id,
            "sampling_id": self._sampling_id,
        }

    def _read_local_files(self) -> list[tuple[Key, StoredCompletion]]:
        """Returns the completions of the files that this rank reads."""
        entries: list[tuple[Key, StoredCompletion]] = []
        for path in sorted(self._step_folder.glob("*.safetensors")):
            if zlib.crc32(path.name.encode()) % self._session.world_size == self._session.rank:
                entries += self._read_file(path)
        return entries

    def _read_file(self, path: Path) -> list[tuple[Key, StoredCompletion]]:
        """Returns the completions of a file; none if it is damaged, forged or from another
        policy."""
        try:
            with open_regular(path) as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != path.stem:
                    raise OSError("its contents are damaged")
            with safe_open(path, "np") as file:
                if file.metadata() != self._metadata():
                    _log.info(
                        "step %d: %s was sampled from other weights or with other settings, "
                        "and is not used",
                        self._step,
                        path.name,
                    )
                    return []
                arrays = {name: file.get_tensor(name) for name in self._array_names}
            self._check(arrays)
        except (OSError, SafetensorError, KeyError, TypeError, UntrustedError) as error:
            _log.warning("step %d: %s is not used: %s", self._step, path, error)
            return []
        rows = arrays["rows"].tolist()
        entries: list[tuple[Key, StoredCompletion]] = []
        start = 0
        for number, (position, sample, num_tokens, reason) in enumerate(rows):
            key = (position, sample, arrays["prompts"][number].tobytes().hex())
            stored = StoredCompletion(path.name, start, num_tokens, reason, row=number)
            entries.append((key, stored))
            start += num_tokens
        return entries

    def _check(self, arrays: Mapping[str, Array]) -> None:
        """Raises UntrustedError for arrays that `_pack` does not write.

        Anybody can make a file with a fitting name.
        """
        rows = arrays["rows"]
        num_rows = len(rows)
        num_tokens = len(arrays["token_ids"])
        shapes = {
            "rows": f"int64({num_rows}, 4)",
            "prompts": f"uint8({num_rows}, 16)",
            "token_ids": f"int32({num_tokens},)",
            "logprobs": f"float64({num_tokens},)",
        }
        # The upper bounds of a row's four columns.
        maxima = [1 << 62, 1 << 31, num_tokens, len(_FINISH_REASONS) - 1]
        if (
            any(_shape(arrays[name]) != shape for name, shape in shapes.items())
            or rows[:, 2].sum() != num_tokens
            or (rows < 0).any()
            or (arrays["token_ids"] < 0).any()
            or (rows > maxima).any()
        ):
            raise UntrustedError("its rows do not fit its tokens")


def steps_on_disk(run_dir: str | Path) -> list[int]:
    """Returns the steps that have completions on disk."""
    return sorted(
        int(path.name[5:])
        for path in Path(run_dir, _FOLDER).glob("step_*")
        if path.name[5:].isdecimal() and not path.is_symlink()
    )


def delete_until(run_dir: str | Path, step: int) -> None:
    """Deletes the completions of steps up to `step`, once its checkpoint is complete.

    One rank calls it. Errors only give warnings.
    """

    def warn(_: object, path: str, error: Any) -> None:
        _log.warning("%s could not be removed: %s", path, error[1])

    for old_step in steps_on_disk(run_dir):
        if old_step <= step:
            shutil.rmtree(Path(run_dir, _FOLDER, _step_name(old_step)), onerror=warn)


def prompt_digest(prompt: Prompt) -> str:
    """Returns a digest of the prompt's tokens: 16 bytes in hex."""
    content = np.asarray(prompt.token_ids, np.int32).tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _json_digest(value: Any) -> str:
    content = json.dumps(value, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _step_name(step: int) -> str:
    return f"step_{step:06d}"


def _shape(values: Array) -> str:
    return f"{values.dtype}{values.shape}"


class EpisodeBuffer(RolloutBuffer):
    """Keeps whole episodes, each as JSON next to the tokens that were sampled in it."""

    _array_names = (*RolloutBuffer._array_names, "episodes", "episode_bytes")
    _format = "2"

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
        """Collective. `rewards` look at environments, so their values are stored with an episode.

        Episodes that were kept under other rewards or another environment are not used.
        """
        super().__init__(run_dir, seed, model, rollout, session)
        self._sampling_id = _json_digest([self._sampling_id, environment_id(environment, rewards)])

    def read(self, stored: StoredCompletion) -> Completion:
        """Returns a completion with its episode."""
        completion = super().read(stored)
        slices = self._open_slices(stored.file)
        # The ends of all episodes in the file are computed once and kept with its slices.
        if "ends" not in slices:
            slices["ends"] = np.cumsum(slices["episode_bytes"][:]).tolist()
        start = slices["ends"][stored.row - 1] if stored.row else 0
        encoded = slices["episodes"][start : slices["ends"][stored.row]].tobytes()
        episode = decode_episode(encoded, completion.token_ids)
        return dataclasses.replace(completion, episode=episode)

    def keep(self, prompt: Prompt, sample: int, completion: Completion) -> None:
        """Keep an episode if it can be read back; any other is sampled again after a resume."""
        if encode_episode(completion) is not None:
            super().keep(prompt, sample, completion)

    def _pack(self, sampled: Sequence[Sampled]) -> dict[str, Array]:
        """Returns the arrays of RolloutBuffer, and the episodes as concatenated JSON with their
        sizes."""
        encoded = [encode_episode(completion) or b"" for _, _, completion in sampled]
        return super()._pack(sampled) | {
            "episodes": np.frombuffer(b"".join(encoded), np.uint8),
            "episode_bytes": np.array([len(episode) for episode in encoded], np.int64),
        }

    def _check(self, arrays: Mapping[str, Array]) -> None:
        """Raises UntrustedError also where an episode does not fit its tokens."""
        super()._check(arrays)
        episodes = arrays["episodes"]
        sizes = arrays["episode_bytes"]
        num_tokens = arrays["rows"][:, 2]
        if (
            _shape(episodes) != f"uint8({episodes.size},)"
            or _shape(sizes) != f"int64({len(num_tokens)},)"
            or (sizes < 0).any()
            or (sizes > episodes.size).any()
            or sizes.sum() != episodes.size
        ):
            raise UntrustedError("its episodes do not fit its rows")
        # All sizes were checked above, so that np.split cannot mix the episodes.
        encoded_episodes = np.split(episodes, np.cumsum(sizes)[:-1])
        tokens = np.split(arrays["token_ids"], np.cumsum(num_tokens)[:-1])
        for encoded, token_ids in zip(encoded_episodes, tokens, strict=True):
            decode_episode(encoded.tobytes(), token_ids.tolist())


def environment_id(
    environment: EnvironmentConfig, rewards: Sequence[RewardConfig] = ()
) -> list[Any]:
    """Returns the settings that decide episodes and the `rewards` that look at environments.

    The third element has the SHA-256 of each file that these settings name. What these files import
    or read is not included.
    """
    settings = config_to_dict(environment)
    episode_settings = {name: settings[name] for name in _EPISODE_SETTINGS}
    reward_settings = [config_to_dict(reward) for reward in rewards]
    files = sorted(set(_files([episode_settings, reward_settings])))
    return [episode_settings, reward_settings, {file: _file_digest(file) for file in files}]


def _files(settings: Any) -> Iterator[str]:
    """Yields the files of all strings in `settings` that are "file.py:name"."""
    if isinstance(settings, str):
        path, _, name = settings.rpartition(":")
        if name and path.endswith(".py"):
            yield path
    elif isinstance(settings, Mapping | list | tuple):
        for inner in settings.values() if isinstance(settings, Mapping) else settings:
            yield from _files(inner)


def _file_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        # The code that runs the file will refuse it.
        return f"{error.strerror}"


def encode_episode(completion: Completion) -> bytes | None:
    """Returns JSON that `decode_episode` reads back as the same episode.

    Returns None for an episode that is not kept: its environment failed, or its messages are not
    JSON (NaN, endless nesting), so that it would come back changed.
    """
    assert completion.episode is not None
    if completion.episode.status in FAILED_STATUSES:
        return None
    try:
        fields = episode_fields(completion.episode)
        encoded = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
        if json.loads(encoded) != fields:
            return None
        decode_episode(encoded, completion.token_ids)
    except (TypeError, ValueError, RecursionError, UntrustedError):
        return None
    return encoded


def decode_episode(encoded: bytes, token_ids: Sequence[int]) -> Episode:
    """Returns the episode. Raises UntrustedError for JSON that is no episode of these tokens."""
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
