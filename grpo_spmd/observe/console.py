"""Prints the run's start, a line for each step, and warnings about steps that look wrong.

The line of a step has columns of fixed width, chosen to fit the terminal, or 80 characters if there
is none.
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
_HEADER_EVERY_LINES = 20
# The time left is estimated from the mean time of this many last steps.
_NUM_RECENT_STEPS = 20
# An entropy below this is warned of, in nats per token. At this entropy about one token in a
# thousand is not the likeliest one.
_MIN_ENTROPY = 0.01
# From this fraction of completions without a reward on, a warning is shown.
_MANY_UNSCORED = 0.1
Metrics = Mapping[str, float | None]


def _duration(seconds: float) -> str:
    """Returns a duration in seconds as text of at most 6 characters, such as "12min"."""
    if seconds < 99.5:
        return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.0f}s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f}min"
    return f"{seconds / 3600:.1f}h" if seconds < 99.5 * 3600 else f"{seconds / 86400:.0f}d"


class _Column(NamedTuple):
    """One column in the lines of steps: its title, its width, its metric and how to format it."""

    title: str
    width: int
    metric: str
    format: Callable[[float], str]


_LOSS = _Column("loss", 9, "loss/total", lambda x: f"{x:+.4f}" if abs(x) < 100 else f"{x:+.1e}")
# Shown in the place of the loss if there is a teacher or a critic, since the loss then says less.
_SIGNALS = (
    _Column("teacher", 9, "teacher/kl", "{:.4f}".format),
    _Column("critic", 9, "critic/explained_variance", "{:.2f}".format),
)
_COLUMNS = (
    _Column("reward", 8, "reward/mean", "{:.3f}".format),
    _Column("spread", 7, "reward/std", "{:.3f}".format),
    _Column(
        "tokens", 7, "completion/tokens_mean", lambda x: f"{x:.0f}" if x >= 1000 else f"{x:.1f}"
    ),
    _Column("cut", 5, "completion/truncated_frac", "{:.0%}".format),
    _LOSS,
    _Column("grad", 7, "optim/grad_norm", lambda x: f"{x:.3f}" if x < 100 else f"{x:.0e}"),
    # shown in wide terminals only
    _Column("entropy", 8, "loss/entropy", "{:.3f}".format),
    _Column("mismatch", 9, "weight_sync/mismatch_kl", "{:.0e}".format),
    _Column("time", 6, "time/step_s", _duration),
)
_LEFT_WIDTH = 6


def banner(
    model: ModelConfig,
    data: DataConfig,
    rollout: RolloutConfig,
    rewards: Sequence[RewardConfig],
    num_steps: int,
) -> Iterator[str]:
    """Yields lines that describe the training. They are printed before the models are loaded."""
    lora = f", LoRA of rank {model.lora.rank}" if model.lora.rank else ""
    yield f"model: {model.path}, {model.dtype}{lora}"
    yield f"data: {data.train}"
    # an environment may give the only reward
    if rewards:
        names = ", ".join(
            reward.metric_name
            if reward.weight == 1
            else f"{reward.metric_name} x {reward.weight:g}"
            for reward in rewards
        )
        is_watched = not any(reward.weight for reward in rewards)
        yield f"rewards, only watched: {names}" if is_watched else f"rewards: {names}"
    num_prompts = rollout.num_prompts_per_step
    max_tokens = num_prompts * rollout.group_size * rollout.max_completion_tokens
    yield (
        f"{num_steps} steps of {num_prompts} prompts x {rollout.group_size} completions: "
        f"at most {max_tokens:,} sampled tokens each"
    )


def log_to_terminal(rank: int) -> None:
    """Makes the log show rank 0's lines, and warnings of other ranks, in the terminal.

    All lines are kept in memory too, until `log_to_file` opens the rank's file.
    """
    terminal = Terminal(sys.stdout)
    terminal.setLevel(logging.WARNING if rank else logging.INFO)
    terminal.setFormatter(logging.Formatter(f"rank {rank}: %(message)s" if rank else "%(message)s"))
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.handlers[:] = [terminal, MemoryHandler(1000, flushLevel=logging.CRITICAL + 1)]


def log_to_file(path: Path) -> None:
    """Makes the log write all lines to `path` too, beginning with those kept in memory."""
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for handler in list(_log.handlers):
        if isinstance(handler, MemoryHandler):
            handler.setTarget(file)
            handler.close()
            _log.removeHandler(handler)
    _log.addHandler(file)


class Console:
    """Makes the terminal's lines and warnings for the steps of a run of `num_steps` steps."""

    def __init__(self, num_steps: int) -> None:
        """Begins a run; the columns are chosen at the first header."""
        self._num_steps = num_steps
        self._num_lines = 0
        self._columns: list[_Column] = []
        self._step_width = len(f"step {num_steps}/{num_steps}")
        # how many characters of the terminal's width are free after the fixed columns
        self._room = 0
        # the times when the last steps ended, on the monotonic clock
        self._ends: deque[float] = deque(maxlen=_NUM_RECENT_STEPS + 1)
        self._warned: set[str] = set()

    def show(self, metrics: Metrics) -> None:
        """Logs the lines and the warnings of a step that has ended."""
        for line in self.lines(metrics):
            _log.info(line)
        for line in self.warnings(metrics):
            _log.warning(line)

    def lines(self, metrics: Metrics) -> Iterator[str]:
        """Yields the step's line, with a header above it every 20 lines."""
        if self._num_lines % _HEADER_EVERY_LINES == 0:
            yield self._header(metrics)
        self._num_lines += 1
        self._ends.append(time.monotonic())
        step = int(metrics["step"] or 0)
        cells = [f"step {step}/{self._num_steps}".ljust(self._step_width)]
        for column in self._columns:
            value = metrics.get(column.metric)
            cells.append(("-" if value is None else column.format(value)).rjust(column.width))
        cells.append(self._time_left(step).rjust(_LEFT_WIDTH))
        yield "".join(cells) + self._details(metrics)

    def warnings(self, metrics: Metrics) -> Iterator[str]:
        """Yields the warnings about a step; each kind of problem only once per process."""
        for name, text in alarms(metrics):
            if name not in self._warned:
                self._warned.add(name)
                yield f"step {int(metrics['step'] or 0)}: {text}"

    def _header(self, metrics: Metrics) -> str:
        """Returns the header, and chooses the columns of the lines under it."""
        # measured at each header, since the user may have resized the terminal
        width = shutil.get_terminal_size((80, 24)).columns
        fixed_width = self._step_width + sum(column.width for column in _COLUMNS) + _LEFT_WIDTH
        self._room = width - fixed_width
        signals = [column for column in _SIGNALS if metrics.get(column.metric) is not None]
        columns = [c for c in _COLUMNS if self._room >= 0 or c.title != "entropy"]
        self._columns = [signals[0] if signals and c is _LOSS else c for c in columns]
        titles = "".join(column.title.rjust(column.width) for column in self._columns)
        return " " * self._step_width + titles + "left".rjust(_LEFT_WIDTH)

    def _time_left(self, step: int) -> str:
        """Returns the expected time until the run's end, by the last 20 steps; "-" at first."""
        if len(self._ends) < 2:
            return "-"
        steps_s = [end - start for start, end in pairwise(self._ends)]
        return _duration((self._num_steps - step) * sum(steps_s) / len(steps_s))

    def _details(self, metrics: Metrics) -> str:
        """Returns the cells for which there is room right of the columns.

        They are the mean of each reward, if there are several, then the slowest phases with their
        times.
        """
        rewards = {
            # "reward/NAME/mean" without its ends
            name[7:-5]: value
            for name, value in metrics.items()
            if re.fullmatch("reward/.+/mean", name)
        }
        cells = []
        if len(rewards) > 1:
            for name, value in rewards.items():
                cells.append(f"  {name} {'-' if value is None else f'{value:.3f}'}")
        seconds = {name: metrics.get(f"time/{name}_s") or 0.0 for name in PHASES}
        for name in sorted(seconds, key=lambda name: -seconds[name]):
            if seconds[name] >= 0.005:
                cells.append(f"  {name} {_duration(seconds[name])}")
        text = ""
        for cell in cells:
            if len(text + cell) <= self._room:
                text += cell
        return text


