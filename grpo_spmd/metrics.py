"""Metric keys, phase timer and memory, and where metrics go: JSONL always, the console, W&B if asked for."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_spmd import doctor
from grpo_spmd.assemble import Decision, SampledStep
from grpo_spmd.config import Config, LossConfig, config_to_dict
from grpo_spmd.distributed import Session, gather_bytes, merge_sums, on_rank0, set_collective_timeouts
from grpo_spmd.doctor import Rank0Error
from grpo_spmd.loss import ratio_percentiles
from grpo_spmd.manifest import Start, begin_in, write_durably
from grpo_spmd.memory import MemoryLedger
from grpo_spmd.proofs import LogprobOracle
from grpo_spmd.wandb_feed import WandbFeed
from grpo_spmd.weight_sync import SyncStats

PHASES = ("weight_sync", "eval", "rollout", "reward", "logprobs", "update", "checkpoint")
_log = logging.getLogger("grpo_spmd")

# Dense bf16 peak, FLOP/s, by a part of the device's name (vendor data sheets).
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}


class MetricsLog:
    """Times the phases of a step and writes one metrics object a step: `metrics.jsonl`, a console line, W&B if asked for."""

    def __init__(
        self, config: Config, session: Session, num_parameters: int, pool_bytes: Callable[[], int] = lambda: 0, first_step: int = 0
    ) -> None:
        """`pool_bytes`: the engine's, see memory.MemoryUse. `first_step`: the one that the run begins or goes on with."""
        self._step = first_step
        set_collective_timeouts(config.watchdog)  # here, where engine and policy have made their groups
        self._config, self._session, self._num_parameters = config, session, num_parameters
        self._run_dir = Path(config.run_dir)
        self._times: dict[str, float] = {}
        self._memory = MemoryLedger(config, session.device, pool_bytes)
        self._largest: dict[str, float] = {}
        self._recorded: dict[str, float | None] = {}
        self._rank0_sums: dict[str, Any] = {}
        self._step_start = time.perf_counter()
        # Of the run so far, which may have begun in another process.
        self._rewards = [line.get("reward/mean") or 0.0 for line, _ in _read_lines(self._run_dir / "metrics.jsonl")]
        self._num_own_steps, self._has_ended = 0, False
        self._oracle = LogprobOracle(config.model.dtype, config.proofs.max_mismatch)
        self._run_start = time.perf_counter()
        self._file = LineFile(self._run_dir / "metrics.jsonl") if session.is_rank0 else None
        self._wandb = WandbFeed(config) if session.is_rank0 and config.logging.wandb else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `time/<name>_s` and its memory to the ledger (memory.py), which an out-of-memory error shows.

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

    def check_step(self, step: int, sampled: SampledStep, decided: Decision, synced: SyncStats, local_sums: dict[str, Any]) -> None:
        """Collective. Bring the ranks' sums (this rank's are those of the update, and its `take_busy_sums`) together and judge them.

        Raises:
            Rank0Error: on every rank, where engine and policy differ by more than rounding (proofs.py), too many updates in a row were
                not finite, or other tokens were trained on than rank 0 decided. The step's line is written all the same: its figures are
                what one wants to see then.
        """
        if local_sums["max:skipped"] and not _dump_is_due(self._config, step):  # the same on all ranks
            _dump_rollouts(self._config, step, sampled, decided)

        def judge(parts: list[dict[str, Any]]) -> None:
            self._rank0_sums = merge_sums(parts)
            try:
                self._oracle.check(step, self._rank0_sums)
                _check_skipped(self._rank0_sums, step, self._config)
                _check_trained(self._rank0_sums, step, self._config, decided)
            except Exception:
                self._write_step(step, decided, synced, [self._times_and_memory()])
                raise

        on_rank0(judge, local_sums)

    def end_step(self, step: int, decided: Decision, synced: SyncStats) -> None:
        """Collective. Bring the ranks' times together and write the step."""
        on_rank0(lambda parts: self._write_step(step, decided, synced, parts), self._times_and_memory())
        self._recorded.clear()
        self._times.clear()
        self._largest.clear()
        self._memory.end_step()
        self._step = step + 1
        self._step_start = time.perf_counter()

    def _times_and_memory(self) -> dict[str, float]:
        return {
            "max:step_s": time.perf_counter() - self._step_start,
            **{f"max:time/{name}": seconds for name, seconds in self._times.items()},
            **{f"max:{name}": value for name, value in (self._memory.metrics() | self._largest).items()},
        }

    def _write_step(self, step: int, decided: Decision, synced: SyncStats, times: list[dict[str, Any]]) -> None:
        metrics = {"step": step, **self._derive(decided, synced, merge_sums([self._rank0_sums, *times])), **self._recorded}
        self._write(metrics)
        self._rewards.append(metrics["reward/mean"] or 0.0)
        self._num_own_steps += 1
        _log.info(_console_line(metrics, self._config.training.num_steps))
        if not metrics["optim/updates"] and not metrics["optim/skipped_updates"]:
            _log.warning("step %d: no update was made, since no completion counts (see dynamic_sampling/* and reward/unscored_frac)", step)

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
        """No line comes any more. W&B gets its time to end, or 5 s where the run was preempted and has none to spare."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish(None if self._has_ended else 5.0)

    def _derive(self, decided: Decision, synced: SyncStats, sums: dict[str, Any]) -> dict[str, float | None]:
        """The contract's keys from the step's raw numbers."""
        world_size = self._session.world_size
        times = {name: sums.get(f"max:time/{name}", 0.0) for name in PHASES}
        step_s = sums["max:step_s"]
        out = decided.metrics | loss_metrics(sums, self._config.loss)
        out |= {
            "weight_sync/bytes": synced.bytes,
            "weight_sync/num_collectives": synced.num_collectives,
            "weight_sync/proof_s": synced.proof_s,
            "time/step_s": step_s,
            **{f"time/{name}_s": seconds for name, seconds in times.items()},
            "rollout/tail_waste_frac": tail_waste_frac(sums, world_size),
            "rollout/tokens_per_s": decided.num_sampled_tokens / max(times["rollout"], 1e-9),
            "throughput/samples_per_s": len(decided.counts) / step_s,
            "throughput/tokens_per_s_per_rank": decided.num_tokens / step_s / world_size,
            **{name.removeprefix("max:"): value for name, value in sums.items() if name.startswith("max:memory/")},
        }
        if self._session.device.type == "cuda":
            # Forward and backward of a dense model: 6 FLOPs a parameter and token; attention is left out, so this is a lower bound.
            num_tokens = decided.num_tokens * self._config.training.num_epochs
            flops = 6.0 * self._num_parameters * num_tokens / max(times["update"], 1e-9) / world_size
            name = torch.cuda.get_device_name()
            peak = next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)
            out["throughput/mfu"] = None if peak is None else flops / peak
        return out

    def _write(self, metrics: dict[str, float | None]) -> None:
        # NaN is not JSON; a reader would stop at it.
        clean = {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
        assert self._file is not None
        self._file.write(json.dumps(clean))
        if self._wandb is not None:
            self._wandb.line_written()


def loss_metrics(sums: dict[str, Any], config: LossConfig) -> dict[str, float | None]:
    """The keys that come of the sums of a step's update, over all ranks."""
    tokens, updates, measured_tokens = sums["loss_tokens"], sums["max:updates"], sums.get("mismatch_tokens", 0.0)
    kl_coef = config.kl_coef if config.kl_in == "loss" else 0.0
    out = {
        "loss/total": _mean(sums["policy"] + kl_coef * sums["kl"] - config.entropy_coef * sums["entropy"], updates),
        "loss/policy": _mean(sums["policy"], updates),
        "loss/kl": _mean(sums["kl"], updates),
        "loss/entropy": _mean(sums["entropy"], updates),
        "loss/clip_frac": _mean(sums["clipped"], tokens),
        "optim/grad_norm": sums.get("max:grad_norm"),
        "optim/lr": sums.get("max:lr"),
        "optim/updates": sums["max:updates"],
        "optim/skipped_updates": sums["max:skipped"],
        "weight_sync/mismatch_kl": _mean(sums.get("mismatch_kl"), measured_tokens),
        "weight_sync/mismatch_abs_mean": _mean(sums.get("mismatch_abs"), measured_tokens),
        "weight_sync/mismatch_abs_max": sums.get("max:mismatch_abs"),
    }
    percents = (1, 50, 99)
    for percent, ratio in zip(percents, ratio_percentiles(sums.get("hist:mismatch", []), percents), strict=True):
        out[f"rollout_correction/ratio_p{percent:02d}"] = ratio
    if config.rollout_correction != "none":
        out["rollout_correction/weight_mean"] = _mean(sums["correction"], tokens)
        out["rollout_correction/capped_frac"] = _mean(sums["capped"], tokens)
    return out


