"""Names that people bring for teachers and reward servers; config/aliases.py reads them as its own. Read in TRL 1.16
(DistillationConfig), verl's distillation.yaml, OpenRLHF's flags and slime's arguments.py, all of 2026."""

from __future__ import annotations

TRL = """\
teacher_model_name_or_path, teacher_model | teacher.path |
teacher_model_revision | teacher.path | a folder of that revision
teacher_model_init_kwargs | model.dtype | the teacher's is the policy's
lmbda | | distillation is of the policy's own completions: 1
"""

VERL = """\
distillation.enabled, distillation.teacher_model.model_path, teacher_model.model_path, distillation | teacher.path |
distillation_loss.loss_mode | teacher.loss, teacher.beta | \
sampled, topk or full; a beta of 0 is the forward KL, 1 the reverse
distillation_loss.topk | teacher.top_k |
distillation_loss.distillation_loss_coef, distillation_loss_coef | teacher.coef |
distillation_loss.jsd_beta, jsd_beta | teacher.beta |
distillation_loss.use_policy_loss, use_policy_loss | rewards.N.weight | 0: the teacher alone teaches
"""

OPENRLHF = """\
remote_rm_url, reward.remote_url | rewards.N.url | form: openrlhf; of a Python file rewards.N.function
"""

SLIME = """\
use_opd, opd_teacher_load, opd_type | teacher.path | in the process, sharded as the policy is
opd_kl_coef | teacher.coef | with teacher.loss: sampled
rm_url | rewards.N.url | form: slime is the default
custom_rm_path | rewards.N.function | "file.py:fn"
rm_type | rewards.N.name | a shipped reward
"""
