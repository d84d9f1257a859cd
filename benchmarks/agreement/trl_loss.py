"""Our losses beside TRL's: the same data, weights and settings, loss and gradient of every
parameter, float32 on the CPU.

A tiny random Qwen3 and a ragged batch are made in a temporary folder. TRL's GRPOTrainer and
RLOOTrainer (trl_loss_worker.py, in .venv-trl, made on first use) take them from rewards and token
ids to gradients, padded as TRL pads; ours goes from the same rewards and ids through the sharded
policy, packed micro-batches and grpo_spmd.learn.losses.

What is claimed to be the same must agree within 1e-5: the loss (relative where it is above 1) and,
for every parameter, the norm of the difference of the gradients over the norm of TRL's. "next
variant" is that same distance to the closest other variant of the table: what a switch without
effect would show. Exit code 1 where a claim fails. Rows that differ say why.

Both sides clip at 0.8 and 1.28 and take rewards minus the group's mean, unless the row says
otherwise.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.agreement.trl_loss_batch import Batch, make
from benchmarks.agreement.trl_loss_variants import NOT_OURS, NOT_THEIRS, Variant, variants
from benchmarks.support.report import Row, arguments_parser, report
from benchmarks.support.trl_environment import NO_VLLM, TRL_VERSION, trl_python
from grpo_spmd.config.schema import ModelConfig, OptimizerConfig, TrainingConfig
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.advantages import compute_advantages, overlong_penalties
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.balance import plan_batch
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.records import Rollout

TOLERANCE = 1e-5
_MAX_ROW_TOKENS = 100  # several micro-batches


@dataclass(frozen=True)
class Result:
    loss: float
    advantages: Tensor  # [B]
    gradients: dict[str, Tensor]


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    transformers.utils.logging.disable_progress_bar()
    python = trl_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch = make(folder)
        chosen = variants(batch)
        (folder / "variants.json").write_text(
            json.dumps([_for_worker(variant, batch) for variant in chosen])
        )
        command = [python, "-W", "ignore", "-m", "benchmarks.agreement.trl_loss_worker", name]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", NO_VLLM: "1"})
        theirs = [
            load_result(folder / "trl" / f"{number}.safetensors") for number in range(len(chosen))
        ]
        ours = run_ours(folder, batch, chosen)
    rows = [compare(*item, theirs) for item in zip(chosen, ours, theirs, strict=True)]
    report("trl_loss", rows, args.json)
    for title, names in (("TRL has, we do not", NOT_OURS), ("we have, TRL does not", NOT_THEIRS)):
        print(f"\n{title}:" + "".join(f"\n  {name}: {reason}" for name, reason in names.items()))
    failed = [row["variant"] for row in rows if row["verdict"] == "FAILED"]
    claims = sum(not variant.reason for variant in chosen)
    print(
        f"\n{claims - len(failed)} of {claims} claims of agreement within {TOLERANCE:g} hold",
        flush=True,
    )
    if failed:
        raise AssertionError(f"off by more than {TOLERANCE:g}: {'; '.join(failed)}")


def _for_worker(variant: Variant, batch: Batch) -> dict[str, Any]:
    return {
        "trainer": variant.trainer,
        "arguments": variant.arguments,
        "num_parts": variant.num_parts,
        "on_policy": variant.on_policy,
        "engine": "vllm_importance_sampling_mode" in variant.trl,
        "rewards": batch.rewards_of(variant.rewards),
        "overlong_reward": variant.overlong_reward,
    }


def load_result(path: Path) -> Result:
    tensors = load_file(path)
    gradients = {
        name.partition("/")[2]: tensor
        for name, tensor in tensors.items()
        if name.startswith("gradient/")
    }
    return Result(float(tensors["loss"]), tensors["advantages"], gradients)


# Our side


def run_ours(folder: Path, batch: Batch, chosen: list[Variant]) -> list[Result]:
    """Collective. Our results, in a process group of one."""
    session = start_session()
    models = {}
    for name in ("policy", "old", "ref"):
        model = ModelConfig(path=str(folder / name), dtype="float32", logprob_chunk_tokens=7)
        models[name] = build_policy(model, batch.temperature, session, trainable=name == "policy")
    scores = {name: _score(model, batch, session) for name, model in models.items()}
    results = []
    for variant in chosen:
        old = scores["policy" if variant.on_policy else "old"]
        results.append(_run(variant, batch, models["policy"], old, scores["ref"], session))
    end_session()
    return results


@torch.no_grad()
def _score(policy: Policy, batch: Batch, session: Session) -> list[Tensor]:
    """The logprobs of each completion, [tokens]."""
    sequences = zip(batch.prompt_ids, batch.completion_ids, batch.rollout_logprobs, strict=True)
    return [
        policy(pack_rollouts([Rollout(0, 0.0, True, *ids)], session.device))[0] for ids in sequences
    ]


def _run(
    variant: Variant,
    batch: Batch,
    policy: Policy,
    old: list[Tensor],
    ref: list[Tensor],
    session: Session,
) -> Result:
    loss_config, advantage_config = variant.loss_config, variant.advantage_config
    rewards = torch.tensor(
        [math.nan if r is None else r for r in batch.rewards_of(variant.rewards)],
        dtype=torch.float64,
    )
    if advantage_config.overlong_buffer_tokens:
        num_tokens = torch.tensor([len(ids) for ids in batch.completion_ids], dtype=torch.float64)[
            None
        ]
        buffer, penalty = advantage_config.overlong_buffer_tokens, advantage_config.overlong_penalty
        rewards -= overlong_penalties(num_tokens, batch.max_completion_tokens, buffer, penalty)[0]
    if loss_config.kl_in == "reward":
        estimates = [
            kl_estimate(*pair, loss_config.kl_estimator).double().sum()
            for pair in zip(old, ref, strict=True)
        ]
        rewards -= loss_config.kl_coef * torch.stack(estimates)
    advantages, _ = compute_advantages(
        rewards.view(-1, batch.group_size),
        advantage_config.estimator,
        advantage_config.normalize_std,
    )
    advantages = advantages.flatten()
    masked = [cut and loss_config.mask_truncated for cut in batch.truncated]
    rollouts = [
        Rollout(i, float(advantages[i]), not bool(rewards[i].isnan()) and not masked[i], *ids)
        for i, ids in enumerate(
            zip(batch.prompt_ids, batch.completion_ids, batch.rollout_logprobs, strict=True)
        )
    ]
    counted = [rollout for rollout in rollouts if rollout.loss_mask]
    plan = plan_batch(
        [r.num_tokens for r in rollouts],
        num_ranks=1,
        mini_batch_sizes=[len(rollouts)],
        max_tokens=_MAX_ROW_TOKENS,
    )
    loss = 0.0
    policy.zero_grad()
    updater = PolicyUpdater(
        policy, OptimizerConfig(), loss_config, TrainingConfig(), batch.max_completion_tokens
    )
    for row in plan[0][0]:
        micro_batch = pack_rollouts([rollouts[i] for i in row], session.device)
        micro_batch.old_logprobs = None if variant.on_policy else torch.cat([old[i] for i in row])
        if loss_config.kl_coef and loss_config.kl_in == "loss":
            micro_batch.ref_logprobs = torch.cat([ref[i] for i in row])
        sums, _ = updater.backward(
            micro_batch, sum(len(r.completion_ids) for r in counted), len(counted), is_synced=True
        )
        loss += variant.factor * float(sums["loss"].value)
    gradients = {}
    for name, parameter in hf_named_parameters(policy):
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = variant.factor * parameter.grad.full_tensor()
    return Result(loss, advantages, gradients)


# The comparison


def compare(variant: Variant, ours: Result, theirs: Result, all_theirs: list[Result]) -> Row:
    """One row: how far apart, and what that means for the claim."""
    far, location = gradient_difference(ours, theirs)
    loss_far = abs(ours.loss - theirs.loss) / max(1.0, abs(theirs.loss))
    advantages_far = float((ours.advantages - theirs.advantages).abs().max())
    measured = {"loss": loss_far, "gradients": far, "advantages": advantages_far}
    # NaN is no agreement, so the comparison must be this way round.
    agree = all(measured[name] <= TOLERANCE for name in variant.compares.split(", "))
    rest = [gradient_difference(second, theirs)[0] for second in all_theirs]
    label = "" if variant.compares == "loss, gradients" else f" {variant.compares}"
    return {
        "variant": variant.name,
        "verdict": "differs" if variant.reason else f"same{label}" if agree else "FAILED",
        "loss ours": ours.loss,
        "loss TRL": theirs.loss,
        "loss off by": loss_far,
        "gradients off by": far,
        "worst parameter": location.removeprefix("model."),
        "advantages off by": advantages_far,
        "next variant": min((second for second in rest if second > TOLERANCE), default=math.nan),
        "gradient norm TRL": _norm(theirs),
        "gradient probe TRL": probe(theirs),
        "ours": _settings(variant),
        "TRL": f"{variant.trainer}Trainer "
        + " ".join(f"{name}={value}" for name, value in variant.trl.items()),
        "TRL version": TRL_VERSION,
        "why": variant.reason or "-",
    }


def gradient_difference(ours: Result, theirs: Result) -> tuple[float, str]:
    """The largest norm of the difference over the norm of theirs of a parameter, and its name."""
    assert ours.gradients.keys() == theirs.gradients.keys(), (
        ours.gradients.keys() ^ theirs.gradients.keys()
    )
    far = {
        name: float((ours.gradients[name] - theirs).norm() / theirs.norm())
        for name, theirs in theirs.gradients.items()
    }
    worst = max(far, key=lambda name: math.inf if math.isnan(far[name]) else far[name])
    return far[worst], worst


def probe(result: Result) -> float:
    """The gradient's product with a fixed random direction of unit length: a number that knows its
    sign and place, for
    the record."""
    generator = torch.Generator().manual_seed(7)
    total, squares = 0.0, 0.0
    for _, gradient in sorted(result.gradients.items()):
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        total += float((direction * gradient).sum())
        squares += float(direction.square().sum())
    return total / math.sqrt(squares)


def _settings(variant: Variant) -> str:
    """What our config has that the plain variant has not."""
    plain, words = Variant("", {}), []
    for section, config, default in (
        ("loss", variant.loss_config, plain.loss_config),
        ("advantage", variant.advantage_config, plain.advantage_config),
    ):
        names = [
            item.name
            for item in fields(config)
            if getattr(config, item.name) != getattr(default, item.name)
        ]
        words += [f"{section}.{name}={getattr(config, name)}" for name in names]
    return " ".join(words) or "-"


def _norm(result: Result) -> float:
    return math.sqrt(
        sum(float(gradient.double().square().sum()) for gradient in result.gradients.values())
    )


if __name__ == "__main__":
    with exit_with_outcome():
        main()