class LineFile:
    """Appends whole lines. What the disk does not take (it is full, or over quota) waits in memory, and is tried again with the next line.

    A run should not end for want of a kilobyte while the space may come back; where it does not, the next checkpoint says so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []

    def write(self, line: str) -> None:
        """Append `line`, after what waits."""
        self._waiting.append(line.encode() + b"\n")
        self._flush()

    def close(self) -> None:
        if self._waiting:
            self._flush()
        if self._waiting:
            _log.error("%s lacks its last %d lines", self._path, len(self._waiting))
        self._file.close()

    def _flush(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        rest = b"".join(self._waiting)
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)  # half a line would spoil the next one
            _log.warning("%s: %s; %d lines wait in memory", self._path, error.strerror, len(self._waiting))
            return
        if len(self._waiting) > 1:
            _log.warning("%s: written again, all %d lines that waited", self._path, len(self._waiting))
        self._waiting.clear()


def tail_waste_frac(sums: dict[str, Any], world_size: int) -> float | None:
    """The share of rank-seconds of the step's generations in which a rank had come to its end and waited for the slowest."""
    busy = sum(seconds for name, seconds in sums.items() if name.startswith("busy_s/"))
    until_slowest = world_size * sum(seconds for name, seconds in sums.items() if name.startswith("max:busy_s/"))
    return 1 - busy / until_slowest if until_slowest else None


