"""The tests that only `tests/run.sh --nightly` runs, each with the reason why CI can do without it.

A key is a file below tests/, or a file and the beginning of test names in it. An entry is one more
variant of something that an unmarked test shows already, or a benchmark's own test.
`tests/conftest.py` marks them. A fixture that makes what many tests look at makes only what
`selected_values` lists.
"""

from __future__ import annotations

from typing import Any

import pytest

NIGHTLY: dict[str, str] = {
    # whole runs
    "runs/test_demos.py": "the plain demo learns in runs/test_end_to_end.py; these are its five "
    "variants",
    "runs/test_unfinished.py": "unit/test_episodes.py has the advantages of such episodes by hand, "
    "this a training",
    "runs/test_teacher.py": "ranks/test_teacher.py has the update, this a whole run, its resume "
    "and replay",
    "runs/test_signals_together.py": "each signal has a test of its own; this combines them",
    "runs/test_ppo.py": "ranks/test_critic.py has the update, this a whole run, its resume and "
    "replay",
    "runs/test_served_teacher.py": "ranks/test_served_teacher.py has the update, this whole runs",
    "runs/test_engine_judge.py": "ranks/test_engine_judge.py has the scores, this a whole run",
    "runs/test_reward_models.py": "ranks/test_reward_models.py has the scores, this whole runs",
    "runs/test_three_ways.py": "ranks/test_episodes.py has episodes of each kind, this other "
    "trainers' code",
    "runs/test_wandb_feed.py": "faults/test_trackers.py has a killed run with W&B, this the "
    "package itself",
    "runs/test_end_to_end.py::test_chat_messages_in_parquet": "unit/test_data.py reads both",
    "runs/test_end_to_end.py::test_mini_batches_reference": "ranks/test_partition.py has the parts",
    "runs/test_end_to_end.py::test_the_whole_demo": "half of the demo is run always",
    "runs/test_end_to_end.py::test_the_first_task": "the demo learns always, and "
    "runs/test_paper_commands.py starts commands of papers",
    "runs/test_paper_commands.py::test_a_command_runs[configs/README.md: python -m "
    "grpo_spmd.plan": ("README.md's plan is started always"),
    "runs/test_paper_commands.py::test_a_command_runs[README.md: python -m grpo_spmd.replay": (
        "the replay of launch/READ_A_BAD_RUN.md is started always"
    ),
    "runs/test_paper_commands.py::test_a_command_runs[launch/README.md: torchrun --nnodes 2 "
    "--nproc-per-node 8 ... -m grpo_spmd.checkup": "faults/test_checkup.py starts it",
    "runs/test_paper_commands.py::test_a_command_runs[configs/MODELS.md: python -m "
    "grpo_spmd.plan": ("README.md's plan is started always"),
    "runs/test_scripts.py::test_a_benchmarks_environment": "a benchmark's set-up",
    "ranks/test_logit_changes.py::test_policy_and_engine_agree_on_caps_windows_and_long_rotary_"
    "factors[gemma3": "gemma2 has windows and caps",
    "runs/test_prefetch.py": "unit/test_early.py has the hub's refusals, this whole downloads",
    "runs/test_compaction.py": "unit/test_papers.py has a compacting agent, ranks/test_episodes.py "
    "forks that are trained, this the whole demo",
    # benchmarks' own tests
    "runs/test_signals_benchmark.py": "a benchmark's counts",
    "runs/test_diagnosis_benchmark.py": "unit/test_diagnosis.py has each rule, this real ill runs",
    "runs/test_gpu_benchmark.py": "a benchmark's dry form",
    "runs/test_gpu_day.py": "a benchmark's dry form",
    "unit/test_gpu_day.py::test_the_largest_size_that_fits": "a benchmark's plan; "
    "unit/test_fit.py has the planner",
    "unit/test_fit.py::test_a_model_larger_than_a_gpu_runs": "a smaller device is tried always",
    "unit/test_fit.py::test_the_planner_refuses_what_no_choice_fits": "as the one before; "
    "unit/test_plan.py has plans that do not fit",
    "ranks/test_partition.py::test_the_update_of_experts_does_not_depend_on_the_split": (
        "ranks/test_router_partition.py has the splits of experts with recorded routes"
    ),
    "ranks/test_hybrid.py::test_an_update_does_not_depend_on_the_split": "the gradients of packed "
    "rows are compared always with plain transformers, and the splits of a model of attention",
    "ranks/test_hybrid.py::test_packed_rows_are_those_of_transformers_sequence_by_sequence[1": (
        "two ranks are tried always"
    ),
    "ranks/test_hybrid.py::test_the_engine_stays_as_near_as_at_the_start_and_is_that_of_the_files"
    "[qwen3_5_moe": "the dense one is tried always",
    "ranks/test_experts.py::test_engine_equals_transformers_after_each_update[mixtral": (
        "qwen3_moe is tried always"
    ),
    "ranks/test_experts.py::test_engine_equals_transformers_after_each_update[glm4": (
        "qwen3_moe is tried always"
    ),
    "ranks/test_experts.py::test_the_gradient_is_that_of_transformers_and_wrong_experts_are_seen"
    "[granitemoe": "glm4_moe is tried always",
    "ranks/test_experts.py::test_the_gradient_is_that_of_transformers_and_wrong_experts_are_seen"
    "[qwen2_moe": "glm4_moe is tried always",
    "ranks/test_router_replay.py::test_recorded_routes_are_those_of_transformers[granite": (
        "qwen3_moe is tried always"
    ),
    "ranks/test_experts.py::test_a_run_is_resumed_to_the_bit_and_its_export_has_the_weights_by_"
    "expert[glm4": "qwen3_moe is tried always",
    "ranks/test_fused_logprobs.py::test_a_run_with_the_kernels": "the kernels are compared with "
    "float64 always",
    # further families, ranks and cases
    "ranks/test_policy_critic.py": "ranks/test_critic.py has a critic of its own",
    "ranks/test_served_teacher.py::test_the_real_server": "the other tests there ask a stand-in",
    "ranks/test_weight_sync.py::test_engine_equals_transformers_after_each_update[granite": (
        "qwen2 is tried always"
    ),
    "ranks/test_weight_sync.py::test_engine_equals_transformers_after_each_update[llama": (
        "qwen2 is tried always"
    ),
    "ranks/test_families.py::test_a_family_trains_at_rounding_and_its_sync_is_proved_whole[glm4": (
        "phi3 is tried always"
    ),
    "ranks/test_families.py::test_a_family_trains_at_rounding_and_its_sync_is_proved_whole[smollm3": (  # noqa: E501
        "phi3 is tried always"
    ),
    "ranks/test_families.py::test_a_family_trains_at_rounding_and_its_sync_is_proved_whole[olmo": (
        "phi3 is tried always"
    ),
    "ranks/test_families.py::test_a_family_trains_at_rounding_and_its_sync_is_proved_whole[gpt": (
        "phi3 is tried always"
    ),
    "ranks/test_dry_run.py::test_ours_runs_on_a_cuda_device[figures": "as the next",
    "ranks/test_dry_run.py::test_bytes_and_collectives": "counts against two real ranks; those "
    "of a rank of 64 are worked out by hand always",
    "runs/test_end_to_end.py::test_a_named_recipe_trains[opd": "dapo is tried always, and "
    "ranks/test_recipes.py has the update of each",
    "runs/test_end_to_end.py::test_a_named_recipe_trains[reinforce_pp": "as opd",
    "runs/test_scripts.py::test_the_demo_refuses": "unit/test_bad_inputs.py has the refusals, this "
    "the script's set-up before them",
    "ranks/test_lora.py::test_two_steps_of_the_real_loop[merged": "the adapters' sync is tried "
    "always, and both are proved after each sync",
    "ranks/test_proofs.py::test_every_planted_fault_is_seen_and_nothing_else[llama": (
        "qwen2 in bfloat16 on two ranks is tried always"
    ),
    "ranks/test_proofs.py::test_every_planted_fault_is_seen_and_nothing_else[qwen2-True-1": (
        "as llama"
    ),
    "ranks/test_proofs.py::test_the_check_of_the_update_sees_planted_faults_and_changes_no_bit[clean": (  # noqa: E501
        "every run of the suite is a clean one, and ranks/test_proof_switches.py has its bits"
    ),
    "ranks/test_partition.py::test_loss_gradient_and_parameters_do_not_depend_on_the_split[4": (
        "1 and 2 ranks are tried always"
    ),
    "ranks/test_partition.py::test_loss_gradient_and_parameters_do_not_depend_on_the_split[3": (
        "1 and 2 ranks are tried always"
    ),
    **{
        "ranks/test_partition.py::test_scores_of_tokens_are_those_of_plain_transformers_however_"
        f"the_work_is_split[{num_ranks}": "1 and 2 ranks are tried always"
        for num_ranks in (3, 4)
    },
    **{
        "ranks/test_partition.py::test_loss_gradient_and_parameters_do_not_depend_on_the_split"
        f"[{num_ranks}-{setting}": "all settings are compared always with plain transformers, on 2 "
        "ranks, and all splits of two settings on 1 and 2"
        for num_ranks in (1, 2)
        for setting in (
            "clip",
            "gspo",
            "cispo",
            "sequence",
            "icepop",
            "kl",
            "reinforce_pp",
            "max_rl",
            "mask",
        )
    },
    **{
        f"ranks/test_reward_models.py::{test}": "two ranks are tried always"
        for test in (
            "test_scores_are_those_of_transformers[one",
            "test_the_budget_of_a_row_does_not_change_a_score[one",
            "test_ranks_do_not_change_a_score",
            "test_rounding_in_bfloat16_passes_the_running_check[one",
            "test_the_running_check_sees[one",
            "test_a_model_that_waits_in_host_memory_refuses_to_score[one",
        )
    },
    **{
        f"ranks/test_engine_judge.py::{test}[1": "2 ranks are tried always, each of which judges"
        for test in (
            "test_replies_and_scores_are_those_of_transformers",
            "test_a_fault_would_be_seen",
        )
    },
    "ranks/test_critic.py::test_planted_faults_are_seen[1": "2 ranks are tried always",
    "ranks/test_teacher.py::test_planted_faults_are_seen[1": "2 ranks are tried always",
    "ranks/test_served_teacher.py::test_planted_faults_are_seen": "ranks/test_teacher.py has a "
    "teacher's faults, unit/test_served_teacher.py what a server may answer",
    "ranks/test_fused_logprobs.py::test_kernels_equal_float64_in_the_interpreter[all": (
        "some shapes are tried always"
    ),
    "ranks/test_fused_logprobs.py::test_kernels_compile_for_real_gpus[all": (
        "H100 is tried always"
    ),
    "unit/test_fit.py::test_the_planner_takes_the_cheapest": "a smaller device is tried always",
    "ranks/test_rollout.py::test_a_whole_run_is_the_same": "the tokens of both schedules are "
    "compared always",
    "ranks/test_memory.py::test_a_run_with_offload": "three steps with offload are compared always",
    "ranks/test_episodes.py::test_failures_are_counted": "faults/test_environment_pool.py has "
    "environments that fail, and unit/test_episodes.py what becomes of their episodes",
    "ranks/test_episodes.py::test_a_run_killed": "unit/test_kept_episodes.py has what is kept of "
    "episodes, faults/test_resume.py runs that are killed, and ranks/test_rollout_buffer.py steps",
    **{
        "runs/test_report_page.py::test_every_view_is_shown_without_an_error_or_a_request"
        f"[{run}-390": "each run is shown always at 1280, and two at 390"
        for run in ("killed", "crashed", "two", "episode", "thousand")
    },
    "unit/test_plan.py::test_what_a_rank_holds_on_a_cpu_is_predicted_within_three_percent"
    "[overrides1": "offload is tried always",
    "unit/test_plan.py::test_what_fake_tensors_do_otherwise_than_real_ones_is_known[overrides1": (
        "a tied model is tried always"
    ),
    "faults/test_early_scoring.py::test_what_was_begun_early_is_scored_as_ever[early1": (
        "early0 is tried always"
    ),
    "faults/test_sandbox.py::test_many_pairs_are_zero_and_not_unknown[False": (
        "partial credit is tried always"
    ),
    # waits of tens of seconds
    "faults/test_doctor.py::test_a_raise_ends_all_ranks_with_its_traceback[0": "rank 1 is tried "
    "always in each phase, and rank 0 where nobody reads",
    **{
        "faults/test_doctor.py::test_the_rank_that_sleeps_is_named_not_the_one_that_waits"
        f"[{rank}": "a rank that samples, scores and updates is tried always"
        for rank in ("0 weight_sync", "1 eval", "0 logprobs", "0 checkpoint")
    },
    **{
        f"faults/test_doctor.py::test_the_end_waits_for_nobody_who_reads_it[{fault}": (
            "each kind of reader is tried always with a raise"
        )
        for fault in ("0 rollout sleep", "1 logprobs sleep", "1 eval sleep", "0 checkpoint stop")
    },
    **{
        f"faults/test_preemption.py::test_all_ranks_stop_alike_and_leave_a_marker[{case}": (
            "SIGUSR1 to a rank is tried always, and SIGTERM to torchrun in faults/test_resume.py"
        )
        for case in ("SIGTERM to torchrun", "SIGUSR1 to torchrun", "SIGHUP")
    },
    "faults/test_doctor.py::test_a_raise_on_one_host": "one host is tried always",
    "faults/test_doctor.py::test_both_hosts": "one host is tried always",
    "faults/test_checkup.py::test_a_rank_that_hangs": "a rank that differs is tried always",
    "faults/test_checkup.py::test_a_rank_that_does_not_come": "a rank that differs is tried always",
    "faults/test_failures.py::test_a_reward_that_always_raises": "a raise in each phase is tried always",  # noqa: E501
    "faults/test_ctrl_c.py::test_it_leaves_in_time_and_without_a_trace[set-up": (
        "Ctrl-C in a run is tried always"
    ),
    "faults/test_early_scoring.py::test_a_run_that_dies": "faults/test_resume.py has kills",
    "faults/test_ctrl_c.py::test_a_run_that_scores": "Ctrl-C in the other phases is tried always",
    "faults/test_checkup.py::test_two_hosts[False": "hosts that see each other are tried always",
    "faults/test_checkup.py::test_ranks_of_srun": "torchrun's ranks are tried always",
    "faults/test_checkup.py::test_a_rank_without": "ranks that differ are tried always",
    "faults/test_checkup.py::test_what_check_and_planner": "runs/test_paper_commands.py calls both",
    "faults/test_environment_pool.py::test_what_hangs_is_killed_with_all_that_it_started[ignore": (
        "a plain hang is tried always"
    ),
    "faults/test_environment_pool.py::test_what_hangs_is_killed_with_all_that_it_started[daemon": (
        "a plain hang is tried always"
    ),
    "faults/test_environment_pool.py::test_a_breakpoint": "a reward's is tried always",
    "faults/test_node_script.py::test_the_nodes_of_skypilot": "a pod of Kubernetes is tried always",
    "faults/test_setup_script.py": "CI itself runs the script",
}


def is_nightly(node_id: str) -> bool:
    """Whether a test, named as pytest names it from the repository's root, is in NIGHTLY."""
    name = node_id.removeprefix("tests/")
    return any(name.startswith(key) for key in NIGHTLY)


def selected_values(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Returns the values that a parameter has in this file's selected tests, each once."""
    values = [
        item.callspec.params[parameter]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
        and parameter in item.callspec.params
    ]
    return list(dict.fromkeys(values))
