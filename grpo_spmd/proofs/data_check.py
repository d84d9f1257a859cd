"""Compares a step's prompts, reward inputs and stop tokens with the files that they come from."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.schema import DataConfig
from grpo_spmd.proofs.gradient_check import CheckResult
from grpo_spmd.records import RolloutGroup, ScoredRollouts

_log = logging.getLogger("grpo_spmd")
_NUM_PROMPTS = 4  # of a rank
_Row = dict[str, Any]


def check_data(
    groups: Sequence[RolloutGroup], scored: ScoredRollouts, tokenizer: Any, data: DataConfig
) -> CheckResult:
    """Checks some of this rank's prompts, and what the reward functions got for them."""
    result = CheckResult()
    checked = groups[:_NUM_PROMPTS]
    try:
        rows = _read_rows(data.train, {group.prompt.row for group in checked})
    except (OSError, ValueError) as error:  # moved away since the start: no fault of the run
        _log.warning(
            "update check: prompts are not compared with data.train, which cannot be read again: "
            "%s",
            error,
        )
        return result
    for number, group in enumerate(checked):
        prompt = group.prompt
        row = rows.get(prompt.row)
        where = f"{data.train}, row {prompt.row}"
        if row is None:
            result.errors.append(f"the prompt of {where} has no such row")
            continue
        if data.prompt_template is None and prompt.text != _prompt_of(row, data):
            result.errors.append(f"the prompt of {where} is not what stands there")
        # A template may write today's date, which was another one when the run began.
        is_chat = not isinstance(prompt.text, str)
        is_dated = is_chat and "strftime_now" in str(tokenizer.chat_template)
        if not is_dated and list(prompt.token_ids) != _token_ids(prompt.text, tokenizer):
            result.errors.append(
                f"the token ids of the prompt of {where} are not those of its text"
            )
        expected = {
            name: value
            for name, value in row.items()
            if data.prompt_template or name != data.prompt_key
        }
        expected["prompts"] = prompt.text
        first = number * len(group.completions)
        for completion, inputs in zip(
            group.completions, scored.reward_inputs[first:], strict=False
        ):
            episode = completion.episode
            if episode is not None and not episode.turns:
                continue  # no function got it
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            expected["completions"] = text
            if episode is not None:
                expected["completions"] = episode.messages
            elif is_chat:
                expected["completions"] = [{"role": "assistant", "content": text}]
            expected["completion_ids"] = completion.token_ids
            wrong = [
                name for name, value in expected.items() if repr(inputs.get(name)) != repr(value)
            ]
            if wrong:
                result.errors.append(
                    f"the reward functions were given another {wrong[0]!r} for a completion of "
                    f"{where} than the row and the completion have"
                )
    return result


def check_stop_ids(path: Path, tokenizer: Any, stop_ids: Collection[int]) -> CheckResult:
    """Compares the engine's stop tokens with those that the model's folder names."""
    expected: set[int] = {tokenizer.eos_token_id} - {None}
    for file in filter(Path.is_file, (path / "generation_config.json", path / "config.json")):
        ids = json.loads(file.read_text("utf-8-sig")).get("eos_token_id")
        if ids is not None:
            expected |= {ids} if isinstance(ids, int) else set(ids)
            break
    if expected == set(stop_ids):
        return CheckResult()
    return CheckResult(
        [
            f"completions are to end at {sorted(expected)} (eos_token_id in {path}), and the engine "
            f"ends them at {sorted(stop_ids)}"
        ]
    )


def _read_rows(source: str, numbers: Collection[int]) -> dict[int, _Row]:
    """Returns these rows of a data set, by number."""
    last = max(numbers, default=-1)
    if source.startswith("hub:"):
        import datasets

        _, repo, subset, split = source.split(":", 3)
        table = datasets.load_dataset(repo, subset or None, split=split)
        return {number: dict(table[number]) for number in numbers}
    rows: dict[int, _Row] = {}
    start = 0
    if source.endswith(".parquet"):
        import pyarrow.parquet

        if Path(source).is_dir():
            table = pyarrow.parquet.read_table(source, memory_map=True)
            return {number: table.slice(number, 1).to_pylist()[0] for number in numbers}
        # Each rank reads it: never hold all of the file in memory.
        file = pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
        for batch in file.iter_batches(4096, use_threads=False):
            if start > last:
                break
            for number in numbers:
                if start <= number < start + len(batch):
                    rows[number] = batch.slice(number - start, 1).to_pylist()[0]
            start += len(batch)
        return rows
    with Path(source).open("rb") as lines:
        for line in lines:
            if start > last:
                break
            if line.strip():
                if start in numbers:
                    rows[start] = json.loads(line.decode("utf-8-sig"))
                start += 1
    return rows


def _prompt_of(row: _Row, data: DataConfig) -> Any:
    prompt = row.get(data.prompt_key)
    if isinstance(prompt, str) and (data.as_chat or data.system_prompt):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and data.system_prompt and prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
    return prompt


def _token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(
        tokenizer.apply_chat_template(
            prompt, tokenize=True, add_generation_prompt=True, return_dict=False
        )
    )
