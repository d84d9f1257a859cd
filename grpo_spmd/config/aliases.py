"""Names that people bring from other trainers, and what they are here. Loaded only when an unknown key is met.

A line: names | keys here, where there are any | what to mind. A name with dots is one with its sections, matched from
the end: "actor_rollout_ref.rollout.n" is found as "rollout.n". Read in TRL 1.16 (GRPOConfig, TrainingArguments), verl's
ppo_trainer.yaml, OpenRLHF's flags (flat ones, and those with sections of 0.10) and prime-rl's configs, all of 2026.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

_SIZES = (
    "sizes are global here: prompts x group_size a step, and micro-batches are counted in tokens"
)
_STEPS = "a step here is one rollout with its updates"
_SERVER = "the engine is in the process: there is no server, Ray or placement"

TRL = f"""
learning_rate | optimizer.lr |
per_device_train_batch_size, gradient_accumulation_steps | rollout.num_prompts_per_step, rollout.group_size, \
training.max_tokens_per_micro_batch | {_SIZES}
per_gpu_train_batch_size, auto_find_batch_size | training.max_tokens_per_micro_batch | {_SIZES}
per_device_eval_batch_size | | all of data.eval is sampled at one time
generation_batch_size | rollout.num_prompts_per_step | counts prompts, theirs completions: divide by num_generations
steps_per_generation | training.num_mini_batches | optimizer steps a rollout
num_generations | rollout.group_size |
num_generations_eval | eval.num_samples |
max_completion_length | rollout.max_completion_tokens |
temperature | rollout.temperature |
max_length, max_seq_length | data.max_prompt_tokens, rollout.max_completion_tokens | it follows from their sum
max_prompt_length | data.max_prompt_tokens | a longer prompt is refused or dropped (data.on_long_prompt), never cut
num_iterations | training.num_epochs | passes over one rollout
max_steps | training.num_steps | {_STEPS}, theirs an optimizer step
num_train_epochs | training.num_steps | {_STEPS}: epochs x rows / rollout.num_prompts_per_step
beta | loss.kl_coef | weight of the KL to the reference; AdamW's are optimizer.betas, a divergence's teacher.beta
epsilon | loss.clip_ratio_low, loss.clip_ratio_high | theirs sets both: give both; ours are 0.2 and 0.28 by default
epsilon_high | loss.clip_ratio_high | for CISPO theirs is the bound itself, ours what lies above 1
delta | loss.dual_clip |
cliprange, clip_range | loss.clip_ratio_low, loss.clip_ratio_high | theirs sets both: give both
mini_batch_size | training.num_mini_batches | how many, not how large
loss_type | loss.policy, loss.aggregation | dapo and bnpo are aggregation token, \
grpo sequence, dr_grpo constant; cispo is a policy
importance_sampling_level | loss.policy | sequence is gspo, token is clip
scale_rewards | advantage.normalize_std | group, batch or none
reward_weights | rewards.N.weight | rewards: [{{function: "file.py:fn", weight: 1}}]
reward_funcs, reward_processing_classes | rewards.N.function | rewards: [{{function: "file.py:fn"}}]
mask_truncated_completions | loss.mask_truncated |
shuffle_dataset | data.shuffle |
train_dataset, dataset_name | data.train | a .jsonl or .parquet file, or hub:REPO:SUBSET:SPLIT
eval_dataset | data.eval |
model_name_or_path, model_name | model.path |
model_init_kwargs, dtype, torch_dtype, bf16, fp16 | model.dtype | compute dtype; master weights are float32
attn_implementation | model.attention | auto, flash or sdpa
gradient_checkpointing | model.activation_checkpointing |
gradient_checkpointing_kwargs | model.activation_checkpointing | true, or selective
torch_compile | model.compile |
peft_config, use_peft, lora_r, lora.r | model.lora.rank | with model.lora.alpha and target_modules
lora_alpha | model.lora.alpha |
lora_target_modules, target_modules | model.lora.target_modules |
lora_dropout, lora_bias, lora.bias, use_dora, use_rslora, lora_task_type | | \
plain adapters, without dropout, as the engine applies them
weight_decay | optimizer.weight_decay | on matrices only
adam_beta1, adam_beta2 | optimizer.betas | both in one list: [0.9, 0.95]
adam_epsilon, optimizer.eps | | AdamW's 1e-8
max_grad_norm | optimizer.max_grad_norm |
lr_scheduler_type, lr_scheduler_kwargs | optimizer.schedule | constant, linear or cosine; its floor is optimizer.min_lr
warmup_steps | optimizer.warmup_steps | optimizer steps
warmup_ratio | optimizer.warmup_steps | a number of optimizer steps, not a share
optim | | AdamW is the optimizer
save_steps, save_strategy | checkpoint.every_steps | {_STEPS}
save_total_limit | checkpoint.keep |
resume_from_checkpoint | checkpoint.resume | auto, never, or a checkpoint's folder
load_best_model_at_end, metric_for_best_model | checkpoint.best_metric | e.g. eval/gsm8k/mean
save_only_model | checkpoint.export_every_steps | a number of steps
output_dir | run_dir |
eval_steps, eval_strategy, evaluation_strategy, do_eval | eval.every_steps | with data.eval
eval_on_start | eval.every_steps | an evaluation before training is always made
report_to | logging.trackers | wandb, tensorboard, trackio; offline: logging.wandb
run_name, logging_dir | run_dir | W&B's run is named after it
project | logging.wandb_project |
logging_steps, logging_strategy | | each step is one line of metrics.jsonl
log_completions, num_completions_to_print | logging.rollouts_every_steps | they are written to run_dir/rollouts
use_vllm, vllm_mode, vllm_server_host, vllm_server_port, vllm_server_base_url | | vLLM always runs in the process
vllm_gpu_memory_utilization | rollout.gpu_memory_utilization |
vllm_tensor_parallel_size | rollout.tensor_parallel_size |
vllm_max_model_length, vllm_max_model_len | data.max_prompt_tokens, rollout.max_completion_tokens | \
it follows from their sum
vllm_enable_sleep_mode | rollout.sleep_level | the engine always sleeps on a GPU while the policy trains
vllm_importance_sampling_correction, vllm_importance_sampling_mode | loss.rollout_correction | token_truncate is \
token_tis, sequence_truncate sequence_tis, token_mask icepop
vllm_importance_sampling_cap, vllm_importance_sampling_clip_max | loss.rollout_correction_cap |
generation_kwargs, cache_implementation | rollout.engine | what vllm.LLM takes; what cuts the distribution is refused
entropy_coef | loss.entropy_coef |
data_seed, data.seed | seed | one seed for all
deepspeed, fsdp, fsdp_config, ds3_gather_for_generation, ddp_backend | | FSDP2 shards the policy over all ranks; \
model.num_replicas and model.offload are its settings
sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps | | the reference stays where the policy started
top_entropy_quantile, off_policy_mask_threshold, sapo_temperature_neg, sapo_temperature_pos | |
use_bias_correction_kl, vllm_model_impl, use_liger_kernel | |
multi_objective_aggregation | | rewards are summed with their weights, then normalised
disable_dropout | | dropout is always off
chat_template_kwargs | data.system_prompt, data.as_chat | the tokenizer's own template, with no arguments: \
put what they would do into chat_template.jinja
dataset_config, dataset_train_split, dataset_test_split | data.train, data.eval | parts of hub:REPO:SUBSET:SPLIT
trust_remote_code, model.trust_remote_code | | code of a model's folder is never run
load_in_4bit, load_in_8bit, use_bnb_nested_quant | | policy and engine compute in bfloat16 or float32: no quantisation
tf32 | model.dtype | bfloat16 or float32
do_train | | python -m grpo_spmd.train always does
log_level, logging.level, log.level | | metrics.jsonl has everything, the console a line a step
model.revision, model_revision | model.path | the folder of that revision; a hub id is its main
model.tokenizer, tokenizer_name, tokenizer_name_or_path | model.path | the tokenizer is in the model's folder
stop, stop_token_ids, stop_strings | | \
a completion ends with the model's own eos (generation_config.json), or is cut off
ignore_eos | | every completion may end
num_processes, nproc_per_node, nproc | | torchrun --nproc-per-node N, or grpo-spmd train --nproc N
push_to_hub, hub_model_id, hub_token | | python -m grpo_spmd.export writes the model's folder
environment_factory | environment.factory | "file.py:Class", or a mapping of names to such
tools | environment.tools | a list of "file.py:function"
max_tool_calling_iterations | environment.max_turns | counts turns: one more than calling iterations
"""

VERL = f"""
data.train_files | data.train | one file
data.val_files | data.eval | with eval.every_steps
data.train_batch_size, train_batch_size, data.gen_batch_size | rollout.num_prompts_per_step | prompts on both sides
data.max_prompt_length, rollout.prompt_length | data.max_prompt_tokens |
data.max_response_length, max_response_length, rollout.response_length | rollout.max_completion_tokens |
filter_overlong_prompts | data.on_long_prompt | drop
data.truncation | data.on_long_prompt | refused or dropped, never cut
apply_chat_template_kwargs, custom_chat_template | data.system_prompt, data.as_chat | the tokenizer's own template
rollout.n | rollout.group_size |
ppo_mini_batch_size | training.num_mini_batches | how many, not how large: train_batch_size / ppo_mini_batch_size
ppo_epochs | training.num_epochs |
ppo_micro_batch_size, ppo_micro_batch_size_per_gpu, log_prob_micro_batch_size, log_prob_micro_batch_size_per_gpu, \
ppo_max_token_len_per_gpu, log_prob_max_token_len_per_gpu, use_dynamic_bsz, use_remove_padding | \
training.max_tokens_per_micro_batch | always packed, by tokens of one rank, in all passes
actor.clip_ratio, clip_ratio | loss.clip_ratio_low, loss.clip_ratio_high | theirs sets both: give both
actor.clip_ratio_low | loss.clip_ratio_low |
actor.clip_ratio_high | loss.clip_ratio_high |
clip_ratio_c | loss.dual_clip |
reward_fn_key, data.reward_fn_key | rewards.N.args | each column of a row reaches the reward under its own name
rollout.name, rollout.mode, rollout.load_format, rollout.calculate_log_probs, actor.strategy, ref.strategy | | \
vLLM in the process, and FSDP2
actor_rollout_ref.rollout.top_p, actor_rollout_ref.rollout.top_k | | training samples from the whole distribution
policy_loss.loss_mode, loss_mode | loss.policy | vanilla is clip
loss_agg_mode | loss.aggregation | token-mean is token, seq-mean-token-mean sequence, seq-mean-token-sum-norm constant
use_kl_loss, kl_loss_coef | loss.kl_coef | 0 is off; loss.kl_in: loss
kl_loss_type | loss.kl_estimator | kl is k1, mse k2, low_var_kl k3
use_kl_in_reward | loss.kl_in | reward, with loss.kl_coef
kl_ctrl.kl_coef, algorithm.kl_ctrl | loss.kl_coef | constant; with loss.kl_in: reward
algorithm.kl_penalty | loss.kl_estimator | with loss.kl_in: reward
entropy_coeff | loss.entropy_coef |
algorithm.adv_estimator, adv_estimator | advantage.estimator | grpo, dr_grpo, rloo, reinforce_pp, gae
norm_adv_by_std_in_grpo | advantage.normalize_std | true is group, false none
filter_groups.enable, filter_groups | rollout.dynamic_sampling | true or false
filter_groups.max_num_gen_batches, max_num_gen_batches | rollout.dynamic_sampling_max_rounds | \
from 1 on; theirs is without end at 0
rollout_is, tis_imp_ratio_cap | loss.rollout_correction | token_tis, sequence_tis or icepop
rollout_is_threshold | loss.rollout_correction_cap |
rollout_correction.bypass_mode, bypass_mode | loss.old_logprobs | engine
actor.optim.lr, optim.lr | optimizer.lr |
actor.optim.weight_decay, optim.weight_decay | optimizer.weight_decay | on matrices only
actor.optim.betas | optimizer.betas |
warmup_style, optim.lr_scheduler_type | optimizer.schedule | constant, linear or cosine
min_lr_ratio | optimizer.min_lr | a learning rate, not a share
lr_warmup_steps | optimizer.warmup_steps | optimizer steps
lr_warmup_steps_ratio | optimizer.warmup_steps | a number of optimizer steps, not a share
grad_clip, clip_grad | optimizer.max_grad_norm |
actor_rollout_ref.model.path | model.path |
enable_gradient_checkpointing | model.activation_checkpointing |
model.lora_rank, lora_rank | model.lora.rank |
model.lora_alpha | model.lora.alpha |
model.target_modules | model.lora.target_modules |
param_offload, fsdp_config.param_offload | model.offload | true
optimizer_offload, fsdp_config.optimizer_offload | model.offload | optimizer
fsdp_size | model.num_replicas | theirs is ranks a copy, ours how many copies
use_torch_compile | model.compile |
tensor_model_parallel_size | rollout.tensor_parallel_size |
rollout.gpu_memory_utilization | rollout.gpu_memory_utilization |
rollout.temperature | rollout.temperature |
enforce_eager, max_num_seqs, max_num_batched_tokens, enable_chunked_prefill, engine_kwargs.vllm, engine_kwargs | \
rollout.engine | as in rollout.engine: {{max_num_seqs: 64}}
rollout.max_model_len | data.max_prompt_tokens, rollout.max_completion_tokens | it follows from their sum
free_cache_engine | rollout.sleep_level | the engine always sleeps on a GPU while the policy trains
val_kwargs.n | eval.num_samples |
val_kwargs.temperature | eval.temperature |
val_kwargs.top_p, val_kwargs.top_k, val_kwargs.do_sample | eval.temperature | 0 is greedy; nothing is cut away
custom_reward_function.path, custom_reward_function.name, custom_reward_function, compute_score | rewards.N.function | \
"file.py:fn" over lists: fn(prompts, completions, **columns)
overlong_buffer.len | advantage.overlong_buffer_tokens |
overlong_buffer | advantage.overlong_buffer_tokens | tokens
overlong_buffer.penalty_factor | advantage.overlong_penalty |
total_training_steps | training.num_steps | {_STEPS}
total_epochs | training.num_steps | {_STEPS}: epochs x rows / rollout.num_prompts_per_step
save_freq | checkpoint.every_steps | 0: only at the end
max_actor_ckpt_to_keep | checkpoint.keep | from 1 on
resume_mode, resume_from_path | checkpoint.resume | auto, never (disable), or a checkpoint's folder
test_freq | eval.every_steps | with data.eval
val_before_train | eval.every_steps | an evaluation before training is always made
trainer.logger | logging.trackers | metrics.jsonl and the console are always written
trainer.project_name, project_name | logging.wandb_project |
trainer.experiment_name, experiment_name, default_local_dir | run_dir |
rollout_data_dir, log_val_generations | logging.rollouts_every_steps | they are written to run_dir/rollouts
nnodes, n_gpus_per_node | | torchrun's --nnodes and --nproc-per-node
ulysses_sequence_parallel_size, expert_parallel_size, pipeline_model_parallel_size, megatron | |
multi_turn, transfer_queue, ray_init, ray_kwargs | |
balance_batch | | always
actor_rollout_ref, trainer, algorithm | | its keys have other names: configs/README.md, "Coming from"
"""

OPENRLHF = f"""
pretrain, actor.model_name_or_path | model.path |
prompt_data, data.prompt_dataset | data.train | a .jsonl or .parquet file, or hub:REPO:SUBSET:SPLIT
prompt_split, data.prompt_split | data.train | the last part of hub:REPO:SUBSET:SPLIT
eval_dataset, eval.dataset | data.eval |
input_key, data.input_key | data.prompt_key |
label_key, data.label_key | rewards.N.args | each column of a row reaches the reward under its own name
input_template, data.input_template | data.prompt_template | columns in braces: 'Q: {{question}}'
apply_chat_template, data.apply_chat_template | data.as_chat |
prompt_max_len | data.max_prompt_tokens |
generate_max_len, rollout.max_new_tokens, max_new_tokens | rollout.max_completion_tokens |
max_len, data.max_len | data.max_prompt_tokens, rollout.max_completion_tokens | it follows from their sum
max_samples, data.max_samples | | give a file with as many rows
rollout_batch_size, rollout.batch_size | rollout.num_prompts_per_step | prompts on both sides
train_batch_size, train.batch_size | training.num_mini_batches | how many optimizer steps a rollout: \
rollout_batch_size x n_samples_per_prompt / train_batch_size
micro_train_batch_size, micro_rollout_batch_size, train.micro_batch_size, rollout.micro_batch_size, packing_samples, \
use_dynamic_batch, train_max_tokens_per_gpu, rollout_max_tokens_per_gpu, train.max_tokens_per_gpu, \
train.dynamic_batch_enable | training.max_tokens_per_micro_batch | always packed, by tokens of one rank
n_samples_per_prompt | rollout.group_size |
eval_n_samples_per_prompt, eval.n_samples_per_prompt | eval.num_samples |
eval_temperature | eval.temperature |
max_epochs, train.max_epochs | training.num_epochs | passes over one rollout
num_episodes, train.num_episodes | training.num_steps | {_STEPS}: episodes x rows / rollout.num_prompts_per_step
actor_learning_rate, actor.adam.lr, adam.lr | optimizer.lr |
adam_betas, adam.betas | optimizer.betas |
l2, adam.weight_decay | optimizer.weight_decay |
max_norm, actor.max_norm | optimizer.max_grad_norm |
lr_scheduler, actor.lr_scheduler, actor.scheduler | optimizer.schedule | constant, linear or cosine
lr_warmup_ratio | optimizer.warmup_steps | a number of optimizer steps, not a share
init_kl_coef, kl.init_coef | loss.kl_coef | 0.01 there, 0 here
use_kl_loss, kl.use_loss | loss.kl_in | loss, with loss.kl_coef; without it theirs is in the reward
kl_target, kl_horizon, kl.target, kl.horizon | loss.kl_coef | constant here
kl.estimator | loss.kl_estimator |
eps_clip, actor.eps_clip | loss.clip_ratio_low, loss.clip_ratio_high | theirs sets both: give both
eps_clip_low_high, actor.eps_clip_low_high | loss.clip_ratio_low, loss.clip_ratio_high |
policy_loss_type | loss.policy | ppo is clip
advantage_estimator, advantage.estimator, algo.advantage.estimator | advantage.estimator | group_norm is grpo, \
reinforce is reinforce_pp, reinforce_baseline grpo with advantage.normalize_std: batch
no_advantage_std_norm | advantage.normalize_std | none
entropy_loss_coef, actor.entropy_coef | loss.entropy_coef |
overlong_buffer_len | advantage.overlong_buffer_tokens |
overlong_penalty_factor | advantage.overlong_penalty |
dynamic_filtering, dynamic_filtering_enable, dynamic_filtering_reward_range, dynamic_filtering_range | \
rollout.dynamic_sampling | groups whose rewards are all alike are replaced
enable_vllm_is_correction | loss.rollout_correction | token_tis
vllm_is_truncated_threshold | loss.rollout_correction_cap | the upper of theirs
agent_func_path, train.agent_func_path | rewards.N.function | "file.py:fn"
normalize_reward, reward_clip_range, reward.clip_range | | scale in the reward itself
vllm_num_engines, vllm.num_engines | | each rank has an engine; rollout.tensor_parallel_size ranks may share one
vllm_sync_backend, vllm.sync_backend, vllm_generate_batch_size, colocate_all_models, colocate_actor_ref, \
train.colocate_all, async_train | | {_SERVER}
actor_num_nodes, actor_num_gpus_per_node, ref_num_nodes, ref_num_gpus_per_node, actor.num_nodes, \
actor.num_gpus_per_node, ref.num_nodes, ref.num_gpus_per_node | | torchrun's --nnodes and --nproc-per-node
vllm_enable_sleep, vllm.enable_sleep, deepspeed_enable_sleep | rollout.sleep_level | the engine always sleeps on a GPU
vllm.gpu_memory_utilization | rollout.gpu_memory_utilization |
vllm.tensor_parallel_size | rollout.tensor_parallel_size |
zero_stage, ds.zero_stage | | FSDP2 shards parameters, gradients and optimizer state over all ranks, as stage 3 does
zpg | model.num_replicas | theirs is ranks a copy, ours how many copies
adam_offload, ds.adam_offload | model.offload | optimizer
gradient_checkpointing_enable | model.activation_checkpointing |
ring_attn_size, ds_tensor_parallel_size | |
flash_attn, attn.flash | model.attention | flash
full_determinism | | a run is a function of config and seed
save_path, ckpt_path, ckpt.output_dir, ckpt.path | run_dir | checkpoints are in run_dir/checkpoints
save_steps, ckpt.save_steps | checkpoint.every_steps | {_STEPS}
eval_steps, eval.steps | eval.every_steps |
max_ckpt_num, ckpt.max_num | checkpoint.keep |
save_hf_ckpt, ckpt.save_hf | checkpoint.export_every_steps | a number of steps
load_checkpoint, ckpt.load_enable | checkpoint.resume | auto
use_wandb, wandb_run_name, wandb_org, wandb_group | logging.wandb | true, online or offline
use_tensorboard | logging.trackers | wandb, tensorboard, trackio
"""

PRIME_RL = """
model.name | model.path |
orchestrator.batch_size, batch_size, token_batch_size | rollout.num_prompts_per_step | \
counts prompts, theirs completions: batch_size / rollouts_per_example
rollouts_per_example, orchestrator.group_size | rollout.group_size |
eval.rollouts_per_example | eval.num_samples |
seq_len, max_model_len | data.max_prompt_tokens, rollout.max_completion_tokens | \
longest rollout; micro-batches by training.max_tokens_per_micro_batch
sampling.max_tokens, max_tokens, sampling.max_completion_tokens | rollout.max_completion_tokens |
sampling.temperature, temp_scheduler | rollout.temperature | constant
eval.sampling.temperature | eval.temperature |
sampling.min_tokens, min_tokens | | every completion may end at once
env | environment.gym, environment.factory | or data and rewards alone, for one turn
trainer.optim.lr | optimizer.lr |
trainer.optim.weight_decay | optimizer.weight_decay |
optim.max_norm | optimizer.max_grad_norm |
betas1, betas2 | optimizer.betas | both in one list: [0.9, 0.95]
scheduler, scheduler.type, decay_steps | optimizer.schedule | constant, linear or cosine, to the run's end
min_lr, scheduler.min_lr | optimizer.min_lr | with optimizer.schedule
scheduler.warmup_steps | optimizer.warmup_steps |
max_steps | training.num_steps |
ckpt.interval | checkpoint.every_steps |
ckpt.keep_last | checkpoint.keep |
ckpt.keep_interval | checkpoint.keep | only the newest stay, and the best by checkpoint.best_metric
ckpt.resume_step | checkpoint.resume | auto, never, or a checkpoint's folder
eval.interval | eval.every_steps |
eval_base_model | eval.every_steps | an evaluation before training is always made
eval.env | data.eval |
output_dir, clean_output_dir | run_dir | a folder in use is refused, never emptied
wandb, wandb.offline | logging.wandb | true, online or offline
wandb.project | logging.wandb_project |
wandb.name | run_dir | W&B's run is named after it
model.attn, attn | model.attention | flash or sdpa
model.ac, ac, ac.freq | model.activation_checkpointing | true, or selective
fsdp_cpu_offload | model.offload | true
optim_cpu_offload | model.offload | optimizer
dp_replicate | model.num_replicas |
fused_lm_head_chunk_size | model.logprob_chunk_tokens |
model.tp, model.cp, model.ep | | rollout.tensor_parallel_size is the engine's
lora.dropout | | adapters have no dropout, since the engine has none
kl_tau, loss.kl_tau | loss.kl_coef |
ipo_mask_low, ipo_mask_high | loss.rollout_correction | icepop masks tokens by the ratio of policy and engine
online_difficulty_filtering, buffer.online_difficulty_filtering | rollout.dynamic_sampling |
parallel.tp | rollout.tensor_parallel_size |
inference.gpu_memory_utilization | rollout.gpu_memory_utilization |
trainer.loss.type | loss.policy | clip, gspo or cispo
max_async_level, max_off_policy_steps, strict_async_level, oversampling_factor, max_inflight_rollouts, \
weight_broadcast, rollout_transport | | policy and engine take turns on the same ranks: nothing is asynchronous
dist_timeout_seconds | watchdog.timeout_s |
teacher_model | teacher.path |
enable_router_replay, teacher_tau | |
trainer, orchestrator, inference, deployment, slurm | | its keys have other names: configs/README.md, "Coming from"
"""

# Names that people bring for teachers, critics, reward models and reward servers; config/aliases.py reads them as its
# own. Read in TRL 1.16 (DistillationConfig), verl's critic.yaml and distillation.yaml, OpenRLHF's flags and slime's
# arguments.py, all of 2026.


_BOTH_LAMBDAS = "theirs sets both: give both"
_RM = "rewards: [{model: PATH}]"

TRL_SIGNALS = f"""\
teacher_model_name_or_path, teacher_model | teacher.path |
teacher_model_revision | teacher.path | a folder of that revision
teacher_model_init_kwargs | model.dtype | the teacher's is the policy's
use_teacher_server, teacher_model_server_url | teacher.url | with /v1/completions behind it
lmbda | | distillation is of the policy's own completions: 1
reward_model_path | rewards.N.model | {_RM}
cliprange_value | critic.clip_value |
vf_coef | critic.coef | with critic.path: policy; a critic of its own has an optimizer of its own
"""

VERL_SIGNALS = f"""\
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

