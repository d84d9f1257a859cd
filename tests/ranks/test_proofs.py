"""The running proofs see planted faults and name the right tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.test_partition import SECTIONS
from tests.support.models import make_model, write_config
from tests.support.ranks import run_worker


# Between them: tied and untied, tensor parallel 1 and 2, both dtypes, biases, KV heads held twice,
# an odd vocabulary
# that is padded.
@pytest.mark.parametrize(
    ("family", "tied", "tp", "dtype"),
    [
        ("qwen2", True, 1, "float32"),
        ("llama", False, 1, "bfloat16"),
        ("qwen3", False, 2, "float32"),
        ("qwen2", True, 2, "bfloat16"),
    ],
)
def test_every_planted_fault_is_seen_and_nothing_else(
    tmp_path: Path, family: str, tied: bool, tp: int, dtype: str
) -> None:
    kv_heads = {"num_key_value_heads": 1} if family == "qwen3" else {}
    folder = make_model(
        tmp_path / family, family, tied=tied, hidden_size=128, **kv_heads
    )  # 128: q_proj is square
    rollout = {"temperature": 0.7, "tensor_parallel_size": tp, "max_completion_tokens": 16}
    config = write_config(tmp_path, folder, rollout=rollout, data={"max_prompt_tokens": 48})
    output = run_worker(tp, "proof", str(config), f"model.dtype={dtype}")
    assert output.count("faults seen") == tp
    assert "not proved" not in output


@pytest.mark.parametrize(
    ("part", "message"), [("faults", "38 faults seen"), ("clean", "26 clean updates pass")]
)
def test_the_check_of_the_update_sees_planted_faults_and_changes_no_bit(
    tmp_path: Path, part: str, message: str
) -> None:
    """38 faults are each named. 26 kinds of clean updates pass (losses, estimators, both dtypes,
    recomputation, adapters, replicas, a rank with few rollouts, episodes), 13 of them compared to
    the bit with an update that nobody looks at."""
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    sections = {**SECTIONS, "data": {"max_prompt_tokens": 16}}
    config = write_config(tmp_path, folder, **sections)
    output = run_worker(2, "update_check", str(config), part)
    assert output.count(message) == 2, output
