"""Worker: 20 optimizer steps, each followed by a sync; the engine must answer as plain transformers
does with the gathered weights.

python -m tests.support.workers.sync CONFIG NUM_STEPS
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import EngineStateError, Request
from grpo_spmd.engine.weight_sync import WeightSync, saved_tensors
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.config_json import kv_bytes_per_token, read_model
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.records import Completion, Rollout
from tests.support.workers.conversations import (
    converse_later,
    end_while_all_wait,
    fail_while_all_wait,
    stale_cache_shows,
)


def main() -> None:
    config, num_steps = load_config(sys.argv[1]), int(sys.argv[2])
    session = start_session(config.model.num_replicas)
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    refuses(lambda: engine.generate([Request([1], 0)], 0), "asleep")
    refuses(lambda: engine.load_weights(iter([]), 0), "asleep")
    kv_cache_is_as_explained(engine, config)
    policy = build_policy(config.model, config.rollout.temperature, session)
    optimizer, _ = build_optimizer(policy, config.optimizer)
    weight_sync = WeightSync(policy, engine, config.rollout.sync_bucket_bytes(session.device.type))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32
    )

    worst = 0.0
    for step in range(num_steps):
        disturb(policy, optimizer, step)
        weight_sync.sync(step)
        refuses(
            lambda version=step: engine.generate([Request([1], 0)], version + 1), "policy_version"
        )
        if config.rollout.engine_ranks > 1:
            refuses(
                lambda version=step: engine.generate([Request([1], engine.tp_rank)], version),
                "ranks [1] of engine",
            )
        with torch.no_grad():  # by torch's own full_tensor(), not by the code under test
            full = {
                name: p.full_tensor() if isinstance(p, DTensor) else p
                for name, p in hf_named_parameters(policy)
            }
            plain.load_state_dict(full, strict=False)
            plain.tie_weights()
        # One prompt long enough that its prefix is cached, again at each step: a cache that
        # survived the sync would
        # show.
        prompts = [[5] * 40, [5] * 40, [7, 8, 9], [3]]
        requests = [
            Request(prompt, 1000 * engine.engine_rank + i) for i, prompt in enumerate(prompts)
        ]
        for request, completion in zip(requests, engine.generate(requests, step), strict=True):
            worst = max(
                worst, difference(plain, request.prompt_ids, completion, config.rollout.temperature)
            )
        engine.sleep()
    if experts := {name for name in full if ".experts." in name}:
        # On a CPU vLLM packs experts, and GLM4-MoE's routers have a constant beside the weight.
        assert weight_sync._direct is not None
        loaded = full.keys() - weight_sync._direct.names
        assert {name for name in loaded if not name.endswith("mlp.gate.weight")} == experts
    stale_cache_shows(engine, weight_sync.sync, lambda: disturb(policy, optimizer, num_steps))
    # The product with Qwen2-MoE's shared_expert_gate, of one row, depends on the batch, as does
    # that with GLM4-MoE's router, of float32.
    depends = plain.config.model_type in ("qwen2_moe", "glm4_moe")
    converse_later(engine, 2, max_error=2e-6 * depends)
    end_while_all_wait(engine, 2)
    fail_while_all_wait(engine, 2)
    engine.sleep()
    engine.wake_weights()
    saved = saved_tensors(all_but_one(full), policy.saved)
    refuses(lambda: engine.load_weights(saved, 99), "not covered")
    refuses(lambda: engine.generate([Request([1], 0)], 99), "asleep")
    print(f"rank {session.rank} worst {worst:.3e}", flush=True)
    assert worst < 1e-4, worst
    engine.shutdown()
    end_session()


def kv_cache_is_as_explained(engine: RolloutEngine, config: Config) -> None:
    """vLLM divides the memory of its KV cache into as many blocks as the bytes of a token by
    `--explain` say."""
    facts, cache = read_model(config.model.path), engine._llm.llm_engine.vllm_config.cache_config
    assert facts is not None
    assert facts.dimensions is not None
    token = kv_bytes_per_token(facts.dimensions, 4, config.rollout.engine_ranks)
    assert cache.num_gpu_blocks == cache.kv_cache_memory_bytes // (cache.block_size * token), cache


def disturb(policy: Policy, optimizer: torch.optim.Optimizer, step: int) -> None:
    """An optimizer step that moves every parameter."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 90, (40,), generator=generator).tolist()
    batch = pack_rollouts(
        [Rollout(0, 1.0, True, ids[:20], ids[20:], [0.0] * 20)], torch.device("cpu")
    )
    logprobs, _ = policy(batch)
    (-logprobs.mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


def difference(
    plain: torch.nn.Module, prompt: list[int], completion: Completion, temperature: float
) -> float:
    ids = torch.tensor([prompt + completion.token_ids])
    with torch.no_grad():
        logits = plain(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


def all_but_one(full: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return (
        (name, tensor) for name, tensor in full.items() if "layers.1.self_attn.o_proj" not in name
    )


def refuses(call: object, expected: str) -> None:
    try:
        call()  # type: ignore[operator]
    except EngineStateError as error:
        assert expected in str(error), error  # noqa: PT017
    else:
        raise AssertionError(f"was not refused: {expected}")


if __name__ == "__main__":
    with exit_with_outcome():
        main()
