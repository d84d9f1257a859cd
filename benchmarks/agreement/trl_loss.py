"""Our losses beside TRL's: the same data, weights and settings, loss and gradient of every parameter, float32 on the CPU.

A tiny random Qwen3 and a ragged batch are made in a temporary folder. TRL's GRPOTrainer and RLOOTrainer (trl_loss_worker.py, in .venv-trl,
made on first use) take them from rewards and token ids to gradients, padded as TRL pads; ours goes from the same rewards and ids through
the sharded policy, packed micro-batches and grpo_spmd.loss.

What is claimed to be the same must agree within 1e-5: the loss (relative where it is above 1) and, for every parameter, the norm of the
difference of the gradients over the norm of TRL's. "next variant" is that same distance to the closest other variant of the table: what a
switch without effect would show. Exit code 1 where a claim fails. Rows that differ say why.

Both sides clip at 0.8 and 1.28 and take rewards minus the group's mean, unless the row says otherwise.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.support.report import Row, main_arguments, report
from benchmarks.support.trl_environment import NO_VLLM, TRL_VERSION, trl_python
from grpo_spmd.advantages import compute_advantages, overlong_penalties
from grpo_spmd.batching import pack_rollouts, plan_batch
from grpo_spmd.config import AdvantageConfig, Config, DataConfig, LossConfig, ModelConfig, RolloutConfig
from grpo_spmd.data_types import Rollout
from grpo_spmd.demo import make_tokenizer, tiny_config
from grpo_spmd.distributed import Session, end_session, exit_with_outcome, start_session
from grpo_spmd.loss import kl_estimate
from grpo_spmd.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.update import PolicyUpdater

TOLERANCE = 1e-5

_GROUP_SIZE = 4
_MAX_PROMPT, _MAX_COMPLETION = 9, 24
_MAX_ROW_TOKENS = 100  # several micro-batches
_TEMPERATURE = 0.8
_EOS = 0
_CHARACTERS = "0123456789+-*,=:"  # ids 1 to 16 of the demo's tokenizer
_UNKNOWN = 5  # the rollout without a reward, where there is one


@dataclass(frozen=True)
class Variant:
    """One setting on both sides. Our side begins at PPO's clip without any extra; `trl` holds arguments of GRPOConfig or RLOOConfig."""

    name: str
    trl: dict[str, Any]
    loss: dict[str, Any] = field(default_factory=dict)
    advantage: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why they differ; empty: they must agree
    rewards: str = "plain"  # or "times_1000", beside which the 1e-4 that TRL adds to a std is nothing, or "one_unknown"
    trainer: str = "GRPO"
    num_parts: int = 2  # TRL's micro-batches
    on_policy: bool = False  # old logprobs are those of the weights that train
    overlong_reward: list[int] | None = None  # TRL: arguments of the reward function get_soft_overlong_punishment
    factor: float = 1.0  # of our loss, where the two differ by a known constant
    compares: str = "loss, gradients"  # or "gradients", "advantages"

    @property
    def arguments(self) -> dict[str, Any]:
        """All that TRL is given: its clip is at 0.8 and 1.2 by default, and its GRPOTrainer divides by the group's std."""
        plain: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
        return {**plain, **({"scale_rewards": "none"} if self.trainer == "GRPO" else {}), **self.trl}

    @property
    def loss_config(self) -> LossConfig:
        plain: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "dual_clip": None, "rollout_correction": "none"}
        return LossConfig(**{**plain, **self.loss})

    @property
    def advantage_config(self) -> AdvantageConfig:
        return AdvantageConfig(**{"estimator": "dr_grpo", **self.advantage})


@dataclass(frozen=True)
class Batch:
    """What both sides read, in the order of rollouts, whole groups one after another."""

    prompts: list[str]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    rollout_logprobs: list[list[float]]
    rewards: list[float]
    group_size: int = _GROUP_SIZE
    max_completion_tokens: int = _MAX_COMPLETION
    temperature: float = _TEMPERATURE

    @property
    def truncated(self) -> list[bool]:
        return [ids[-1] != _EOS for ids in self.completion_ids]

    def rewards_of(self, kind: str) -> list[float | None]:
        if kind == "one_unknown":
            return [None if i == _UNKNOWN else reward for i, reward in enumerate(self.rewards)]
        return [reward * (1000 if kind == "times_1000" else 1) for reward in self.rewards]


