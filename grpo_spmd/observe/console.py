"""What a run says in a terminal: what is about to start, a line a step, and in words what a curve would show too late.

Lines of steps are columns of fixed width that fit the terminal, or 80 columns where there is none.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import NamedTuple

from grpo_spmd.config.schema import PHASES, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.exit import Terminal

_log = logging.getLogger("grpo_spmd")
_HEADER_EVERY = 20  # lines
_NUM_RECENT = 20  # steps whose mean time the rest is expected to take
_LEAST_ENTROPY = 0.01  # nats a token: about one token in a thousand is not the likeliest
Metrics = Mapping[str, float | None]


class _Column(NamedTuple):
    title: str
    width: int
    metric: str
    form: Callable[[float], str]


_COLUMNS = (
    _Column("reward", 8, "reward/mean", "{:.3f}".format),
    _Column("spread", 7, "reward/std", "{:.3f}".format),
    _Column(
        "tokens", 7, "completion/tokens_mean", lambda x: f"{x:.0f}" if x >= 1000 else f"{x:.1f}"
    ),
    _Column("cut", 5, "completion/truncated_frac", "{:.0%}".format),
    _Column("loss", 9, "loss/total", lambda x: f"{x:+.4f}" if abs(x) < 100 else f"{x:+.1e}"),
    _Column("grad", 7, "optim/grad_norm", lambda x: f"{x:.3f}" if x < 100 else f"{x:.0e}"),
    _Column("mismatch", 9, "weight_sync/mismatch_kl", "{:.0e}".format),
    _Column("time", 6, "time/step_s", lambda seconds: _duration(seconds)),
)
_ENTROPY = _Column(
    "entropy", 8, "loss/entropy", "{:.3f}".format
)  # where the terminal has room for it
_LEFT_WIDTH = 6


def banner(
    model: ModelConfig,
    data: DataConfig,
    rollout: RolloutConfig,
    rewards: Sequence[RewardConfig],
    num_steps: int,
) -> Iterator[str]:
    """What is about to be trained, before anything takes long."""
    yield f"model: {model.path}, {model.dtype}" + (
        f", LoRA of rank {model.lora.rank}" if model.lora.rank else ""
    )
    yield f"data: {data.train}"
    named = [(reward.metric_name, reward.weight) for reward in rewards]
    if named:  # an environment may give the only one
        said = ", ".join(name if weight == 1 else f"{name} x {weight:g}" for name, weight in named)
        yield (
            f"rewards: {said}"
            if any(reward.weight for reward in rewards)
            else f"rewards, only watched: {said}"
        )
    prompts, size = rollout.num_prompts_per_step, rollout.group_size
    most = prompts * size * rollout.max_completion_tokens
    yield f"{num_steps} steps of {prompts} prompts x {size} completions: at most {most:,} sampled tokens each"


def log_to_terminal(rank: int) -> None:
    """Show rank 0's log lines, and other ranks' warnings. What is said until there is a file waits
    for it."""
    to_terminal = Terminal(sys.stdout)
    to_terminal.setLevel(logging.WARNING if rank else logging.INFO)
    to_terminal.setFormatter(
        logging.Formatter(f"rank {rank}: %(message)s" if rank else "%(message)s")
    )
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.handlers[:] = [to_terminal, MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)]


def log_to_file(path: Path) -> None:
    """Write all lines to `path` too, those from before first."""
    to_file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for waiting in [handler for handler in _log.handlers if isinstance(handler, MemoryHandler)]:
        waiting.setTarget(to_file)
        waiting.close()
        _log.removeHandler(waiting)
    _log.addHandler(to_file)


class Console:
    """Lines of the steps of a run with `num_steps` of them."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._num_lines = num_steps, 0
        self._columns: tuple[_Column, ...] = _COLUMNS
        self._place = len(f"step {num_steps}/{num_steps}")
        self._room = 0
        self._ends: deque[float] = deque(maxlen=_NUM_RECENT + 1)  # of steps, on the monotonic clock
        self._warned: set[str] = set()

    def show(self, metrics: Metrics) -> None:
        """Log what there is to say of a step that has come to its end."""
        for line in self.lines(metrics):
            _log.info(line)
        for line in self.warnings(metrics):
            _log.warning(line)

    def lines(self, metrics: Metrics) -> Iterator[str]:
        """The step's line, under a header now and then."""
        if self._num_lines % _HEADER_EVERY == 0:
            yield self._header()
        self._num_lines += 1
        self._ends.append(time.monotonic())
        step = int(metrics["step"] or 0)
        cells = [f"step {step}/{self._num_steps}".ljust(self._place)]
        for column in self._columns:
            value = metrics.get(column.metric)
            cells.append(("-" if value is None else column.form(value)).rjust(column.width))
        cells.append(self._left(step).rjust(_LEFT_WIDTH))
        yield "".join(cells) + self._rest(metrics)

    def warnings(self, metrics: Metrics) -> Iterator[str]:
        """What is wrong with the step in words, each once in the life of the process."""
        for name, text in alarms(metrics):
            if name not in self._warned:
                self._warned.add(name)
                yield f"step {int(metrics['step'] or 0)}: {text}"

    def _header(self) -> str:
        width = shutil.get_terminal_size((80, 24)).columns
        needed = self._place + sum(column.width for column in _COLUMNS) + _LEFT_WIDTH
        has_entropy = width >= needed + _ENTROPY.width
        self._columns = (*_COLUMNS[:-2], _ENTROPY, *_COLUMNS[-2:]) if has_entropy else _COLUMNS
        self._room = width - needed - _ENTROPY.width
        titles = "".join(column.title.rjust(column.width) for column in self._columns)
        return " " * self._place + titles + "left".rjust(_LEFT_WIDTH)

    def _left(self, step: int) -> str:
        if len(self._ends) < 2:
            return "-"
        steps_s = [later - earlier for earlier, later in pairwise(self._ends)]
        return _duration((self._num_steps - step) * sum(steps_s) / len(steps_s))

    def _rest(self, metrics: Metrics) -> str:
        """Where the terminal has room: the rewards one by one, then the phases that took
        longest."""
        rewards = {
            key[7:-5]: value
            for key, value in metrics.items()
            if re.fullmatch("reward/.+/mean", key)
        }
        more = [
            f"  {name} {'-' if value is None else f'{value:.3f}'}"
            for name, value in rewards.items()
        ]
        more *= len(rewards) > 1
        seconds = {name: metrics.get(f"time/{name}_s") or 0.0 for name in PHASES}
        more += [
            f"  {name} {_duration(seconds[name])}"
            for name in sorted(seconds, key=lambda name: -seconds[name])
        ]
        text = ""
        for cell in more[: len(more) - sum(of < 0.005 for of in seconds.values())]:
            text += cell if len(text + cell) <= self._room else ""
        return text


