"""Worker: updates of a fixed set of rollouts, from scoring's result to new parameters, for several
settings and splits of the work.

    python -m tests.support.workers.update CONFIG REFERENCE_MODEL OUT.pt SETTING ...
Each SETTING has all splits.
Rank 0 saves {(setting, split): {loss, gradients, parameters, ...}}; the rollouts are those of
`fixed_groups`.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils

import grpo_spmd.learn.balance
from benchmarks.speed.balance import plan_of
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.reductions import Mean
from grpo_spmd.distributed.session import Session, end_session, policy_mesh, start_session
from grpo_spmd.learn.assemble import assemble_batch, penalise_rewards_by_kl
from grpo_spmd.learn.balance import plan_batch
from grpo_spmd.learn.update import attach_logprobs
from grpo_spmd.model.families.refusals import refuse_tensors
from grpo_spmd.model.policy import (
    Policy,
    build_policy,
    build_reference,
    hf_named_parameters,
    load_weights,
)
from grpo_spmd.observe.token_scores import KeptScores
from grpo_spmd.records import BatchPlan, Completion, Prompt, RolloutGroup, ScoredRollouts
from tests.support.learn import merged_on_all, sampled_step_of, updater_of

NUM_GROUPS, GROUP_SIZE, LONGEST = 6, 4, 28
UNSCORED = (3, 1)  # (slot, sample) of a completion whose reward is unknown

# What of a config differs from the test's file. The engine's logprobs are made up, so that ratios
# to them lie on both
# sides of every bound.
_ENGINE_RATIO = {"old_logprobs": "engine", "rollout_correction": "none"}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "as configured": {},
    "clip": {"loss": {**_ENGINE_RATIO, "dual_clip": 1.5}},
    "gspo, sequence": {"loss": {**_ENGINE_RATIO, "policy": "gspo", "aggregation": "sequence"}},
    "cispo, constant": {"loss": {**_ENGINE_RATIO, "policy": "cispo", "aggregation": "constant"}},
    "sequence_tis": {
        "loss": {"rollout_correction": "sequence_tis", "rollout_correction_cap": 1.01}
    },
    "icepop": {
        "loss": {"rollout_correction": "icepop", "rollout_correction_cap": 3.0},
        "advantage": {"normalize_std": "batch"},
    },
    "kl in reward": {
        "loss": {"kl_in": "reward", "kl_coef": 0.05, "aggregation": "constant"},
        "advantage": {"estimator": "dr_grpo"},
    },
    "reinforce_pp": {"advantage": {"estimator": "reinforce_pp"}, "loss": {"kl_in": "reward"}},
    "max_rl": {"advantage": {"estimator": "max_rl"}},
    "mask_truncated": {
        "loss": {"mask_truncated": True, "aggregation": "sequence"},
        "advantage": {"overlong_buffer_tokens": 10, "overlong_penalty": 0.7, "estimator": "rloo"},
    },
    "two epochs, two mini-batches": {
        "optimizer": {"lr": 1e-3},
        "loss": {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02},
        "training": {"num_epochs": 2, "num_mini_batches": 2},
    },
}


def fixed_groups() -> list[RolloutGroup]:
    """Ragged lengths from 1 to LONGEST, and in slot 2 a group in which every completion was cut
    off."""
    rng = random.Random(7)
    groups = []
    for slot in range(NUM_GROUPS):
        prompt = Prompt(
            slot, slot, [rng.randrange(1, 90) for _ in range(rng.randint(1, 9))], "", {}
        )
        completions = []
        for _ in range(GROUP_SIZE):
            length = LONGEST if slot == 2 else rng.choice([1, 2, 3, 5, 8, 13, 21, LONGEST])
            token_ids = [rng.randrange(1, 90) for _ in range(length)]
            completions.append(
                Completion(
                    token_ids,
                    [-rng.random() * 10 for _ in token_ids],
                    "length" if slot == 2 else "stop",
                )
            )
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def fixed_reward(slot: int, sample: int) -> float | None:
    return None if (slot, sample) == UNSCORED else random.Random(f"{slot}/{sample}").random()


def score(groups: list[RolloutGroup]) -> ScoredRollouts:
    """What scoring says about these groups of `fixed_groups`."""
    scored = ScoredRollouts()
    for group in groups:
        for sample in range(GROUP_SIZE):
            scored.rewards.append(fixed_reward(group.slot, sample))
    scored.by_name = {"fixed": list(scored.rewards)}
    statuses = ["not_applicable" if reward is None else "ok" for reward in scored.rewards]
    scored.statuses = {"fixed": statuses}
    return scored


def with_setting(config: Config, setting: str) -> Config:
    for section, values in SETTINGS[setting].items():
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **values)}
        )
    return config


# Tokens of a micro-batch; how groups are dealt to the ranks that sampled them; whether rollouts
# share a row.
SPLITS = {
    "one row, dealt in turn": (100_000, "in turn", True),
    "a few rows, dealt as tensor parallel 2 deals": (90, "tensor parallel", True),
    "a row for each rollout, dealt at random": (90, "at random", False),
}
# What of the model's config differs in one more update each; compiling takes a while, so that it is
# done at one world
# size only.
VARIANTS: dict[str, dict[str, Any]] = {
    "activations recomputed, small logit chunks": {
        "activation_checkpointing": True,
        "logprob_chunk_tokens": 5,
    },
    "activations recomputed but for products": {"activation_checkpointing": "selective"},
    "compiled": {"compile": True},
}
COMPILED_AT = 2
REPLICATED = "two replicas of the policy"  # HSDP: 2 x 1 of 2 ranks, 2 x 2 of 4


def deal(groups: list[RolloutGroup], method: str, session: Session) -> list[RolloutGroup]:
    """The groups of this rank, in the order in which it holds them."""
    if method == "in turn":
        return groups[session.rank :: session.world_size]
    if method == "at random":
        order = random.Random(3).sample(groups, len(groups))
        owners = [random.Random(slot).randrange(session.world_size) for slot in range(len(groups))]
        return [group for group in order if owners[group.slot] == session.rank]
    # rollout.rollout_groups: to engines in turn, then to the ranks of an engine in turn
    size = min(2, session.world_size)
    return groups[session.rank // size :: session.world_size // size][session.rank % size :: size]


def plan_unpacked(*args: Any, **kwargs: Any) -> BatchPlan:
    """The plan with every rollout in a row of its own."""
    plan = [
        [[[i] for row in rank for i in row] for rank in mini_batch]
        for mini_batch in plan_batch(*args, **kwargs)
    ]
    return plan_of(
        [
            [rank + [[]] * (max(map(len, mini_batch)) - len(rank)) for rank in mini_batch]
            for mini_batch in plan
        ]
    )


def main() -> None:
    config, reference_model, out = load_config(sys.argv[1]), sys.argv[2], sys.argv[3]
    settings = sys.argv[4:]
    session = start_session()
    policy = build_policy(config.model, config.rollout.temperature, session)
    reference_values = dataclasses.replace(config.model, path=reference_model)
    reference = build_reference(
        policy, reference_values, config.rollout.temperature, config.loss.kl_coef, session
    )
    assert isinstance(reference, Policy)

    results = {}
    # Of the other settings one split, which tests compare with plain transformers.
    brief = {1: [*SPLITS][:1], 2: [*SPLITS][1:2]}.get(session.world_size, [])
    for setting in SETTINGS:
        for split, (tokens, method, packed) in SPLITS.items():
            if setting not in settings and split not in brief:
                continue
            if session.world_size == 3 and packed and method == "tensor parallel":  # 3 ranks cannot
                continue
            changed = with_setting(config, setting)
            changed = dataclasses.replace(
                changed,
                training=dataclasses.replace(changed.training, max_tokens_per_micro_batch=tokens),
            )
            results[setting, split] = one_update(
                changed, policy, reference, deal(fixed_groups(), method, session), packed, session
            )
    for variant, changes in VARIANTS.items():
        if variant == "compiled" and session.world_size != COMPILED_AT:
            continue
        changed_policy = build_policy(
            dataclasses.replace(config.model, **changes), config.rollout.temperature, session
        )
        groups = deal(fixed_groups(), "in turn", session)
        results["as configured", variant] = one_update(
            config, changed_policy, reference, groups, True, session
        )
        results["as configured", variant]["graphs"] = torch._dynamo.utils.counters["stats"][
            "unique_graphs"
        ]
    if session.world_size % 2 == 0:
        replicated = build_policy(
            config.model,
            config.rollout.temperature,
            dataclasses.replace(session, mesh=policy_mesh(session.device, 2)),
        )
        for setting in ("as configured", "two epochs, two mini-batches"):
            result = one_update(
                with_setting(config, setting), replicated, reference, groups, True, session
            )
            results[setting, REPLICATED] = result
            digests = on_rank0(
                list,
                [float(parameter.double().sum()) for parameter in result["parameters"].values()],
            )
            assert all(digest == digests[0] for digest in digests), "replicas differ"
    if session.is_rank0:
        torch.save(results, out)
    end_session()


def one_update(
    config: Config,
    policy: Policy,
    reference: Policy,
    groups: list[RolloutGroup],
    packed: bool,
    session: Session,
) -> dict[str, Any]:
    folder = Path(config.model.path)
    stored = refuse_tensors(policy.model, folder, policy.saved)
    load_weights(hf_named_parameters(policy), folder, stored)
    updater = updater_of(policy, config)
    gradients: list[dict[str, torch.Tensor]] = []
    updater.optimizer.register_step_pre_hook(lambda *_: gradients.append(_full_gradients(policy)))

    sampled = sampled_step_of(config, session)
    sampled.add(groups, score(groups))
    grpo_spmd.learn.balance.plan_batch = plan_batch if packed else plan_unpacked
    batch, decision = assemble_batch(sampled, session)
    retained = KeptScores()
    attach_logprobs(
        policy,
        reference,
        batch,
        config.loss,
        config.training.num_optimizer_steps,
        keep_scores=retained,
    )
    decision = penalise_rewards_by_kl(batch, decision, config.loss, config.advantage)
    sums = merged_on_all(updater.update(batch, keep_scores=retained))
    policy_term, kl, entropy, tokens, updates = (
        sums[name].value for name in ("policy", "kl", "entropy", "loss_tokens", "optim/updates")
    )
    kl_coef = config.loss.kl_coef if config.loss.kl_in == "loss" else 0.0
    mismatch, corrected = sums["weight_sync/mismatch_kl"], config.loss.rollout_correction != "none"
    assert isinstance(mismatch, Mean)
    return {
        "loss": (policy_term + kl_coef * kl - config.loss.entropy_coef * entropy) / updates,
        "updates": updates,
        "loss_tokens": tokens,
        "clip_frac": sums["loss/clip_frac"].value,
        "correction": sums["rollout_correction/weight_mean"].value if corrected else 0.0,
        "capped_frac": sums["rollout_correction/capped_frac"].value if corrected else 0.0,
        "grad_norm": sums["optim/grad_norm"].value,
        "mismatch_tokens": mismatch.count,
        "mismatch_kl": mismatch.value,
        "mismatch_histogram": sums["mismatch_ratios"].value,
        "metrics": {
            name: value
            for name, value in decision.metrics.items()
            if not name.startswith("batching/")
        },
        "advantages": on_rank0(
            lambda pieces: [
                value for _, value in sorted(pair for piece in pieces for pair in piece)
            ],
            list(decision.advantages.items()),
        ),
        "scores": on_rank0(
            lambda pieces: [line for piece in pieces for line in piece],
            [*map(bytes.decode, retained.lines())],
        ),
        "rows": len(batch.mini_batches[0]),
        "shared_rows": sum(row.tree is not None for row in batch.micro_batches),
        "forwarded_frac": sums["batching/forwarded_tokens_frac"].value,
        "router_aux": sums["router_aux"].value if "router_aux" in sums else 0.0,
        "gradients": gradients,
        "parameters": {
            name: parameter.full_tensor().clone() for name, parameter in hf_named_parameters(policy)
        },
    }


def _full_gradients(policy: Policy) -> dict[str, torch.Tensor]:
    result = {}
    for name, parameter in hf_named_parameters(policy):
        assert parameter.grad is not None, name
        result[name] = parameter.grad.full_tensor().clone()  # type: ignore[attr-defined]
    return result


if __name__ == "__main__":
    with exit_with_outcome():
        main()
