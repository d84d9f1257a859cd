"""This module keeps finished completions on disk until a checkpoint has saved their step.

A resumed run does not sample these completions again.

    <run_dir>/rollout_buffer/step_000012/<sha256 of the file>.msgpack

A completion is used again only for the same prompt, sample and sampling settings, and for
bit-identical weights (`weights_id`). After a resume, the weights are bit-identical at the step from
which the run resumed; at later steps only where training is deterministic, as on a CPU. If a
process dies, each file is complete or absent. A damaged file, whose contents do not match the hash
in its name, is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import shutil
import time
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from grpo_spmd.config.describe import config_to_dict
from grpo_spmd.config.schema import EnvironmentConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.files import open_regular, write_durably
from grpo_spmd.learn.contexts import read_routes
from grpo_spmd.observe.rollout_record import episode_fields, read_episode
from grpo_spmd.records import FAILED_STATUSES, Completion, Prompt

_log = logging.getLogger("grpo_spmd")
_FOLDER = "rollout_buffer"
_FORMAT = "5"
# Seconds between two writes: a process that is killed loses at most this much work.
_WRITE_EVERY_S = 60.0
# The settings that determine the content of an episode. Deadlines and numbers of processes do not.
_EPISODE_SETTINGS = (
    "tools", "factory", "gym", "agent", "max_turns", "max_tokens", "history", "discount",
)  # fmt: skip
# Position in the prompt stream, sample number, digest of the prompt's tokens.
Key = tuple[int, int, str]
# Slot of the prompt in the step, sample number.
Slot = tuple[int, int]


class _Record(msgspec.Struct):
    """One completion in a file of the buffer. The memoryviews refer to the memory-mapped file, so
    their bytes are read from disk only when they are used."""

    position: int
    sample: int
    prompt_digest: str
    token_ids: memoryview
    """int32 numbers."""
    logprobs: memoryview
    """float64 numbers, one for each token."""
    finish_reason: str
    episode: memoryview | None = None
    """The result of `encode_episode`; None without an environment."""
    routes: list[tuple[memoryview, tuple[int, int, int]]] = []
    """For each of the completion's contexts (several if it is an episode): its routes, which are
    the experts that an MoE's router chose for each token, with their shape. Empty without routes.
    """


class _File(msgspec.Struct):
    """The contents of one file of the buffer."""

    identity: dict[str, str]
    """The step, the weights and the settings of the completions, which are used only if these are
    equal to the present ones."""
    records: list[_Record]


class StoredCompletion(NamedTuple):
    """The place of a finished completion on disk."""

    file: str
    # The index of the completion's record in the file.
    number: int
    num_tokens: int


class RolloutBuffer:
    """Keeps this rank's finished completions on disk during a step; with an environment these are
    its episodes.

    When a stopped run resumes, every rank finds what any of the ranks had kept. An error of the
    disk is logged as a warning and does not stop the run.
    """

    def __init__(
        self,
        run_dir: str,
        seed: int,
        model: ModelConfig,
        rollout: RolloutConfig,
        session: Session,
        environment: EnvironmentConfig | None = None,
        rewards: Sequence[RewardConfig] = (),
    ) -> None:
        """Collective. Looks up on rank 0 which steps have files on disk.

        With an `environment` completions are episodes. `rewards` are those that look at
        environments, whose values are stored in the episodes. Episodes that were kept under other
        rewards or another environment are not used.
        """
        self._run_dir = run_dir
        self._session = session
        settings = config_to_dict(rollout)
        sampling = {
            name: settings[name]
            for name in ("temperature", "max_completion_tokens", "stop", "engine")
        }
        decisive = [seed, model.path, model.dtype, config_to_dict(model.lora), sampling]
        # With router replay the stored completions must have routes, so the setting counts too.
        decisive.append(model.router_replay)
        if environment is not None:
            decisive.append(environment_id(environment, rewards))
        content = json.dumps(decisive, sort_keys=True).encode()
        self._sampling_id = hashlib.blake2b(content, digest_size=16).hexdigest()
        # The step of the last `find`, and its completions that are not on disk yet.
        self._step = -1
        self._pending: list[_Record] = []
        self._last_write = time.monotonic()
        self._steps_on_disk: set[int] = set(on_rank0(lambda _: steps_on_disk(run_dir), None))

    def find(
        self, step: int, weights_id: str, prompts: Sequence[Prompt], num_samples: int
    ) -> dict[Slot, StoredCompletion]:
        """Returns, by (slot, sample), the stored completions that need not be sampled again.

        They were sampled from the weights `weights_id`. Collective on the first call of a step. The
        result is equal on all ranks, because it decides which rank samples what.
        """
        if step != self._step:
            self._begin_step(step, weights_id)
        stored: dict[Slot, StoredCompletion] = {}
        # Most steps have nothing on disk.
        for slot, prompt in enumerate(prompts if self._stored else ()):
            digest = _prompt_digest(prompt)
            for sample in range(num_samples):
                key = (prompt.position, sample, digest)
                if key in self._stored:
                    stored[slot, sample] = self._stored[key]
        return stored

    def _begin_step(self, step: int, weights_id: str) -> None:
        """Forgets the previous step, and reads from disk which completions of `step` are stored.

        Collective if completions of the step are on disk.
        """
        self._step = step
        self._step_folder = _folder(self._run_dir, step)
        # The identity that a file must have for its completions to be used in this step.
        self._identity = {
            "format": _FORMAT,
            "step": str(step),
            "weights_id": weights_id,
            "sampling_id": self._sampling_id,
        }
        self._pending = []
        # The stored completions of this step, equal on all ranks.
        self._stored: dict[Key, StoredCompletion] = {}
        # The mapped files of this step by name.
        self._files: dict[str, _File] = {}
        if step not in self._steps_on_disk:
            return
        # Each rank reads some of the files. A file that a shared disk does not show to its rank yet
        # is not used, and its completions are sampled again.
        entries: list[tuple[Key, StoredCompletion]] = []
        for path in sorted(self._step_folder.glob("*.msgpack")):
            if zlib.crc32(path.name.encode()) % self._session.world_size != self._session.rank:
                continue
            try:
                with open_regular(path) as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != path.stem:
                        raise OSError("its contents are damaged")
                file = self._map_file(path.name)
                if file.identity != self._identity:
                    raise ValueError("it was sampled from other weights or with other settings")
            except (OSError, ValueError) as error:
                _log.warning("step %d: %s is not used: %s", step, path, error)
                continue
            for number, record in enumerate(file.records):
                key = (record.position, record.sample, record.prompt_digest)
                stored = StoredCompletion(path.name, number, record.token_ids.nbytes // 4)
                entries.append((key, stored))
        by_rank: list[list[Any]] = on_rank0(list, entries)
        for pairs in by_rank:
            self._stored |= {tuple(key): StoredCompletion(*entry) for key, entry in pairs}
        number = len(self._stored)
        _log.info("step %d: %d completions were sampled before the run was stopped", step, number)

    def read(self, stored: StoredCompletion) -> Completion:
        """Returns a completion that `find` has listed, read from its file."""
        record = self._map_file(stored.file).records[stored.number]
        token_ids = record.token_ids.cast("i").tolist()
        logprobs: list[Any] = record.logprobs.cast("d").tolist()
        episode = None
        if record.episode is not None:
            episode = read_episode(json.loads(bytes(record.episode)), token_ids)
        completion = Completion(token_ids, logprobs, record.finish_reason, episode)
        # A plain completion has the routes of one context, an episode those of each segment. Their
        # shape is (tokens, layers, experts of a token).
        routes = [read_routes(content, n, (layers, k)) for content, (n, layers, k) in record.routes]
        if not routes:
            return completion
        if episode is None:
            return replace(completion, routes=routes[0])
        segments = zip(episode.segments, routes, strict=True)
        routed = tuple(replace(segment, routes=experts) for segment, experts in segments)
        return replace(completion, episode=replace(episode, segments=routed))

    def _map_file(self, name: str) -> _File:
        """Returns the contents of one of the step's files.

        The file is memory-mapped, so only those bytes are read that are used. Raises OSError or
        ValueError if it cannot be read.
        """
        if name not in self._files:
            with open_regular(self._step_folder / name) as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._files[name] = msgspec.msgpack.decode(content, type=_File)
        return self._files[name]

    def keep(self, prompt: Prompt, sample: int, completion: Completion) -> None:
        """Keeps a completion of the current step, which is the step of the last `find`.

        It is written within a minute, as long as generation goes on. A completion whose episode
        cannot be stored is not kept, so that a resume samples it again.
        """
        episode = None
        if completion.episode is not None:
            encoded = encode_episode(completion)
            if encoded is None:
                return
            episode = memoryview(encoded)
        routed = completion.episode.segments if completion.episode else [completion]
        self._pending.append(
            _Record(
                position=prompt.position,
                sample=sample,
                prompt_digest=_prompt_digest(prompt),
                # array takes a quarter of the time that numpy takes for a list.
                token_ids=memoryview(array("i", completion.token_ids)),
                logprobs=memoryview(array("d", completion.logprobs)),
                finish_reason=completion.finish_reason,
                episode=episode,
                routes=[
                    (memoryview(context.routes.tobytes()), context.routes.shape)
                    for context in routed
                    if context.routes is not None
                ],
            )
        )
        if time.monotonic() - self._last_write > _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Writes the completions that were kept since the last write to a new file, if there are
        any."""
        pending = self._pending
        self._pending = []
        self._last_write = time.monotonic()
        if not pending:
            return
        payload = msgspec.msgpack.encode(_File(self._identity, pending))
        try:
            self._step_folder.mkdir(parents=True, exist_ok=True)
            # Checkpoints need the free space more than this buffer does.
            if shutil.disk_usage(self._step_folder).free < 10 * len(payload):
                raise OSError("the disk is nearly full")
            write_durably(
                self._step_folder / f"{hashlib.sha256(payload).hexdigest()}.msgpack", payload
            )
        except OSError as error:
            _log.warning(
                "step %d: %d completions are not kept on disk (%s)", self._step, len(pending), error
            )


