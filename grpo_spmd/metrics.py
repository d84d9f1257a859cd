"""Metric keys, phase timer and memory, and where metrics go: JSONL always, the console, W&B if asked for."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_spmd.assemble import Decision
from grpo_spmd.config import Config, ConfigError, config_to_dict
from grpo_spmd.data_types import RolloutGroup, ScoredRollouts
from grpo_spmd.distributed import Session, gather_bytes, merge_sums, on_rank0
from grpo_spmd.weight_sync import SyncStats

PHASES = ("weight_sync", "rollout", "reward", "logprobs", "update", "checkpoint")
MAX_MISMATCH_ABS_MEAN = 0.2  # nats
_log = logging.getLogger("grpo_spmd")

# Dense bf16 peak, FLOP/s, by a part of the device's name (vendor data sheets).
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12}


class MetricsLog:
    """Times the phases of a step and writes one metrics object a step: `metrics.jsonl`, a console line, W&B if asked for."""

    def __init__(self, config: Config, session: Session, num_parameters: int) -> None:
        self._config, self._session, self._num_parameters = config, session, num_parameters
        self._run_dir = Path(config.run_dir)
        self._times: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._step_start = time.perf_counter()
        self._rewards: list[float] = []
        self._run_start = time.perf_counter()
        self._file = (self._run_dir / "metrics.jsonl").open("a", encoding="utf-8") if session.is_rank0 else None
        self._wandb = _start_wandb(config) if session.is_rank0 and config.logging.wandb else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `time/<name>_s` and records its peak memory."""
        assert name in PHASES, name
        _reset_peak_memory(self._session.device)
        start = time.perf_counter()
        yield
        if self._session.device.type == "cuda":
            torch.cuda.synchronize()  # kernels run on: without this their time would be counted in a later phase
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - start
        self._peaks[name] = max(self._peaks.get(name, 0.0), _peak_memory_gib(self._session.device))

    def end_step(self, step: int, decided: Decision, synced: SyncStats, local_sums: dict[str, float]) -> None:
        """Collective. Bring the ranks' times and sums (this rank's are what `update_policy` returned) together and write the step."""
        now = time.perf_counter()
        part = dict(local_sums)
        part["max:step_s"] = now - self._step_start
        part |= {f"max:time/{name}": seconds for name, seconds in self._times.items()}
        part |= {f"max:memory/{name}": gib for name, gib in self._peaks.items()}
        sums = on_rank0(_merge_and_check, part)
        if self._session.is_rank0:
            self._write({"step": step, **self._derive(decided, synced, sums)})
        self._times.clear()
        self._peaks.clear()
        self._step_start = now

    def close(self) -> None:
        """Say how the run went; finish W&B."""
        if not self._session.is_rank0:
            return
        first, last = self._rewards[0], self._rewards[-10:]
        minutes, seconds = divmod(int(time.perf_counter() - self._run_start), 60)
        _log.info(
            "done: %d steps in %d min %02d s, reward/mean %.3f at the first step, %.3f over the last %d; see %s",
            len(self._rewards), minutes, seconds, first, sum(last) / len(last), len(last), self._run_dir / "metrics.jsonl",
        )  # fmt: skip
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            _never_fatal(self._wandb.finish)

    def _derive(self, decided: Decision, synced: SyncStats, sums: dict[str, float]) -> dict[str, float | None]:
        """The contract's keys from the step's raw numbers."""
        world_size = self._session.world_size
        tokens = max(sums["loss_tokens"], 1.0)
        times = {name: sums.get(f"max:time/{name}", 0.0) for name in PHASES}
        step_s = sums["max:step_s"]
        rollout, kl_coef, entropy_coef = self._config.rollout, self._config.loss.kl_coef, self._config.loss.entropy_coef
        policy, kl, entropy = sums["policy"] / tokens, sums["kl"] / tokens, sums["entropy"] / tokens
        out = decided.metrics | {
            "loss/total": policy + kl_coef * kl - entropy_coef * entropy,
            "loss/policy": policy,
            "loss/kl": kl,
            "loss/entropy": entropy,
            "loss/clip_frac": sums["clipped"] / tokens,
            "optim/grad_norm": sums["max:grad_norm"],
            "optim/lr": sums["max:lr"],
            "weight_sync/mismatch_kl": sums["mismatch_kl"] / tokens,
            "weight_sync/mismatch_abs_mean": sums["mismatch_abs"] / tokens,
            "weight_sync/mismatch_abs_max": sums["max:mismatch_abs"],
            "weight_sync/bytes": synced.bytes,
            "weight_sync/num_collectives": synced.num_collectives,
            "time/step_s": step_s,
            **{f"time/{name}_s": seconds for name, seconds in times.items()},
            "rollout/tokens_per_s": decided.num_completion_tokens / max(times["rollout"], 1e-9),
            "throughput/samples_per_s": rollout.num_prompts_per_step * rollout.group_size / step_s,
            "throughput/tokens_per_s_per_rank": decided.num_tokens / step_s / world_size,
            **{f"memory/{name}/peak_gib": sums[f"max:memory/{name}"] for name in PHASES if f"max:memory/{name}" in sums},
        }
        if self._session.device.type == "cuda":
            # Forward and backward of a dense model: 6 FLOPs a parameter and token; attention is left out, so this is a lower bound.
            flops = 6.0 * self._num_parameters * decided.num_tokens / max(times["update"], 1e-9) / world_size
            name = torch.cuda.get_device_name()
            peak = next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)
            out["throughput/mfu"] = None if peak is None else flops / peak
        return out

    def _write(self, metrics: dict[str, float | None]) -> None:
        # NaN is not JSON; a reader would stop at it.
        clean = {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
        assert self._file is not None
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        self._rewards.append(metrics["reward/mean"] or 0.0)
        _log.info(_console_line(metrics, self._config.training.num_steps))
        if self._wandb is not None and not _never_fatal(self._wandb.log, clean, step=int(metrics["step"] or 0)):
            self._wandb = None


def _merge_and_check(parts: list[dict[str, float]]) -> dict[str, float]:
    """Add up the ranks' sums, and stop where engine and policy give the sampled tokens quite different logprobs.

    Rounding in bfloat16 makes about 0.01 nats; stale weights, or a model whose logprobs this package computes wrongly, make 0.3 and more.
    """
    sums = merge_sums(parts)
    mean = sums["mismatch_abs"] / max(sums["loss_tokens"], 1.0)
    if mean > MAX_MISMATCH_ABS_MEAN:
        raise RuntimeError(
            f"engine and policy differ by {mean:.3g} nats a token on the tokens just sampled, over {MAX_MISMATCH_ABS_MEAN}: "
            "the engine does not hold the policy's weights, or the policy does not compute this model as the engine does"
        )
    return sums


def dump_rollouts_if_due(config: Config, step: int, groups: Sequence[RolloutGroup], scored: ScoredRollouts, decided: Decision) -> None:
    """Collective. Write `rollouts/step_<step>.jsonl`: one line a rollout, in the order of rollout ids, whatever rank made it."""
    every = config.logging.rollouts_every_steps
    if every == 0 or step % every:
        return
    lines = {}
    own = ((g, sample, c) for g in groups for sample, c in enumerate(g.completions))
    for number, (group, sample, completion) in enumerate(own):
        rollout_id = scored.rollout_ids[number]
        by_name = {name: None if v[number] is None or math.isnan(v[number] or 0.0) else v[number] for name, v in scored.by_name.items()}
        record = {
            "rollout_id": rollout_id,
            "row": group.prompt.row,
            "position": group.prompt.position,
            "sample": sample,
            "prompt": group.prompt.text,
            "completion": scored.texts[number],
            "reward": scored.rewards[number],
            "rewards": by_name,
            "advantage": decided.advantages[rollout_id],
            "finish_reason": completion.finish_reason,
            "prompt_ids": group.prompt.token_ids,
            "completion_ids": completion.token_ids,
            "rollout_logprobs": completion.logprobs,
        }
        lines[rollout_id] = json.dumps(record, ensure_ascii=False)
    parts = gather_bytes(json.dumps(lines).encode())
    if parts is not None:
        merged = {int(i): line for part in parts for i, line in json.loads(part).items()}
        path = Path(config.run_dir) / "rollouts" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(merged[i] + "\n" for i in sorted(merged)), encoding="utf-8")


