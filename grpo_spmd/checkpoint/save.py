"""This module saves checkpoints, from which a run continues exactly as if it had never stopped.

The state is *staged* (copied into host memory) while training waits, and written in the background.
manifest.py describes the format of the folder. Each rank writes its own shard, in the safetensors
format of torch's distributed checkpoints, so that `torch.distributed.checkpoint` can load the
shards into any world size and mesh. `dcp.save` is not used: its thread needs collectives of its own
and a second copy of all bytes, and its default format is a pickle. No states of random generators
are saved, since every random draw is a function of (seed, step, position, sample).
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from grpo_spmd.checkpoint.export import copy_companions, export_checkpoint
from grpo_spmd.checkpoint.manifest import FORMAT, write_manifest
from grpo_spmd.checkpoint.run_dir import (
    Start,
    checkpoint_path,
    put_in_place,
    remove_old,
    temporary_path,
)
from grpo_spmd.checkpoint.state import (
    RunFacts,
    TrainedSignal,
    load_state,
    state_tensors,
    write_shard,
)
from grpo_spmd.config.schema import CheckpointConfig
from grpo_spmd.distributed.collectives import clone_store, on_rank0
from grpo_spmd.distributed.preemption import remove_marker, write_marker
from grpo_spmd.distributed.session import Session
from grpo_spmd.files import sync_path
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.config_json import checkpoint_folder
from grpo_spmd.model.lora import write_peft_config
from grpo_spmd.model.offload import host_buffer
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import first_row, is_first_replica
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics
from grpo_spmd.records import Fields
from grpo_spmd.rollout.buffer import delete_until

_log = logging.getLogger("grpo_spmd")
# A save that hangs for longer (a file server may) counts as failed.
_SAVED_WITHIN_S = 3600.0


@dataclass(frozen=True)
class _StagedSave:
    """A state that was copied into host memory and waits to be written."""

    folder: Path
    first_rows: dict[str, int]
    """For each tensor of which this rank writes rows: the index of its first row in the whole
    tensor."""
    trainer: Fields
    """The content of trainer.json."""
    start: float
    """The time.perf_counter() at which the copy began."""


@dataclass
class Checkpoints:
    """Saves the run's state every checkpoint.every_steps steps, at the end, and when the run is
    preempted.

    Training waits only for the copy into host memory (`stage_if_due`). Then a thread of each rank
    writes and syncs its shard; rank 0's thread adds the other files and gives the folder its name.
    A save that fails is logged as an error: earlier checkpoints stay, and the run goes on to the
    next save. Only the last save of a run must succeed.
    """

    run_dir: Path
    config: CheckpointConfig
    num_steps: int
    """The number of steps of the whole run. The state after the last step is always saved."""
    session: Session
    policy: Policy
    updater: PolicyUpdater
    facts: RunFacts
    """The facts about the run that trainer.json records."""
    critic: TrainedSignal | None = None

    def __post_init__(self) -> None:
        # The staged tensors in host memory. They are allocated once, since pinned memory is slow to
        # allocate.
        self._buffers: dict[str, Tensor] = {}
        self._staged: _StagedSave | None = None
        self._writer: threading.Thread | None = None
        # Why the last save failed; None if it did not. Only rank 0 gets to know of failures in the
        # background.
        self._failure: str | None = None
        # A connection to the run's store, by which the writer threads exchange their results.
        self._store = clone_store()
        self._num_saves = 0
        # The step whose state was staged last, or else the step at which this launch started; -1
        # before `load`.
        self._saved_step = -1
        # The seconds of the slowest save, from the begin of the copy to the rename of the folder.
        self._max_save_s = 0.0
        self._metric_by_step: dict[int, float] = {}
        # The bytes of metrics.jsonl that `_best_step` has read so far.
        self._num_metrics_bytes = 0

    def load(self, start: Start) -> None:
        """Collective. Restores the training state if `start` has a checkpoint."""
        self._saved_step = start.step
        remove_marker(self.run_dir)
        if start.folder is not None:
            load_state(self.policy, self.updater, start.folder, start.trainer, self.critic)
            if self.session.is_rank0:
                _log.info("goes on from %s", start.folder)

    @property
    def time_to_save_s(self) -> float:
        """An estimate of the seconds that a save would take now: those of the slowest save so far,
        0 before the first.

        The time is doubled while a save is running, since that save must end first.
        """
        is_writing = self._writer is not None and self._writer.is_alive()
        return self._max_save_s * (2 if is_writing else 1)

    def stage_if_due(self, step: int, position: int, log_state: Fields) -> None:
        """Collective. Stages the state after `step` finished steps, if a save is due after them.

        `position` is the next index in the prompt stream. `log_state` is LogprobCheck.state, which
        trainer.json records.
        """
        if self._is_due(step, self.config.every_steps):
            self.stage(step, position, log_state)

    def stage(self, step: int, position: int, log_state: Fields) -> None:
        """Collective. Waits until the previous save is written, then copies the state after `step`
        finished steps into host memory, from where `write_staged` writes it.

        `position` is the next index in the prompt stream, `log_state` is LogprobCheck.state. If the
        disk has no room, nothing is staged: the failure is logged and kept, and not raised."""
        self._wait_for_writer()
        start = time.perf_counter()
        folder = checkpoint_path(self.run_dir, step)
        tensors = state_tensors(self.policy, self.updater, self.critic)
        # If several replicas hold the same rows, only the first replica writes them.
        shards = {name: tensor for name, tensor in tensors.items() if is_first_replica(tensor)}
        # The bytes that this rank needs on the disk. An exported model takes at most as many bytes
        # as the policy's tensors in the checkpoint, which are float32.
        num_bytes = 0
        for name, tensor in shards.items():
            is_exported = name.startswith("policy.") and self._is_export_due(step)
            num_bytes += tensor.to_local().nbytes * (2 if is_exported else 1)
        self._failure, self._max_save_s = on_rank0(
            lambda sizes: self._prepare(folder, sum(sizes)), num_bytes
        )
        if self._failure is not None:
            return
        # A rank may have no rows of a small tensor.
        first_rows = {name: first_row(t) for name, t in shards.items() if len(t.to_local())}
        for name in first_rows:
            local = shards[name].to_local().detach()
            if name not in self._buffers:
                buffer = host_buffer(local.nbytes, local.device)
                self._buffers[name] = buffer.view(local.dtype).view(local.shape)
            # From a GPU this call only starts the copy.
            self._buffers[name].copy_(local, non_blocking=True)
        if self.session.device.type == "cuda":
            torch.cuda.synchronize()
        self._num_saves += 1
        self._saved_step = step
        trainer: Fields = {
            "format": FORMAT,
            "step": step,
            "position": position,
            **self.updater.state(),
            **log_state,
            **asdict(self.facts),
        }
        if self.critic is not None:
            trainer["critic"] = self.critic.state()
        self._staged = _StagedSave(folder, first_rows, trainer, start)

    def write_staged(self) -> None:
        """Starts the background thread that writes what was staged, if anything was.

        Called after the step's metrics line was written, because a run that continues from this
        checkpoint will not write that line again.
        """
        if self._staged is not None:
            self._writer = threading.Thread(
                target=self._write, args=(self._staged,), name="checkpoint", daemon=True
            )
            self._staged = None
            self._writer.start()

    def wait(self) -> None:
        """Collective. Waits for the last save to finish. Raises RuntimeError on every rank if it
        failed."""
        self._wait_for_writer()
        failure = on_rank0(lambda _: self._failure, None)
        if failure is not None:
            raise RuntimeError(f"the run's last state could not be saved: {failure}")

    def save_preempted(self, step: int, position: int, log_state: Fields, reason: str) -> None:
        """Collective. Saves the state after `step` finished steps and marks the run as preempted.

        A state that is on disk already, or from which this launch started, is not saved again.
        `reason` is for the marker and the log. Raises RuntimeError on every rank if the state could
        not be saved.
        """
        self._wait_for_writer()
        if on_rank0(lambda _: self._saved_step != step or self._failure is not None, None):
            self.stage(step, position, log_state)
            self.write_staged()
        self.wait()
        write_marker(self.run_dir, step, reason)
        if self.session.is_rank0:
            _log.info("preempted (%s): everything is saved, up to step %d", reason, step)
            _log.info("to go on: the same command with checkpoint.resume=auto")

    def _is_due(self, step: int, every_steps: int) -> bool:
        """Returns True after the run's last step and after every `every_steps` steps (0: never)."""
        return step == self.num_steps or (every_steps > 0 and step % every_steps == 0)

    def _is_export_due(self, step: int) -> bool:
        """Returns True if the checkpoint after `step` is also exported as a model's folder."""
        return self._is_due(step, self.config.export_every_steps)

    def _wait_for_writer(self) -> None:
        """Waits until this rank's thread has written the save before, if one is being written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _prepare(self, folder: Path, num_bytes: int) -> tuple[str | None, float]:
        """Makes an empty temporary folder for a checkpoint of `num_bytes`. Runs on rank 0.

        Returns (why that failed or None, seconds of the slowest save so far), for all ranks.
        """
        temporary = temporary_path(folder)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "state").mkdir(parents=True)
            # It is better to fail now than in the middle of a shard.
            free = shutil.disk_usage(temporary).free
            if free < num_bytes:
                shutil.rmtree(temporary, ignore_errors=True)
                raise OSError(
                    f"it takes {num_bytes / 2**20:,.1f} MiB, and {free / 2**20:,.1f} MiB are free"
                )
        except OSError as error:
            return _log_failure(folder, error), self._max_save_s
        return None, self._max_save_s

    def _write(self, staged: _StagedSave) -> None:
        """Writes this rank's shard and, on rank 0, completes the save. Runs in the writer thread.

        Each rank sets the key checkpoint/SAVE/RANK in the store to its result, or to its error. So
        errors reach rank 0, which waits for all of these keys; nothing is raised.
        """
        key = f"checkpoint/{self._num_saves}"
        rank = self.session.rank
        result: Fields = {"file": None}
        try:
            if staged.first_rows:
                name = f"state/shard_{rank + 1:05d}.safetensors"
                tensors = {tensor: self._buffers[tensor] for tensor in staged.first_rows}
                path = temporary_path(staged.folder) / name
                result = {"file": name, **write_shard(path, tensors, staged.first_rows)}
        except Exception as error:  # most likely a full disk
            result = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
        # Not by a collective: in this thread it would get mixed up with those of the training.
        self._store.set(f"{key}/{rank}", json.dumps(result))
        if self.session.is_rank0:
            try:
                self._complete(staged, self._wait_for_results(key))
            except Exception as error:
                # An incomplete checkpoint only fills the disk.
                shutil.rmtree(temporary_path(staged.folder), ignore_errors=True)
                self._failure = _log_failure(staged.folder, error)

    def _wait_for_results(self, key: str) -> list[Fields]:
        """Returns every rank's result, in the order of ranks. Runs in rank 0's writer thread.

        Waits for the keys `key`/RANK that the ranks set (see `_write`), and then deletes them."""
        keys = [f"{key}/{rank}" for rank in range(self.session.world_size)]
        self._store.wait(keys, timedelta(seconds=_SAVED_WITHIN_S))
        results = [json.loads(self._store.get(rank_key)) for rank_key in keys]
        for rank_key in keys:
            self._store.delete_key(rank_key)
        return results

    def _complete(self, staged: _StagedSave, results: list[Fields]) -> None:
        """Completes a checkpoint whose shards are written. Runs in rank 0's writer thread.

        Writes the other files, and the manifest last, then renames the folder, and removes old
        checkpoints. `results` has the result of each rank. Raises OSError if a rank could not write
        its shard.
        """
        errors = [result["error"] for result in results if "error" in result]
        if errors:
            raise OSError("; ".join(errors))
        temporary = temporary_path(staged.folder)
        digests = {result.pop("file"): result for result in results if result["file"]}
        for name in digests:
            if not (temporary / name).is_file():
                raise OSError(
                    f"rank 0 does not see {name}, which another rank has written: "
                    "run_dir must be a file system that all nodes share"
                )
        # The files that belong to the weights: config and tokenizer, or peft's adapter config.
        companions = temporary / "model"
        companions.mkdir()
        if self.policy.lora.rank:
            write_peft_config(self.policy.model, self.facts.model_path, companions)
        else:
            copy_companions(checkpoint_folder(self.facts.model_path), companions)
        content = json.dumps(staged.trainer, indent=1)
        (temporary / "trainer.json").write_text(content, encoding="utf-8")
        if self._is_export_due(staged.trainer["step"]):
            try:
                export_checkpoint(temporary, temporary)
            # The run's state is saved, and a user can export it at any time.
            except Exception as error:
                _log.error("%s is saved, but not exported: %s", staged.folder, error)
        write_manifest(temporary, digests)
        metrics = self.run_dir / "metrics.jsonl"
        if metrics.exists():
            # A run that continues from this checkpoint does not write these lines again.
            sync_path(metrics)
        put_in_place(temporary, staged.folder)
        self._max_save_s = max(self._max_save_s, time.perf_counter() - staged.start)
        delete_until(self.run_dir, staged.trainer["step"])
        remove_old(self.run_dir, self.config.keep, self._best_step())

    def _best_step(self) -> int | None:
        """Returns the step of the checkpoint on disk with the highest `best_metric`.

        None if the config names no metric, or if no checkpoint has a value of it. Runs on rank 0.
        """
        name = self.config.best_metric
        path = self.run_dir / "metrics.jsonl"
        if name is None:
            return None
        start = self._num_metrics_bytes
        for line in read_metrics(path, start):
            self._num_metrics_bytes = line.end
            value = line.values.get(name)
            if isinstance(value, int | float):
                # A step's own metrics measure the policy before its update, which is that of the
                # checkpoint one step earlier. An evaluation's metrics measure the policy after the
                # step's update.
                lag = 0 if is_evaluation(line.values) else 1
                self._metric_by_step[line.values["step"] - lag] = value
        if self._num_metrics_bytes > start and not self._metric_by_step:
            _log.warning("checkpoint.best_metric: no line of %s has a %s so far", path, name)
        steps = [
            step
            for step in sorted(self._metric_by_step)
            if checkpoint_path(self.run_dir, step).exists()
        ]
        return max(steps, key=self._metric_by_step.__getitem__, default=None)


def _log_failure(folder: Path, error: Exception) -> str:
    """Logs that a save failed, and returns the reason as text."""
    kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
    text = f"{folder}: {kind}{error}"
    _log.error("checkpoint not saved, those before it stay as they are: %s", text)
    return text
