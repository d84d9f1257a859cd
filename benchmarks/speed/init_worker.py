"""One rank of the init benchmark: build the model in one of two ways and tell what that took.

python -m benchmarks.speed.init_worker policy|from_pretrained FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import transformers

from benchmarks.support.models import make_model
from benchmarks.support.ranks import peak_bytes, tell
from grpo_spmd.config.schema import ModelConfig
from grpo_spmd.demo.making import model_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.model.policy import build_policy


def main() -> None:
    label, folder = sys.argv[1:]
    transformers.utils.logging.disable_progress_bar()
    session = start_session()
    torch.ones(64, 64) @ torch.ones(
        64, 64
    )  # the libraries' own first allocations belong to what was there before
    built: list[torch.nn.Module] = []

    def build() -> None:
        if label == "policy":
            built.append(build_policy(ModelConfig(path=folder, dtype="float32"), 1.0, session))
            return
        plain = transformers.AutoModelForCausalLM
        built.append(plain.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False))
        for p in (
            built[0].parameters()
        ):  # it maps the files and reads nothing yet: touch what a first forward pass would
            p.detach().sum()

    start = time.perf_counter()
    peak = peak_bytes(build, on_gpu=False)
    seconds = time.perf_counter() - start
    local = [p.to_local() if label == "policy" else p for p in built[0].parameters()]  # type: ignore[attr-defined]
    shard = sum(p.numel() * 4 for p in local)
    tell({"peak_beyond_shard_bytes": peak - shard, "shard_bytes": shard, "seconds": seconds})
    end_session()


def make(folder: Path) -> tuple[int, int, int]:
    """Random weights of 0.3 billion parameters in files of at most 400 MB. Returns how many, bytes
    of a layer and of
    the largest tensor."""
    config = model_config(
        vocab_size=64000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    )
    model = make_model(folder, config, max_shard_size="400MB")
    layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    return model.num_parameters(), layer, max(p.numel() * 4 for p in model.parameters())


if __name__ == "__main__":
    with exit_with_outcome():
        main()
