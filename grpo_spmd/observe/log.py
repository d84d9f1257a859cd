"""Makes the metrics of each step on rank 0 and writes them to metrics.jsonl.

The ranks' sums ("reductions") are merged, checked and turned into metrics. A line of metrics goes
to metrics.jsonl, to the console and to the followers (trackers and report). The first half of this
file consists of pure functions and counters: loss metrics, waiting time, progress and wall-clock
time. The second half is MetricsLog, which merges what the ranks have measured.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from grpo_spmd.config.schema import LossConfig, TrainingConfig
from grpo_spmd.distributed.collectives import on_rank0_bytes
from grpo_spmd.distributed.reductions import Max, Reductions, merge_bytes, metric_values, to_bytes
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.losses import TILT_SUMS, ratio_percentiles, total_loss
from grpo_spmd.observe.cards import peak_tflops
from grpo_spmd.observe.console import Console
from grpo_spmd.observe.followers import Followers
from grpo_spmd.observe.memory import PhaseTimer
from grpo_spmd.observe.metrics_file import LineFile, is_evaluation, read_metrics
from grpo_spmd.observe.run_folder import dump_path
from grpo_spmd.observe.timeline import Span, TimelineFile, timed_spans
from grpo_spmd.proofs.logprob_check import LogprobCheck
from grpo_spmd.records import Decision, SyncStats

_log = logging.getLogger("grpo_spmd")
# What each rank sends in the two collectives of a step: to `check_step` its seconds of each
# generation and its counts (_SUMS), to `end_step` its spans and its maxima (_MAXIMA).
_encode = msgspec.msgpack.encode
_SUMS = msgspec.msgpack.Decoder(tuple[list[float], bytes])
_MAXIMA = msgspec.msgpack.Decoder(tuple[list[Span], bytes])
Metrics = dict[str, float | None]
# The percentiles of the ratio of policy to engine probability that are metrics.
_PERCENTS = (1, 50, 99)
# A run's last log line shows the mean reward over this many last steps.
_NUM_LAST_REWARDS = 10


def loss_metrics(sums: Reductions, loss: LossConfig) -> Metrics:
    """Returns the loss metrics of a step from the merged sums of all ranks' updates.

    A term of the loss is the mean over the step's updates, or over its batches if the loss was only
    measured. It is None if there were none.
    """
    # "measured" counts batches whose loss was computed without an update of the policy
    num_batches = sums["measured" if "measured" in sums else "optim/updates"].value
    terms = {name: sums[name].value for name in ("policy", "kl", "entropy")}
    # "total" comes first, so that the metrics are in a fixed order
    terms = {"total": total_loss(terms["policy"], terms["kl"], terms["entropy"], loss), **terms}
    # the loss has these terms only if there is a teacher, a critic or a load-balance loss
    for name in ("teacher", "value", "router_aux"):
        if name in sums:
            terms[name] = sums[name].value
            terms["total"] += terms[name]
    metrics: Metrics = {
        f"loss/{name}": total / num_batches if num_batches else None
        for name, total in terms.items()
    }
    ratios = ratio_percentiles(sums["mismatch_ratios"].value, _PERCENTS)
    percentiles = {
        f"rollout_correction/ratio_p{percent:02d}": ratio
        for percent, ratio in zip(_PERCENTS, ratios, strict=True)
    }
    return metrics | metric_values(sums) | percentiles


def tail_waste_frac(generation_s: Sequence[Sequence[float]]) -> float | None:
    """Returns the fraction of rank-seconds in which ranks waited for the slowest rank.

    `generation_s[rank][i]` is the time of the step's i-th generation on that rank. Returns None if
    nothing was generated.
    """
    generations = list(zip(*generation_s, strict=True))
    # on every rank each generation lasts until its slowest rank is ready
    until_slowest = len(generation_s) * sum(map(max, generations))
    return 1 - sum(map(sum, generations)) / until_slowest if until_slowest else None


class Progress:
    """Counts the completions and tokens that the run has sampled so far.

    All ranks have the same counts. A checkpoint keeps them, so that a resumed run has the figures
    of a run that was never stopped.
    """

    def __init__(self, trainer: Mapping[str, Any], step: int) -> None:
        """Continues the counts in `trainer`, the trainer.json of the checkpoint after `step` steps.

        `trainer` is empty if the run begins at step 0. Earlier versions did not count. If one of
        them wrote the checkpoint, the counts are left out of the metrics, since they would be too
        small.
        """
        self._counts: dict[str, int] = {
            name: trainer.get(name, 0)
            for name in ("num_completions", "num_tokens")
            if name in trainer or not step
        }

    def count(self, num_completions: int, num_tokens: int, epoch: float) -> dict[str, float]:
        """Adds what a step has sampled, and returns the progress/ metrics.

        `epoch` is the number of passes over the data so far.
        """
        metrics = {"progress/epoch": epoch}
        for name, number in (("num_completions", num_completions), ("num_tokens", num_tokens)):
            if name in self._counts:
                self._counts[name] += number
                metrics[f"progress/{name.removeprefix('num_')}"] = self._counts[name]
        return metrics

    def state(self) -> dict[str, int]:
        """Returns the counts for a checkpoint."""
        return dict(self._counts)


@dataclass
class MetricsLog:
    """Collects the metrics of each step from all ranks; rank 0 checks and writes them.

    For each step call `record_largest` any number of times, `check_step` after the updates, and
    `end_step` when all phases are over.
    """

    run_dir: Path
    num_parameters: int
    began: float
    """The start of the launch on the monotonic clock."""
    session: Session
    timer: PhaseTimer
    logprob_check: LogprobCheck
    loss: LossConfig
    training: TrainingConfig
    followers: Followers | None

    def __post_init__(self) -> None:
        """Opens the files on rank 0, and reads what earlier launches wrote to metrics.jsonl."""
        self._path = self.run_dir / "metrics.jsonl"
        self._local_maxima: dict[str, float] = {}
        # the seconds of each generation of this rank in the present step
        self._generation_s: list[float] = []
        # the metrics of the present step that `check_step` has computed on rank 0
        self._rank0_metrics: Metrics = {}
        newest: dict[str, Any] = {}
        # reward/mean of each step, for the last line of the run
        self._rewards: list[float] = []
        for line in read_metrics(self._path) if self.session.is_rank0 else ():
            if not is_evaluation(line.values):
                newest = line.values
                self._rewards.append(newest.get("reward/mean") or 0.0)
        self._num_earlier_steps = len(self._rewards)
        self._first_step_start = time.monotonic()
        # The time of earlier launches counts, but not the time between two launches, nor that of
        # steps that were lost and are made again.
        self._start = self.began - float(newest.get("time/wall_s") or 0.0)
        self._has_ended = False
        self._console = Console(self.training.num_steps)
        self._file = LineFile(self._path) if self.session.is_rank0 else None
        self._timeline = TimelineFile(self.run_dir) if self.session.is_rank0 else None

    def write_evaluation(self, step: int, metrics: Metrics) -> None:
        """Writes a line for an evaluation of the policy after `step`, unless `metrics` is {}."""
        if metrics and self.session.is_rank0:
            self._write({"step": step, **metrics})

    def record_largest(self, local_metrics: dict[str, float]) -> None:
        """Keeps metrics of this rank; the step's line gets the largest value over all ranks."""
        self._local_maxima |= local_metrics

    def check_step(
        self,
        step: int,
        decision: Decision,
        sync: SyncStats,
        local_sums: Reductions,
        local_generation_s: list[float],
    ) -> None:
        """Collective. Merges and checks what the ranks' updates and generations have measured.

        `local_sums` are this rank's counts, and `local_generation_s` the seconds of each of its
        generations. Raises Rank0Error on every rank if engine and policy differ by more than
        rounding (logprob_check.py), if too many updates in a row were not finite, or if the number
        of trained tokens is not the one that rank 0 decided. In that case the step's line is
        written all the same, since its figures help to find the cause.
        """

        def judge(payloads: list[bytes]) -> None:
            """Computes the step's metrics on rank 0 from all ranks' payloads, and checks them."""
            pairs = list(map(_SUMS.decode, payloads))
            sums = merge_bytes(content for _, content in pairs)
            self._rank0_metrics = {
                **decision.metrics,
                **loss_metrics(sums, self.loss),
                "weight_sync/bytes": sync.bytes,
                "weight_sync/num_collectives": sync.num_collectives,
                "weight_sync/proof_s": sync.proof_s,
                "rollout/tail_waste_frac": tail_waste_frac([seconds for seconds, _ in pairs]),
            }
            # this order matters: the first check that fails names the likeliest cause
            try:
                self.logprob_check.check(
                    step,
                    sums["weight_sync/mismatch_abs_mean"].value,
                    sums["weight_sync/mismatch_abs_max"].value,
                    [sums[name].value for name in TILT_SUMS],
                )
                dump = dump_path(self.run_dir, step)
                _check_skipped(step, sums, self.training.max_nonfinite_in_a_row, dump)
                num_loss_tokens = self.training.num_epochs * sum(decision.num_loss_tokens)
                _check_trained(step, sums, num_loss_tokens)
            # the line is written although the step failed, with the times of rank 0 alone
            except Exception:
                self._write_step(step, decision, [self._pack_local()])
                raise

        self._generation_s = local_generation_s
        on_rank0_bytes(judge, _encode((local_generation_s, to_bytes(local_sums))))

    def end_step(self, step: int, decision: Decision) -> None:
        """Collective. Gathers the ranks' times on rank 0 and writes the step's line there."""
        on_rank0_bytes(
            lambda payloads: self._write_step(step, decision, payloads), self._pack_local()
        )
        self._local_maxima.clear()
        self.timer.end_step()

    def end_run(self) -> None:
        """Logs a summary of the run on rank 0: steps, minutes and mean rewards."""
        self._has_ended = True
        # a run without any step has only evaluated a policy that was trained elsewhere
        if not self.session.is_rank0 or not self._rewards:
            return
        minutes, seconds = divmod(int(time.monotonic() - self._first_step_start), 60)
        num_own_steps = len(self._rewards) - self._num_earlier_steps
        own_steps = f", the last {num_own_steps} of them" if self._num_earlier_steps else ""
        last_rewards = self._rewards[-_NUM_LAST_REWARDS:]
        mean = sum(last_rewards) / len(last_rewards)
        _log.info(
            f"done: {len(self._rewards)} steps{own_steps} in {minutes} min {seconds:02d} s, "
            f"reward/mean {self._rewards[0]:.3f} at the first step, {mean:.3f} over the last "
            f"{len(last_rewards)}; see {self._path}"
        )

    def close(self) -> None:
        """Closes the files on rank 0, and ends the followers (trackers and report).

        They get 60 s to finish, or 5 s if the run was preempted.
        """
        for file in (self._file, self._timeline):
            if file is not None:
                file.close()
        if self.followers is not None:
            self.followers.finish(self._has_ended)

    def _pack_local(self) -> bytes:
        """Returns this rank's spans and its largest-value metrics, as bytes for rank 0.

        A span is one stay in a phase (timeline.py).
        """
        local_metrics = self.timer.metrics() | self._local_maxima
        maxima: Reductions = {name: Max(value) for name, value in local_metrics.items()}
        spans = timed_spans(self.timer.spans, self._generation_s)
        return _encode((spans, to_bytes(maxima)))

    def _write_step(self, step: int, decision: Decision, payloads: list[bytes]) -> None:
        """Writes the step's lines (metrics, timeline, console) on rank 0.

        `payloads` has what `_pack_local` returned on each rank.
        """
        pairs = list(map(_MAXIMA.decode, payloads))
        spans = [rank_spans for rank_spans, _ in pairs]
        maxima = metric_values(merge_bytes(content for _, content in pairs))
        world_size = self.session.world_size
        step_s = maxima["time/step_s"] or 0.0
        metrics = {
            "step": step,
            **self._rank0_metrics,
            **maxima,
            "rollout/tokens_per_s": decision.num_sampled_tokens
            / max(maxima["time/rollout_s"] or 0.0, 1e-9),
            "throughput/samples_per_s": decision.num_rollouts / step_s,
            "throughput/tokens_per_s_per_rank": decision.num_tokens / step_s / world_size,
        }
        if self.session.device.type == "cuda":
            # A lower bound: forward and backward of a dense model take 6 FLOPs per parameter and
            # token that is read, without attention. None for a device whose peak is not known.
            shared = self._rank0_metrics.get("batching/forwarded_tokens_frac") or 1.0
            num_tokens = decision.num_tokens * self.training.num_epochs * shared
            update_s = max(maxima["time/update_s"] or 0.0, 1e-9)
            flops = 6.0 * self.num_parameters * num_tokens / update_s / world_size
            peak = peak_tflops(torch.cuda.get_device_name())
            metrics["throughput/mfu"] = flops / (peak * 1e12) if peak else None
        if self._timeline is not None:
            # before metrics.jsonl, so that whoever follows that file finds the step's timeline
            self._timeline.write(step, self.timer.step_unix_s, world_size, spans)
        self._write(metrics)
        self._rewards.append(metrics["reward/mean"] or 0.0)
        self._console.show(metrics)

    def _write(self, metrics: Metrics) -> None:
        """Writes a line to metrics.jsonl, with the time, and tells the followers. Rank 0 only."""
        times = {"time/wall_s": time.monotonic() - self._start, "time/unix_s": time.time()}
        # NaN is not valid JSON, and readers would refuse the line
        finite = {
            name: value if value is None or math.isfinite(value) else None
            for name, value in (metrics | times).items()
        }
        assert self._file is not None
        self._file.write(json.dumps(finite))
        if self.followers is not None:
            self.followers.line_written(int(finite["step"] or 0), is_evaluation(finite))


