"""Names that people bring for teachers, critics, reward models and reward servers; config/aliases.py reads them as its
own. Read in TRL 1.16 (DistillationConfig), verl's critic.yaml and distillation.yaml, OpenRLHF's flags and slime's
arguments.py, all of 2026."""

from __future__ import annotations

_BOTH_LAMBDAS = "theirs sets both: give both"
_RM = "rewards: [{model: PATH}]"

TRL = f"""\
teacher_model_name_or_path, teacher_model | teacher.path |
teacher_model_revision | teacher.path | a folder of that revision
teacher_model_init_kwargs | model.dtype | the teacher's is the policy's
use_teacher_server, teacher_model_server_url | teacher.url | with /v1/completions behind it
lmbda | | distillation is of the policy's own completions: 1
reward_model_path | rewards.N.model | {_RM}
cliprange_value | critic.clip_value |
vf_coef | critic.coef | with critic.path: policy; a critic of its own has an optimizer of its own
"""

VERL = f"""\
critic.model.path | critic.path |
critic.optim.lr | critic.lr |
critic.cliprange_value, cliprange_value | critic.clip_value |
trainer.critic_warmup, critic_warmup | critic.warmup_steps |
algorithm.gamma | critic.gamma |
algorithm.lam | critic.lam, critic.lam_policy | {_BOTH_LAMBDAS}
reward_model.model.path, reward_model.path, reward_model | rewards.N.model | {_RM}
distillation.enabled, distillation.teacher_model.model_path, teacher_model.model_path, distillation | teacher.path |
distillation_loss.loss_mode | teacher.loss, teacher.beta | \
sampled, topk or full; a beta of 0 is the forward KL, 1 the reverse
distillation_loss.topk | teacher.top_k |
distillation_loss.distillation_loss_coef, distillation_loss_coef | teacher.coef |
distillation_loss.jsd_beta, jsd_beta | teacher.beta |
distillation_loss.use_policy_loss, use_policy_loss | rewards.N.weight | 0: the teacher alone teaches
"""

OPENRLHF = f"""\
critic_pretrain, critic.model_name_or_path | critic.path |
critic_learning_rate, critic.adam.lr | critic.lr |
value_clip, critic.value_clip | critic.clip_value |
freezing_actor_steps | critic.warmup_steps |
algo.advantage.gamma, advantage.gamma | critic.gamma |
lambd, algo.advantage.lambd, advantage.lambd | critic.lam, critic.lam_policy | {_BOTH_LAMBDAS}
reward_pretrain, reward.model_name_or_path | rewards.N.model | {_RM}
remote_rm_url, reward.remote_url | rewards.N.url, rewards.N.function | with form: openrlhf; a .py file is a function
"""

SLIME = f"""\
use_opd, opd_teacher_load, opd_type | teacher.path | in the process, sharded as the policy is
opd_kl_coef | teacher.coef | with teacher.loss: sampled
rm_url | rewards.N.url | form: slime is the default
custom_rm_path | rewards.N.function | "file.py:fn"
rm_type | rewards.N.name | a shipped reward
critic_load | critic.path |
critic_lr | critic.lr |
num_critic_only_steps | critic.warmup_steps |
value_clip | critic.clip_value |
gamma | critic.gamma |
lambd | critic.lam, critic.lam_policy | {_BOTH_LAMBDAS}
"""