def log_to_terminal(session: Session) -> None:
    """Show rank 0's log lines, and other ranks' warnings."""
    to_terminal = logging.StreamHandler(sys.stdout)
    to_terminal.setLevel(logging.INFO if session.is_rank0 else logging.WARNING)
    to_terminal.setFormatter(logging.Formatter("%(message)s" if session.is_rank0 else f"rank {session.rank}: %(message)s"))
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.handlers[:] = [to_terminal]


def open_run_dir(config: Config, session: Session, num_dropped_prompts: int) -> None:
    """Collective. Make the run folder: `config.yaml` as resolved, and `logs/rank_<rank>.log`, which gets all log lines of a rank.

    Raises:
        ConfigError: another run has taken the folder since it was checked.
    """

    def claim(_: list[Any]) -> None:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        try:
            with Path(config.run_dir, "config.yaml").open("x", encoding="utf-8") as file:
                yaml.safe_dump(config_to_dict(config), file, sort_keys=False)
        except FileExistsError:
            raise ConfigError(f"run_dir: another run has just taken {config.run_dir}; choose another") from None

    on_rank0(claim, None)
    logs = Path(config.run_dir, "logs")
    logs.mkdir(parents=True, exist_ok=True)  # a node's own, where the folder is not shared
    to_file = logging.FileHandler(logs / f"rank_{session.rank}.log", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _log.addHandler(to_file)
    if num_dropped_prompts and session.is_rank0:
        _log.warning("data: dropped %d prompts longer than data.max_prompt_tokens=%d", num_dropped_prompts, config.data.max_prompt_tokens)


def _console_line(m: dict[str, float | None], num_steps: int) -> str:
    def value(name: str) -> float:
        number = m[name]
        return math.nan if number is None else number

    phases = " ".join(f"{name} {value(f'time/{name}_s'):.2f}" for name in PHASES if value(f"time/{name}_s") >= 0.005)
    return (
        f"step {int(value('step')) + 1}/{num_steps}  reward {value('reward/mean'):.3f}  tokens {value('completion/tokens_mean'):.1f}"
        f"  loss {value('loss/total'):+.4f}  grad {value('optim/grad_norm'):.2f}  entropy {value('loss/entropy'):.2f}"
        f"  mismatch_kl {value('weight_sync/mismatch_kl'):.0e}  {value('time/step_s'):.2f} s ({phases})"
    )


def _start_wandb(config: Config) -> Any:
    """A W&B run, or None with a warning: a tracker must never stop a training."""
    mode = config.logging.wandb if isinstance(config.logging.wandb, str) else None  # None: as WANDB_MODE says, else online
    try:
        import wandb

        settings = wandb.Settings(init_timeout=30)  # without a network the default waits three times as long
        return wandb.init(
            settings=settings,
            project=config.logging.wandb_project,
            name=Path(config.run_dir).name,
            dir=config.run_dir,
            mode=mode,
            config=config_to_dict(config),
        )
    except Exception as error:  # no package, no key, no network
        _log.warning("W&B is off for this run (%s: %s); metrics.jsonl is complete without it", type(error).__name__, error)
        return None


def _never_fatal(call: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        call(*args, **kwargs)
    except Exception as error:  # whatever a tracker raises, the training goes on
        _log.warning("W&B failed and is off from here on (%s: %s); metrics.jsonl goes on", type(error).__name__, error)
        return False
    return True


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        _write_if_possible(Path("/proc/self/clear_refs"), "5")  # Linux: VmHWM starts again from the present size


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    return 0.0


def _write_if_possible(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError:  # a container may forbid it; the peak is then that of the whole run so far
        return