def alarms(metrics: Metrics) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) for each problem that a step's metrics show.

    The console warns of each kind once. The diagnosis of a run makes findings of some kinds.
    """
    step = int(metrics["step"] or 0)
    dump = f"rollouts/step_{step:06d}.jsonl"
    has_critic = metrics.get("critic/loss") is not None
    critic_skipped = metrics.get("critic/skipped_updates") or 0
    # the policy's skipped updates have a warning of their own
    if critic_skipped and not metrics["optim/skipped_updates"]:
        yield (
            "critic",
            f"{critic_skipped:.0f} updates of the critic were given up: "
            "loss or gradient was not finite",
        )
    # the policy makes no update while the critic warms up, and that is no problem
    is_warming_up = has_critic or critic_skipped > 0
    # with a teacher or a critic a group of equal rewards still gives a gradient
    has_signal = metrics.keys() & {"teacher/kl", "critic/loss"}
    if not metrics["optim/updates"] and not metrics["optim/skipped_updates"] and not is_warming_up:
        yield (
            "update",
            "no update was made, since no completion counts "
            "(see dynamic_sampling/*, reward/unscored_frac)",
        )
    elif metrics.get("reward/zero_std_groups_frac") == 1.0 and not has_signal:
        yield (
            "alike",
            f"in every group all rewards are alike (mean {metrics.get('reward/mean'):.3g}), "
            "so that nothing is learned from this step; "
            "if that goes on, the task is too hard, too easy, "
            f"or the reward never differs: see {dump}",
        )
    elif metrics.get("optim/grad_norm") == 0.0:
        yield (
            "gradient",
            f"the gradient is 0, so that nothing is learned from this step; see {dump}",
        )
    unscored = metrics.get("reward/unscored_frac") or 0.0
    if _MANY_UNSCORED <= unscored < 1.0:
        yield (
            "unscored",
            f"{unscored:.0%} of the completions have no reward and are left out of the loss and of "
            "reward/mean: a reward or the environment failed, or no reward applied (see "
            f"reward/*/error_frac, and the statuses in {dump})",
        )
    if metrics.get("completion/truncated_frac") == 1.0:
        yield (
            "truncated",
            "every completion was cut off at rollout.max_completion_tokens: "
            "a reward that looks for an end or an answer cannot find one; "
            f"raise it, look at the model's eos_token_id, or see {dump}",
        )
    entropy = metrics.get("loss/entropy")
    if entropy is not None and entropy < _MIN_ENTROPY:
        yield (
            "entropy",
            f"the policy's entropy is {entropy:.2g} nats a token: "
            "completions of a group hardly differ any more "
            "(a lower optimizer.lr, a higher loss.clip_ratio_high or loss.kl_coef slow "
            "that down)",
        )
