"""Named algorithms: the values that `algorithm: NAME` sets where file, command line and Python set
none.

A recipe has what defines the algorithm, not what depends on model, data and lengths (learning rate,
batch, buffers). The source of each value stands behind it: a section of the paper, or a file of a
trainer that runs it ("same": the source of the line above). The values were looked up in TRL's
paper index and in the named files (2026-11); numbers of sections and equations are from memory.
`loss.rollout_correction` is in no paper: it keeps our default unless the loss is one of sequences.

python -m grpo_spmd.config.recipes      prints the table of configs/README.md
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Algorithm = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "max_rl", "opd", "ppo"
]


@dataclass(frozen=True)
class Recipe:
    """A Recipe is the definition of one algorithm."""

    name: str  # as people write it, with its paper
    values: dict[str, Any]  # by dotted key
    yours: str = ""  # settings that belong to it and depend on your sizes
    needs: tuple[str, ...] = ()  # keys that only the user can set, and without which it cannot run


# fmt: off
RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("GRPO (DeepSeekMath, 2402.03300)", {
        "advantage.estimator": "grpo",       # section 4.1.2, outcome supervision
        "advantage.normalize_std": "group",  # same: (r - mean) / std of the group
        "loss.policy": "clip",               # equation 3
        "loss.clip_ratio_low": 0.2,          # not in the paper; PPO's 0.2, TRL's GRPOConfig.epsilon
        "loss.clip_ratio_high": 0.2,         # same
        "loss.dual_clip": None,              # none in equation 3
        "loss.aggregation": "sequence",      # equation 3: 1/G sum 1/|o| sum
        "loss.kl_coef": 0.04,                # section 4.2, training setup
        "loss.kl_estimator": "k3",           # equation 4
        "loss.kl_in": "loss",                # section 4.1.1
    }, "`group_size` 64, `lr` 1e-6, one update a rollout in the paper"),
    "dapo": Recipe("DAPO (2503.14476)", {
        "rollout.dynamic_sampling": True,    # section 3.2
        "advantage.estimator": "grpo",       # equation 9
        "advantage.normalize_std": "group",  # same
        "loss.policy": "clip",               # equation 8
        "loss.clip_ratio_low": 0.2,          # section 4.1, clip-higher of section 3.1
        "loss.clip_ratio_high": 0.28,        # same
        # not in the paper; verl's default, in force in its run_dapo_qwen2.5_32b.sh
        "loss.dual_clip": 3.0,
        "loss.aggregation": "token",         # section 3.3
        "loss.mask_truncated": True,         # section 3.4, overlong filtering
        "loss.kl_coef": 0.0,                 # section 2.3
    }, "`advantage.overlong_buffer_tokens`: a fifth of the longest completion in the paper "
       "(4,096 of 20,480); "
       "`num_mini_batches` 16, `group_size` 16"),
    "dr_grpo": Recipe("Dr. GRPO (2503.20783)", {
        "advantage.estimator": "dr_grpo",    # section 3.2: no division by the deviation
        "loss.policy": "clip",               # equation 3
        "loss.clip_ratio_low": 0.2,          # oat's PPOArgs.cliprange
        "loss.clip_ratio_high": 0.2,         # same
        "loss.dual_clip": None,              # none in the paper
        # section 3.2 and listing 1: over the longest completion
        "loss.aggregation": "constant",
        # --beta 0 in understand-r1-zero/examples/qwen2.5-math-7b.sh
        "loss.kl_coef": 0.0,
    }, "`group_size` 8, `lr` 1e-6, one epoch in its scripts"),
    "gspo": Recipe("GSPO (2507.18071)", {
        "advantage.estimator": "grpo",       # equation 6
        "advantage.normalize_std": "group",  # same
        "loss.policy": "gspo",               # equation 7
        "loss.clip_ratio_low": 3e-4,         # section 5.1
        "loss.clip_ratio_high": 4e-4,        # same
        "loss.dual_clip": None,              # none in equation 5
        "loss.aggregation": "sequence",      # equation 5
        # ours: a weight of sequences for a loss of sequences
        "loss.rollout_correction": "sequence_tis",
        "loss.kl_coef": 0.0,                 # verl#2775, where the authors say so
    }, "`num_mini_batches` 4 in the paper; with one update a rollout nothing is clipped"),
    "cispo": Recipe("CISPO (MiniMax-M1, 2506.13585)", {
        "advantage.estimator": "grpo",       # section 3.1
        "advantage.normalize_std": "group",  # same; ScaleRL takes the batch's
        "loss.policy": "cispo",              # equation 4
        "loss.clip_ratio_low": 1.0,          # section 3.1: no lower bound
        # ScaleRL's (2510.13786) bound of 5 = 1 + this, as in TRL's paper index. MiniMax-M1 tunes it
        # and does not say to what; verl's example has 0.2.
        "loss.clip_ratio_high": 4.0,
        "loss.aggregation": "token",         # equation 4: 1 / sum of |o|
        "loss.kl_coef": 0.0,                 # section 3.1
    }, "several updates a rollout (`num_mini_batches`), or nothing is off-policy and nothing "
       "clipped"),
    "rloo": Recipe("RLOO (Back to Basics, 2402.14740)", {
        "advantage.estimator": "rloo",       # equation 8
        # the paper's is plain REINFORCE, which this is with one update a rollout
        "loss.policy": "clip",
        "loss.clip_ratio_low": 0.2,          # TRL's RLOOConfig.epsilon
        "loss.clip_ratio_high": 0.2,         # same
        "loss.dual_clip": None,              # none in the paper
        # section 3.1: a completion is one action, its logprobs are summed
        "loss.aggregation": "constant",
        "loss.kl_coef": 0.03,                # appendix C, by TRL's paper index
        "loss.kl_estimator": "k1",           # equation 3: beta log(pi / pi_ref)
        "loss.kl_in": "reward",              # same
    }, "`group_size` 2 and 4, `num_mini_batches` 2, `lr` 1e-6 in the paper"),
    "reinforce_pp": Recipe("REINFORCE++ (2501.03262)", {
        # section 3: advantages normalized over the global batch
        "advantage.estimator": "reinforce_pp",
        "loss.policy": "clip",               # section 3, PPO's clipping
        "loss.clip_ratio_low": 0.2,          # OpenRLHF's models/loss.py, PolicyLoss
        "loss.clip_ratio_high": 0.2,         # same
        "loss.dual_clip": None,              # none in the paper
        "loss.aggregation": "token",         # same, token_level_loss
        # --init_kl_coef in OpenRLHF's train_reinforce_llama_ray_hybrid_engine.sh
        "loss.kl_coef": 1e-4,
        "loss.kl_estimator": "k1",           # section 3: log(pi / pi_ref) of each token
        # same; theirs from each token on, ours from the completion as a whole
        "loss.kl_in": "reward",
    }, "`lr` 5e-7 in OpenRLHF's script; theirs takes one completion a prompt, ours two at least"),
    "max_rl": Recipe("MaxRL (2602.02710)", {
        "advantage.estimator": "max_rl",     # algorithm 1: (r - mean) / mean
        # tajwarfahim/maxrl, qwen3_experiments/run_qwen3_training.sh
        "loss.policy": "clip",
        "loss.clip_ratio_low": 0.2,          # same
        "loss.clip_ratio_high": 0.2,         # same
        "loss.dual_clip": 3.0,               # same, verl's default
        "loss.aggregation": "token",         # same, verl's default
        "loss.kl_coef": 0.0,                 # same
    }, "rewards of 0 and 1; a larger `group_size` (16 there) is a better objective, "
       "not only less noise"),
    "opd": Recipe("on-policy distillation (Thinking Machines, 2025), as slime runs it", {
        # the blog's reverse KL of the sampled tokens; slime's --use-opd
        "teacher.loss": "sampled",
        "teacher.coef": 1.0,                 # slime's --opd-kl-coef
        "loss.aggregation": "token",         # each token is taught by itself
        "loss.kl_coef": 0.0,                 # the teacher takes the reference's place
    }, "`teacher.path` (needed); rewards beside it count, with weight 0 they are only watched",
    ("teacher.path",)),
    "ppo": Recipe("PPO with a critic (1707.06347), as TinyZero runs it", {
        # TinyZero's verl/trainer/config/ppo_trainer.yaml, algorithm.adv_estimator
        "advantage.estimator": "gae",
        # verl's core_algos.py whitens GAE's advantages over the step's tokens
        "advantage.normalize_std": "batch",
        "critic.gamma": 1.0,                 # ppo_trainer.yaml, algorithm.gamma
        "critic.lam": 1.0,                   # same, algorithm.lam
        "critic.lam_policy": 1.0,            # same
        "critic.clip_value": 0.5,            # same, critic.cliprange_value; PPO's own 0.2
        "loss.policy": "clip",               # equation 7 of PPO
        "loss.clip_ratio_low": 0.2,          # PPO's table 3; ppo_trainer.yaml, actor.clip_ratio
        "loss.clip_ratio_high": 0.2,         # same
        "loss.dual_clip": None,              # none in PPO
        "loss.aggregation": "token",         # verl's masked mean
        "loss.kl_coef": 0.001,               # same, algorithm.kl_ctrl.kl_coef
        "loss.kl_estimator": "k1",           # same, algorithm.kl_penalty: kl
        "loss.kl_in": "reward",              # same: token by token, as with a critic here too
    }, "`critic.path` (needed), `critic.lr` 1e-5 beside `lr` 1e-6 there, `critic.warmup_steps`, "
       "`num_mini_batches`; its `entropy_coef` 0.001", ("critic.path",)),
}
# fmt: on


def recipes_as_markdown() -> str:
    """Returns a table: the recipes, the keys that they set, and the keys left to the user."""
    lines = ["| `algorithm` | is | sets | yours to set |", "|---|---|---|---|"]
    for name, recipe in RECIPES.items():
        sections: dict[str, list[str]] = {}
        for key, value in recipe.values.items():
            section, _, name_in_section = key.partition(".")
            sections.setdefault(section, []).append(
                f"{name_in_section}: {value if isinstance(value, str) else json.dumps(value)}"
            )
        settings = "; ".join(
            f"`{section}: {{{', '.join(values)}}}`" for section, values in sections.items()
        )
        lines.append(f"| `{name}` | {recipe.name} | {settings} | {recipe.yours} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(recipes_as_markdown())