def _mean(total: float | None, count: float) -> float | None:
    """None where a step measured nothing (all its updates were skipped, or it kept no group): a 0 would look like a measurement."""
    return None if total is None or not count else total / count


def _check_skipped(sums: dict[str, Any], step: int, config: Config) -> None:
    skipped, ids, most = int(sums["max:skipped"]), sorted(set(sums["ids:nonfinite"])), config.training.max_nonfinite_in_a_row
    if not skipped:
        return
    suspects = f"rollouts {ids[:10]} have logprobs that are not finite" if ids else "no single rollout's logprobs show it"
    text = f"step {step}: {skipped} updates skipped, since loss or gradient was not finite; {suspects}; see {_rollouts_file(config, step)}"
    if sums["max:skipped_in_a_row"] >= most:
        raise FloatingPointError(f"{text}. That is {most} in a row (training.max_nonfinite_in_a_row)")
    _log.warning(text)


def _check_trained(sums: dict[str, Any], step: int, config: Config, decided: Decision) -> None:
    """Every token that rank 0 counted, on some rank, once an epoch: a rollout lost or doubled on the way would bias the gradient."""
    expected = config.training.num_epochs * sum(decided.num_loss_tokens)
    if not sums["max:skipped"] and sums["loss_tokens"] != expected:
        raise RuntimeError(f"step {step}: trained on {sums['loss_tokens']:.0f} tokens where rank 0 had decided on {expected}")


def _rollouts_file(config: Config, step: int) -> Path:
    return Path(config.run_dir) / "rollouts" / f"step_{step:06d}.jsonl"


def dump_rollouts_if_due(config: Config, step: int, sampled: SampledStep, decided: Decision) -> None:
    """Collective. Each `logging.rollouts_every_steps`: write `rollouts/step_<step>.jsonl`, a line a rollout, whatever rank made it.

    Groups that dynamic sampling dropped are there too, with rollout_id null. The order is that of the prompt stream.
    """
    if _dump_is_due(config, step):
        _dump_rollouts(config, step, sampled, decided)


@contextmanager
def dump_if_refused(config: Config, step: int, sampled: SampledStep) -> Iterator[None]:
    """Collective, where rank 0 refuses the step's rewards: writes its rollouts, due or not, for they show what was wrong."""
    try:
        yield
    except Rank0Error:  # on all ranks alike
        _dump_rollouts(config, step, sampled, None)
        raise


def _dump_is_due(config: Config, step: int) -> bool:
    every = config.logging.rollouts_every_steps
    return every > 0 and step % every == 0


def _dump_rollouts(config: Config, step: int, sampled: SampledStep, decided: Decision | None) -> None:
    lines: dict[int, str] = {}
    slots = {position: slot for slot, position in enumerate(decided.positions if decided else [])}
    scored, size = sampled.scored, config.rollout.group_size
    own = ((g, sample, c) for g in sampled.groups for sample, c in enumerate(g.completions))
    for number, (group, sample, completion) in enumerate(own):
        position = group.prompt.position
        rollout_id = slots[position] * size + sample if position in slots else None
        record = {
            "rollout_id": rollout_id,
            "row": group.prompt.row,
            "position": position,
            "sample": sample,
            "prompt": group.prompt.text,
            "completion": scored.texts[number],
            "reward": scored.rewards[number],
            "rewards": scored.finite_by_name(number),
            "statuses": {name: statuses[number] for name, statuses in scored.statuses.items()},
            "advantage": None if decided is None or rollout_id is None else decided.advantages[rollout_id],
            "finish_reason": completion.finish_reason,
            "prompt_ids": group.prompt.token_ids,
            "completion_ids": completion.token_ids,
            "rollout_logprobs": [x if math.isfinite(x) else None for x in completion.logprobs],
        }
        lines[position * size + sample] = json.dumps(record, ensure_ascii=False)
    write_lines_in_order(_rollouts_file(config, step), lines)


