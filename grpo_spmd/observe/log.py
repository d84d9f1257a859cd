"""One metrics object a step: brought together, judged, and written to metrics.jsonl, the console and the tracker."""

from __future__ import annotations

import json
import logging
import math
import time
from itertools import islice
from pathlib import Path

import torch

from grpo_spmd.config.schema import LossConfig, TrainingConfig
from grpo_spmd.distributed.collectives import on_rank0_bytes
from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.distributed.reductions import Max, Reductions, merge_bytes, metric_values, to_bytes
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.losses import TILT_SUMS
from grpo_spmd.observe.console import Console
from grpo_spmd.observe.derive import Metrics, loss_metrics, mfu, tail_waste_frac, throughput
from grpo_spmd.observe.followers import Followers
from grpo_spmd.observe.metrics_file import (
    LineFile,
    is_evaluation,
    read_metrics,
    read_metrics_backwards,
)
from grpo_spmd.observe.phase_timer import PhaseTimer
from grpo_spmd.observe.progress import WallClock
from grpo_spmd.observe.run_folder import dump_path
from grpo_spmd.observe.timeline import TimelineFile, pack_spans, unpack_spans
from grpo_spmd.proofs.logprob_check import LogprobCheck
from grpo_spmd.records import Decision, SyncStats

_log = logging.getLogger("grpo_spmd")


class MetricsLog:
    def __init__(
        self,
        run_dir: Path,
        session: Session,
        timer: PhaseTimer,
        logprob_check: LogprobCheck,
        loss: LossConfig,
        training: TrainingConfig,
        num_parameters: int,
        followers: Followers | None,
        began: float,
    ) -> None:
        """`began`: the launch, on the monotonic clock."""
        self._run_dir, self._session, self._timer, self._logprob_check = (
            run_dir,
            session,
            timer,
            logprob_check,
        )
        self._loss, self._training, self._num_parameters, self._followers = (
            loss,
            training,
            num_parameters,
            followers,
        )
        self._path = run_dir / "metrics.jsonl"
        self._largest: dict[str, float] = {}
        self._generation_s: list[float] = []  # of this rank, in the step
        self._rank0_metrics: Metrics = {}  # of the step, as far as they are known
        # of the run so far, which may have begun in another process
        steps = (
            line.metrics for line in read_metrics(self._path) if not is_evaluation(line.metrics)
        )
        first = [*islice(steps, session.is_rank0)]
        from_end = (
            metrics for metrics in read_metrics_backwards(self._path) if not is_evaluation(metrics)
        )
        newest = [*islice(from_end, 10 * len(first))][::-1]
        self._num_steps = newest[-1]["step"] + 1 - first[0]["step"] if first else 0
        self._rewards = [
            metrics.get("reward/mean") or 0.0 for metrics in first + newest
        ]  # the first, and the last ten
        self._clock = WallClock(began, newest[-1] if newest else {})
        self._num_own_steps, self._has_ended = 0, False
        self._run_start, self._console = time.perf_counter(), Console(training.num_steps)
        self._file = LineFile(self._path) if session.is_rank0 else None
        self._timeline = TimelineFile(run_dir) if session.is_rank0 else None

    def write_evaluation(self, step: int, metrics: Metrics) -> None:
        """A line of its own for what an evaluation of the policy after `step` found; none where there was none."""
        if metrics and self._session.is_rank0:
            self._write({"step": step, **metrics})

    def record_largest(self, local_metrics: dict[str, float]) -> None:
        """Keep this rank's `local_metrics` for the line of the step, which gets the largest over the ranks."""
        self._largest |= local_metrics

    def check_step(
        self,
        step: int,
        decision: Decision,
        sync: SyncStats,
        local_sums: Reductions,
        local_generation_s: list[float],
    ) -> None:
        """Collective. Bring together and judge what the ranks' updates came to, and how long their generations took.
        Raises Rank0Error on every rank, where engine and policy differ by more than rounding (logprob_check.py), too
        many updates in a row were not finite, or other tokens were trained on than rank 0 decided. The step's line is
        written all the same: its figures are what one wants to see then."""

        def judge(parts: list[bytes]) -> None:
            told = [PackedReader(part) for part in parts]
            sums = merge_bytes(of_rank.rest() for of_rank in told)
            waste = {
                "rollout/tail_waste_frac": tail_waste_frac([of_rank.header for of_rank in told])
            }
            synced = {
                f"weight_sync/{name}": getattr(sync, name)
                for name in ("bytes", "num_collectives", "proof_s")
            }
            self._rank0_metrics = decision.metrics | loss_metrics(sums, self._loss) | synced | waste
            try:
                mean, largest = (
                    sums[f"weight_sync/mismatch_abs_{name}"].value for name in ("mean", "max")
                )
                self._logprob_check.check(
                    step, mean, largest, [sums[name].value for name in TILT_SUMS]
                )
                _check_skipped(
                    step,
                    sums,
                    self._training.max_nonfinite_in_a_row,
                    dump_path(self._run_dir, step),
                )
                _check_trained(
                    step, sums, self._training.num_epochs * sum(decision.num_loss_tokens)
                )
            except Exception:
                self._write_step(step, decision, [self._of_rank()])
                raise

        self._generation_s = local_generation_s
        on_rank0_bytes(judge, pack(local_generation_s) + to_bytes(local_sums))

    def end_step(self, step: int, decision: Decision) -> None:
        """Collective. Bring the ranks' times together and write the step."""
        on_rank0_bytes(lambda parts: self._write_step(step, decision, parts), self._of_rank())
        self._largest.clear()
        self._timer.end_step()

    def end_run(self) -> None:
        """Say how the run went."""
        self._has_ended = True
        if not self._session.is_rank0:
            return
        if not self._rewards:  # it has only evaluated a policy that was trained elsewhere
            return
        minutes, seconds = divmod(int(time.perf_counter() - self._run_start), 60)
        first, last = self._rewards[0], self._rewards[1:][-10:]
        own = (
            f", the last {self._num_own_steps} of them"
            if self._num_own_steps < self._num_steps
            else ""
        )
        _log.info(
            "done: %d steps%s in %d min %02d s, reward/mean %.3f at the first step, %.3f over the last %d; see %s",
            *(
                self._num_steps,
                own,
                minutes,
                seconds,
                first,
                sum(last) / len(last),
                len(last),
                self._path,
            ),
        )

    def close(self) -> None:
        """No line comes any more. Trackers get their time to end, or 5 s where the run was preempted and has none."""
        for file in (self._file, self._timeline):
            if file is not None:
                file.close()
        if self._followers is not None:
            self._followers.finish(self._has_ended)

    def _of_rank(self) -> bytes:
        """What rank 0 needs of each: its spans, and what the largest is written of."""
        largest: Reductions = {
            name: Max(value) for name, value in (self._timer.metrics() | self._largest).items()
        }
        return pack_spans(self._timer.spans, self._generation_s) + to_bytes(largest)

    def _write_step(self, step: int, decision: Decision, parts: list[bytes]) -> None:
        told, world_size = [PackedReader(part) for part in parts], self._session.world_size
        spans = [unpack_spans(of_rank) for of_rank in told]
        largest = metric_values(merge_bytes(of_rank.rest() for of_rank in told))
        metrics = {
            "step": step,
            **self._rank0_metrics,
            **largest,
            **throughput(decision, largest, world_size),
        }
        if self._session.device.type == "cuda":
            num_tokens, update_s = (
                decision.num_tokens * self._training.num_epochs,
                largest["time/update_s"] or 0.0,
            )
            device = torch.cuda.get_device_name()
            metrics["throughput/mfu"] = mfu(
                self._num_parameters, num_tokens, update_s, world_size, device
            )
        if self._timeline is not None:  # before it: who follows metrics.jsonl finds it
            self._timeline.write(step, self._timer.step_unix_s, world_size, spans)
        self._write(metrics)
        reward = metrics["reward/mean"] or 0.0
        self._rewards += [reward] if self._rewards else [reward, reward]
        self._num_own_steps, self._num_steps = self._num_own_steps + 1, self._num_steps + 1
        self._console.show(metrics)

    def _write(self, metrics: Metrics) -> None:
        metrics = metrics | self._clock.metrics()
        # NaN is not JSON: a reader would stop at it
        clean = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in metrics.items()
        }
        assert self._file is not None
        self._file.write(json.dumps(clean))
        if self._followers is not None:
            self._followers.line_written(int(clean["step"] or 0), is_evaluation(clean))


