"""One rank of the init benchmark: make the model, or build it in one of two ways and print what that took.

python -m benchmarks.speed.init_worker make|policy|from_pretrained FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers

from grpo_spmd.config import ModelConfig
from grpo_spmd.distributed import end_session, exit_with_outcome, start_session
from grpo_spmd.policy import build_policy


def main() -> None:
    what, folder = sys.argv[1:]
    transformers.utils.logging.disable_progress_bar()
    if what == "make":
        make(Path(folder))
        return
    session = start_session()
    torch.ones(64, 64) @ torch.ones(64, 64)  # the libraries' own first allocations belong to what was there before
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    start = time.perf_counter()
    if what == "policy":
        policy = build_policy(ModelConfig(path=folder, dtype="float32"), 1.0, session)
        shard = sum(p.to_local().numel() * 4 for p in policy.parameters())  # type: ignore[attr-defined]
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for p in model.parameters():  # it maps the files and reads nothing yet: touch what a first forward pass would
            p.detach().sum()
        shard = sum(p.numel() * 4 for p in model.parameters())
    seconds = time.perf_counter() - start
    beyond = status_bytes("VmHWM") - before - shard
    line = json.dumps({"peak_beyond_shard_bytes": beyond, "shard_bytes": shard, "seconds": seconds})
    sys.stdout.write(f"init_worker: {line}\n")  # in one piece: print() on torchrun's unbuffered ranks writes the line break apart
    end_session()


def make(folder: Path) -> None:
    """Random weights of 0.3 billion parameters in files of at most 400 MB, and the sizes that the result is read against."""
    config = transformers.Qwen3Config(
        vocab_size=64000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="400MB")
    layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    sizes = {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "layer_bytes": layer,
        "largest_tensor_bytes": max(p.numel() * 4 for p in model.parameters()),
    }
    (folder / "sizes.json").write_text(json.dumps(sizes))


def status_bytes(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


if __name__ == "__main__":
    with exit_with_outcome():
        main()