@dataclass(frozen=True)
class Result:
    loss: float
    advantages: Tensor  # [B]
    gradients: dict[str, Tensor]


def variants(batch: Batch) -> list[Variant]:
    """Every variant that both have, then those that differ on purpose, with numbers."""
    grpo, dapo, dr_grpo = ({"loss_type": name} for name in ("grpo", "dapo", "dr_grpo"))
    k3: dict[str, Any] = {"beta": 0.1, "use_bias_correction_kl": False}
    ours_k3 = {"kl_coef": 0.1, "kl_estimator": "k3"}
    gspo = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.08}
    ours_gspo = {"policy": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.08}
    cispo = {"loss_type": "cispo", "epsilon_high": 1.28}  # TRL's is the bound itself, ours is what it lies above 1
    ours_cispo = {"policy": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28}
    token_cap = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.5}
    ours_token_cap = {"rollout_correction": "token_tis", "rollout_correction_cap": 1.5}
    sequence_cap = {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 2.0}
    ours_sequence_cap = {"rollout_correction": "sequence_tis", "rollout_correction_cap": 2.0}
    band = {**token_cap, "vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 1 / 1.5}
    group_std = {"scale_rewards": "group"}
    rloo, ours_rloo = {"beta": 0.0}, {"estimator": "rloo"}
    kl_in_reward = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
    mask, ours_mask = {"mask_truncated_completions": True}, {"mask_truncated": True}
    same = [
        Variant("GRPO", grpo, {"aggregation": "sequence"}),
        Variant("BNPO, one micro-batch", {"loss_type": "bnpo"}, num_parts=1),
        Variant("Dr. GRPO", dr_grpo, {"aggregation": "constant"}),
        Variant("DAPO", dapo),
        Variant("DAPO, old policy = policy", dapo, on_policy=True),
        Variant("GRPO, std of the group", {**grpo, **group_std}, {"aggregation": "sequence"}, {"estimator": "grpo"}, rewards="times_1000"),
        Variant(
            "DAPO, std of the batch",
            {**dapo, "scale_rewards": "batch"},
            advantage={"estimator": "grpo", "normalize_std": "batch"},
            rewards="times_1000",
        ),
        Variant("two bounds (dual clip)", {**dapo, "delta": 1.5}, {"dual_clip": 1.5}),
        Variant("GSPO", {**gspo, **grpo}, {**ours_gspo, "aggregation": "sequence"}),
        Variant("GSPO, token mean", {**gspo, **dapo}, ours_gspo),
        Variant("GSPO, dual clip", {**gspo, **grpo, "delta": 1.2}, {**ours_gspo, "aggregation": "sequence", "dual_clip": 1.2}),
        Variant(
            "LUSPO (ours times max_completion_tokens)",
            {**gspo, "loss_type": "luspo"},
            {**ours_gspo, "aggregation": "constant"},
            factor=batch.max_completion_tokens,
        ),
        Variant("CISPO", cispo, ours_cispo),
        Variant("DAPO, k3", {**dapo, **k3}, ours_k3),
        Variant("GRPO, k3", {**grpo, **k3}, {**ours_k3, "aggregation": "sequence"}),
        Variant("Dr. GRPO, k3", {**dr_grpo, **k3}, {**ours_k3, "aggregation": "constant"}),
        Variant("GSPO, k3", {**gspo, **grpo, **k3}, {**ours_gspo, **ours_k3, "aggregation": "sequence"}),
        Variant("CISPO, k3", {**cispo, **k3}, {**ours_cispo, **ours_k3}),
        Variant("DAPO, entropy bonus", {**dapo, "entropy_coef": 0.05}, {"entropy_coef": 0.05}, num_parts=1),
        Variant("DAPO, token TIS", {**dapo, **token_cap}, ours_token_cap),
        Variant("GRPO, token TIS", {**grpo, **token_cap}, {**ours_token_cap, "aggregation": "sequence"}),
        Variant("DAPO, sequence TIS", {**dapo, **sequence_cap}, ours_sequence_cap),
        Variant("DAPO, IcePop", {**dapo, **band}, {"rollout_correction": "icepop", "rollout_correction_cap": 1.5}),
        Variant("GSPO, sequence TIS", {**gspo, **grpo, **sequence_cap}, {**ours_gspo, **ours_sequence_cap, "aggregation": "sequence"}),
        Variant("CISPO, token TIS", {**cispo, **token_cap}, {**ours_cispo, **ours_token_cap}),
        Variant(
            "DAPO, soft overlong punishment",
            dapo,
            advantage={"overlong_buffer_tokens": 8},
            overlong_reward=[_MAX_COMPLETION, 8],
        ),
        Variant("DAPO, truncated masked", {**dapo, **mask}, ours_mask),
        Variant(
            "all at once: dual clip, k3, token TIS, truncated masked, std of the group",
            {**dapo, **group_std, "delta": 1.5, **k3, **token_cap, **mask},
            {"dual_clip": 1.5, **ours_k3, **ours_token_cap, **ours_mask},
            {"estimator": "grpo"},
            rewards="times_1000",
        ),
        Variant(
            "RLOO, old policy = policy (ours times max_completion_tokens)",
            rloo,
            {"aggregation": "constant"},
            ours_rloo,
            trainer="RLOO",
            num_parts=1,
            on_policy=True,
            factor=batch.max_completion_tokens,
            compares="gradients",
        ),
        Variant(
            "RLOO, k1 in the reward",
            {**rloo, "beta": 0.1},
            kl_in_reward,
            ours_rloo,
            trainer="RLOO",
            num_parts=1,
            compares="advantages",
        ),
    ]
    kept = [not cut for cut in batch.truncated]
    sequences = sum(kept) / len(kept)
    lengths = [len(ids) for ids in batch.completion_ids]
    scored = sum(length for i, length in enumerate(lengths) if i != _UNKNOWN) / sum(lengths)
    counted = "TRL counts masked sequences in the mean"
    same += [
        Variant(
            "GRPO, truncated masked (ours times kept / all)", {**grpo, **mask}, {"aggregation": "sequence", **ours_mask}, factor=sequences
        ),
        Variant(
            "Dr. GRPO, truncated masked (ours times kept / all)",
            {**dr_grpo, **mask},
            {"aggregation": "constant", **ours_mask},
            factor=sequences,
        ),
        Variant("DAPO, one reward unknown (ours times kept / all tokens)", dapo, rewards="one_unknown", factor=scored),
    ]
    differ = [
        Variant("GRPO, truncated masked", {**grpo, **mask}, {"aggregation": "sequence", **ours_mask}, reason=counted),
        Variant("Dr. GRPO, truncated masked", {**dr_grpo, **mask}, {"aggregation": "constant", **ours_mask}, reason=counted),
        Variant("DAPO, one reward unknown", dapo, rewards="one_unknown", reason="TRL counts its tokens in the mean, with advantage 0"),
        Variant(
            "DAPO, k3, one reward unknown",
            {**dapo, **k3},
            ours_k3,
            rewards="one_unknown",
            reason="TRL counts its tokens, and its KL pulls",
        ),
        Variant(
            "GRPO, std of the group, rewards of 0 to 1",
            {**grpo, **group_std},
            {"aggregation": "sequence"},
            {"estimator": "grpo"},
            reason="TRL divides by std + 1e-4",
        ),
        Variant(
            "DAPO, k3 as TRL has it by default",
            {**dapo, "beta": 0.1},
            ours_k3,
            reason="use_bias_correction_kl: TRL multiplies the KL term by the ratio",
        ),
        Variant(
            "GSPO, token TIS",
            {**gspo, **grpo, **token_cap},
            {**ours_gspo, **ours_token_cap, "aggregation": "sequence"},
            reason="a token's weight stays with its own gradient in ours, is averaged over the sequence in TRL; same loss",
        ),
        Variant(
            "CISPO, our lower bound 0.8",
            cispo,
            {**ours_cispo, "clip_ratio_low": 0.2},
            reason="TRL (and MiniMax-M1's runs) bound the ratio above only: set clip_ratio_low: 1",
        ),
        Variant(
            "GRPO, entropy bonus",
            {**grpo, "entropy_coef": 0.05},
            {"aggregation": "sequence", "entropy_coef": 0.05},
            num_parts=1,
            reason="TRL's bonus is a token mean whatever the aggregation",
        ),
        Variant(
            "DAPO, entropy bonus, two micro-batches",
            {**dapo, "entropy_coef": 0.05},
            {"entropy_coef": 0.05},
            reason="TRL's bonus is a mean of micro-batch means",
        ),
        Variant("BNPO, two micro-batches", {"loss_type": "bnpo"}, reason="TRL's mean is over each micro-batch: it depends on the split"),
        Variant(
            "DAPO, TRL's default correction",
            {**dapo, "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 2.0},
            ours_sequence_cap,
            reason="sequence_mask: TRL drops sequences above the cap, ours caps them",
        ),
        Variant(
            "RLOO, k1 in the reward, off policy",
            {**rloo, "beta": 0.1},
            {**kl_in_reward, "aggregation": "constant"},
            ours_rloo,
            trainer="RLOO",
            num_parts=1,
            factor=batch.max_completion_tokens,
            reason="TRL clips the product of a sequence's ratios, ours each token's or their geometric mean",
        ),
    ]
    return same + differ


NOT_OURS = {
    "SAPO, VESPO": "other gates in place of the clip",
    "top_entropy_quantile": "policy term on the tokens of highest entropy alone",
    "off_policy_mask_threshold": "drops sequences of negative advantage that drifted from the old policy",
    "use_adaptive_entropy": "a controller for entropy_coef",
    "multi_objective_aggregation: normalize_then_sum": "each reward function normalised by itself (GDPO)",
    "normalize_advantages (RLOO)": "RLOO advantages over the batch's standard deviation; nearest is reinforce_pp",
    "vllm_importance_sampling_mode: sequence_mask": "see the row of TRL's default correction",
}
NOT_THEIRS = {
    "advantage.estimator: reinforce_pp": "REINFORCE++, no trainer of TRL",
    "kl_estimator: k1, k2 in the loss": "TRL has k3 alone",
    "kl_in: reward with GRPO's advantages": "TRL has it for RLOO alone",
    "old_logprobs: engine": "TRL's ratio is to its own old logprobs",
}


def main() -> None:
    args = main_arguments(__doc__)
    transformers.utils.logging.disable_progress_bar()
    python = trl_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch = make(folder)
        chosen = variants(batch)
        (folder / "variants.json").write_text(json.dumps([_for_worker(variant, batch) for variant in chosen]))
        command = [python, "-W", "ignore", "-m", "benchmarks.agreement.trl_loss_worker", name]
        subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", NO_VLLM: "1"})
        theirs = [load_result(folder / "trl" / f"{number}.safetensors") for number in range(len(chosen))]
        ours = run_ours(folder, batch, chosen)
    rows = [compare(*each, theirs) for each in zip(chosen, ours, theirs, strict=True)]
    report("trl_loss", rows, args.json)
    for title, names in (("TRL has, we do not", NOT_OURS), ("we have, TRL does not", NOT_THEIRS)):
        print(f"\n{title}:" + "".join(f"\n  {name}: {reason}" for name, reason in names.items()))
    failed = [row["variant"] for row in rows if row["verdict"] == "FAILED"]
    claims = sum(not variant.reason for variant in chosen)
    print(f"\n{claims - len(failed)} of {claims} claims of agreement within {TOLERANCE:g} hold", flush=True)
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
    gradients = {name.partition("/")[2]: tensor for name, tensor in tensors.items() if name.startswith("gradient/")}
    return Result(float(tensors["loss"]), tensors["advantages"], gradients)


# The data


def make(folder: Path) -> Batch:
    """The models policy, old and ref, a tokenizer, and the batch, from seeds of our own: the same on every machine and version."""
    for number, name in enumerate(("policy", "old", "ref")):
        _make_model(folder / name, seed=number)
    generator = torch.Generator().manual_seed(11)

    def ids(length: int) -> list[int]:
        return torch.randint(1, len(_CHARACTERS) + 1, (length,), generator=generator).tolist()

    prompt_ids, completion_ids = [], []
    for length in (3, _MAX_PROMPT, 1, 6, 2, 8):  # six groups
        prompt = ids(length)
        for _ in range(_GROUP_SIZE):
            prompt_ids.append(prompt)
            length_c = int(torch.randint(2, _MAX_COMPLETION - 2, (), generator=generator))
            completion_ids.append([*ids(length_c - 1), _EOS])
    completion_ids[2] = ids(_MAX_COMPLETION)  # cut off
    completion_ids[9] = ids(_MAX_COMPLETION)
    completion_ids[12] = [_EOS]  # nothing but its end
    rewards = [round(float(x), 3) for x in torch.rand(len(completion_ids), generator=generator)]
    old = transformers.AutoModelForCausalLM.from_pretrained(folder / "old", dtype=torch.float32)
    rollout_logprobs = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        with torch.no_grad():
            logits = old(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / _TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        noise = 0.4 * torch.randn(len(completion), generator=generator)  # an engine far from the policy, so that caps bind
        rollout_logprobs.append((logprobs + noise).clamp(max=-1e-3).tolist())
    batch = Batch(["".join(_CHARACTERS[i - 1] for i in p) for p in prompt_ids], prompt_ids, completion_ids, rollout_logprobs, rewards)
    (folder / "batch.json").write_text(json.dumps(asdict(batch)))
    return batch


def _make_model(folder: Path, seed: int) -> None:
    """Seed 0 is the policy, 1 a neighbour of it, others strangers."""
    make_tokenizer(folder)
    config = tiny_config(intermediate_size=96, eos_token_id=_EOS, pad_token_id=_EOS)
    model = transformers.Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(0 if seed == 1 else seed)
    nearby = torch.Generator().manual_seed(100)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(float(parameter.ndim == 1) + 0.1 * torch.randn(parameter.shape, generator=generator))
            if seed == 1:
                parameter.add_(0.015 * torch.randn(parameter.shape, generator=nearby))
    model.save_pretrained(folder)


# Our side


def run_ours(folder: Path, batch: Batch, chosen: list[Variant]) -> list[Result]:
    """Collective. Our results, in a process group of one."""
    session = start_session()
    models = {
        name: build_policy(
            ModelConfig(path=str(folder / name), dtype="float32", logprob_chunk_tokens=7), _TEMPERATURE, session, trainable=name == "policy"
        )
        for name in ("policy", "old", "ref")
    }
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
    return [policy(pack_rollouts([Rollout(0, 0.0, True, *ids)], session.device))[0] for ids in sequences]


def _run(variant: Variant, batch: Batch, policy: Policy, old: list[Tensor], ref: list[Tensor], session: Session) -> Result:
    loss_config, advantage_config = variant.loss_config, variant.advantage_config
    rewards = torch.tensor([math.nan if r is None else r for r in batch.rewards_of(variant.rewards)], dtype=torch.float64)
    if advantage_config.overlong_buffer_tokens:
        num_tokens = torch.tensor([len(ids) for ids in batch.completion_ids], dtype=torch.float64)[None]
        buffer, penalty = advantage_config.overlong_buffer_tokens, advantage_config.overlong_penalty
        rewards -= overlong_penalties(num_tokens, batch.max_completion_tokens, buffer, penalty)[0]
    if loss_config.kl_in == "reward":
        estimates = [kl_estimate(*pair, loss_config.kl_estimator).double().sum() for pair in zip(old, ref, strict=True)]
        rewards -= loss_config.kl_coef * torch.stack(estimates)
    advantages, _ = compute_advantages(rewards.view(-1, batch.group_size), advantage_config.estimator, advantage_config.normalize_std)
    advantages = advantages.flatten()
    masked = [cut and loss_config.mask_truncated for cut in batch.truncated]
    rollouts = [
        Rollout(i, float(advantages[i]), not bool(rewards[i].isnan()) and not masked[i], *ids)
        for i, ids in enumerate(zip(batch.prompt_ids, batch.completion_ids, batch.rollout_logprobs, strict=True))
    ]
    counted = [rollout for rollout in rollouts if rollout.counts]
    plan = plan_batch([r.num_tokens for r in rollouts], num_ranks=1, mini_batch_sizes=[len(rollouts)], max_tokens=_MAX_ROW_TOKENS)
    loss = 0.0
    policy.zero_grad()
    config = Config(
        run_dir="",
        model=ModelConfig(path=""),
        data=DataConfig(train=""),
        rewards=(),
        rollout=RolloutConfig(max_completion_tokens=batch.max_completion_tokens),
        loss=loss_config,
    )
    updater = PolicyUpdater(policy, config)
    for row in plan[0][0]:
        micro_batch = pack_rollouts([rollouts[i] for i in row], session.device)
        micro_batch.old_logprobs = None if variant.on_policy else torch.cat([old[i] for i in row])
        if loss_config.kl_coef and loss_config.kl_in == "loss":
            micro_batch.ref_logprobs = torch.cat([ref[i] for i in row])
        sums, _ = updater.backward(micro_batch, sum(len(r.completion_ids) for r in counted), len(counted), unmoved=True)
        loss += variant.factor * float(sums["loss"])
    gradients = {}
    for name, parameter in hf_named_parameters(policy):
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = variant.factor * parameter.grad.full_tensor()
    return Result(loss, advantages, gradients)


# The comparison


def compare(variant: Variant, ours: Result, theirs: Result, all_theirs: list[Result]) -> Row:
    """One row: how far apart, and what that means for the claim."""
    far, where = gradient_difference(ours, theirs)
    loss_far = abs(ours.loss - theirs.loss) / max(1.0, abs(theirs.loss))
    advantages_far = float((ours.advantages - theirs.advantages).abs().max())
    measured = {"loss": loss_far, "gradients": far, "advantages": advantages_far}
    # NaN is no agreement, so the comparison must be this way round.
    agree = all(measured[name] <= TOLERANCE for name in variant.compares.split(", "))
    others = [gradient_difference(other, theirs)[0] for other in all_theirs]
    what = "" if variant.compares == "loss, gradients" else f" {variant.compares}"
    return {
        "variant": variant.name,
        "verdict": "differs" if variant.reason else f"same{what}" if agree else "FAILED",
        "loss ours": ours.loss,
        "loss TRL": theirs.loss,
        "loss off by": loss_far,
        "gradients off by": far,
        "worst parameter": where.removeprefix("model."),
        "advantages off by": advantages_far,
        "next variant": min((other for other in others if other > TOLERANCE), default=math.nan),
        "gradient norm TRL": _norm(theirs),
        "gradient probe TRL": probe(theirs),
        "ours": _settings(variant),
        "TRL": f"{variant.trainer}Trainer " + " ".join(f"{name}={value}" for name, value in variant.trl.items()),
        "TRL version": TRL_VERSION,
        "why": variant.reason or "-",
    }


def gradient_difference(ours: Result, theirs: Result) -> tuple[float, str]:
    """The largest norm of the difference over the norm of theirs of a parameter, and its name."""
    assert ours.gradients.keys() == theirs.gradients.keys(), ours.gradients.keys() ^ theirs.gradients.keys()
    far = {name: float((ours.gradients[name] - theirs).norm() / theirs.norm()) for name, theirs in theirs.gradients.items()}
    worst = max(far, key=lambda name: math.inf if math.isnan(far[name]) else far[name])
    return far[worst], worst


def probe(result: Result) -> float:
    """The gradient's product with a fixed random direction of unit length: a number that knows its sign and place, for the record."""
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
        names = [each.name for each in fields(config) if getattr(config, each.name) != getattr(default, each.name)]
        words += [f"{section}.{name}={getattr(config, name)}" for name in names]
    return " ".join(words) or "-"


def _norm(result: Result) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in result.gradients.values()))


if __name__ == "__main__":
    with exit_with_outcome():
        main()
