"""Worker: updates of a mixture of experts on fixed rollouts with routes, for several splits of the
work.

    python -m tests.support.workers.routed_update CONFIG REFERENCE_MODEL OUT.pt [VARIANT]
Rank 0 saves {(routes, split): result of one_update}; with a VARIANT that one alone.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import numpy as np
import torch
import transformers

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, policy_mesh, start_session
from grpo_spmd.learn.contexts import completion_contexts
from grpo_spmd.model.policy import Policy, build_policy, build_reference
from grpo_spmd.records import Completion, Episode, Prompt, RolloutGroup, Segment, Turn
from tests.support.workers.update import (
    REPLICATED,
    SPLITS,
    VARIANTS,
    deal,
    fixed_groups,
    one_update,
)

FORKED_SLOT = 4
NUM_EXPERTS, NUM_LAYERS, TOP_K = 6, 2, 2
# "random": any routes, which only a replay can take. "equal": those that the policy takes itself.
# "none": the policy takes its own. "several steps": the first over two epochs and mini-batches.
SEVERAL = "several steps"
KINDS = ("random", "equal", "none", SEVERAL)


def routed_groups(kind: str, model: Any = None) -> list[RolloutGroup]:
    """`fixed_groups` with routes, and with a group of episodes: two turns with a tool's text
    between, and a fork that begins anew after the first turn. `model` is plain transformers'."""
    rng = random.Random(11)
    groups = []
    for group in fixed_groups():
        completions = []
        for completion in group.completions:
            if group.slot == FORKED_SLOT:
                completion = _forked(group.prompt, completion, rng)
            contexts = completion_contexts(group.prompt.token_ids, completion)
            routes = [_routes(kind, context.token_ids[:-1], rng, model) for context in contexts]
            if completion.episode is None:
                completions.append(dataclasses.replace(completion, routes=routes[0]))
                continue
            segments = tuple(
                dataclasses.replace(segment, routes=experts)
                for segment, experts in zip(completion.episode.segments, routes, strict=True)
            )
            episode = dataclasses.replace(completion.episode, segments=segments)
            completions.append(dataclasses.replace(completion, episode=episode))
        groups.append(dataclasses.replace(group, completions=completions))
    return groups


def _forked(prompt: Prompt, completion: Completion, rng: random.Random) -> Completion:
    stretches = [[rng.randrange(1, 90) for _ in range(n)] for n in (3, 2, 4, 5, 2)]
    first, tool, second, question, third = stretches
    paths = [
        [(prompt.token_ids, False), (first, True), (tool, False), (second, True)],
        [(prompt.token_ids, False), (first, False), (question, False), (third, True)],
    ]
    segments = []
    for path in paths:
        ids = [i for part, _ in path for i in part]
        sampled = [is_sampled for part, is_sampled in path for _ in part]
        segments.append(Segment(np.array(ids, np.int32), np.array(sampled)))
    token_ids = [*first, *second, *third]
    turns = tuple(Turn(len(part), "stop") for part in (first, second, third))
    episode = Episode("ok", tuple(segments), turns)
    logprobs = [-rng.random() * 10 for _ in token_ids]
    return Completion(token_ids, logprobs, completion.finish_reason, episode)


def _routes(kind: str, token_ids: Any, rng: random.Random, model: Any) -> Any:
    if kind == "none":
        return None
    if kind in ("random", SEVERAL):
        experts = [
            [rng.sample(range(NUM_EXPERTS), TOP_K) for _ in range(NUM_LAYERS)] for _ in token_ids
        ]
        return np.array(experts, np.uint8)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids.tolist()]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(TOP_K)[1] for layer in logits], 1).numpy().astype(np.uint8)


def main() -> None:
    config, reference_model, out = load_config(sys.argv[1]), sys.argv[2], sys.argv[3]
    # Rows with routes share no prefixes.
    training = dataclasses.replace(config.training, share_prefixes=False)
    config = dataclasses.replace(config, training=training)
    session = start_session()
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32
    )
    groups = {kind: routed_groups(kind, plain) for kind in KINDS}
    temperature = config.rollout.temperature

    def build(kind: str, used_session: Any = session, **changes: Any) -> Policy:
        model = dataclasses.replace(config.model, **changes)
        return build_policy(model, temperature, used_session, replays_routes=kind != "none")

    policies = {kind: build(kind) for kind in KINDS}
    values = dataclasses.replace(config.model, path=reference_model)
    reference = build_reference(
        policies["random"], values, temperature, config.loss.kl_coef, session
    )
    assert isinstance(reference, Policy)
    results = {}

    def update(
        kind: str, split: str, policy: Policy, tokens: int, method: str, packed: bool
    ) -> None:
        changed = dataclasses.replace(
            config,
            training=dataclasses.replace(config.training, max_tokens_per_micro_batch=tokens),
        )
        if kind == SEVERAL:
            training = dataclasses.replace(changed.training, num_epochs=2, num_mini_batches=2)
            changed = dataclasses.replace(changed, training=training)
        # The reference, another model, has routes of its own.
        if kind in ("equal", "none"):
            loss = dataclasses.replace(changed.loss, router_aux_coef=0.0, kl_coef=0.0)
            changed = dataclasses.replace(changed, loss=loss)
        dealt = deal(groups[kind], method, session)
        results[kind, split] = one_update(changed, policy, reference, dealt, packed, session)

    if len(sys.argv) > 4:
        changed = build("random", **VARIANTS[sys.argv[4]])
        update("random", sys.argv[4], changed, 90, "in turn", True)
        torch.save(results, out)
        end_session()
        return
    for kind in KINDS:
        for split, (tokens, method, packed) in SPLITS.items():
            update(kind, split, policies[kind], tokens, method, packed)
    for variant, changes in VARIANTS.items():
        if variant != "compiled":
            update("random", variant, build("random", **changes), 90, "in turn", True)
    if session.world_size % 2 == 0:
        replicated = dataclasses.replace(session, mesh=policy_mesh(session.device, 2))
        update("random", REPLICATED, build("random", replicated), 90, "in turn", True)
    if session.is_rank0:
        torch.save(results, out)
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
