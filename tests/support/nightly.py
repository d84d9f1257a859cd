"""The tests that only `tests/run.sh --nightly` runs, each with the reason why CI can do without it.

A key is a file below tests/, or a file and the beginning of test names in it. An entry is one more
variant of something that an unmarked test shows already, or a benchmark's own test.
`tests/conftest.py` marks them.
"""

from __future__ import annotations

NIGHTLY: dict[str, str] = {
    # whole runs
    "runs/test_demos.py": "the plain demo learns in runs/test_end_to_end.py; these are its five "
    "variants",
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
    "runs/test_prefetch.py": "unit/test_early.py has the hub's refusals, this whole downloads",
    # benchmarks' own tests
    "runs/test_signals_benchmark.py": "a benchmark's counts",
    "runs/test_diagnosis_benchmark.py": "unit/test_diagnosis.py has each rule, this real ill runs",
    "runs/test_gpu_benchmark.py": "a benchmark's dry form",
    "runs/test_gpu_day.py": "a benchmark's dry form",
    # further families, ranks and cases
    "ranks/test_policy_critic.py": "ranks/test_critic.py has a critic of its own",
    "ranks/test_served_teacher.py::test_the_real_server": "the other tests there ask a stand-in",
    "ranks/test_weight_sync.py::test_engine_equals_transformers_after_each_of_20_updates[granite": (
        "qwen2 is tried always"
    ),
    "ranks/test_weight_sync.py::test_engine_equals_transformers_after_each_of_20_updates[llama": (
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
    "ranks/test_dry_run.py::test_ours_runs_on_a_cuda_device[figures": "counts against two real ranks",  # noqa: E501
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
    # waits of tens of seconds
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
