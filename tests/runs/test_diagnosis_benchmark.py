"""Real runs, ill and healthy: the diagnosis names each cause and says nothing false."""

from __future__ import annotations

from benchmarks.agreement.diagnosis import CASES, measure_all


def test_each_cause_is_named_and_nothing_false_is_said() -> None:
    rows = measure_all([*CASES])
    assert {row["case"]: row["false"] for row in rows if row["false"]} == {}
    assert [row["case"] for row in rows if row["result"] not in ("named", "silent")] == []
    assert sum(row["result"] == "named" for row in rows) >= 20
    assert sum(row["result"] == "silent" for row in rows) >= 20
