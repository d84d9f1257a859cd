"""The launcher's exit code, by those of its ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher import api

from grpo_spmd.distributed import launch


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(api, "LocalElasticAgent", api.LocalElasticAgent)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("codes", "expected", "message"),
    [
        ({}, 0, ""),
        ({0: 2, 1: 2}, 2, ""),  # what a user typed is refused by all
        ({1: 2}, 2, ""),  # the others were ended before they could
        ({0: 1, 1: 2}, 1, ""),
        ({0: 1}, 1, ""),
        (
            {3: -9},
            1,
            "rank 3 was ended by SIGKILL\n",
        ),  # the kernel's, for memory: nobody else on its node may know
    ],
)
def test_the_exit_code_is_that_of_the_ranks(
    codes: dict[int, int],
    expected: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: Any) -> None:
        if codes:
            raise ChildFailedError(
                "x", {rank: ProcessFailure(rank, 1, code, "") for rank, code in codes.items()}
            )

    monkeypatch.setattr(run, "run", fail)
    assert launch._run(["--standalone", "-m", "x"]) == expected
    assert capsys.readouterr().err == message