def _check_skipped(step: int, sums: Reductions, max_in_a_row: int, dump: Path) -> None:
    """Warn of updates that were not made, with the rollouts that are to blame; an error after too many in a row."""
    num_skipped, ids = (
        int(sums["optim/skipped_updates"].value),
        sorted(set(sums["nonfinite_rollouts"].value)),
    )
    if not num_skipped:
        return
    found = (
        f"rollouts {ids[:10]} have logprobs that are not finite"
        if ids
        else "no single rollout's logprobs show it"
    )
    text = f"step {step}: {num_skipped} updates skipped, since loss or gradient was not finite; {found}; see {dump}"
    if sums["skipped_in_a_row"].value >= max_in_a_row:
        raise FloatingPointError(
            f"{text}. That is {max_in_a_row} in a row (training.max_nonfinite_in_a_row)"
        )
    _log.warning(text)


def _check_trained(step: int, sums: Reductions, expected: int) -> None:
    """Each token that rank 0 counted, once an epoch: a rollout lost or doubled on the way would bias the gradient."""
    found = sums["loss_tokens"].value
    if "measured" in sums:  # one pass, and no update
        return
    if not sums["optim/skipped_updates"].value and found != expected:
        raise RuntimeError(
            f"step {step}: trained on {found:.0f} tokens where rank 0 had decided on {expected}"
        )