def _check_skipped(step: int, sums: Reductions, max_in_a_row: int, dump: Path) -> None:
    """Warns of skipped updates and names the rollouts that caused them.

    Raises FloatingPointError if `max_in_a_row` updates in a row were skipped.
    """
    num_skipped = int(sums["optim/skipped_updates"].value)
    if not num_skipped:
        return
    ids = sorted(set(sums["nonfinite_rollouts"].value))
    cause = "no single rollout's logprobs show it"
    if ids:
        cause = f"rollouts {ids[:10]} have logprobs that are not finite"
    text = (
        f"step {step}: {num_skipped} updates skipped, since loss or gradient was not finite; "
        f"{cause}; see {dump}"
    )
    if sums["skipped_in_a_row"].value >= max_in_a_row:
        raise FloatingPointError(
            f"{text}. That is {max_in_a_row} in a row (training.max_nonfinite_in_a_row)"
        )
    _log.warning(text)


def _check_trained(step: int, sums: Reductions, expected: int) -> None:
    """Raises RuntimeError if the number of trained tokens, over all epochs, is not `expected`.

    A rollout that is lost or doubled on its way to the ranks would bias the gradient. A step with
    skipped updates is not checked.
    """
    # the loss was only measured, without an update
    if "measured" in sums:
        return
    num_tokens = sums["loss_tokens"].value
    if not sums["optim/skipped_updates"].value and num_tokens != expected:
        raise RuntimeError(
            f"step {step}: trained on {num_tokens:.0f} tokens "
            f"where rank 0 had decided on {expected}"
        )
