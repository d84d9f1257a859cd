"""Checkpoints: everything a run needs to go on exactly, copied out in a moment and written in the background.

What is in one, and how it is told to be whole, is in manifest.py. The shards are in the safetensors format of torch's distributed
checkpoints, so that `torch.distributed.checkpoint` reads them into any world size and mesh. They are written by each rank itself, and not
by `dcp.save`: its background thread needs collectives of its own and a second copy of all bytes, and its default format is unpickled.

Random states are not saved, because there are none: every random number is a function of (seed, step, position, sample).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
import time
import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config import Config, ConfigError, flat_config
from grpo_spmd.data_types import Prompt
from grpo_spmd.distributed import Session, on_rank0, own_store
from grpo_spmd.export import export_checkpoint
from grpo_spmd.lora import hf_name, write_peft_config
from grpo_spmd.manifest import (
    FORMAT,
    CheckpointError,
    NewerFormatError,
    Start,
    check_same_run,
    checkpoint_path,
    fingerprint_of_files,
    is_inside,
    is_same_launch,
    list_checkpoints,
    lock_run_dir,
    note_launch,
    put_in_place,
    read_manifest,
    read_trainer,
    refuse_in_use,
    remove_old,
    step_of,
    sync_path,
    temporary_path,
    verify_files,
    write_manifest,
)
from grpo_spmd.metrics import last_step
from grpo_spmd.policy import Policy, checkpoint_folder, first_row, is_first_replica
from grpo_spmd.preemption import leave_marker, remove_marker
from grpo_spmd.rollout_buffer import forget_before
from grpo_spmd.update import PolicyUpdater

_log = logging.getLogger("grpo_spmd")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_SAVED_WITHIN_S = 3600.0  # a file server that hangs for longer is a failed save
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def find_start(config: Config, session: Session, prompts: Sequence[Prompt]) -> Start:
    """Collective. The newest good checkpoint of the run folder, or the one that `checkpoint.resume` names; all ranks the same.

    Each rank reads its share of the files and compares their checksums. A damaged checkpoint is passed over, with a warning.

    Raises:
        ConfigError: the run folder is in use; the named checkpoint is damaged; all are; one is of a later version; or it belongs to another
            model, data set or seed.
    """
    # Rank 0 says, for another rank may see the folder a moment later.
    folders, goes_on, named = on_rank0(lambda _: _candidates(config, session.is_restart), None)
    why: list[str] = []
    for folder in map(Path, folders):
        damage = _damage_found(folder, session)
        if damage is None:
            return _start_from(config, folder, goes_on, prompts)
        why.append(damage)
        if session.is_rank0 and not named:
            _log.warning("passed over: %s", damage)
    if why:
        all_bad = "" if named else f"; {len(why)} checkpoints cannot be loaded; move them away to start anew"
        raise ConfigError(f"checkpoint.resume: {why[0]}{all_bad}")
    return Start(goes_on=goes_on)


def _candidates(config: Config, is_restart: bool) -> tuple[list[str], bool, bool]:
    """On rank 0: the checkpoints to try, whether the run that the folder holds goes on, and whether the one to try was named."""
    run_dir = Path(config.run_dir)
    if not is_restart and is_same_launch(run_dir):  # an earlier launch had the same id: its note must not speak for this one's restarts
        lock_run_dir(run_dir)
        note_launch(run_dir, "")
    again = is_restart and is_same_launch(run_dir)  # then the run has begun, from wherever `resume` said
    has_begun = again and bool(list_checkpoints(run_dir))
    named = config.checkpoint.resume not in ("auto", "never") and not has_begun
    goes_on = again or config.checkpoint.resume == "auto" or (named and is_inside(config.checkpoint.resume, run_dir))
    if not goes_on:
        refuse_in_use(run_dir)
    elif run_dir.exists():
        lock_run_dir(run_dir)
    if named:
        return [config.checkpoint.resume], goes_on, True
    return [str(folder) for folder in list_checkpoints(run_dir)[::-1]] if goes_on else [], goes_on, False


def _damage_found(folder: Path, session: Session) -> str | None:
    """Collective."""
    error = ""
    try:
        verify_files(folder, read_manifest(folder), session.rank, session.world_size)
        read_trainer(folder)
    except NewerFormatError as newer:
        error = f"!{newer}"
    except CheckpointError as damaged:
        error = str(damaged)
    except OSError as unreadable:
        error = f"{folder}: cannot be read: {unreadable}"

    def first(errors: list[str]) -> str | None:
        for text in errors:
            if text.startswith("!"):
                raise ConfigError(f"checkpoint.resume: {text[1:]}")
        return next((text for text in errors if text), None)

    return on_rank0(first, error)


def _start_from(config: Config, folder: Path, goes_on: bool, prompts: Sequence[Prompt]) -> Start:
    """Collective."""

    def check(_: list[Any]) -> tuple[dict[str, Any], bool]:
        trainer = read_trainer(folder)
        changed = check_same_run(folder, trainer, config)
        for name, mine in _fingerprints(config, prompts).items():
            if trainer[name] != mine:
                what = "model.path holds another model" if name == "model_fingerprint" else "data.train gives other prompts"
                raise ConfigError(f"checkpoint.resume: {what} than the run had that wrote {folder}; restore it, or start a new run_dir")
        is_last = int(trainer["step"]) >= config.training.num_steps
        if is_last:
            _log.info("%s is the end of this run; raise training.num_steps (%d) to go on", folder, config.training.num_steps)
        if changed:
            _log.info("changed since %s was written: %s", folder, "; ".join(changed))
        closing = config.training.num_steps if config.eval.every_steps else -1  # the line of the evaluation that closes a run
        return trainer, goes_on and is_last and last_step(Path(config.run_dir, "metrics.jsonl")) >= closing

    trainer, is_over = on_rank0(check, None)
    return Start(int(trainer["step"]), folder, trainer, goes_on, is_over)


def _fingerprints(config: Config, prompts: Sequence[Prompt]) -> dict[str, str]:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(array("q", [len(prompt.token_ids), *prompt.token_ids]))
    files = [p for p in checkpoint_folder(config.model.path).iterdir() if p.suffix == ".safetensors" or p.name == "config.json"]
    return {"model_fingerprint": fingerprint_of_files(files), "data_fingerprint": digest.hexdigest()}


class Checkpoints:
    """Saves the run's state each `checkpoint.every_steps`, at the end, and when the run is preempted.

    Training waits for the copy into host memory alone (`stage_if_due`). The rest is done by a thread of each rank: it writes and syncs its
    shard; rank 0's then adds the rest and gives the folder its name. A save that fails is an error in the log: the checkpoints before
    it stay, the run goes on, and the next save tries again. Only the last one of a run must succeed.
    """

    def __init__(self, config: Config, session: Session, policy: Policy, updater: PolicyUpdater, prompts: Sequence[Prompt]) -> None:
        self._config, self._session, self._policy, self._updater = config, session, policy, updater
        self._run_dir = Path(config.run_dir)
        self._buffers: dict[str, Tensor] = {}  # in host memory, made once: pinned memory is slow to get
        self._staged: _Staged | None = None
        self._writer: threading.Thread | None = None
        self._failure: str | None = None  # of the last save; on rank 0 that of any rank
        self._store = own_store()
        self._num_saves = 0
        self._saved_step = -1  # staged last, or what this folder's run started from
        self._longest_s = 0.0  # that a save took, from the copy to the folder's name
        self._identity = _fingerprints(config, prompts) if session.is_rank0 else {}
        self._metric_by_step: dict[int, float] = {}
        self._metrics_read = 0  # bytes of metrics.jsonl that were looked at

    def load(self, start: Start) -> None:
        """Collective. Put policy, optimizer and schedule where the checkpoint had them, if there is one."""
        self._saved_step = start.step
        remove_marker(self._run_dir)
        if start.folder is not None:
            load_state(self._policy, self._updater, start.folder, start.trainer)
            if self._session.is_rank0:
                _log.info("goes on from %s", start.folder)

    @property
    def time_to_save_s(self) -> float:
        """What it may take to save the state now: the longest that a save took, and again where one is under way; 0: not known yet."""
        return self._longest_s * (2 if self._writer is not None and self._writer.is_alive() else 1)

    def stage_if_due(self, step: int, position: int, log_state: dict[str, Any]) -> None:
        """Collective. After `step` finished steps: copy the state, if it is to be saved.

        Args:
            position: the next place in the prompt stream.
            log_state: MetricsLog.state.
        """
        every = self._config.checkpoint.every_steps
        if step == self._config.training.num_steps or (every and step % every == 0):
            self.stage(step, position, log_state)

    def stage(self, step: int, position: int, log_state: dict[str, Any]) -> None:
        """Collective. Copy the state into host memory, once the save before is through."""
        self._wait_for_writer()
        start = time.perf_counter()
        folder = checkpoint_path(self._run_dir, step)
        shards = {name: t for name, t in state_tensors(self._policy, self._updater).items() if is_first_replica(t)}
        num_bytes = sum(
            tensor.to_local().nbytes * (1 + (name.startswith("policy.") and self._is_exported(step))) for name, tensor in shards.items()
        )
        self._failure, self._longest_s = on_rank0(lambda sizes: (self._prepare(folder, sum(sizes)), self._longest_s), num_bytes)
        if self._failure is not None:
            return
        rows: dict[str, int] = {}
        for name, tensor in shards.items():
            local = tensor.to_local().detach()
            if not len(local):  # fewer rows than ranks
                continue
            if name not in self._buffers:
                self._buffers[name] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
            self._buffers[name].copy_(local, non_blocking=True)
            rows[name] = first_row(tensor)
        if self._session.device.type == "cuda":
            torch.cuda.synchronize()
        self._num_saves, self._saved_step = self._num_saves + 1, step
        trainer = {
            "format": FORMAT,
            "step": step,
            "position": position,
            **self._updater.state(),
            **log_state,
            **self._identity,
            "config": flat_config(self._config),
            "model_path": self._config.model.path,
            "dtype": self._config.model.dtype,
            "world_size": self._session.world_size,
        }
        self._staged = _Staged(step, folder, rows, trainer, start)

    def save_begun(self, step: int, position: int, log_state: dict[str, Any], reason: str) -> None:
        """Collective. The run is preempted: save the state with which its present step has begun, and leave word that all is saved.

        Nothing is written where that state is on disk, or is what the run started from.

        Raises:
            RuntimeError: on every rank, where it could not be saved.
        """
        self._wait_for_writer()
        if on_rank0(lambda _: self._saved_step != step or self._failure is not None, None):
            self.stage(step, position, log_state)
            self.write_staged()
        self.wait()
        leave_marker(self._run_dir, step, reason)
        if self._session.is_rank0:
            _log.info("preempted (%s): everything is saved; the run goes on at step %d with checkpoint.resume: auto", reason, step + 1)

    def write_staged(self) -> None:
        """Let the background thread write what was staged, if anything was. The step's metrics line is on disk by now: a run that goes on
        from this checkpoint will not write it again."""
        if self._staged is not None:
            self._writer = threading.Thread(target=self._write, args=(self._staged,), name="checkpoint", daemon=True)
            self._staged = None
            self._writer.start()

    def wait(self) -> None:
        """Collective. Wait for the last save.

        Raises:
            RuntimeError: on every rank, if it failed.
        """
        self._wait_for_writer()
        failure = on_rank0(lambda _: self._failure, None)
        if failure is not None:
            raise RuntimeError(f"the run's last state could not be saved: {failure}")

    def _is_exported(self, step: int) -> bool:
        every = self._config.checkpoint.export_every_steps
        return step == self._config.training.num_steps or (every > 0 and step % every == 0)

    def _wait_for_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _prepare(self, folder: Path, num_bytes: int) -> str | None:
        """On rank 0: an empty folder to write into; returns why there is none."""
        temporary = temporary_path(folder)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "state").mkdir(parents=True)
            free = shutil.disk_usage(temporary).free
            if free < num_bytes:
                shutil.rmtree(temporary, ignore_errors=True)
                raise OSError(f"it takes {num_bytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free")
        except OSError as error:
            return _tell_failure(folder, error)
        return None

    # In the background

    def _write(self, staged: _Staged) -> None:
        """One rank's thread. What went wrong goes to rank 0 through the store; nothing is raised."""
        key = f"checkpoint/{self._num_saves}"
        mine: dict[str, Any] = {"file": None}
        try:
            if staged.rows:
                name = f"state/shard_{self._session.rank + 1:05d}.safetensors"
                tensors = {tensor: self._buffers[tensor] for tensor in staged.rows}
                mine = {"file": name, **write_shard(temporary_path(staged.folder) / name, tensors, staged.rows)}
        except Exception as error:  # a full disk most of all
            mine = {"error": f"rank {self._session.rank}: {type(error).__name__}: {error}"}
        self._store.set(f"{key}/{self._session.rank}", json.dumps(mine))
        if self._session.is_rank0:
            try:
                self._complete(staged, self._hear_all(key))
            except Exception as error:
                shutil.rmtree(temporary_path(staged.folder), ignore_errors=True)  # half a checkpoint would only keep a full disk full
                self._failure = _tell_failure(staged.folder, error)

    def _hear_all(self, key: str) -> list[dict[str, Any]]:
        """On rank 0: what every rank's thread has to say, in the order of ranks."""
        said, deadline = [], time.monotonic() + _SAVED_WITHIN_S
        for rank in range(self._session.world_size):
            while not self._store.check([f"{key}/{rank}"]):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} has not written its part within {_SAVED_WITHIN_S:.0f} s")
                time.sleep(0.01)
            said.append(json.loads(self._store.get(f"{key}/{rank}")))
            self._store.delete_key(f"{key}/{rank}")
        return said

    def _complete(self, staged: _Staged, said: list[dict[str, Any]]) -> None:
        """On rank 0: all that is not shards, then the manifest, then the name."""
        if errors := [part["error"] for part in said if "error" in part]:
            raise OSError("; ".join(errors))
        config, temporary = self._config, temporary_path(staged.folder)
        digests = {part.pop("file"): part for part in said if part["file"]}
        for name in digests:
            if not (temporary / name).is_file():
                raise OSError(
                    f"rank 0 does not see {name}, which another rank has written: run_dir must be a file system that all nodes share"
                )
        self._write_companions(temporary / "model")
        (temporary / "trainer.json").write_text(json.dumps(staged.trainer, indent=1), encoding="utf-8")
        if self._is_exported(staged.step):
            try:
                export_checkpoint(temporary, temporary)
            except Exception as error:  # what the run needs is there, and a user can export it at any time
                _log.error("%s is saved, but not exported: %s", staged.folder, error)
        write_manifest(temporary, digests)
        metrics = self._run_dir / "metrics.jsonl"
        if metrics.exists():  # its line of the last step must not be lost where the checkpoint is not
            sync_path(metrics)
        put_in_place(temporary, staged.folder)
        self._longest_s = max(self._longest_s, time.perf_counter() - staged.start)
        forget_before(self._run_dir, staged.step)
        remove_old(self._run_dir, config.checkpoint.keep, self._best_step())

    def _write_companions(self, folder: Path) -> None:
        folder.mkdir()
        if self._policy.lora.rank:
            write_peft_config(self._policy.model, self._config.model.path, folder)
            return
        for path in checkpoint_folder(self._config.model.path).iterdir():
            # model.path may be another run's checkpoint, whose own two files would hide this one's.
            other = path.name.endswith(".index.json") or path.name in ("manifest.json", "trainer.json")
            if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and not other:
                shutil.copyfile(path, folder / path.name)

    def _best_step(self) -> int | None:
        """Of the checkpoints on disk the one after whose steps `checkpoint.best_metric` was highest; it is in the line of the next step."""
        name, path = self._config.checkpoint.best_metric, self._run_dir / "metrics.jsonl"
        if name is None or not path.exists():
            return None
        with path.open("rb") as file:
            file.seek(self._metrics_read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._metrics_read += len(new)
        for line in new.splitlines():
            metrics = json.loads(line)
            if isinstance(metrics.get(name), int | float):
                self._metric_by_step[metrics["step"]] = metrics[name]
        if new and not self._metric_by_step:
            _log.warning("checkpoint.best_metric: no line of %s has a %s so far", path, name)
        known = [step for step in map(step_of, list_checkpoints(self._run_dir)) if step in self._metric_by_step]
        return max(known, key=self._metric_by_step.__getitem__, default=None)


@dataclass(frozen=True)
class _Staged:
    step: int
    folder: Path
    rows: dict[str, int]  # tensor name to its first row, of what this rank writes
    trainer: dict[str, Any]
    start: float


def _tell_failure(folder: Path, error: Exception) -> str:
    text = f"{folder}: {error}" if isinstance(error, OSError) else f"{folder}: {type(error).__name__}: {error}"
    _log.error("checkpoint not saved, those before it stay as they are: %s", text)
    return text


def state_tensors(policy: Policy, updater: PolicyUpdater) -> dict[str, DTensor]:
    """What trains, and its moments once there are any, by their names in a checkpoint."""
    tensors: dict[str, DTensor] = {}
    for name, parameter in trained_parameters(policy).items():
        tensors[f"policy.{name}"] = parameter
        for moment in _MOMENTS:
            if moment in updater.optimizer.state.get(parameter, {}):
                tensors[f"{moment}.{name}"] = updater.optimizer.state[parameter][moment]
    return tensors


def trained_parameters(policy: Policy) -> dict[str, DTensor]:
    """Sharded parameters that train by HF's name, adapters as LAYER.lora_A.weight and LAYER.lora_B.weight."""
    found: dict[str, DTensor] = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor), name
            found[hf_name(name).replace(".default.", ".")] = parameter
    return found


