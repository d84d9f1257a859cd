"""What a step's prompts and rewards were made of, once more from the files: rows, token ids, texts, stop tokens."""

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
    """Some of this rank's prompts beside their rows, and what the reward functions were given for their completions."""
    found, chosen = CheckResult(), list(enumerate(groups[:_NUM_PROMPTS]))
    try:
        rows = _rows(data.train, {group.prompt.row for _, group in chosen})
    except (OSError, ValueError) as error:  # moved away since the start: no fault of the run
        _log.warning(
            "update check: prompts are not compared with data.train, which cannot be read again: %s",
            error,
        )
        return found
    for number, group in chosen:
        prompt, row = group.prompt, rows.get(group.prompt.row)
        where = f"{data.train}, row {prompt.row}"
        if row is None:
            found.errors.append(f"the prompt of {where} has no such row")
            continue
        if data.prompt_template is None and prompt.text != _prompt_of(row, data):
            found.errors.append(f"the prompt of {where} is not what stands there")
        # A template may write today's date, which was another when the run began.
        is_dated = not isinstance(prompt.text, str) and "strftime_now" in str(
            tokenizer.chat_template
        )
        if not is_dated and list(prompt.token_ids) != _token_ids(prompt.text, tokenizer):
            found.errors.append(f"the token ids of the prompt of {where} are not those of its text")
        own = None if data.prompt_template else data.prompt_key
        expected = {name: value for name, value in row.items() if name != own} | {
            "prompts": prompt.text
        }
        first = number * len(group.completions)
        for completion, given in zip(group.completions, scored.reward_inputs[first:], strict=False):
            if completion.episode is not None and not completion.episode.turns:
                continue  # no function was given it
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            said = (
                text if isinstance(prompt.text, str) else [{"role": "assistant", "content": text}]
            )
            if completion.episode is not None:
                said = completion.episode.messages
            expected |= {"completions": said, "completion_ids": completion.token_ids}
            if wrong := [
                name for name, value in expected.items() if repr(given.get(name)) != repr(value)
            ]:
                what = f"the reward functions were given another {wrong[0]!r} for a completion of {where}"
                found.errors.append(f"{what} than the row and the completion have")
    return found


def check_stop_ids(path: Path, tokenizer: Any, used: Collection[int]) -> CheckResult:
    """Beside what the model's folder says, `used`, at which the engine stops."""
    said: set[int] = {tokenizer.eos_token_id} - {None}
    for file in filter(Path.is_file, (path / "generation_config.json", path / "config.json")):
        ids = json.loads(file.read_text("utf-8-sig")).get("eos_token_id")
        if ids is not None:
            said |= {ids} if isinstance(ids, int) else set(ids)
            break
    wrong = f"completions are to end at {sorted(said)} (eos_token_id in {path}), and the engine ends them at "
    return CheckResult([] if said == set(used) else [f"{wrong}{sorted(used)}"])


def _rows(source: str, wanted: Collection[int]) -> dict[int, _Row]:
    """These rows of a data set, by number."""
    found, number, last = dict[int, _Row](), 0, max(wanted, default=-1)
    if source.startswith("hub:"):
        import datasets

        _, repo, subset, split = source.split(":", 3)
        table = datasets.load_dataset(repo, subset or None, split=split)
        return {number: dict(table[number]) for number in wanted}
    if source.endswith(".parquet"):
        import pyarrow.parquet

        if Path(source).is_dir():
            table = pyarrow.parquet.read_table(source, memory_map=True)
            return {number: table.slice(number, 1).to_pylist()[0] for number in wanted}
        file = pyarrow.parquet.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
        for batch in file.iter_batches(
            4096, use_threads=False
        ):  # each rank does this: not all of it in memory
            if number > last:
                break
            found |= {
                n: batch.slice(n - number, 1).to_pylist()[0]
                for n in wanted
                if 0 <= n - number < len(batch)
            }
            number += len(batch)
        return found
    with Path(source).open("rb") as lines:
        for line in lines:
            if number > last:
                break
            if line.strip():
                if number in wanted:
                    found[number] = json.loads(line.decode("utf-8-sig"))
                number += 1
    return found


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
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    return list(tokenizer.apply_chat_template(prompt, **options))
