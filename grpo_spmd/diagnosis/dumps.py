"""Causes that a run's dumped rollouts give away: what rewards follow, how completions end, prompts
that repeat.

Only the first and the newest dumps are read, and those about the step at which lengths changed. The
folder may be somebody else's: what cannot be read is passed over.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from grpo_spmd.diagnosis.curves import metric_curve
from grpo_spmd.diagnosis.results import Finding
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.files import UntrustedError, read_json
from grpo_spmd.observe.run_folder import ReadErrors

_FIELDS = (
    "rollout_id",
    "row",
    "position",
    "sample",
    "prompt",
    "columns",
    "completion",
    "reward",
    "completion_ids",
    "finish_reason",
)
_NUM_NEWEST = 3
_MAX_ROLLOUTS = 4_096  # of a step
_MIN_GROUPS = 8
_FOLLOWS = 0.8  # a correlation
_MOST = 0.8  # of completions


@dataclass
class Dumps:
    """The first and the newest dumped rollouts of a run, read when a rule asks for them."""

    run: RecordedRun

    @cached_property
    def initial(self) -> list[Any]:
        """The rollouts of the first dumped step."""
        return self._read(self.run.dumped_steps[:1])

    @cached_property
    def newest(self) -> list[Any]:
        """The rollouts of the last dumped steps."""
        return self._read(self.run.dumped_steps[-_NUM_NEWEST:])

    def around(self, step: int) -> list[Any]:
        """Returns the rollouts of the dumped steps that are nearest to a step."""
        steps = sorted(self.run.dumped_steps, key=lambda dumped_step: abs(dumped_step - step))
        return self._read(steps[:_NUM_NEWEST])

    def _read(self, steps: Sequence[int]) -> list[Any]:
        rollouts: list[Any] = []
        for step in steps:
            for _, record in self.run.files.rollouts(step, _FIELDS, ReadErrors()):
                rollouts.append(record)
                if len(rollouts) >= _MAX_ROLLOUTS * len(steps):
                    break
        return rollouts


def _judge_length_reward(run: RecordedRun, dumps: Dumps) -> Iterator[Finding]:
    """Yields a reward that follows the length of completions, while these grow or shrink."""
    tokens = metric_curve(run.steps, "completion/tokens_mean")
    if len(tokens) < 6 or tokens.start <= 0:
        return
    ratio = tokens.end / tokens.start
    steps = tokens.moved()
    if 1 / 1.3 < ratio < 1.3 or steps is None:
        return
    # At the end all completions may be as long as they can be.
    groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for record in dumps.around(steps.first):
        if record.reward is not None:
            groups[record.position].append((len(record.completion_ids), record.reward))
    correlations = []
    for group in groups.values():
        lengths, rewards = np.array(group, np.float64).T
        # A correlation needs both to differ.
        if len(group) >= 3 and np.ptp(lengths) > 0 and np.ptp(rewards) > 0:
            correlations.append(float(np.corrcoef(lengths, rewards)[0, 1]))
    if len(correlations) < _MIN_GROUPS:
        return
    correlation = float(np.mean(correlations))
    if abs(correlation) >= _FOLLOWS and (correlation > 0) == (ratio > 1):
        yield Finding(
            "warning",
            "the reward follows the length",
            f"Within a group rewards and lengths correlate by {correlation:.2f}, and completions "
            f"went from {tokens.start:.0f} to {tokens.end:.0f} tokens: length is what is learned. "
            "Bound it in the reward, or advantage.overlong_penalty; loss.aggregation=constant "
            "favours no length.",
            step=steps.first,
            metric=tokens.key,
            explains=(tokens.key, "completion/truncated_frac", "reward/zero_std_groups_frac"),
        )


def _judge_end_of_turn(run: RecordedRun, dumps: Dumps) -> Iterator[Finding]:
    """Yields a special token with which completions end their turn and sample on."""
    cut = metric_curve(run.steps, "completion/truncated_frac")
    if len(cut) == 0 or cut.start < _MOST:
        return
    names = _special_tokens(run)
    truncated = [record for record in dumps.initial if record.finish_reason == "length"]
    counts = Counter(
        token for record in truncated for token in {*record.completion_ids} & names.keys()
    )
    for token, count in counts.most_common(1):
        if count >= _MOST * len(truncated):
            yield Finding(
                "bad",
                f"{names[token]!r:.40} does not end a completion",
                f"{count / len(truncated):.0%} of the completions recorded at the start contain "
                "it and go on to rollout.max_completion_tokens, so it is no stop token: add it to "
                "eos_token_id in the model's generation_config.json.",
                step=int(cut.steps[0]),
                metric=cut.key,
                explains=(
                    cut.key,
                    "completion/tokens_mean",
                    "reward/zero_std_groups_frac",
                    "reward/std",
                ),
            )


def _special_tokens(run: RecordedRun) -> dict[int, str]:
    """Returns the special tokens in the run folder's copy of the tokenizer, by id."""
    names: dict[int, str] = {}
    with suppress(OSError, UntrustedError, ValueError):
        entries = read_json(run.folder / "tokenizer.json").get("added_tokens")
        for entry in entries if isinstance(entries, list) else []:
            is_special = isinstance(entry, dict) and entry.get("special") is True
            if is_special and type(entry.get("id")) is int:
                names[entry["id"]] = str(entry.get("content"))
    return names