def write_lines_in_order(path: Path, lines: dict[int, str]) -> None:
    """Collective. Write all ranks' lines to one file, in the order of their numbers. A disk that is full costs that file alone."""
    # A line is JSON and has no line break of its own. Half a surrogate pair, which a prompt may hold, becomes JSON's escape for it.
    parts = gather_bytes("".join(f"{number}\t{line}\n" for number, line in lines.items()).encode("utf-8", "backslashreplace"))
    if parts is not None:
        numbered = [line.split(b"\t", 1) for part in parts for line in part.split(b"\n") if line]
        numbered.sort(key=lambda pair: int(pair[0]))
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(line + b"\n" for _, line in numbered))
        except OSError as error:  # these lines are for people; a full disk is no reason to stop a run that may find space again
            path.unlink(missing_ok=True)
            _log.warning("%s is not written: %s", path, error.strerror)


def log_to_terminal(session: Session) -> None:
    """Show rank 0's log lines, and other ranks' warnings."""
    to_terminal = logging.StreamHandler(sys.stdout)
    to_terminal.setLevel(logging.INFO if session.is_rank0 else logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("%(message)s" if session.is_rank0 else f"rank {session.rank}: %(message)s"))
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.handlers[:] = [to_terminal]


def open_run_dir(config: Config, session: Session, num_dropped_prompts: int, start: Start) -> None:
    """Collective. Make the run folder: `config.yaml` as resolved, and `logs/rank_<rank>.log`, which gets all log lines of a rank.

    Where a run goes on in it, its metrics are cut back to the steps before the start, as if it had never come further.

    Raises:
        ConfigError: another run has taken the folder since it was checked.
    """

    def claim(_: list[Any]) -> None:
        begin_in(Path(config.run_dir), start)
        cut_metrics(Path(config.run_dir, "metrics.jsonl"), start.step)
        text = yaml.safe_dump(config_to_dict(config), sort_keys=False)
        write_durably(Path(config.run_dir, "config.yaml"), text.encode("utf-8"))

    on_rank0(claim, None)
    logs = Path(config.run_dir, "logs")
    logs.mkdir(parents=True, exist_ok=True)  # a node's own, where the folder is not shared
    doctor.write_reports_to(logs)
    to_file = logging.FileHandler(logs / f"rank_{session.rank}.log", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(to_file)
    if num_dropped_prompts and session.is_rank0:
        _log.warning("data: dropped %d prompts longer than data.max_prompt_tokens=%d", num_dropped_prompts, config.data.max_prompt_tokens)


def _read_lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The whole lines of a metrics.jsonl, parsed and as they are; a kill may have cut the last one short."""
    if path.exists():
        with path.open("rb") as file:
            for text in file:
                with suppress(ValueError):
                    line = json.loads(text)
                    if isinstance(line, dict) and isinstance(line.get("step"), int):
                        yield line, text.rstrip(b"\n")


def last_step(path: Path) -> int:
    """Of a metrics.jsonl; -1 where it has none."""
    return max((line["step"] for line, _ in _read_lines(path)), default=-1)


def cut_metrics(path: Path, start_step: int) -> None:
    """Keep the lines of the steps before `start_step`, and say so where one is missing; a line that a kill has cut short goes too."""
    if not path.exists():
        return
    kept = {line["step"]: text + b"\n" for line, text in _read_lines(path) if line["step"] < start_step}
    write_durably(path, b"".join(kept.values()))
    if missing := sorted(set(range(start_step)) - kept.keys()):
        _log.warning("%s lacks %d of the steps before %d, first step %d", path, len(missing), start_step, missing[0])


def _console_line(m: dict[str, float | None], num_steps: int) -> str:
    def value(name: str) -> float:
        number = m.get(name)
        return math.nan if number is None else number

    def shown(name: str, form: str) -> str:
        number = m.get(name)
        return "-" if number is None else format(number, form)

    phases = " ".join(f"{name} {value(f'time/{name}_s'):.2f}" for name in PHASES if value(f"time/{name}_s") >= 0.005)
    return (
        f"step {int(value('step')) + 1}/{num_steps}  reward {value('reward/mean'):.3f}  tokens {value('completion/tokens_mean'):.1f}"
        f"  loss {shown('loss/total', '+.4f')}  grad {shown('optim/grad_norm', '.2f')}  entropy {shown('loss/entropy', '.2f')}"
        f"  mismatch_kl {shown('weight_sync/mismatch_kl', '.0e')}  {value('time/step_s'):.2f} s ({phases})"
    )
