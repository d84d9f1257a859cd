"""The faults of benchmarks/agreement/mutations.py can still be planted: run whole, it would say so
only after
minutes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agreement.mutations_faults import FAULTS, Fault, plant, problems
from tests.support.processes import ROOT


def test_every_fault_can_be_planted_and_its_tests_are_there() -> None:
    assert problems(ROOT) == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


def test_a_fault_that_is_there_twice_or_does_not_parse_is_refused(tmp_path: Path) -> None:
    (tmp_path / "grpo_spmd").mkdir()
    file = tmp_path / "grpo_spmd" / "some.py"
    file.write_text("a = 1\nb = 2\n")
    fault = Fault("sign", "some.py", "a = 1", "a = -1", ())
    for faulty in (
        replace(fault, old=" = "),
        replace(fault, old="c = 3"),
        replace(fault, new="a = ("),
    ):
        with pytest.raises(ValueError, match=r"sign: some\.py"):
            plant(tmp_path, faulty)
    plant(tmp_path, fault)
    assert file.read_text() == "a = -1\nb = 2\n"
