"""Checkpoints: everything a run needs to go on exactly, copied out in a moment and written in the background. What is
in one, and how it is told to be whole, is in manifest.py. The shards are in the safetensors format of torch's
distributed checkpoints, so that `torch.distributed.checkpoint` reads them into any world size and mesh. Each rank
writes its own, not `dcp.save`, whose thread needs collectives of its own and a second copy of all bytes, and whose
default format is unpickled. There are no random states: every draw is a function of (seed, step, position, sample)."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_spmd.checkpoint.export import export_checkpoint
from grpo_spmd.checkpoint.manifest import FORMAT, write_manifest
from grpo_spmd.checkpoint.merge import copy_companions
from grpo_spmd.checkpoint.restore import load_state
from grpo_spmd.checkpoint.run_dir import (
    Start,
    checkpoint_path,
    put_in_place,
    remove_old,
    temporary_path,
)
from grpo_spmd.checkpoint.state import RunFacts, TrainedSignal, state_tensors, write_shard
from grpo_spmd.config.schema import CheckpointConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.preemption import remove_marker, write_marker
from grpo_spmd.distributed.session import Session
from grpo_spmd.distributed.store import clone_store
from grpo_spmd.files import sync_path
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.hf_files import checkpoint_folder
from grpo_spmd.model.lora import write_peft_config
from grpo_spmd.model.offload import host_buffer
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import first_row, is_first_replica
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics
from grpo_spmd.rollout.buffer import delete_until

_log = logging.getLogger("grpo_spmd")
_SAVED_WITHIN_S = 3600.0  # a file server that hangs for longer is a failed save


@dataclass(frozen=True)
class _Staged:
    step: int
    folder: Path
    rows: dict[str, int]  # of what this rank writes: tensor name to its first row
    trainer: dict[str, Any]
    start: float  # when the copy began


class Checkpoints:
    """Saves the run's state each `every_steps`, at the end, and when the run is preempted.
    Training waits for the copy into host memory alone (`stage_if_due`). A thread of each rank then writes and syncs its
    shard; rank 0's adds the rest and gives the folder its name. A save that fails is an error in the log: the
    checkpoints before it stay, and the run goes on to the next save. Only the last one of a run must succeed."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        num_steps: int,
        session: Session,
        policy: Policy,
        updater: PolicyUpdater,
        facts: RunFacts,
        critic: TrainedSignal | None = None,
    ) -> None:
        """`num_steps`: of the whole run, after which it is saved and exported; `facts`: what is written beside it."""
        self._run_dir, self._config, self._num_steps, self._facts = (
            run_dir,
            config,
            num_steps,
            facts,
        )
        self._session, self._policy, self._updater, self._critic = session, policy, updater, critic
        self._buffers: dict[
            str, Tensor
        ] = {}  # in host memory, made once: pinned memory is slow to get
        self._staged: _Staged | None = None
        self._writer: threading.Thread | None = None
        self._failure: str | None = None  # of the last save; on rank 0 that of any rank
        self._store, self._num_saves = clone_store(), 0
        self._saved_step = -1  # staged last, or what this folder's run started from
        self._longest_s = 0.0  # that a save took, from the copy to the folder's name
        self._metric_by_step: dict[int, float] = {}
        self._metrics_read = 0  # bytes of metrics.jsonl that were looked at

    def load(self, start: Start) -> None:
        """Collective. Put policy, optimizer and schedule where the checkpoint had them, if there is one."""
        self._saved_step = start.step
        remove_marker(self._run_dir)
        if start.folder is not None:
            load_state(self._policy, self._updater, start.folder, start.trainer, self._critic)
            if self._session.is_rank0:
                _log.info("goes on from %s", start.folder)

    @property
    def time_to_save_s(self) -> float:
        """What saving the state now may take: the longest save, twice where one is under way; 0: not known yet."""
        return self._longest_s * (2 if self._writer is not None and self._writer.is_alive() else 1)

    def stage_if_due(self, step: int, position: int, log_state: dict[str, Any]) -> None:
        """Collective. After `step` finished steps: copy the state, if it is to be saved. `position`: the next place in
        the prompt stream; `log_state`: LogprobCheck.state."""
        if self._is_due(step, self._config.every_steps):
            self.stage(step, position, log_state)

    def stage(self, step: int, position: int, log_state: dict[str, Any]) -> None:
        """Collective. Copy the state into host memory, once the save before is through."""
        self._wait_for_writer()
        start, folder = time.perf_counter(), checkpoint_path(self._run_dir, step)
        tensors = state_tensors(self._policy, self._updater, self._critic)
        shards = {name: t for name, t in tensors.items() if is_first_replica(t)}
        num_bytes = sum(t.to_local().nbytes for t in shards.values())
        if self._is_due(step, self._config.export_every_steps):
            num_bytes += sum(
                t.to_local().nbytes for name, t in shards.items() if name.startswith("policy.")
            )
        self._failure, self._longest_s = on_rank0(
            lambda sizes: self._prepare(folder, sum(sizes)), num_bytes
        )
        if self._failure is not None:
            return
        rows = {
            name: first_row(t) for name, t in shards.items() if len(t.to_local())
        }  # a rank may have none
        for name in rows:
            local = shards[name].to_local().detach()
            if name not in self._buffers:
                self._buffers[name] = (
                    host_buffer(local.nbytes, local.device).view(local.dtype).view(local.shape)
                )
            self._buffers[name].copy_(local, non_blocking=True)
        if self._session.device.type == "cuda":
            torch.cuda.synchronize()
        self._num_saves, self._saved_step = self._num_saves + 1, step
        trainer: dict[str, Any] = {"format": FORMAT, "step": step, "position": position}
        trainer |= {**self._updater.state(), **log_state, **asdict(self._facts)}
        if self._critic is not None:
            trainer["critic"] = self._critic.state()
        self._staged = _Staged(step, folder, rows, trainer, start)

    def write_staged(self) -> None:
        """Let the background thread write what was staged, if anything was. The step's metrics line is on disk by now:
        a run that goes on from this checkpoint will not write it again."""
        if self._staged is not None:
            self._writer = threading.Thread(
                target=self._write, args=(self._staged,), name="checkpoint", daemon=True
            )
            self._staged = None
            self._writer.start()

    def wait(self) -> None:
        """Collective. Wait for the last save. Raises RuntimeError on every rank, if it failed."""
        self._wait_for_writer()
        if (failure := on_rank0(lambda _: self._failure, None)) is not None:
            raise RuntimeError(f"the run's last state could not be saved: {failure}")

    def save_preempted(
        self, step: int, position: int, log_state: dict[str, Any], reason: str
    ) -> None:
        """Collective. Save the state with which the present step began, unless it is on disk or the run started from
        it, and leave word that all is saved. Raises RuntimeError on every rank, where it could not be saved."""
        self._wait_for_writer()
        if on_rank0(lambda _: self._saved_step != step or self._failure is not None, None):
            self.stage(step, position, log_state)
            self.write_staged()
        self.wait()
        write_marker(self._run_dir, step, reason)
        if self._session.is_rank0:
            _log.info("preempted (%s): everything is saved, up to step %d", reason, step)
            _log.info("to go on: the same command with checkpoint.resume=auto")

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._num_steps or (every > 0 and step % every == 0)

    def _wait_for_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _prepare(self, folder: Path, num_bytes: int) -> tuple[str | None, float]:
        """On rank 0: an empty folder to write into. Why there is none, and the longest save so far."""
        temporary = temporary_path(folder)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "state").mkdir(parents=True)
            free = shutil.disk_usage(temporary).free
            if free < num_bytes:
                shutil.rmtree(temporary, ignore_errors=True)
                raise OSError(
                    f"it takes {num_bytes / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free"
                )
        except OSError as error:
            return _log_failure(folder, error), self._longest_s
        return None, self._longest_s

    def _write(self, staged: _Staged) -> None:
        """One rank's thread. What went wrong goes to rank 0 through the store; nothing is raised."""
        key, rank = f"checkpoint/{self._num_saves}", self._session.rank
        mine: dict[str, Any] = {"file": None}
        try:
            if staged.rows:
                name = f"state/shard_{rank + 1:05d}.safetensors"
                tensors = {tensor: self._buffers[tensor] for tensor in staged.rows}
                mine = {
                    "file": name,
                    **write_shard(temporary_path(staged.folder) / name, tensors, staged.rows),
                }
        except Exception as error:  # a full disk most of all
            mine = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
        self._store.set(f"{key}/{rank}", json.dumps(mine))
        if self._session.is_rank0:
            try:
                self._complete(staged, self._hear_all(key))
            except Exception as error:
                shutil.rmtree(
                    temporary_path(staged.folder), ignore_errors=True
                )  # half of it only fills the disk
                self._failure = _log_failure(staged.folder, error)

    def _hear_all(self, key: str) -> list[dict[str, Any]]:
        """On rank 0: what every rank's thread has to say, in the order of ranks."""
        said, deadline = [], time.monotonic() + _SAVED_WITHIN_S
        for rank in range(self._session.world_size):
            while not self._store.check([f"{key}/{rank}"]):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {rank} has not written its part within {_SAVED_WITHIN_S:.0f} s"
                    )
                time.sleep(0.01)
            said.append(json.loads(self._store.get(f"{key}/{rank}")))
            self._store.delete_key(f"{key}/{rank}")
        return said

    def _complete(self, staged: _Staged, said: list[dict[str, Any]]) -> None:
        """On rank 0: all that is not shards, then the manifest, then the name."""
        if errors := [part["error"] for part in said if "error" in part]:
            raise OSError("; ".join(errors))
        temporary = temporary_path(staged.folder)
        digests = {part.pop("file"): part for part in said if part["file"]}
        for name in digests:
            if not (temporary / name).is_file():
                why = f"rank 0 does not see {name}, which another rank has written"
                raise OSError(f"{why}: run_dir must be a file system that all nodes share")
        self._write_companions(temporary / "model")
        (temporary / "trainer.json").write_text(
            json.dumps(staged.trainer, indent=1), encoding="utf-8"
        )
        if self._is_due(staged.step, self._config.export_every_steps):
            try:
                export_checkpoint(temporary, temporary)
            except (
                Exception
            ) as error:  # what the run needs is there, and a user can export it at any time
                _log.error("%s is saved, but not exported: %s", staged.folder, error)
        write_manifest(temporary, digests)
        if (
            metrics := self._run_dir / "metrics.jsonl"
        ).exists():  # its last line must not be lost, once this is kept
            sync_path(metrics)
        put_in_place(temporary, staged.folder)
        self._longest_s = max(self._longest_s, time.perf_counter() - staged.start)
        delete_until(self._run_dir, staged.step)
        remove_old(self._run_dir, self._config.keep, self._best_step())

    def _write_companions(self, folder: Path) -> None:
        folder.mkdir()
        if self._policy.lora.rank:
            write_peft_config(self._policy.model, self._facts.model_path, folder)
            return
        copy_companions(checkpoint_folder(self._facts.model_path), folder)

    def _best_step(self) -> int | None:
        """Of the checkpoints on disk that with the highest `best_metric`; a step's is of the policy before it."""
        name, path = self._config.best_metric, self._run_dir / "metrics.jsonl"
        if name is None:
            return None
        start = self._metrics_read
        for line in read_metrics(path, start):
            self._metrics_read = line.end
            if isinstance(line.metrics.get(name), int | float):
                self._metric_by_step[line.metrics["step"] - (not is_evaluation(line.metrics))] = (
                    line.metrics[name]
                )
        if self._metrics_read > start and not self._metric_by_step:
            _log.warning("checkpoint.best_metric: no line of %s has a %s so far", path, name)
        kept = (
            step
            for step in sorted(self._metric_by_step)
            if checkpoint_path(self._run_dir, step).exists()
        )
        return max(kept, key=self._metric_by_step.__getitem__, default=None)


def _log_failure(folder: Path, error: Exception) -> str:
    text = (
        f"{folder}: {error}"
        if isinstance(error, OSError)
        else f"{folder}: {type(error).__name__}: {error}"
    )
    _log.error("checkpoint not saved, those before it stay as they are: %s", text)
    return text
