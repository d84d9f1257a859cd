"""The training loop: the phases of a step in their order, and nothing else.

A phase is a named section of a step, such as "rollout" or "update". Its name is used for its timer,
as the prefix of its metrics, and for its time limit in the config. parts.py builds the parts that
the loop calls.
"""

from __future__ import annotations

from grpo_spmd.checks.inputs import Inputs
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.preemption import Preempted
from grpo_spmd.learn.assemble import assemble_batch, penalise_rewards_by_kl
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import attach_logprobs
from grpo_spmd.parts import Run, open_run


def train(config: Config, inputs: Inputs) -> bool:
    """Collective. Trains until the run is finished or preempted, and returns True in both cases.

    A preempted run has saved its state. If an earlier launch has finished the run, nothing is done.
    Errors are raised.
    """
    run = open_run(config, inputs)
    # An earlier launch has finished this run.
    if run is None:
        return True
    try:
        # steps() raises Preempted before a step if the run has to stop.
        for step in run.steps():
            _train_step(run, step)
        _finish(run)
    except Preempted as preempted:
        with run.phase("checkpoint"):
            run.save_begun_step(str(preempted))
    run.close()
    return True


def _train_step(run: Run, step: int) -> None:
    """Collective. Samples the rollouts of one step, scores them and trains on them."""
    config = run.config
    log = run.log
    phase = run.phase
    with phase("weight_sync"):
        sync_stats = run.weight_sync.sync(step)
    with phase("eval"):
        # The engine now has the weights after `step - 1` steps.
        log.write_evaluation(step - 1, run.evaluator.evaluate_if_due(step - 1))
    sampled = SampledStep(run.step_rules)
    generation_s: list[float] = []
    # One round is enough, unless dynamic sampling drops groups, which are then replaced.
    while sampled.num_missing:
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
    stop_check = run.preemption.check_in_update
    kept_scores = run.dump.keep_scores_if_due(step)
    with phase("logprobs"):
        route_metrics = attach_logprobs(
            run.policy,
            run.reference,
            batch,
            config.loss,
            num_optimizer_steps=config.training.num_optimizer_steps,
            stop_check=stop_check,
            keep_scores=kept_scores,
        )
        decision = penalise_rewards_by_kl(batch, decision, config.loss, config.advantage)
        decision = run.signals.attach(batch, decision, stop_check, sampled)
    with phase("reward"):
        run.dump.write_if_due(step, sampled, decision)
    run.preemption.check_before_update()
    with phase("update"):
        run.update_check.run_if_due(step, sampled, batch, decision)
        # In the critic's warm-up steps only the critic is trained: the policy's loss is measured.
        update = run.updater.measure if run.signals.freezes_policy(step) else run.updater.update
        sums = update(batch, run.update_check, stop_check, kept_scores)
        sums |= run.signals.update(batch) | route_metrics
        sums |= run.sampler.engine.take_speculation()
    log.record_largest(run.update_check.metrics())
    run.dump.write_updated(step, sampled, decision, sums, kept_scores)
    counts = run.progress.count(
        sampled.num_completions, decision.num_sampled_tokens, run.stream.epoch
    )
    log.record_largest(counts | run.stream.metrics())
    # This comes before the checkpoint: a step that fails its checks must not be saved.
    log.check_step(step, decision, sync_stats, sums, generation_s)
    with phase("checkpoint"):
        run.checkpoints.stage_if_due(step, run.stream.position, run.log_state())
    log.end_step(step, decision)
    # The staged checkpoint is written in the background. This comes last, so that the metrics of
    # every step that a checkpoint contains are on disk.
    run.checkpoints.write_staged()


def _finish(run: Run) -> None:
    """Collective. Ends a run after its last step: evaluates the policy, and waits for the save.

    The final policy is evaluated if the config has evaluations. The last checkpoint is still being
    written in the background.
    """
    num_steps = run.config.training.num_steps
    if run.config.eval.every_steps:
        run.begin_step(num_steps + 1)
        with run.phase("weight_sync"):
            run.weight_sync.sync(num_steps + 1)
        with run.phase("eval"):
            run.log.write_evaluation(num_steps, run.evaluator.evaluate(num_steps))
    with run.phase("checkpoint"):
        run.checkpoints.wait()
    run.log_diagnosis()
    run.log.end_run()
