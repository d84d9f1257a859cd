"""Worker: 20 optimizer steps of a hybrid model, each followed by a sync; the engine, which computes
recurrent layers on a CPU in bfloat16 alone, must stay as near to plain transformers as it was at
the start, and not so near to weights that it was not sent. The last answers are written to OUT
beside the trained model. With 0 steps an engine that vLLM fills from that model's files must give
the same answers, to the bit.

python -m tests.support.workers.hybrid_sync CONFIG NUM_STEPS OUT
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.demo.countdown import make_tokenizer
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.engine.weight_proof import prove_weights
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.records import SyncStats
from tests.support.full_tensors import gather_full_tensors, load_full_tensors
from tests.support.workers.sync import disturb

PROMPTS = [[5] * 40, [5] * 40, *([start, 8, 9, *range(1, 4 * start)] for start in range(1, 13))]
# Each is seen in one tensor.
FAULTS = ("conv1d.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_a.weight", "A_log")


def main() -> None:
    config, num_steps, out = load_config(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    session = start_session(config.model.num_replicas)
    if not num_steps:
        compare_fresh_engine(config, session, out)
        return
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    policy = build_policy(config.model, config.rollout.temperature, session)
    optimizer, _ = build_optimizer(policy, config.optimizer)
    sync = WeightSync(policy, engine, config.rollout.sync_bucket_bytes("cpu"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32
    )
    temperature = config.rollout.temperature
    means = []
    for step in range(num_steps + 1):
        sync.sync(step)
        copy_weights(policy, plain)
        means.append(mismatch(engine, plain, step, temperature))
        if step < num_steps:
            disturb(policy, optimizer, step)
            engine.sleep()
    answers = [completion.logprobs for completion in generate(engine, num_steps)]
    if session.rank == 0:
        plain.to(torch.bfloat16).save_pretrained(out / "trained")
        make_tokenizer(out / "trained")
        torch.save(answers, out / "answers.pt")
        plain.to(torch.float32)
    disturb(policy, optimizer, num_steps)
    copy_weights(policy, plain)
    stale = mismatch(engine, plain, num_steps, temperature)
    later = max(means[1:])
    print(f"rank {session.rank} start {means[0]:.1e}, later {later:.1e}, stale {stale:.1e} nats")
    # Routes of experts flip where two are nearly alike.
    assert later < 3 * means[0] < stale, means
    print(f"rank {session.rank} {faults_are_seen(policy, engine)} faults seen", flush=True)
    engine.shutdown()
    end_session()


def compare_fresh_engine(config: Config, session: Session, out: Path) -> None:
    """An engine that loads the trained model's files answers as the one that was synced."""
    rollout = replace(config.rollout, engine={**config.rollout.engine, "load_format": "auto"})
    model = replace(config.model, path=str(out / "trained"))
    engine = RolloutEngine(model, rollout, config.max_rollout_tokens, session, [0])
    engine.wake_weights()
    engine.wake_kv_cache()
    engine.policy_version = 0
    answers = [completion.logprobs for completion in generate(engine, 0)]
    assert answers == torch.load(out / "answers.pt", weights_only=True)
    print(f"rank {session.rank} answers as the synced engine", flush=True)
    engine.shutdown()
    end_session()


def generate(engine: RolloutEngine, step: int) -> list[Any]:
    return engine.generate([Request(list(prompt), i) for i, prompt in enumerate(PROMPTS)], step)


@torch.no_grad()
def copy_weights(policy: Policy, plain: Any) -> None:
    """Collective. By torch's own full_tensor(), rounded as the engine's weights are."""
    weights = {
        name: parameter.full_tensor().bfloat16().float()
        for name, parameter in hf_named_parameters(policy)
        if isinstance(parameter, DTensor)
    }
    plain.load_state_dict(weights, strict=False)
    plain.tie_weights()


@torch.no_grad()
def mismatch(engine: RolloutEngine, plain: Any, step: int, temperature: float) -> float:
    """Returns the mean |engine - plain transformers| of the sampled tokens, in nats."""
    differences = []
    for prompt, completion in zip(PROMPTS, generate(engine, step), strict=True):
        ids = torch.tensor([list(prompt) + completion.token_ids])
        logits = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        differences.append((expected - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(differences).mean())


def faults_are_seen(policy: Policy, engine: RolloutEngine) -> int:
    """The engine is given a wrong tensor of a recurrent layer, one at a time; returns how many."""
    clean = dict(gather_full_tensors(policy, engine.dtype, 1 << 20, SyncStats()))
    for leaf in FAULTS:
        name = next(name for name in clean if name.endswith(leaf))
        wrong = clean[name].clone()
        wrong[-1] = wrong[0]
        load_full_tensors(policy, engine, {**clean, name: wrong})
        try:
            prove_weights(policy, engine, 1)
        except Rank0Error as error:
            assert name in str(error), error  # noqa: PT017
            assert "in 1 of" in str(error), error  # noqa: PT017
        else:
            raise AssertionError(f"was not seen: {name}")
    load_full_tensors(policy, engine, clean)
    prove_weights(policy, engine, 1)
    return len(FAULTS)


if __name__ == "__main__":
    with exit_with_outcome():
        main()
