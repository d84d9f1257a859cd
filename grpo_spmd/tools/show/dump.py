"""What the pages share about recorded completions: filters of lines, texts of messages, errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.observe.token_scores import TokenScores
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.terminal import Line, Terminal

_MAX_LISTED_STEPS = 8  # at each end of a list
LineFilter = Callable[[bytes], bool]


def error_lines(errors: ReadErrors, terminal: Terminal) -> Iterator[Line]:
    """Yields what could not be read from a run's dumps; nothing if all was read."""
    if errors.num_missing:
        warning = f"{errors.num_missing} rollouts of the step are not in its files"
        warning += "; each node wrote one file"
        yield from terminal.excerpt(warning, 2, styles="warning")
    if errors.num:
        more = f" (and {errors.num - 1} more)" if errors.num > 1 else ""
        yield from terminal.excerpt(f"not read{more}: {errors.first}", 3, styles="warning")


def contains_text(text: str) -> LineFilter | None:
    """Returns a filter for raw lines that may contain `text` in upper or lower case.

    Returns None if raw bytes cannot tell, because JSON may escape the text's characters.
    """
    # JSON may write other characters as escapes or as themselves.
    if not text.isascii():
        return None
    # As JSON writes the text: quotes and control characters are escaped there.
    needle = json.dumps(text)[1:-1].lower().encode()
    return lambda line: needle in line.lower()


def text_pattern(text: str) -> re.Pattern[str]:
    """Returns a pattern for `text` in upper or lower case; ASCII text matches ASCII only."""
    return re.compile(re.escape(text), re.IGNORECASE | (re.ASCII if text.isascii() else 0))


def has_row(row: int) -> LineFilter:
    """Returns a filter for raw lines from that row of the data set."""
    # After the number something else must follow, or row 1 would match row 10.
    pattern = re.compile(rb'"row": ?%d[,}\s]' % row)
    return lambda line: pattern.search(line) is not None


def prompt_text(prompt: str | Sequence[Any]) -> str:
    """Returns a prompt as one text: a string, or the contents of its chat messages."""
    return prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))


def message_text(message: object) -> str:
    """Returns the content of a chat message as text; as JSON if it is no text."""
    content = message.get("content") if isinstance(message, Mapping) else message
    # Content may be a list of parts, as in multimodal chats.
    if isinstance(content, list) and all(isinstance(p, Mapping) and "text" in p for p in content):
        return "".join(as_text(item["text"]) for item in content)
    return "" if content is None else as_text(content)


def as_text(value: object) -> str:
    """Returns a text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    """Returns JSON of a value from a dump."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):  # nested more deeply than JSON can be written
        return "..."


def read_scores(
    run: RecordedRun, step: int, rollout_ids: Collection[int | None], errors: ReadErrors
) -> dict[int, TokenScores]:
    """Returns the token scores of these rollouts by rollout id; {} if the run recorded none."""
    scores = run.files.scores(step, errors)
    return {entry.rollout_id: entry for entry in scores if entry.rollout_id in rollout_ids}


def read_max_differences(run: RecordedRun, step: int, errors: ReadErrors) -> dict[int, float]:
    """Returns the largest |policy - engine| of each rollout's tokens in nats, by rollout id.

    NaN means that a difference was not finite.
    """
    return {
        scores.rollout_id: math.nan if scores.difference_max is None else scores.difference_max
        for scores in run.files.scores(step, errors)
    }


def describe_steps(steps: Sequence[int]) -> str:
    """Returns in words which steps have completions."""
    if not steps:
        return "there are none of any step (logging.rollouts_every_steps)"
    # Dumps at even distances are the usual case, and short to say.
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    if len(steps) > 3 and len(set(gaps)) == 1:
        every = "" if gaps[0] == 1 else f", every {gaps[0]}"
        return f"there are those of steps {steps[0]} to {steps[-1]}{every}"
    listed = [str(step) for step in steps]
    if len(listed) > 2 * _MAX_LISTED_STEPS:
        listed = [*listed[:_MAX_LISTED_STEPS], "...", *listed[-_MAX_LISTED_STEPS:]]
    return f"there are those of step{'s' * (len(steps) > 1)} {', '.join(listed)}"


def find_dumped_step(run: RecordedRun, step: int | None) -> int:
    """Returns `step`, or the newest step with completions if `step` is None.

    Raises ConfigError if that step has no completions.
    """
    if step is None and run.dumped_steps:
        return run.dumped_steps[-1]
    if step is None or step not in run.dumped_steps:
        problem = "no completions are in"
        if step is not None:
            problem = f"--step {step}: no completions of it are in"
        raise ConfigError(f"{problem} {run.folder}/rollouts; {describe_steps(run.dumped_steps)}")
    return step
