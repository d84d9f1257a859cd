"""The faults that `mutations` plants: edits of grpo_spmd/ that somebody might make, each with what
should see it.

A test (tests/unit/test_mutations.py) says at once when a text is no longer there, so that code may
move.
"""

from __future__ import annotations

import ast
import threading
from dataclasses import dataclass
from pathlib import Path

# Trainings that reach what the demo does not. {made} is the folder of models and data.
# longer than a block of the prefix cache (32 tokens on a CPU), and the same eight at every step
_LONG_PROMPTS = (
    "data.train={made}/long.jsonl",
    "data.max_prompt_tokens=48",
    "rewards=[{{name: format, args: {{pattern: '[0-4].*'}}}}]",
)
_SEVERAL_BUCKETS = (
    "model.path={made}/wide",
    "rollout.weight_sync_bucket_mib=1",
    "optimizer.lr=1e-4",
)
_EXPERTS = (
    "model.path={made}/experts",
    "rewards=[{{name: format, args: {{pattern: '[0-4].*'}}}}]",
)
_COOL = ("rollout.temperature=0.7",)
_ROUTED = ("model.path={made}/routed", "loss.router_aux_coef=0.1", "optimizer.lr=1e-3")
_CRITIC = (
    "critic.path={made}/model",
    "critic.lr=2e-3",
    "advantage.estimator=gae",
    "advantage.normalize_std=batch",
)

_SHARING = ("model.sequence_parallel_size=2",)

_SYNC = "tests/ranks/test_weight_sync.py"
_UPDATES = f"{_SYNC}::test_engine_equals_transformers_after_each_update"
_TIED, _UNTIED, _SHARDED = (
    f"{_UPDATES}[{of}]" for of in ("qwen2-True-1", "granite-False-1", "qwen3-False-2")
)
_EXPERTS_TEST = "tests/ranks/test_experts.py"
_EXPERTS_SYNC = f"{_EXPERTS_TEST}::test_engine_equals_transformers_after_each_update[glm4_moe-1-1]"
_SHARED = (
    "tests/ranks/test_sequence_parallel.py"
    "::test_the_update_of_two_ranks_that_share_rows_is_that_of_plain_transformers"
)
_GATHER = f"{_SYNC}::test_bucketed_gather_equals_full_tensor[3-1]"
_PARTITION = "tests/ranks/test_partition.py"
_LOSS, _ADVANTAGES, _BATCHING = (
    f"tests/unit/test_{name}.py" for name in ("loss", "advantages", "batching")
)
_ROLLOUT = "tests/unit/test_rollout.py"
_SPECULATION = "tests/unit/test_speculation.py::test_places_are_sampled_as_one_after_the_other"
_SPECULATED = ("rollout.speculation=auto", *_LONG_PROMPTS)
_CRITIC_TEST = "tests/ranks/test_critic.py"
_EVALUATE = "tests/unit/test_evaluate.py"
_ROUTES = "tests/unit/test_routing.py"
_CHECK = "tests/ranks/test_proofs.py::test_the_check_of_the_update_sees_planted_faults_and_changes_no_bit"  # noqa: E501
_PACKED_HYBRID = (
    "tests/ranks/test_hybrid.py"
    "::test_packed_rows_are_those_of_transformers_sequence_by_sequence[1-qwen3_5_text]"
)
_PREFIX_TREE = "tests/unit/test_prefix_tree.py"
_SHARED_PREFIXES = (*_LONG_PROMPTS, "training.share_prefixes=true")
_HYBRID = ("model.path={made}/hybrid", "model.dtype=bfloat16")


@dataclass(frozen=True)
class Fault:
    """An edit that somebody might make, what reaches it in a training, and the tests that should
    see it."""

    name: str
    file: str  # below grpo_spmd/
    old: str  # is there exactly once
    new: str
    tests: tuple[str, ...]  # the fast ones first
    overrides: tuple[str, ...] = ()  # of the training
    of_sync: bool = False  # trained once more with proofs.every_steps=1


