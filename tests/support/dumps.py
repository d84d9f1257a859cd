"""Reads rollout dumps as the manual says that anybody may, without a line of the package."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def dumped(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The rollouts of a step as they are in the files of all nodes, in the order of the prompt
    stream."""
    lines = [
        line
        for path in (run_dir / "rollouts").glob(f"step_{step:06d}*.jsonl")
        for line in path.read_bytes().removesuffix(b"\n").split(b"\n")
    ]
    return sorted((json.loads(line) for line in lines), key=lambda r: (r["position"], r["sample"]))


def scored(lines: Iterable[bytes | str]) -> list[dict[str, Any]]:
    """Lines of token_scores/, by rollout id, their arrays as lists."""
    kinds = dict.fromkeys(("difference", "entropy", "advantages"), "<f2") | {"loss_mask": "u1"}
    result = [json.loads(line) for line in lines]
    for values in result:
        for name in kinds.keys() & values.keys():
            values[name] = np.frombuffer(base64.b64decode(values[name]), kinds[name]).tolist()
    return sorted(result, key=lambda values: values["rollout_id"])


def scores_of(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Of the dump's rollouts that were trained on."""
    paths = (run_dir / "token_scores").glob(f"step_{step:06d}*.jsonl")
    return scored(
        line for path in paths for line in path.read_bytes().removesuffix(b"\n").split(b"\n")
    )


def logprobs_of(rollout: dict[str, Any]) -> list[float]:
    values: list[float] = np.frombuffer(
        base64.b64decode(rollout["rollout_logprobs"]), "<f4"
    ).tolist()
    return values
