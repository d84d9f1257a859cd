"""Worker: an engine that loads a folder's files as vLLM does; it must answer as plain transformers
over these files, as near as bfloat16 allows, and not as the model that the config names.

python -m tests.support.workers.hybrid_served CONFIG FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
import transformers

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import LoraConfig
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from tests.support.workers.hybrid_sync import mismatch


def main() -> None:
    config, folder = load_config(sys.argv[1]), sys.argv[2]
    session = start_session(1)
    rollout = replace(config.rollout, engine={**config.rollout.engine, "load_format": "auto"})
    model = replace(config.model, path=folder, lora=LoraConfig())
    engine = RolloutEngine(model, rollout, 128, session, [0])
    engine.wake_weights()
    engine.wake_kv_cache()
    engine.policy_version = 0
    served, base = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, config.model.path)
    )
    near, far = (mismatch(engine, m, 0, config.rollout.temperature) for m in (served, base))
    print(f"mean mismatch {near:.1e} nats, of the base {far:.1e}")
    assert near < 0.1 < 0.3 < far
    print("answers as transformers does", flush=True)
    engine.shutdown()
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
