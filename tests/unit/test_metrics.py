"""What is written, and what a full disk leaves of it."""

from __future__ import annotations

import json
import logging
import math
import random
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from grpo_spmd.distributed.reductions import (
    Histogram,
    Ids,
    Max,
    Mean,
    Reductions,
    Sum,
    merge,
    merge_bytes,
    metric_values,
    to_bytes,
)
from grpo_spmd.observe.log import _check_trained
from grpo_spmd.observe.metrics_file import LineFile


def test_what_a_full_disk_refuses_is_written_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real ENOSPC needs a file system of one's own; a limit on the size of this process's files
    gives OSError after a
    part as well."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = [json.dumps({"step": step, "x": "y" * 50}) for step in range(4)]
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        file = LineFile(path)
        file.write(lines[0])
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (100, limit[1])
        )  # takes a part of the second line
        file.write(lines[1])
        assert path.read_text() == f"{{}}\n{lines[0]}\n"
        file.write(lines[2])
        assert path.read_text() == f"{{}}\n{lines[0]}\n"
        assert "File too large; 2 lines wait in memory" in caplog.text
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        file.write(lines[3])
        assert path.read_text().splitlines() == ["{}", *lines]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        file.write("lost")
        file.close()
        assert "lacks its last 1 lines" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_file_that_was_removed_ends_the_run_and_one_that_was_replaced_does_not(
    tmp_path: Path,
) -> None:
    """What is written into a removed file is nowhere: such a run is not done."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = LineFile(path)
    file.write("{}")
    (tmp_path / "other").write_text("{}\n")
    (tmp_path / "other").replace(path)
    file.write("{}")
    shutil.rmtree(path.parent)
    with pytest.raises(RuntimeError, match=r"metrics\.jsonl was removed while the run wrote it"):
        file.write("{}")
    file.close()


def test_every_kind_merges_with_its_like_in_the_order_of_the_parts() -> None:
    single: Reductions = {
        "policy": Sum(1e16),
        "norm": Max(3.0),
        "x": Histogram([1.0, 2.0]),
        "bad": Ids([4]),
        "lr": Max(),
    }
    second: Reductions = {
        "policy": Sum(1.0),
        "norm": Max(2.0),
        "x": Histogram([0.0, 5.0]),
        "bad": Ids([1, 7]),
    }
    third: Reductions = {"policy": Sum(-1e16), "kl/mean": Mean(1.5, 3), "lr": Max(0.1)}
    merged = merge([single, {}, second, third])
    assert merged == {
        "policy": Sum(0.0),  # not 1.0, as in another order
        "norm": Max(3.0),
        "x": Histogram([1.0, 7.0]),
        "bad": Ids([4, 1, 7]),
        "lr": Max(0.1),
        "kl/mean": Mean(1.5, 3),
    }
    assert merge_bytes(map(to_bytes, (single, {}, second, third))) == merged
    assert metric_values(merged) == {"kl/mean": 0.5}


def test_a_mean_of_nothing_and_a_largest_of_nothing_are_no_numbers() -> None:
    assert (Mean().value, Mean(0.0, 0).merge(Mean()).value, Max().merge(Max()).value) == (
        None,
        None,
        None,
    )
    assert (Mean().merge(Mean(3, 2)).value, Max(-1.0).merge(Max()).value) == (1.5, -1.0)


def test_what_is_on_the_device_merges_there_and_survives_the_way_to_rank_0() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(7, generator=generator, dtype=torch.float64)
    kinds: Reductions = {
        "sum": Sum(numbers[0]),
        "mean/a": Mean(numbers[1], torch.tensor(3)),
        "max": Max(numbers[2]),
        "hist": Histogram(numbers[3:5]),
    }
    more: Reductions = {
        "max": Max(numbers[5]),
        "hist": Histogram(numbers[5:]),
        "mean/a": Mean(numbers[6], 4),
    }
    on_host = {name: item.on_host() for name, item in merge([kinds, more]).items()}
    x = numbers.tolist()
    expected: Reductions = {
        "sum": Sum(x[0]),
        "mean/a": Mean(x[1] + x[6], 7),
        "max": Max(max(x[2], x[5])),
        "hist": Histogram([x[3] + x[5], x[4] + x[6]]),
    }
    assert merge_bytes([to_bytes(on_host)]) == expected
    assert math.isnan(Max(torch.tensor(1.0)).merge(Max(torch.tensor(math.nan))).value)


def test_histograms_travel_without_their_empty_bins_and_to_the_bit() -> None:
    rng = random.Random(0)
    ranks: list[Reductions] = []
    for rank in range(40):
        counts = [rng.choice([0.0, 0.0, 0.0, 1.0, rng.random(), 1e16]) for _ in range(401)]
        number = Sum(rng.random()) if rank % 3 else Max()
        ranks.append(
            {
                "a": number,
                "hist": Histogram(counts if rank % 5 else []),
                "none": Histogram([0.0] * 9),
                "b": Ids([rank]),
            }
        )
        filled = sum(count > 0 for count in counts) if rank % 5 else 0
        assert (
            len(to_bytes(ranks[-1])) <= 8 * filled + 51 + 2 + 160
        )  # a bit for a bin, and a header
    expected = [0.0] * 401
    for item in ranks:
        expected = [x + y for x, y in zip(expected, item["hist"].value or [0.0] * 401, strict=True)]
    merged = merge_bytes(map(to_bytes, ranks))
    assert merged["hist"] == Histogram(expected)
    assert merged["none"] == Histogram([0.0] * 9)
    assert merged["b"] == Ids(list(range(40)))
    unknown = merge_bytes([to_bytes({"hist": Histogram([math.nan, 0.0, 2.0])})])["hist"].value
    assert (math.isnan(unknown[0]), unknown[1:]) == (True, [0.0, 2.0])


def test_a_token_lost_or_doubled_on_the_way_is_an_error() -> None:
    def sums(tokens: float, skipped: float = 0.0) -> Reductions:
        return {"loss_tokens": Sum(tokens), "optim/skipped_updates": Max(skipped)}

    _check_trained(3, sums(84.0), expected=84)
    _check_trained(
        3, sums(4.0, skipped=1.0), expected=84
    )  # what a skipped update would have trained is not counted
    for tokens in (83.0, 85.0):
        with pytest.raises(
            RuntimeError,
            match=rf"step 3: trained on {tokens:.0f} tokens where rank 0 had decided on 84",
        ):
            _check_trained(3, sums(tokens), expected=84)