def write_shard(path: Path, tensors: dict[str, Tensor], rows: dict[str, int]) -> dict[str, Any]:
    """Write this rank's rows [rows, ...] of each tensor as safetensors, with the place of the first one; sync; {"bytes", "sha256"}.

    Tensor by tensor and straight from their memory: safetensors' own writer would first make a copy of them all.
    """
    header: dict[str, Any] = {}
    offsets = {name: {"saved_offsets": [rows[name], *[0] * (tensor.ndim - 1)]} for name, tensor in tensors.items()}
    header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text, *map(_bytes_of, tensors.values())):
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def _bytes_of(tensor: Tensor) -> Any:
    """Its memory as a buffer: no copy."""
    return tensor.view(-1).view(torch.uint8).numpy()


@torch.no_grad()
def load_state(policy: Policy, updater: PolicyUpdater | None, folder: Path, trainer: dict[str, Any]) -> None:
    """Collective. Fill the policy's shards, and the optimizer's, from a verified checkpoint of any world size and mesh.

    Args:
        updater: None where only the policy is wanted.

    Raises:
        ConfigError: the tensors are not those of this model.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder / "state"))
    stored = {name: list(getattr(facts, "size", [])) for name, facts in reader.read_metadata().state_dict_metadata.items()}
    parameters = trained_parameters(policy)
    if updater is not None:
        for name, parameter in parameters.items():
            if f"exp_avg.{name}" in stored:
                moments = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
                updater.optimizer.state[parameter] = {"step": torch.tensor(float(trainer["num_updates"])), **moments}
        wanted = state_tensors(policy, updater)
        updater.restore(trainer)
    else:
        wanted = {f"policy.{name}": parameter for name, parameter in parameters.items()}
    expected = {name: list(tensor.shape) for name, tensor in wanted.items()}
    for name in sorted(expected.keys() | {n for n in stored if n.startswith("policy.")}):
        if stored.get(name) != expected.get(name):
            raise ConfigError(
                f"checkpoint.resume: {folder} is of another model: {name} has shape {stored.get(name, 'none')} there, and "
                f"{expected.get(name, 'none')} here"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Each rank reads what it holds: nothing needs to be agreed on, and DCP's own collectives would send pickles.
        dcp.load(dict(wanted), storage_reader=reader, no_dist=True)