_BY_SEQUENCE = (
    "            self._module_forward(row.unflatten(0, run), *args, **options).flatten(0, 1)\n"
)
_YIELD = "            yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)\n"
_TENSOR = "            tensor = full.view(-1)[: parameter.numel()].view(parameter.shape)\n"
_VALUES = "        return shard.local_rows().detach().reshape(-1)\n"
_COPY = "                _copy_part(tensor, tensor_part, rows_of[key], matrix, dtype=self._dtype)\n"
_LOAD = "            self._engine.load_weights(weights, step, direct, gathered=gathered)\n"
_ANSWER = "self.endpoint.answer(call, answer.message, answer.finish_reason, answer.usage)\n"
_SEED = "partial(rollout_seed, self._seed, self._step - 1, prompt.position, sample)"

_PATHS = "    paths = [tuple(number_of[old] for old in node.path) for node in nodes]\n"
_BRANCH = "    total.index_put_((keys,), branch_grads.float(), accumulate=True)\n"
_SAVED = "            yield target.name, rows.view(target.shape)\n"

_PARSER = threading.Lock()

FAULTS = (
    Fault(
        "skipped sync: from the second step on",
        "engine/weight_sync.py",
        _LOAD,
        f"            if self._has_proved:\n                self._engine.policy_version = step\n"
        f"                return 0\n{_LOAD}",
        (_UNTIED,),
        of_sync=True,
    ),
    Fault(
        "one tensor stale: k_proj of layer 1 keeps its first value",
        "engine/weight_sync.py",
        _VALUES,
        "        name, kept = shard.name, gather_tensors.__dict__.setdefault('kept', {})\n"
        "        values = shard.local_rows().detach().reshape(-1)\n"
        "        return kept.setdefault(name, values.clone()) if 'layers.1.self_attn.k_proj' in "
        "name else values\n",
        (_SHARDED,),
        of_sync=True,
    ),
    Fault(
        "stale expert: the second keeps its first down_proj",
        "engine/weight_sync.py",
        _SAVED,
        "            if '.experts.1.down_proj' in target.name:\n"
        "                rows = saved_tensors.__dict__.setdefault(target.name, rows.clone())\n"
        f"{_SAVED}",
        (_EXPERTS_SYNC,),
        _EXPERTS,
        of_sync=True,
    ),
    Fault(
        "gate and up of the experts swapped",
        "engine/weight_sync.py",
        _SAVED,
        "            if '.experts.' in name:\n"
        "                swapped = {'gate_proj': 'up_proj', 'up_proj': 'gate_proj'}\n"
        "                *path, leaf, weight = target.name.split('.')\n"
        "                leaf = swapped.get(leaf, leaf)\n"
        "                target = target._replace(name='.'.join([*path, leaf, weight]))\n"
        f"{_SAVED}",
        (_EXPERTS_SYNC,),
        _EXPERTS,
        of_sync=True,
    ),
    Fault(
        "shared expert dropped: the engine gets zeros",
        "engine/weight_sync.py",
        _SAVED,
        "            if '.shared_experts.down_proj' in target.name:\n"
        "                rows = torch.zeros_like(rows)\n"
        f"{_SAVED}",
        (_EXPERTS_SYNC,),
        _EXPERTS,
        of_sync=True,
    ),
    Fault(
        "correction bias not synced",
        "engine/weight_sync.py",
        "                constants(self._policy.model).items(),\n",
        "",
        (_EXPERTS_SYNC,),
        _EXPERTS,
        of_sync=True,
    ),
    Fault(
        "correction bias rounded to bfloat16 on its way",
        "engine/weight_sync.py",
        "                constants(self._policy.model).items(),\n",
        "                ((n, c.bfloat16()) for n, c in constants(self._policy.model).items()),\n",
        (_EXPERTS_SYNC,),
        _EXPERTS,
        of_sync=True,
    ),
    Fault(
        "tied head stale: its packed copy is not made anew",
        "engine/reload.py",
        "            if _is_packed_copy(tensor):\n                _pack(layer)\n",
        "",
        (_TIED,),
        of_sync=True,
    ),
    Fault(
        "a slice off by a row: the value heads, copied into the engine",
        "engine/reload.py",
        _COPY,
        "                if tensor_part.name.endswith('v_proj.weight') and "
        "tensor_part.num_rows > 1:\n"
        "                    tensor_part = __import__('dataclasses').replace(tensor_part, "
        "hf_start=tensor_part.hf_start + 1, num_rows=tensor_part.num_rows - 1)\n"
        f"{_COPY}",
        (_UNTIED,),
        of_sync=True,
    ),
    Fault(
        "keys and values swapped: where the map says that they are",
        "engine/weight_map.py",
        "    names = [path.removesuffix(leaf) + name for name in fused.get(leaf, [leaf])]\n",
        "    names = [path.removesuffix(leaf) + name for name in fused.get(leaf, [leaf])]\n"
        "    names[1:3] = names[2:0:-1]\n",
        (_UNTIED,),
        of_sync=True,
    ),
    Fault(
        "transposed: square tensors, in the gather",
        "engine/weight_sync.py",
        _YIELD,
        f"{_TENSOR}            yield name, tensor.T if tensor.ndim == 2 and len(tensor) == "
        "tensor.shape[1] else "
        "tensor\n",
        (_GATHER,),
        of_sync=True,
    ),
    Fault(
        "last bucket of the sync dropped: gathered only where full",
        "engine/weight_sync.py",
        "        works.extend(start_all_gather(bucket, group))\n",
        "        if columns == room:\n            works.extend(start_all_gather(bucket, group))\n",
        (_GATHER,),
        _SEVERAL_BUCKETS,
        of_sync=True,
    ),
    Fault(
        "wrong temperature: the policy's logits",
        "model/logprobs.py",
        "return logits.div_(temperature)",
        "return logits",
        ("tests/unit/test_policy.py::test_chunked_logprob_gradients_equal_autograd",),
        _COOL,
    ),
    Fault(
        "wrong temperature: the policy is built without it",
        "parts.py",
        "        config.rollout.temperature,\n        session,\n        seed=config.seed",
        "        1.0,\n        session,\n        seed=config.seed",
        (),
        _COOL,
    ),
    Fault(
        "wrong temperature: the engine samples at 1",
        "engine/engine.py",
        "temperature=rollout.temperature if temperature is None",
        "temperature=1.0 if temperature is None",
        (_TIED,),
        _COOL,
    ),
    Fault(
        "prefix cache kept after the sync",
        "engine/engine.py",
        "        self.reset_prefix_cache()  # it was computed with the old weights\n",
        "",
        (_TIED,),
        _LONG_PROMPTS,
    ),
    Fault(
        "prefix cache kept after an evaluation",
        "rollout/evaluate.py",
        "        engine.reset_prefix_cache()\n",
        "",
        (
            "tests/ranks/test_evaluate.py::test_greedy_evaluation_is_the_argmax_of_plain_transformers[two engines]",  # noqa: E501
        ),
        (*_LONG_PROMPTS, "data.eval={{long: {made}/long.jsonl}}", "eval.every_steps=1"),
    ),
    Fault(
        "off by one: a token is scored by the place after the right one",
        "learn/assemble.py",
        "predict_index=on_device(completion_positions - 1)",
        "predict_index=on_device(completion_positions)",
        (_BATCHING,),
    ),
    Fault(
        "off by one: the mask leaves out the first token",
        "learn/assemble.py",
        "loss_mask=per_token([rollout.loss_mask for rollout in rollouts], np.bool_)",
        "loss_mask=per_token([rollout.loss_mask for rollout in rollouts], np.bool_) * "
        "on_device(np.diff(completion_positions, prepend=-1) == 1)",
        (_BATCHING,),
    ),
    Fault(
        "sequences of a row see their neighbours",
        "model/attention.py",
        "    lengths, starts = batch.sequence_lengths, batch.sequence_starts\n",
        "    lengths, starts = [sum(batch.sequence_lengths)], batch.sequence_starts\n",
        ("tests/unit/test_policy.py::test_a_sequence_does_not_see_its_neighbours_in_the_row",),
    ),
    Fault(
        "completions paired with another prompt",
        "rollout/sample.py",
        "RolloutGroup(slot, self._prompts[slot], completions)",
        "RolloutGroup(slot, self._prompts[slot - 1], completions)",
        (_ROLLOUT,),
    ),
    Fault(
        "per-rank denominator",
        "learn/update.py",
        "self._step(\n                    mini_batch,\n",
        "self._step(\n                    mini_batch._replace(num_loss_tokens="
        "sum(int(m.loss_mask.sum()) for m in mini_batch.micro_batches)),\n",
        (_PARTITION,),
    ),
    Fault(
        "gradients averaged over ranks, not summed",
        "model/sharding.py",
        "            module.set_gradient_divide_factor(1.0)\n",
        "",
        (_PARTITION,),
    ),
    Fault(
        "group split over ranks: each part has its own mean",
        "learn/sampled_step.py",
        "rollout_advantages(rewards, rules.advantage)",
        "rollout_advantages(rewards.reshape(-1, group_size // rules.num_ranks), rules.advantage)",
        (_PARTITION,),
    ),
    Fault(
        "rank 1 leaves out a rollout of each row",
        "learn/assemble.py",
        "[rollouts_by_id[i] for i in row],\n                session.device,",
        "[rollouts_by_id[i] for i in row][session.rank :],\n                session.device,",
        (_PARTITION,),
    ),
    Fault(
        "shared rows: the slices are shifted by one token",
        "model/sequence_parallel.py",
        "    start = rank * num_tokens\n",
        "    start = max(rank * num_tokens - 1, 0)\n",
        (_SHARED,),
        overrides=_SHARING,
    ),
    Fault(
        "shared rows: KV heads in the wrong order",
        "model/sequence_parallel.py",
        "for tensor in (query, key, value)]\n",
        "for tensor in (query, key.flip(1), value.flip(1))]\n",
        (_SHARED,),
        overrides=_SHARING,
    ),
    Fault(
        "shared rows: each rank's gradient is that of all of them",
        "model/sequence_parallel.py",
        "None if grad is None else grad[ctx.predictions]",
        "None if grad is None else grad[ctx.predictions] * dist.get_world_size()",
        (_SHARED,),
        overrides=_SHARING,
    ),
    Fault(
        "advantage sign",
        "learn/advantages.py",
        "centered = torch.where(is_known, rewards - mean, 0.0)",
        "centered = torch.where(is_known, mean - rewards, 0.0)",
        (_ADVANTAGES,),
    ),
    Fault(
        "reward misaligned by one: on the way to rank 0",
        "learn/step_messages.py",
        "np.array(scored.rewards, np.float64)",
        "np.array(scored.rewards[-1:] + scored.rewards[:-1], np.float64)",
        (_PARTITION,),
    ),
    Fault(
        "reward misaligned by one: in the reward pool",
        "rewards/pool/pool.py",
        "for completion, text in zip(group.completions, texts, strict=True):",
        "for completion, text in zip(group.completions, [*texts[-1:], *texts[:-1]], strict=True):",
        ("tests/faults/test_rewards.py",),
    ),
    Fault(
        "unscored sample taken for 0",
        "learn/step_messages.py",
        "np.array(scored.rewards, np.float64)",
        "np.array([reward or 0.0 for reward in scored.rewards], np.float64)",
        (_PARTITION,),
    ),
    Fault(
        "seed ignored: samples of a group alike",
        "rollout/sample.py",
        _SEED,
        _SEED.replace(" sample", " 0"),
        (_ROLLOUT,),
    ),
    Fault(
        "seed ignored: that of the config",
        "rollout/sample.py",
        _SEED,
        _SEED.replace("self._seed", "0"),
        (_ROLLOUT,),
    ),
    Fault(
        "seed ignored: the engine's own is used",
        "engine/engine.py",
        "                seed=request.seed,\n",
        "",
        (
            "tests/ranks/test_evaluate.py::test_two_ranks_and_tensor_parallelism_evaluate_exactly_as_one_rank[two "  # noqa: E501
            "engines]",
        ),
    ),
    Fault(
        "old logprobs taken after the first update",
        "learn/update.py",
        "        if old_logprobs is None:\n            old_logprobs = logprobs.detach()\n",
        "        old_logprobs = logprobs.detach()\n",
        (_PARTITION,),
        ("training.num_mini_batches=2",),
    ),
    Fault(
        "clip bounds swapped",
        "learn/losses.py",
        "ratio.clamp(1.0 - options.clip_ratio_low, 1.0 + options.clip_ratio_high)",
        "ratio.clamp(1.0 - options.clip_ratio_high, 1.0 + options.clip_ratio_low)",
        (_LOSS, _PARTITION),
        ("training.num_mini_batches=2",),
    ),
    Fault(
        "a skipped update moves the optimizer: a step with gradient 0",
        "learn/update.py",
        "            self._skipped_in_a_row += 1\n",
        "            self._skipped_in_a_row += 1\n"
        "            self.optimizer.zero_grad(set_to_none=False)\n"
        "            self.optimizer.step()\n",
        ("tests/ranks/test_nonfinite.py",),
    ),
    Fault(
        "KL sign",
        "learn/losses.py",
        "policy + kl_coef * kl",
        "policy - kl_coef * kl",
        (_LOSS,),
        ("loss.kl_coef=0.01",),
    ),
    Fault(
        "rollout correction upside down",
        "learn/losses.py",
        "policy_logprobs.detach() - rollout_logprobs, 0.0)",
        "rollout_logprobs - policy_logprobs.detach(), 0.0)",
        (_LOSS,),
    ),
    Fault(
        "moments cleared at each update",
        "learn/update.py",
        "            self.optimizer.step()\n",
        "            self.optimizer.state.clear()\n            self.optimizer.step()\n",
        (_CHECK,),
    ),
    Fault(
        "gradients kept for the next update",
        "learn/update.py",
        "        self.optimizer.zero_grad(set_to_none=True)\n        return learning_rate\n",
        "        return learning_rate\n",
        (_CHECK,),
    ),
    Fault(
        "gradient never clipped",
        "learn/update.py",
        "self._trained_model.parameters(), self._max_grad_norm",
        "self._trained_model.parameters(), 1e9",
        (_PARTITION, _CHECK),
        ("optimizer.max_grad_norm=0.01",),
    ),
    Fault(
        "weight decay doubled",
        "model/optimizer.py",
        '"weight_decay": config.weight_decay}',
        '"weight_decay": 2 * config.weight_decay}',
        (_PARTITION, _CHECK),
        ("optimizer.weight_decay=0.01",),
    ),
    Fault(
        "8-bit scale of the row before",
        "model/optimizer.py",
        "    return (fractions * fractions.abs()).mul_(_by_column(scales, codes))\n",
        "    return (fractions * fractions.abs()).mul_(_by_column(scales.roll(1, 0), codes))\n",
        ("tests/unit/test_optimizer.py", _CHECK),
        ("optimizer.name=adamw_8bit",),
    ),
    Fault(
        "warm-up a step behind: the first update has lr 0",
        "model/schedule.py",
        "return (num_updates + 1) / config.warmup_steps",
        "return num_updates / config.warmup_steps",
        ("tests/ranks/test_nonfinite.py", _CHECK),
        ("optimizer.warmup_steps=10",),
    ),
    Fault(
        "the reference is the policy itself",
        "model/policy.py",
        "    if policy.lora.rank:\n        return partial(_base_scores, policy)\n",
        "    return policy\n",
        (_CHECK,),
        ("loss.kl_coef=0.01",),
    ),
    Fault(
        "KL estimator's ratio upside down",
        "learn/losses.py",
        "log_ratio = ref_logprobs - logprobs\n",
        "log_ratio = logprobs - ref_logprobs\n",
        (_LOSS,),
        ("loss.kl_coef=0.01",),
    ),
    Fault(
        "advantages divided by the biased deviation",
        "learn/advantages.py",
        "(count - 1).clamp(min=1)).sqrt()",
        "count.clamp(min=1)).sqrt()",
        (_ADVANTAGES,),
    ),
    Fault(
        "columns of another row: counted without the dropped prompts",
        "data/tokens.py",
        "columns=row.columns,",
        "columns=self._rows[indices].columns,",
        ("tests/unit/test_data.py",),
        (
            "data.train={made}/some_long.jsonl",
            "data.max_prompt_tokens=8",
            "data.on_long_prompt=drop",
        ),
    ),
    Fault(
        "the reward gets the prompt with the completion",
        "rewards/pool/pool.py",
        "token_ids = [completion.token_ids for completion in group.completions]",
        "token_ids = [[*group.prompt.token_ids, *c.token_ids] for c in group.completions]",
        ("tests/faults/test_rewards.py",),
    ),
    Fault(
        "generation_config's stop tokens ignored",
        "files.py",
        'for name in ("generation_config.json", "config.json"):',
        'for name in ("config.json",):',
        (),
        ("model.path={made}/two_stops",),
    ),
    Fault(
        "value loss over masked tokens too",
        "signals/critic.py",
        "row.returns, row.loss_mask, self._config.clip_value",
        "row.returns, torch.ones_like(row.loss_mask), self._config.clip_value",
        (_CRITIC_TEST,),
        _CRITIC,
    ),
    Fault(
        "value clip around the new value",
        "signals/critic.py",
        "values, row.old_values, row.returns, row.loss_mask",
        "values, values.detach(), row.returns, row.loss_mask",
        (_CRITIC_TEST,),
        _CRITIC,
    ),
    Fault(
        "critic's loss over the tokens of the rank",
        "signals/critic.py",
        "self.loss_term(self.model(row), row, mini_batch.num_loss_tokens)",
        "self.loss_term(self.model(row), row, sum(int(r.loss_mask.sum()) for r in "
        "mini_batch.micro_batches))",
        (_CRITIC_TEST,),
        _CRITIC,
    ),
    Fault(
        "a critic that never steps",
        "signals/critic.py",
        "        learning_rate = self.finish_step(is_made)\n",
        "        learning_rate = self.finish_step(False)\n",
        (_CRITIC_TEST,),
        _CRITIC,
    ),
    Fault(
        "a critic that is never updated",
        "signals/opening.py",
        "            metrics |= signal.update(batch)\n",
        "            metrics |= getattr(signal, 'no_update', dict)()\n",
        (),
        _CRITIC,
    ),
    Fault(
        "warm-up of the critic a step short",
        "signals/opening.py",
        "step <= self.critic.warmup_steps",
        "step < self.critic.warmup_steps",
        ("tests/unit/test_critic.py",),
        (*_CRITIC, "critic.warmup_steps=2"),
    ),
    Fault(
        "gae goes on after the last token, from its own value: 0 at first",
        "signals/critic.py",
        "        lengths = np.bincount(row.sequence_index.cpu().numpy())\n",
        "        lengths = np.bincount(row.sequence_index.cpu().numpy())\n"
        "        ends = lengths.cumsum() - 1\n"
        "        token_rewards[ends] += config.gamma * values[ends]\n",
        (_CRITIC_TEST,),
        _CRITIC,
    ),
    Fault(
        "the base as reference with its adapters on: they are 0 at first",
        "model/policy.py",
        "    with lora.adapters_off(policy.model):\n        scores: Scores = policy(batch)\n",
        "    if True:\n        scores: Scores = policy(batch)\n",
        (_CHECK,),
        ("model.lora.rank=4", "loss.kl_coef=0.01"),
    ),
    Fault(
        "a teacher's lesson one token off, from the second row on",
        "signals/teacher.py",
        "            row.teacher_signal = self._make_signal(row, scored, requests)\n",
        "            row.teacher_signal = self._make_signal(row, scored, requests)\n"
        "            if row is not batch.micro_batches[0]:\n"
        "                off = row.teacher_signal.logprobs.roll(1)\n"
        "                signal = dataclasses.replace(row.teacher_signal, logprobs=off)\n"
        "                row.teacher_signal = signal\n",
        ("tests/ranks/test_teacher.py",),
        ("teacher.path={made}/model", "training.max_tokens_per_micro_batch=128"),
    ),
    Fault(
        "evaluation at the training's temperature",
        "rollout/evaluate.py",
        "            evaluation=self.config,\n",
        "            evaluation=None,\n",
        (_EVALUATE,),
        ("eval.every_steps=2", "data.eval={made}/train.jsonl", "eval.temperature=0.6"),
    ),
    Fault(
        "evaluation of episodes at the training's temperature",
        "episodes/environments.py",
        '            "evaluation": evaluation,\n',
        '            "evaluation": None,\n',
        (_EVALUATE,),
    ),
    Fault(
        "token_scores: the entropy of the token before",
        "observe/token_scores.py",
        "                entropy,\n                micro_batch.advantages,\n",
        "                entropy.roll(1),\n                micro_batch.advantages,\n",
        ("tests/unit/test_token_scores.py",),
        ("logging.rollouts_every_steps=1",),
    ),
    Fault(
        "a judge's answer to the completion before",
        "rollout/reward_models.py",
        "            reply = replies.get(key)\n",
        "            reply = replies.get(keys[number - 1])\n",
        ("tests/unit/test_engine_judge.py",),
    ),
    Fault(
        "an agent answered with its turn before",
        "episodes/environments.py",
        _ANSWER,
        "kept = self.endpoint.__dict__.setdefault('kept', {})\n"
        "            before = kept.get(episode.conversation, answer)\n"
        "            kept[episode.conversation] = answer\n            "
        + _ANSWER.replace("answer.message", "before.message"),
        ("tests/unit/test_agent.py",),
    ),
    Fault(
        "speculation: drafts are taken without a check",
        "engine/speculation.py",
        "            num_kept = 1 + next(differing, number)\n",
        "            num_kept = 1 + number\n",
        (_SPECULATION,),
        _SPECULATED,
    ),
    Fault(
        "speculation: the noise of places that were not kept is used up",
        "engine/speculation.py",
        "                generators[place].set_state(generators.states[place + num_kept])\n",
        "                pass\n",
        (_SPECULATION,),
        _SPECULATED,
    ),
    Fault(
        "routes: those of the token before, as the engine records them",
        "engine/routes.py",
        "experts[:num_tokens].numpy()",
        "experts[:num_tokens].roll(1, 0).numpy()",
        ("tests/ranks/test_router_replay.py::test_recorded_routes_are_those_of_transformers",),
        _ROUTED,
    ),
    Fault(
        "routes: those of the token before, in the row",
        "learn/assemble.py",
        "        blocks += [routes, *[last] * num_missing]\n",
        "        blocks += [np.roll(routes, 1, 0), *[last] * num_missing]\n",
        (_ROUTES,),
        _ROUTED,
    ),
    Fault(
        "routes: an episode's or a long prompt's of a later reading",
        "learn/contexts.py",
        "    return np.concatenate([earlier, later[len(earlier) :]])\n",
        "    return later\n",
        (_ROUTES,),
    ),
    Fault(
        "routes: the router's gradient is cut",
        "model/routing.py",
        "            return args[0].gather(-1, self._experts), self._experts\n",
        "            return args[0].detach().gather(-1, self._experts), self._experts\n",
        (_ROUTES,),
        _ROUTED,
    ),
    Fault(
        "routes: the load-balance loss is reported and not learned from",
        "model/routing.py",
        "        return grad, grad.new_ones((), dtype=torch.float64)\n",
        "        return grad, grad.new_zeros((), dtype=torch.float64)\n",
        (_ROUTES,),
        _ROUTED,
    ),
    Fault(
        "routes: the load-balance loss has those of this rank only",
        "learn/update.py",
        "    sum_in_place(counts)\n",
        "",
        ("tests/ranks/test_router_partition.py",),
        _ROUTED,
    ),
    Fault(
        "packed rows: a recurrent state is not reset between sequences of one length",
        "model/families/build.py",
        _BY_SEQUENCE,
        _BY_SEQUENCE.replace("row.unflatten(0, run)", "row[None]"),
        (_PACKED_HYBRID,),
        overrides=_HYBRID,
    ),
    Fault(
        "packed rows: a convolution reads the last tokens of the neighbour",
        "model/families/build.py",
        _BY_SEQUENCE,
        "            self._module_forward(torch.cat([row.unflatten(0, run).roll(1, 0)[:, -3:], "
        "row.unflatten(0, run)], 1), *args, **options)[:, -run[1]:].flatten(0, 1)\n",
        (_PACKED_HYBRID,),
        overrides=_HYBRID,
    ),
    Fault(
        "shared prefixes: a branch sees its sibling",
        "learn/prefix_tree.py",
        _PATHS,
        f"{_PATHS}    paths = [(*path, i - 1) if path and paths[i - 1] == path else path "
        "for i, path in enumerate(paths)]\n",
        (_PREFIX_TREE,),
        overrides=_SHARED_PREFIXES,
    ),
    Fault(
        "shared prefixes: a branch's positions go on after its sibling's",
        "model/attention.py",
        "batch.position_ids[tree.tokens][None]",
        "torch.arange(len(tree.tokens), device=tree.tokens.device)[None]",
        (_PREFIX_TREE,),
        overrides=_SHARED_PREFIXES,
    ),
    Fault(
        "shared prefixes: the gradient of a prefix's keys is that of one branch",
        "model/attention.py",
        _BRANCH,
        _BRANCH.replace("accumulate=True", "accumulate=False"),
        (_PREFIX_TREE,),
        overrides=_SHARED_PREFIXES,
    ),
)