OPENRLHF_SIGNALS = f"""\
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

_SAYS_NOTHING = (
    "name",
    "path",
    "enable",
    "interval",
    "type",
    "len",
    "dataset",
    "env",
    "freq",
    "offline",
    "steps",
)
TRAINERS = {
    "TRL": TRL + TRL_SIGNALS,
    "verl": VERL + VERL_SIGNALS,
    "OpenRLHF": OPENRLHF + OPENRLHF_SIGNALS,
    "prime-rl": PRIME_RL,
    "slime": SLIME,
}


def entries(table: str) -> Iterator[tuple[list[str], list[str], str]]:
    """(names, keys here, what to mind) of each line."""
    for line in table.strip().splitlines():
        names, keys, note = (part.strip() for part in line.split("|"))
        yield names.split(", "), keys.split(", ") if keys else [], note


def known_elsewhere(full: str, value: object = None) -> str | None:
    """What an unknown key, or one below it in `value`, is called here; None where no trainer has that name."""
    for name in (*_leaves(full, value), full):
        for suffix in _suffixes(name):
            if said := _translated(name, suffix):
                return said
    return None


def same_here(full: str) -> str | None:
    """Our key that takes the value of theirs as it stands: one alone, with nothing to mind, and alike for all."""
    for suffix in _suffixes(full):
        found = [
            entry
            for table in TRAINERS.values()
            if (entry := _entry(table, suffix, by_last_part=False))
        ]
        if found:
            keys, note = found[0]
            is_same = len(keys) == 1 and not note and all(entry == found[0] for entry in found)
            return keys[0] if is_same else None
    return None


def _suffixes(name: str) -> list[str]:
    """From the whole name to its last part."""
    parts = name.removeprefix("-").replace("-", "_").split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def known_by_last_part(full: str) -> str | None:
    """The same, of a name without a section, by the last part of theirs: "train_files" is verl's data.train_files."""
    is_telling = "." not in full and full not in _SAYS_NOTHING
    return _translated(full, full.replace("-", "_"), by_last_part=True) if is_telling else None