def _duration(seconds: float) -> str:
    """In at most 6 characters."""
    if seconds < 99.5:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.0f}s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.1f}h" if seconds < 99.5 * 3600 else f"{seconds / 86400:.0f}d"


def alarms(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """(name, text) of what is wrong with a step."""
    step, mean = int(metrics["step"] or 0), metrics.get("reward/mean")
    dump = f"rollouts/step_{step:06d}.jsonl"
    critic_skipped = metrics.get("critic/skipped_updates") or 0
    is_warming_up = metrics.get("critic/loss") is not None or critic_skipped > 0
    if (
        critic_skipped and not metrics["optim/skipped_updates"]
    ):  # the policy's have a warning of their own
        yield (
            "critic",
            f"{critic_skipped:.0f} updates of the critic were given up: loss or gradient was not finite",
        )
    if not metrics["optim/updates"] and not metrics["optim/skipped_updates"] and not is_warming_up:
        yield (
            "update",
            "no update was made, since no completion counts (see dynamic_sampling/*, reward/unscored_frac)",
        )
    elif metrics.get("reward/zero_std_groups_frac") == 1.0 and not metrics.keys() & {
        "teacher/kl",
        "critic/loss",
    }:
        what = f"in every group all rewards are alike (mean {mean:.3g}), so that nothing is learned from this step"
        yield (
            "alike",
            f"{what}; if that goes on, the task is too hard, too easy, or the reward never differs: see {dump}",
        )
    elif metrics.get("optim/grad_norm") == 0.0:
        yield (
            "gradient",
            f"the gradient is 0, so that nothing is learned from this step; see {dump}",
        )
    if metrics.get("completion/truncated_frac") == 1.0:
        what = "every completion was cut off at rollout.max_completion_tokens"
        yield (
            "truncated",
            f"{what}: a reward that looks for an end or an answer cannot find one; raise it, or see {dump}",
        )
    entropy = metrics.get("loss/entropy")
    if entropy is not None and entropy < _LEAST_ENTROPY:
        what = f"the policy's entropy is {entropy:.2g} nats a token: completions of a group hardly differ any more"
        yield (
            "entropy",
            f"{what} (a lower optimizer.lr, a higher loss.clip_ratio_high or loss.kl_coef slow that down)",
        )
