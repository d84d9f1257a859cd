"""What `--explain` works out is what real ranks hold and move."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.support.models import make_model, write_config
from tests.support.ranks import run_worker


def test_shards_and_sync_are_those_of_real_ranks(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    sizes = {"num_prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 12}
    path = write_config(tmp_path, model, loss={"kl_coef": 0.1}, rollout=sizes)
    tree = yaml.safe_load(path.read_text())
    tree["model"]["dtype"] = "bfloat16"
    path.write_text(yaml.safe_dump(tree))
    output = run_worker(2, "explain", str(path))
    assert output.count("agrees") == 2, output
