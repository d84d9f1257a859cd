"""Metric keys, phase timer and memory, and where metrics go: JSONL always, the console, W&B if asked for."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_spmd.config.schema import PHASES, Config
from grpo_spmd.distributed import doctor
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.reductions import Max, Reductions, merge_json, metric_values, to_json
from grpo_spmd.distributed.session import Session, set_collective_timeouts
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.observe.derive import PEAK_FLOPS, console_line, loss_metrics, tail_waste_frac
from grpo_spmd.observe.logprob_oracle import LogprobOracle
from grpo_spmd.observe.memory import MemoryLedger
from grpo_spmd.observe.metrics_file import LineFile, read_lines
from grpo_spmd.observe.rollout_record import dump_is_due, dump_rollouts, rollouts_file
from grpo_spmd.observe.wandb_feed import WandbFeed
from grpo_spmd.records import Decision, SyncStats

_log = logging.getLogger("grpo_spmd")


class MetricsLog:
    """Times the phases of a step and writes one metrics object a step: `metrics.jsonl`, a console line, W&B if asked
    for."""

    def __init__(
        self,
        config: Config,
        session: Session,
        num_parameters: int,
        pool_bytes: Callable[[], int] = lambda: 0,
        first_step: int = 0,
    ) -> None:
        """`pool_bytes`: the engine's, see memory.MemoryUse. `first_step`: the one that the run begins or goes on
        with."""
        self._step = first_step
        set_collective_timeouts(config.watchdog)  # here, where engine and policy have made their groups
        self._config, self._session, self._num_parameters = config, session, num_parameters
        self._run_dir = Path(config.run_dir)
        self._times: dict[str, float] = {}
        self._memory = MemoryLedger(config, session.device, pool_bytes)
        self._largest: dict[str, float] = {}
        self._recorded: dict[str, float | None] = {}
        self._rank0_metrics: dict[str, float | None] = {}  # of the step, as far as they are known
        self._step_start = time.perf_counter()
        # Of the run so far, which may have begun in another process.
        self._rewards = [line.get("reward/mean") or 0.0 for line, _ in read_lines(self._run_dir / "metrics.jsonl")]
        self._num_own_steps, self._has_ended = 0, False
        self._oracle = LogprobOracle(config.model.dtype, config.proofs.max_mismatch)
        self._run_start = time.perf_counter()
        self._file = LineFile(self._run_dir / "metrics.jsonl") if session.is_rank0 else None
        self._wandb = WandbFeed(config) if session.is_rank0 and config.logging.wandb else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `time/<name>_s` and its memory to the ledger (memory.py), which an
        out-of-memory error shows.

        The doctor knows meanwhile that this rank is in it (doctor.py), and how long it may take.
        """
        assert name in PHASES, name
        doctor.enter_phase(name, self._step)
        with self._memory.phase(name):
            start = time.perf_counter()
            yield
            if self._session.device.type == "cuda":
                torch.cuda.synchronize()  # kernels run on: without this their time would be counted in a later phase
            self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - start
        doctor.leave_phase(name, self._step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold so that the next steps are judged as they would have been; known on rank 0."""
        return {"mismatch_scale": self._oracle.measured}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; nothing where it is empty."""
        if state.get("mismatch_scale") is not None:
            self._oracle.measured = tuple(state["mismatch_scale"])

    def record(self, metrics: dict[str, float | None]) -> None:
        """Keep `metrics`, equal on all ranks, for the next line that is written."""
        self._recorded |= metrics

    def record_largest(self, local_metrics: dict[str, float]) -> None:
        """Keep this rank's `local_metrics` for the line of the step, which gets the largest over the ranks."""
        self._largest |= local_metrics

    def check_step(
        self,
        step: int,
        sampled: SampledStep,
        decision: Decision,
        sync_stats: SyncStats,
        local_sums: Reductions,
        local_busy_s: list[float],
    ) -> None:
        """Collective. Bring together what the ranks' updates came to, and judge it.

        `local_busy_s`: seconds of each of this rank's generations of rollouts.

        Raises:
            Rank0Error: on every rank, where engine and policy differ by more than rounding (proofs.py), too many
                updates in a row were not finite, or other tokens were trained on than rank 0 decided. The step's line
                is written all the same: its figures are what one wants to see then.
        """
        if local_sums["optim/skipped_updates"].value and not dump_is_due(self._config, step):  # the same on all ranks
            dump_rollouts(self._config, step, sampled, decision)

        def judge(parts: list[tuple[dict[str, Any], list[float]]]) -> None:
            sums = merge_json(of_update for of_update, _ in parts)
            self._rank0_metrics = loss_metrics(sums, self._config.loss)
            self._rank0_metrics["rollout/tail_waste_frac"] = tail_waste_frac([busy_s for _, busy_s in parts])
            try:
                mean, largest = (sums[f"weight_sync/mismatch_abs_{name}"].value for name in ("mean", "max"))
                self._oracle.check(step, mean, largest)
                _check_skipped(sums, step, self._config)
                _check_trained(sums, step, self._config, decision)
            except Exception:
                self._write_step(step, decision, sync_stats, [to_json(self._times_and_memory())])
                raise

        on_rank0(judge, [to_json(local_sums), local_busy_s])

    def end_step(self, step: int, decision: Decision, sync_stats: SyncStats) -> None:
        """Collective. Bring the ranks' times together and write the step."""
        on_rank0(lambda parts: self._write_step(step, decision, sync_stats, parts), to_json(self._times_and_memory()))
        self._recorded.clear()
        self._times.clear()
        self._largest.clear()
        self._memory.end_step()
        self._step = step + 1
        self._step_start = time.perf_counter()

    def _times_and_memory(self) -> Reductions:
        times = {f"time/{name}_s": self._times.get(name, 0.0) for name in PHASES}
        largest = {"time/step_s": time.perf_counter() - self._step_start, **times, **self._memory.metrics()}
        return {name: Max(value) for name, value in (largest | self._largest).items()}

    def _write_step(
        self, step: int, decision: Decision, sync_stats: SyncStats, times: list[dict[str, list[Any]]]
    ) -> None:
        largest = metric_values(merge_json(times))
        metrics = {"step": step, **self._derive(decision, sync_stats, largest), **self._recorded}
        self._write(metrics)
        self._rewards.append(metrics["reward/mean"] or 0.0)
        self._num_own_steps += 1
        _log.info(console_line(metrics, self._config.training.num_steps))
        if not metrics["optim/updates"] and not metrics["optim/skipped_updates"]:
            _log.warning(
                "step %d: no update was made, since no completion counts (see dynamic_sampling/* and reward/unscored_frac)",
                step,
            )

    def end_run(self) -> None:
        """Write what was recorded after the last step, as a line of its own; say how the run went."""
        self._has_ended = True
        if not self._session.is_rank0:
            return
        if self._recorded:
            self._write({"step": self._config.training.num_steps, **self._recorded})
        minutes, seconds = divmod(int(time.perf_counter() - self._run_start), 60)
        if not self._rewards:  # it has only evaluated a policy that was trained elsewhere
            return
        first, last = self._rewards[0], self._rewards[-10:]
        own = f", the last {self._num_own_steps} of them" if self._num_own_steps < len(self._rewards) else ""
        _log.info(
            "done: %d steps%s in %d min %02d s, reward/mean %.3f at the first step, %.3f over the last %d; see %s",
            len(self._rewards), own, minutes, seconds, first, sum(last) / len(last), len(last), self._run_dir / "metrics.jsonl",
        )  # fmt: skip

    def close(self) -> None:
        """No line comes any more. W&B gets its time to end, or 5 s where the run was preempted and has none to
        spare."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish(None if self._has_ended else 5.0)

    def _derive(
        self, decision: Decision, sync_stats: SyncStats, largest: dict[str, float | None]
    ) -> dict[str, float | None]:
        """The contract's keys from the step's raw numbers."""
        world_size = self._session.world_size
        step_s, rollout_s, update_s = (largest[f"time/{name}_s"] or 0.0 for name in ("step", "rollout", "update"))
        out = decision.metrics | self._rank0_metrics
        out |= {
            "weight_sync/bytes": sync_stats.bytes,
            "weight_sync/num_collectives": sync_stats.num_collectives,
            "weight_sync/proof_s": sync_stats.proof_s,
            **largest,
            "rollout/tokens_per_s": decision.num_sampled_tokens / max(rollout_s, 1e-9),
            "throughput/samples_per_s": len(decision.in_loss) / step_s,
            "throughput/tokens_per_s_per_rank": decision.num_tokens / step_s / world_size,
        }
        if self._session.device.type == "cuda":
            # Forward and backward of a dense model: 6 FLOPs a parameter and token; attention is left out, so this is a
            # lower bound.
            num_tokens = decision.num_tokens * self._config.training.num_epochs
            flops = 6.0 * self._num_parameters * num_tokens / max(update_s, 1e-9) / world_size
            name = torch.cuda.get_device_name()
            peak = next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
            out["throughput/mfu"] = None if peak is None else flops / peak
        return out

    def _write(self, metrics: dict[str, float | None]) -> None:
        # NaN is not JSON; a reader would stop at it.
        clean = {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
        assert self._file is not None
        self._file.write(json.dumps(clean))
        if self._wandb is not None:
            self._wandb.line_written()


def _check_skipped(sums: Reductions, step: int, config: Config) -> None:
    skipped, ids = int(sums["optim/skipped_updates"].value), sorted(set(sums["nonfinite_rollouts"].value))
    most = config.training.max_nonfinite_in_a_row
    if not skipped:
        return
    suspects = (
        f"rollouts {ids[:10]} have logprobs that are not finite" if ids else "no single rollout's logprobs show it"
    )
    text = (
        f"step {step}: {skipped} updates skipped, since loss or gradient was not finite; {suspects}; see "
        f"{rollouts_file(config, step)}"
    )
    if sums["skipped_in_a_row"].value >= most:
        raise FloatingPointError(f"{text}. That is {most} in a row (training.max_nonfinite_in_a_row)")
    _log.warning(text)


def _check_trained(sums: Reductions, step: int, config: Config, decision: Decision) -> None:
    """Every token that rank 0 counted, on some rank, once an epoch: a rollout lost or doubled on the way would bias the
    gradient."""
    expected = config.training.num_epochs * sum(decision.num_loss_tokens)
    found = sums["loss_tokens"].value
    if not sums["optim/skipped_updates"].value and found != expected:
        raise RuntimeError(f"step {step}: trained on {found:.0f} tokens where rank 0 had decided on {expected}")