def known_closely(full: str) -> str | None:
    """The same for a name with a letter too much."""
    last = full.rpartition(".")[2].replace("-", "_")
    all_known = {
        known for table in TRAINERS.values() for names, *_ in entries(table) for known in names
    }
    close = difflib.get_close_matches(last, all_known, n=1, cutoff=0.9)
    said = known_elsewhere(close[0]) if close else None
    return (
        f"{full}: unknown key; did you mean {said.replace(': unknown key', '', 1)}?"
        if said
        else None
    )


def _translated(name: str, known: str, *, by_last_part: bool = False) -> str | None:
    found = {trainer: _entry(table, known, by_last_part) for trainer, table in TRAINERS.items()}
    return f"{name}: unknown key, {_in_words(found)}" if any(found.values()) else None


def _leaves(full: str, value: object) -> Iterator[str]:
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        below = f"{full}.{name}"
        yield from _leaves(below, inner) if isinstance(inner, Mapping) and inner else (below,)


def _entry(table: str, name: str, by_last_part: bool) -> tuple[list[str], str] | None:
    for names, keys, note in entries(table):
        if name in ([known.rpartition(".")[2] for known in names] if by_last_part else names):
            return keys, note
    return None


def _in_words(found: Mapping[str, tuple[list[str], str] | None]) -> str:
    """Trainers that mean the same by a name in one clause."""
    clauses: dict[str, list[str]] = {}
    for trainer, entry in found.items():
        if entry is not None:
            keys, note = entry
            said = f"here {', '.join(keys)}" if keys else "nothing here"
            said += f" ({note})" if note else ""
            clauses.setdefault(said, []).append(f"{trainer}'s")
    return "; ".join(f"{' and '.join(trainers)} name: {said}" for said, trainers in clauses.items())