# Made in every copy, also in the one without a fault: the matrix of world sizes 1 to 4 takes three
# times as long as
# that of 1 and 2.
SHORTER = Fault(
    "", "../tests/ranks/test_partition.py", "WORLD_SIZES = (1, 2, 3, 4)", "WORLD_SIZES = (1, 2)", ()
)


def plant(root: Path, fault: Fault, *, write: bool = True) -> None:
    """Make the edit below `root`, or only try it.

    Raises:
        ValueError: its text is not there exactly once, or what results is no Python.
    """
    path = root / "grpo_spmd" / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(
            f"{fault.name}: {fault.file} holds {text.count(fault.old)} times, not "
            f"once:\n{fault.old}"
        )
    text = text.replace(fault.old, fault.new)
    try:
        # Python 3.11 counts its parser's recursion over all threads, and several plant at once.
        with _PARSER:
            ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{fault.name}: {fault.file} does not parse: {error}") from None
    if write:
        path.write_text(text, encoding="utf-8")


def problems(root: Path) -> list[str]:
    """Of faults that can not be planted, and tests that are not there. Cheap: nothing is imported
    or run."""
    result = []
    for fault in (*FAULTS, SHORTER):
        try:
            plant(root, fault, write=False)
        except (OSError, ValueError) as error:
            result.append(str(error))
        for test in fault.tests:
            file, _, name = test.partition("[")[0].partition("::")
            if not (root / file).exists() or f"def {name}" not in (root / file).read_text(
                encoding="utf-8"
            ):
                result.append(f"{fault.name}: there is no test {test}")
    return result
