"""The variants of `trl_loss`: every loss that both sides have, then those that differ on purpose,
and what only one
side has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.agreement.trl_loss_batch import MAX_COMPLETION, UNKNOWN, Batch
from grpo_spmd.config.schema import AdvantageConfig, LossConfig


@dataclass(frozen=True)
class Variant:
    """One setting on both sides. Our side begins at PPO's clip without any extra; `trl` holds
    arguments of GRPOConfig
    or RLOOConfig."""

    name: str
    trl: dict[str, Any]
    loss: dict[str, Any] = field(default_factory=dict)
    advantage: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why they differ; empty: they must agree
    # or "times_1000", beside which the 1e-4 that TRL adds to a std is nothing, or "one_unknown"
    rewards: str = "plain"
    trainer: str = "GRPO"
    num_parts: int = 2  # TRL's micro-batches
    on_policy: bool = False  # old logprobs are those of the weights that train
    overlong_reward: list[int] | None = (
        None  # TRL: arguments of the reward function get_soft_overlong_punishment
    )
    factor: float = 1.0  # of our loss, where the two differ by a known constant
    compares: str = "loss, gradients"  # or "gradients", "advantages"

    @property
    def arguments(self) -> dict[str, Any]:
        """All that TRL is given: its clip is at 0.8 and 1.2 by default, and its GRPOTrainer divides
        by the group's
        std."""
        plain: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.28}
        return {
            **plain,
            **({"scale_rewards": "none"} if self.trainer == "GRPO" else {}),
            **self.trl,
        }

    @property
    def loss_config(self) -> LossConfig:
        plain: dict[str, Any] = {
            "clip_ratio_low": 0.2,
            "clip_ratio_high": 0.28,
            "dual_clip": None,
            "rollout_correction": "none",
        }
        return LossConfig(**{**plain, **self.loss})

    @property
    def advantage_config(self) -> AdvantageConfig:
        return AdvantageConfig(**{"estimator": "dr_grpo", **self.advantage})


# Arguments of TRL, and ours that mean the same
_GRPO, _DAPO, _DR_GRPO = ({"loss_type": name} for name in ("grpo", "dapo", "dr_grpo"))
_K3: dict[str, Any] = {"beta": 0.1, "use_bias_correction_kl": False}
_OURS_K3 = {"kl_coef": 0.1, "kl_estimator": "k3"}
_GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.08}
_OURS_GSPO = {"policy": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.08}
_CISPO = {
    "loss_type": "cispo",
    "epsilon_high": 1.28,
}  # TRL's is the bound itself, ours is what it lies above 1
_OURS_CISPO = {"policy": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.28}
_TOKEN_CAP = {
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 1.5,
}
_OURS_TOKEN_CAP = {"rollout_correction": "token_tis", "rollout_correction_cap": 1.5}
_SEQUENCE_CAP = {
    "vllm_importance_sampling_mode": "sequence_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}
_OURS_SEQUENCE_CAP = {"rollout_correction": "sequence_tis", "rollout_correction_cap": 2.0}
_BAND = {
    **_TOKEN_CAP,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_min": 1 / 1.5,
}
_GROUP_STD = {"scale_rewards": "group"}
_RLOO, _OURS_RLOO = {"beta": 0.0}, {"estimator": "rloo"}
_KL_IN_REWARD = {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward"}
_MASK, _OURS_MASK = {"mask_truncated_completions": True}, {"mask_truncated": True}
_COUNTED = "TRL counts masked sequences in the mean"

_SAME = (
    Variant("GRPO", _GRPO, {"aggregation": "sequence"}),
    Variant("BNPO, one micro-batch", {"loss_type": "bnpo"}, num_parts=1),
    Variant("Dr. GRPO", _DR_GRPO, {"aggregation": "constant"}),
    Variant("DAPO", _DAPO),
    Variant("DAPO, old policy = policy", _DAPO, on_policy=True),
    Variant(
        "GRPO, std of the group",
        {**_GRPO, **_GROUP_STD},
        {"aggregation": "sequence"},
        {"estimator": "grpo"},
        rewards="times_1000",
    ),
    Variant(
        "DAPO, std of the batch",
        {**_DAPO, "scale_rewards": "batch"},
        advantage={"estimator": "grpo", "normalize_std": "batch"},
        rewards="times_1000",
    ),
    Variant("two bounds (dual clip)", {**_DAPO, "delta": 1.5}, {"dual_clip": 1.5}),
    Variant("GSPO", {**_GSPO, **_GRPO}, {**_OURS_GSPO, "aggregation": "sequence"}),
    Variant("GSPO, token mean", {**_GSPO, **_DAPO}, _OURS_GSPO),
    Variant(
        "GSPO, dual clip",
        {**_GSPO, **_GRPO, "delta": 1.2},
        {**_OURS_GSPO, "aggregation": "sequence", "dual_clip": 1.2},
    ),
    Variant(
        "LUSPO (ours times max_completion_tokens)",
        {**_GSPO, "loss_type": "luspo"},
        {**_OURS_GSPO, "aggregation": "constant"},
        factor=MAX_COMPLETION,
    ),
    Variant("CISPO", _CISPO, _OURS_CISPO),
    Variant("DAPO, k3", {**_DAPO, **_K3}, _OURS_K3),
    Variant("GRPO, k3", {**_GRPO, **_K3}, {**_OURS_K3, "aggregation": "sequence"}),
    Variant("Dr. GRPO, k3", {**_DR_GRPO, **_K3}, {**_OURS_K3, "aggregation": "constant"}),
    Variant(
        "GSPO, k3", {**_GSPO, **_GRPO, **_K3}, {**_OURS_GSPO, **_OURS_K3, "aggregation": "sequence"}
    ),
    Variant("CISPO, k3", {**_CISPO, **_K3}, {**_OURS_CISPO, **_OURS_K3}),
    Variant(
        "DAPO, entropy bonus", {**_DAPO, "entropy_coef": 0.05}, {"entropy_coef": 0.05}, num_parts=1
    ),
    Variant("DAPO, token TIS", {**_DAPO, **_TOKEN_CAP}, _OURS_TOKEN_CAP),
    Variant(
        "GRPO, token TIS", {**_GRPO, **_TOKEN_CAP}, {**_OURS_TOKEN_CAP, "aggregation": "sequence"}
    ),
    Variant("DAPO, sequence TIS", {**_DAPO, **_SEQUENCE_CAP}, _OURS_SEQUENCE_CAP),
    Variant(
        "DAPO, IcePop",
        {**_DAPO, **_BAND},
        {"rollout_correction": "icepop", "rollout_correction_cap": 1.5},
    ),
    Variant(
        "GSPO, sequence TIS",
        {**_GSPO, **_GRPO, **_SEQUENCE_CAP},
        {**_OURS_GSPO, **_OURS_SEQUENCE_CAP, "aggregation": "sequence"},
    ),
    Variant("CISPO, token TIS", {**_CISPO, **_TOKEN_CAP}, {**_OURS_CISPO, **_OURS_TOKEN_CAP}),
    Variant(
        "DAPO, soft overlong punishment",
        _DAPO,
        advantage={"overlong_buffer_tokens": 8},
        overlong_reward=[MAX_COMPLETION, 8],
    ),
    Variant("DAPO, truncated masked", {**_DAPO, **_MASK}, _OURS_MASK),
    Variant(
        "all at once: dual clip, k3, token TIS, truncated masked, std of the group",
        {**_DAPO, **_GROUP_STD, "delta": 1.5, **_K3, **_TOKEN_CAP, **_MASK},
        {"dual_clip": 1.5, **_OURS_K3, **_OURS_TOKEN_CAP, **_OURS_MASK},
        {"estimator": "grpo"},
        rewards="times_1000",
    ),
    Variant(
        "RLOO, old policy = policy (ours times max_completion_tokens)",
        _RLOO,
        {"aggregation": "constant"},
        _OURS_RLOO,
        trainer="RLOO",
        num_parts=1,
        on_policy=True,
        factor=MAX_COMPLETION,
        compares="gradients",
    ),
    Variant(
        "RLOO, k1 in the reward",
        {**_RLOO, "beta": 0.1},
        _KL_IN_REWARD,
        _OURS_RLOO,
        trainer="RLOO",
        num_parts=1,
        compares="advantages",
    ),
)

_DIFFER = (
    Variant(
        "GRPO, truncated masked",
        {**_GRPO, **_MASK},
        {"aggregation": "sequence", **_OURS_MASK},
        reason=_COUNTED,
    ),
    Variant(
        "Dr. GRPO, truncated masked",
        {**_DR_GRPO, **_MASK},
        {"aggregation": "constant", **_OURS_MASK},
        reason=_COUNTED,
    ),
    Variant(
        "DAPO, one reward unknown",
        _DAPO,
        rewards="one_unknown",
        reason="TRL counts its tokens in the mean, with advantage 0",
    ),
    Variant(
        "DAPO, k3, one reward unknown",
        {**_DAPO, **_K3},
        _OURS_K3,
        rewards="one_unknown",
        reason="TRL counts its tokens, and its KL pulls",
    ),
    Variant(
        "GRPO, std of the group, rewards of 0 to 1",
        {**_GRPO, **_GROUP_STD},
        {"aggregation": "sequence"},
        {"estimator": "grpo"},
        reason="TRL divides by std + 1e-4",
    ),
    Variant(
        "DAPO, k3 as TRL has it by default",
        {**_DAPO, "beta": 0.1},
        _OURS_K3,
        reason="use_bias_correction_kl: TRL multiplies the KL term by the ratio",
    ),
    Variant(
        "GSPO, token TIS",
        {**_GSPO, **_GRPO, **_TOKEN_CAP},
        {**_OURS_GSPO, **_OURS_TOKEN_CAP, "aggregation": "sequence"},
        reason="a token's weight stays with its own gradient in ours, is averaged over the "
        "sequence in TRL; same loss",
    ),
    Variant(
        "CISPO, our lower bound 0.8",
        _CISPO,
        {**_OURS_CISPO, "clip_ratio_low": 0.2},
        reason="TRL (and MiniMax-M1's runs) bound the ratio above only: set clip_ratio_low: 1",
    ),
    Variant(
        "GRPO, entropy bonus",
        {**_GRPO, "entropy_coef": 0.05},
        {"aggregation": "sequence", "entropy_coef": 0.05},
        num_parts=1,
        reason="TRL's bonus is a token mean whatever the aggregation",
    ),
    Variant(
        "DAPO, entropy bonus, two micro-batches",
        {**_DAPO, "entropy_coef": 0.05},
        {"entropy_coef": 0.05},
        reason="TRL's bonus is a mean of micro-batch means",
    ),
    Variant(
        "BNPO, two micro-batches",
        {"loss_type": "bnpo"},
        reason="TRL's mean is over each micro-batch: it depends on the split",
    ),
    Variant(
        "DAPO, TRL's default correction",
        {
            **_DAPO,
            "vllm_importance_sampling_mode": "sequence_mask",
            "vllm_importance_sampling_clip_max": 2.0,
        },
        _OURS_SEQUENCE_CAP,
        reason="sequence_mask: TRL drops sequences above the cap, ours caps them",
    ),
    Variant(
        "RLOO, k1 in the reward, off policy",
        {**_RLOO, "beta": 0.1},
        {**_KL_IN_REWARD, "aggregation": "constant"},
        _OURS_RLOO,
        trainer="RLOO",
        num_parts=1,
        factor=MAX_COMPLETION,
        reason="TRL clips the product of a sequence's ratios, ours each token's or their "
        "geometric mean",
    ),
)


def variants(batch: Batch) -> list[Variant]:
    """Those that must agree, among them some whose factor hangs on the batch, then those that
    differ, with numbers."""
    retained = [not cut for cut in batch.truncated]
    sequences = sum(retained) / len(retained)
    lengths = [len(ids) for ids in batch.completion_ids]
    scored = sum(length for i, length in enumerate(lengths) if i != UNKNOWN) / sum(lengths)
    scaled = [
        Variant(
            "GRPO, truncated masked (ours times kept / all)",
            {**_GRPO, **_MASK},
            {"aggregation": "sequence", **_OURS_MASK},
            factor=sequences,
        ),
        Variant(
            "Dr. GRPO, truncated masked (ours times kept / all)",
            {**_DR_GRPO, **_MASK},
            {"aggregation": "constant", **_OURS_MASK},
            factor=sequences,
        ),
        Variant(
            "DAPO, one reward unknown (ours times kept / all tokens)",
            _DAPO,
            rewards="one_unknown",
            factor=scored,
        ),
    ]
    return [*_SAME, *scaled, *_DIFFER]


NOT_OURS = {
    "SAPO, VESPO": "other gates in place of the clip",
    "top_entropy_quantile": "policy term on the tokens of highest entropy alone",
    "off_policy_mask_threshold": "drops sequences of negative advantage that drifted from the "
    "old policy",
    "use_adaptive_entropy": "a controller for entropy_coef",
    "multi_objective_aggregation: normalize_then_sum": "each reward function normalised by "
    "itself (GDPO)",
    "normalize_advantages (RLOO)": "RLOO advantages over the batch's standard deviation; nearest "
    "is reinforce_pp",
    "vllm_importance_sampling_mode: sequence_mask": "see the row of TRL's default correction",
}
NOT_THEIRS = {
    "advantage.estimator: reinforce_pp": "REINFORCE++, no trainer of TRL",
    "kl_estimator: k1, k2 in the loss": "TRL has k3 alone",
    "kl_in: reward with GRPO's advantages": "TRL has it for RLOO alone",
    "old_logprobs: engine": "TRL's ratio is to its own old logprobs",
}
