"""The planner counts the routes of a mixture of experts as the real arrays have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_spmd.checks.explain import training_rows
from grpo_spmd.checks.memory import route_bytes, size_text
from grpo_spmd.config.load import load_config
from grpo_spmd.learn.assemble import _sample_routed, pack_rollouts
from grpo_spmd.model.config_json import read_model
from grpo_spmd.observe.cards import find_card
from grpo_spmd.records import Rollout, Segment
from grpo_spmd.tools.plan.phases import make_plan
from grpo_spmd.tools.plan.step_time import Case
from tests.support.models import make_model, write_config

CPU = torch.device("cpu")
LAYERS, K = 2, 2


@pytest.mark.parametrize(("num_experts", "dtype"), [(6, np.uint8), (260, np.uint16)])
def test_the_planner_counts_the_arrays_of_a_step_s_routes(
    tmp_path: Path, num_experts: int, dtype: Any
) -> None:
    """The real rows of 64 rollouts of full length over two ranks, and their bytes on the way."""
    model = make_model(tmp_path / "model", "qwen3_moe", tied=True, num_experts=num_experts)
    sections: dict[str, Any] = {
        # The planner's kernels for experts are a GPU's, which have no other format.
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {"max_prompt_tokens": 10},
        "rollout": {"num_prompts_per_step": 16, "group_size": 4, "max_completion_tokens": 502},
        "training": {"num_mini_batches": 2, "max_tokens_per_micro_batch": 2048},
    }
    config = load_config(write_config(tmp_path, model, **sections))
    facts = read_model(str(model))
    assert facts is not None
    routes = np.zeros((511, LAYERS, K), dtype)
    segment = [
        Segment(np.zeros(512, np.int32), np.arange(512) >= 10, routes.copy()) for _ in range(32)
    ]
    local = [
        Rollout(i, 1.0, True, [0] * 10, [0] * 502, [0.0] * 502, segments=(segment[i],))
        for i in range(32)
    ]
    rows = [local[i : i + 4] for i in range(0, 32, 4)]
    batches = [pack_rollouts(row, CPU) for row in (*rows, _sample_routed(rows))]
    tensors = [row.routes for row in batches if row.routes is not None]
    expected = route_bytes(config, facts, 2)
    assert sum(r.experts.nbytes + r.is_recorded.nbytes for r in tensors) == expected
    # 32 rollouts and two of them again, 512 tokens, two layers and experts, and a mark.
    assert expected == 34 * 512 * (LAYERS * K * np.dtype(dtype).itemsize + 1)
    for override in ("model.router_replay=false", "rollout.tensor_parallel_size=2"):
        assert route_bytes(load_config(tmp_path / "config.yaml", [override]), facts, 2) == 0
    [row] = [row for row in training_rows(config, facts, 2) if row.name == "routes of the engine"]
    assert row.value == size_text(expected)
    plan = make_plan(Case(config, facts, find_card("H100-80GB"), 2), model)
    assert plan.phases["logprobs"]["routes"] == plan.phases["update"]["routes"] == expected
    assert plan.host["routes"] == 4 * expected