def _judge_repeated_prompts(run: RecordedRun, dumps: Dumps) -> Iterator[Finding]:
    """Yields data in which several rows have the same prompt and columns."""
    # An environment's rows may differ in other columns alone.
    prompts = {
        record.row: str((record.prompt, record.columns)) for record in dumps.initial + dumps.newest
    }
    num_copies = len(prompts) - len({*prompts.values()})
    if len(prompts) >= _MIN_GROUPS and num_copies >= 0.2 * len(prompts):
        yield Finding(
            "warning",
            "the data repeats itself",
            f"Of {len(prompts)} recorded rows {num_copies} are copies of another one: such prompts "
            "count several times in every epoch. Remove copies from data.train.",
            step=run.dumped_steps[0],
        )


def _judge_same_completions(run: RecordedRun, dumps: Dumps) -> Iterator[Finding]:
    """Yields a policy that answers every prompt with one and the same text."""
    texts = Counter(record.completion for record in dumps.newest)
    num_prompts = len({record.position for record in dumps.newest})
    for text, count in texts.most_common(1):
        if num_prompts >= _MIN_GROUPS and count >= 0.9 * len(dumps.newest):
            yield Finding(
                "bad",
                "all completions are one text",
                f"{count / len(dumps.newest):.0%} of the newest completions are {text!r:.80}, "
                "whatever the prompt: go back to a checkpoint before it, with a lower "
                "optimizer.lr, a higher loss.kl_coef or a reward that this text does not get.",
                explains=("reward/zero_std_groups_frac", "loss/entropy", "optim/grad_norm"),
            )


def _judge_evaluation_data(run: RecordedRun, dumps: Dumps) -> Iterator[Finding]:
    """Yields evaluation sets that are the training set."""
    train = run.config.get("data.train")
    for key, value in run.config.items():
        if key.startswith("data.eval") and train is not None and value == train:
            yield Finding(
                "warning",
                f"{key} is data.train",
                "The evaluation asks what was trained on, so it shows memory and not skill: give "
                f"{key} rows of its own.",
            )


DumpRule = Callable[[RecordedRun, Dumps], Iterator[Finding]]
DUMP_RULES: tuple[DumpRule, ...] = (
    _judge_length_reward,
    _judge_end_of_turn,
    _judge_repeated_prompts,
    _judge_same_completions,
    _judge_evaluation_data,
)