def steps_on_disk(run_dir: str | Path) -> list[int]:
    """Returns the steps that have completions on disk."""
    return sorted(
        int(path.name[5:])
        for path in Path(run_dir, _FOLDER).glob("step_*")
        if path.name[5:].isdecimal() and not path.is_symlink()
    )


def delete_until(run_dir: str | Path, step: int) -> None:
    """Deletes the stored completions of all steps up to and including `step`.

    One rank calls this, after the checkpoint of `step` is complete. Errors are logged as warnings.
    """
    for old_step in steps_on_disk(run_dir):
        if old_step <= step:
            try:
                shutil.rmtree(_folder(run_dir, old_step))
            except OSError as error:
                _log.warning("step %d: its completions are not removed: %s", old_step, error)


def _prompt_digest(prompt: Prompt) -> str:
    """Returns a digest of the prompt's tokens: 16 bytes in hex."""
    return hashlib.blake2b(array("i", prompt.token_ids), digest_size=16).hexdigest()


def _folder(run_dir: str | Path, step: int) -> Path:
    """Returns the folder with the files of a step."""
    return Path(run_dir, _FOLDER, f"step_{step:06d}")


def environment_id(
    environment: EnvironmentConfig, rewards: Sequence[RewardConfig] = ()
) -> list[Any]:
    """Returns what identifies an environment and the `rewards` that look at it.

    That is [settings that determine episodes, settings of the rewards, SHA-256 of each file that
    these settings name]. What these files import or read is not included.
    """
    settings = config_to_dict(environment)
    episode_settings = {name: settings[name] for name in _EPISODE_SETTINGS}
    reward_settings = [config_to_dict(reward) for reward in rewards]
    files = sorted(set(_files([episode_settings, reward_settings])))
    return [episode_settings, reward_settings, {file: _file_digest(file) for file in files}]


def _files(settings: Any) -> Iterator[str]:
    """Yields the file of each string of the form "file.py:name" in `settings`."""
    if isinstance(settings, str):
        path, _, name = settings.rpartition(":")
        if name and path.endswith(".py"):
            yield path
    elif isinstance(settings, Mapping | list | tuple):
        for inner in settings.values() if isinstance(settings, Mapping) else settings:
            yield from _files(inner)


def _file_digest(path: str) -> str:
    """Returns the SHA-256 of a file, or the reason why it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        # The code that loads the file will report the error.
        return f"{error.strerror}"


def encode_episode(completion: Completion) -> bytes | None:
    """Returns the episode as JSON from which `read_episode` makes the same episode again.

    Returns None for an episode that cannot be kept, because its environment failed, or because its
    messages are not JSON (NaN, endless nesting) and would be read back changed.
    """
    assert completion.episode is not None
    if completion.episode.status in FAILED_STATUSES:
        return None
    fields = {**episode_fields(completion.episode), "prompt": completion.episode.opening}
    try:
        encoded = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
        read_episode(fields, completion.token_ids)
        return encoded if json.loads(encoded) == fields else None
    except (TypeError, ValueError, RecursionError):
        return None
