"""The story: the order of the phases, nothing else. A phase's name is its timer, its metrics' prefix and its limit."""

from __future__ import annotations

from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.preemption import Preempted
from grpo_spmd.learn.assemble import assemble_batch, penalise_rewards_by_kl
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import attach_logprobs
from grpo_spmd.parts import Run, open_run


def train(config: Config, inputs: Inputs) -> bool:
    """Collective. One whole run; True when it came to its end, or was preempted with everything saved."""
    run = open_run(config, inputs)
    if run is None:  # it has come to its end before
        return True
    try:
        for step in run.steps():  # asks each time whether the run has to stop
            _train_step(run, step)
        _finish(run)
    except Preempted as preempted:
        with run.phase("checkpoint"):
            run.save_begun_step(str(preempted))
    run.close()
    return True


def _train_step(run: Run, step: int) -> None:
    config, log, phase = run.config, run.log, run.phase
    with phase("weight_sync"):
        sync_stats = run.weight_sync.sync(step)
    with phase("eval"):
        log.write_evaluation(
            step - 1, run.evaluator.evaluate_if_due(step - 1)
        )  # of the policy so far
    sampled, generation_s = SampledStep(run.step_rules), list[float]()
    while sampled.num_missing:  # once, unless dynamic sampling has to refill the step
        with phase("rollout"):
            prompts = run.stream.take(sampled.num_missing)
            groups, seconds = run.sampler.sample(prompts, step, sync_stats.weights_id)
            generation_s.append(seconds)
        with phase("reward"), run.dump.if_refused(step, sampled):
            sampled.add(groups, run.score(groups, num_step_completions=sampled.num_completions))
    with phase("rollout"):
        log.record_largest(run.hand_device_to_trainer())
    with phase("reward"), run.dump.if_refused(step, sampled):
        batch, decision = assemble_batch(sampled, run.session)
    with phase("logprobs"):
        check, keep = run.preemption.check_in_update, run.dump.keep_scores_if_due(step)
        attach_logprobs(
            run.policy,
            run.reference,
            batch,
            config.loss,
            config.training.num_optimizer_steps,
            check,
            keep,
        )
        decision = penalise_rewards_by_kl(batch, decision, config.loss, config.advantage)
        decision = run.signals.attach(batch, decision, check)
    with phase("reward"):
        run.dump.write_if_due(step, sampled, decision)
    run.preemption.check_before_update()
    with phase("update"):
        run.update_check.run_if_due(step, sampled, batch, decision)
        update = run.updater.measure if run.signals.freezes_policy(step) else run.updater.update
        sums = update(batch, run.update_check, check, keep) | run.signals.update(batch)
    log.record_largest(run.update_check.metrics())
    run.dump.write_updated(step, sampled, decision, sums, keep)
    counts = run.progress.count(
        sampled.num_completions, decision.num_sampled_tokens, run.stream.epoch
    )
    log.record_largest(counts | run.stream.metrics())
    log.check_step(
        step, decision, sync_stats, sums, generation_s
    )  # before a checkpoint is made of it
    with phase("checkpoint"):
        run.checkpoints.stage_if_due(step, run.stream.position, run.log_state())
    log.end_step(step, decision)
    run.checkpoints.write_staged()  # in the background, now that the step's line is on disk


def _finish(run: Run) -> None:
    """After the last step: evaluate the policy that the run ends with, wait for its checkpoint, say how it went."""
    num_steps = run.config.training.num_steps
    if run.config.eval.every_steps:
        run.begin_step(num_steps + 1)
        with run.phase("weight_sync"):
            run.weight_sync.sync(num_steps + 1)
        with run.phase("eval"):
            run.log.write_evaluation(num_steps, run.evaluator.evaluate(num_steps))
    with run.phase("checkpoint"):
        run.checkpoints.wait()
    run.log.end_run()
