"""`grpo-spmd port`: what scripts of other trainers become, worked by hand. None is ever run."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.coerce import find_alias, key_names, read_table
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.tools import port
from grpo_spmd.tools.port import Unreadable, read_script

VERL = "python3 -m verl.trainer.main_ppo "
OPENRLHF = "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray "
TRL = "accelerate launch --num_processes 4 train.py --output_dir out "


def script(folder: Path, text: str, name: str = "run.sh") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def ported(folder: Path, text: str, name: str = "run.sh") -> port.Port:
    path = script(folder, text, name)
    return port.translate(read_script(path, []), {}, path.stem)


def values(result: port.Port) -> dict[str, Any]:
    return {key: entry.value for key, entry in result.entries.items()}


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        # 8 completions a GPU x 4 GPUs x 8 = 256 completions, of 8 a prompt: 32 prompts; an update
        # has 2 of the 8 passes: 4 updates a rollout. 100 updates are 25 rollouts.
        (
            TRL + "--per_device_train_batch_size 8 --gradient_accumulation_steps 2 "
            "--steps_per_generation 8 --num_generations 8 --max_steps 100",
            {},
            {
                "rollout.num_prompts_per_step": 32,
                "training.num_mini_batches": 4,
                "training.num_steps": 25,
            },
        ),
        # Their defaults: 8 x 4 x 1 / 8 prompts, an update a rollout; 3 epochs of 100 rows by 4.
        (
            TRL + "--learning_rate 1e-5",
            {"rows": 100},
            {
                "rollout.num_prompts_per_step": 4,
                "training.num_steps": 75,
                "optimizer.lr": 1e-5,
                "optimizer.schedule": "linear",
                "optimizer.betas": [0.9, 0.999],
                "optimizer.weight_decay": 0.0,
                "loss.clip_ratio_high": 0.2,
                "loss.dual_clip": None,
            },
        ),
        # 64 completions of 16 a prompt; 64 / (8 x 4) = 2 passes, one for each update. A tenth of
        # 10 rollouts x 2 updates.
        (
            TRL + "--generation_batch_size 64 --num_generations 16 --warmup_ratio 0.1 "
            "--max_steps 20",
            {},
            {
                "rollout.num_prompts_per_step": 4,
                "training.num_mini_batches": 2,
                "optimizer.warmup_steps": 2,
            },
        ),
        (
            TRL + "--loss_type cispo --epsilon_high 5.0 --scale_rewards False --beta 0.04",
            {},
            {
                "loss.policy": "cispo",
                "loss.clip_ratio_low": 1,
                "loss.clip_ratio_high": 4,
                "loss.aggregation": "token",
                "loss.kl_coef": 0.04,
                "advantage.normalize_std": "none",
            },
        ),
        (
            TRL + "--importance_sampling_level sequence --loss_type grpo --epsilon 3e-4 "
            "--epsilon_high 4e-4",
            {},
            {
                "loss.policy": "gspo",
                "loss.aggregation": "sequence",
                "loss.clip_ratio_low": 3e-4,
                "loss.clip_ratio_high": 4e-4,
            },
        ),
        (TRL + "--scale_rewards mean", {}, {"advantage.estimator": "max_rl"}),
        (TRL + "--use_peft", {}, {"model.lora.rank": 16}),
        (TRL + "--max_tool_calling_iterations 5", {}, {"environment.max_turns": 6}),
        # Prompts on both sides; 1024 / 256 updates; 15 epochs of 7473 rows by 1024: 109.5 steps.
        (
            VERL + "algorithm.adv_estimator=grpo data.train_batch_size=1024 "
            "actor_rollout_ref.actor.ppo_mini_batch_size=256 trainer.total_epochs=15 "
            "actor_rollout_ref.rollout.n=5",
            {"rows": 7473},
            {
                "rollout.num_prompts_per_step": 1024,
                "rollout.group_size": 5,
                "training.num_mini_batches": 4,
                "training.num_steps": 110,
            },
        ),
        (
            VERL + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
            "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 "
            "actor_rollout_ref.actor.kl_loss_type=mse algorithm.norm_adv_by_std_in_grpo=False "
            "actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.optim.min_lr_ratio=0.1 "
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
            {},
            {
                "loss.kl_in": "loss",
                "loss.kl_coef": 0.01,
                "loss.kl_estimator": "k2",
                "advantage.normalize_std": "none",
                "loss.rollout_correction": "none",
                "optimizer.min_lr": 2e-7,
            },
        ),
        (
            VERL + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 "
            "algorithm.use_kl_in_reward=True",
            {},
            {"loss.kl_in": "reward", "loss.kl_coef": 0.001, "loss.kl_estimator": "k1"},
        ),
        # 128 prompts x 8 / 512 completions an update; a twentieth of 50 steps x 2 updates. A
        # tenth of the learning rate is left at the end.
        (
            OPENRLHF + "--rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 512 "
            "--advantage_estimator group_norm --actor_learning_rate 5e-7 --lr_warmup_ratio 0.05 "
            "--eps_clip_low_high 0.2 0.3 --prompt_data org/set --init_kl_coef 1e-3 --use_kl_loss "
            "--kl_estimator k3 --remote_rm_url /x/reward_func.py",
            {"rows": 6400},
            {
                "training.num_mini_batches": 2,
                "training.num_steps": 50,
                "optimizer.warmup_steps": 5,
                "optimizer.schedule": "cosine",
                "optimizer.min_lr": 5e-8,
                "loss.clip_ratio_high": 0.3,
                "loss.kl_in": "loss",
                "data.train": "hub:org/set::train",
                "rewards": [{"function": "/x/reward_func.py:reward_func"}],
            },
        ),
        # The names with sections; a prompt has what is left of max_len.
        (
            OPENRLHF + "--rollout.batch_size 64 --rollout.n_samples_per_prompt 4 "
            "--train.batch_size 64 --data.max_len 3000 --rollout.max_new_tokens 1000 "
            "--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0",
            {},
            {
                "rollout.num_prompts_per_step": 64,
                "training.num_mini_batches": 4,
                "data.max_prompt_tokens": 2000,
                "advantage.estimator": "grpo",
                "advantage.normalize_std": "batch",
            },
        ),
    ],
)
def test_settings_are_translated_with_their_arithmetic(
    tmp_path: Path, command: str, options: dict[str, int], expected: dict[str, Any]
) -> None:
    path = script(tmp_path, command)
    found = values(port.translate(read_script(path, []), options, path.stem))
    wrong = {
        key: (found.get(key, "absent"), value)
        for key, value in expected.items()
        if str(found.get(key, "absent")) != str(value)
        and (not isinstance(value, float) or found[key] != pytest.approx(value))
    }
    # What equals a default of ours need not be written.
    defaults = {"advantage.estimator": "grpo", "loss.kl_in": "loss", "loss.clip_ratio_low": 0.2}
    assert {key: pair for key, pair in wrong.items() if defaults.get(key) != pair[1]} == {}


PYTHON = """
    import os
    os.remove(__file__)  # a script that is run would be gone
    MODEL = "org/model"
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    args = parser.parse_args()
    dataset = load_dataset("org/set", "main", split="train[:5%]")
    dataset = dataset.map(lambda row: row)
    config = GRPOConfig(
        output_dir="out", learning_rate=args.learning_rate, max_completion_length=2 * 512,
        reward_weights=[1.0, 0.5], num_generations=4, beta=beta_of(MODEL), top_k=20,
        save_strategy="no", nonsense=1, delta=None, sync_ref_model=False,
    )
    config.loss_type = "dr_grpo"
    class Environment:
        def __init__(self):
            self.max_steps = 9
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL), args=config, train_dataset=dataset,
        reward_funcs=[right, "org/rm"], tools=[look_up],
        rollout_func=play, peft_config=LoraConfig(lora_alpha=64),
    )
"""


def test_a_python_script_is_read_and_not_run(tmp_path: Path) -> None:
    result = ported(tmp_path, PYTHON, "train.py")
    found = values(result)
    assert (tmp_path / "train.py").exists()
    expected = {
        "run_dir": "out",
        "model.path": "org/model",
        "data.train": "hub:org/set:main:train[:5%]",
        "optimizer.lr": 3e-6,
        "rollout.max_completion_tokens": 1024,
        "rollout.group_size": 4,
        "loss.aggregation": "constant",
        "environment.tools": ["train_functions.py:look_up"],
        "rewards": [
            {"function": "train_functions.py:right", "weight": 1.0},
            {"model": "org/rm", "weight": 0.5},
        ],
        # peft's own default, which is not that of TRL's flag (16).
        "model.lora.rank": 8,
        "model.lora.alpha": 64,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert result.notes["nonsense"] == "by hand: not known"
    assert result.notes["top_k"].startswith("by hand: nothing here (training samples from the")
    assert "beta is no plain value: beta_of(MODEL)" in result.notes["beta"]
    assert "loss.kl_coef" not in found
    assert "training.num_steps" not in found  # self.max_steps is another thing
    assert "--rows is not given" in result.notes["training.num_steps"]
    # Suggested keys alone are no counterpart.
    assert result.notes["rollout_func"].startswith("by hand: here environment.gym")
    assert result.notes["ranks"].startswith("decided here: 1 GPU")
    assert result.notes["train_functions.py"].startswith("by hand: copy functions, tools and")


def test_the_defaults_of_rloo_are_its_own(tmp_path: Path) -> None:
    found = values(ported(tmp_path, "RLOOTrainer(model='m', args=RLOOConfig())", "x.py"))
    expected = {
        "advantage.estimator": "rloo",
        "rollout.group_size": 2,
        "loss.kl_coef": 0.05,
        "loss.kl_in": "reward",
        "loss.kl_estimator": "k1",
    }
    assert {key: found.get(key) for key in expected} == expected


def test_every_setting_is_either_used_or_noted(tmp_path: Path) -> None:
    path = script(tmp_path, PYTHON, "train.py")
    read = read_script(path, [])
    result = port.translate(read, {}, "train")
    used = {name for entry in result.entries.values() for name in entry.settings}
    off = {name for name, value in read.settings.items() if value is False}
    assert {*read.settings} <= used | result.notes.keys() | off
    assert read.settings["beta"] == Unreadable("beta_of(MODEL)")


def test_a_shell_script_has_its_variables_arrays_comments_and_quotes(tmp_path: Path) -> None:
    text = r"""
    set -x
    # data.train_batch_size=1 \
    export TRAIN=$HOME/data/gsm8k/train.parquet
    tests="['$HOME/a/gsm8k/test.parquet', '$HOME/a/math/test.parquet']"
    batch=${BATCH:-64}   # a default
    length=$((1024 * 2 + batch))
    MORE=(
       actor_rollout_ref.rollout.n=4
       # actor_rollout_ref.rollout.n=5
       +trainer.logger='["console","wandb"]'
    )
    python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo data.train_files=$TRAIN data.val_files="$tests" \
        data.train_batch_size=$batch actor_rollout_ref.actor.ppo_mini_batch_size=$batch \
        data.max_response_length=$length \
        trainer.experiment_name='a b' trainer.test_freq=5 trainer.save_freq=-1 \
        actor_rollout_ref.model.path=$NOWHERE/model ${MORE[@]} $@
    """
    result = ported(tmp_path, text)
    found = values(result)
    expected = {
        "run_dir": "runs/a b",
        "data.train": "~/data/gsm8k/train.parquet",
        "data.eval": {"gsm8k": "~/a/gsm8k/test.parquet", "math": "~/a/math/test.parquet"},
        "rollout.max_completion_tokens": 2112,
        "rollout.group_size": 4,
        "eval.every_steps": 5,
        "checkpoint.every_steps": 0,
        "logging.trackers": ["wandb"],
        "model.path": "MODEL",
    }
    assert {key: found.get(key) for key in expected} == expected
    # 64 prompts, the default of ours, come of the script all the same.
    assert result.entries["rollout.num_prompts_per_step"].settings == {"data.train_batch_size"}
    assert result.notes["actor_rollout_ref.model.path"] == "by hand: here model.path"


def test_refused_values_are_left_out_and_the_rest_is_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TRL + "--loss_type vespo --temperature 0.7 --gradient_accumulation_steps 4 "
    text += (
        "--steps_per_generation 2 --model_name_or_path 'a\x1b[31m\nb' --x 'q\x1b[2J\nrun_dir: y'"
    )
    path, out = script(tmp_path, text), tmp_path / "x.yaml"
    monkeypatch.setattr(sys, "argv", ["port", "--out", str(out), str(path), "--beta", "0.5"])
    port.main()
    config = load_config(out)
    # half a mini-batch, a loss that is not here, and a path with escapes
    assert (config.training.num_mini_batches, config.loss.policy) == (1, "clip")
    assert (config.rollout.temperature, config.loss.kl_coef, config.model.path) == (
        0.7,
        0.5,
        "MODEL",
    )
    written = out.read_text()
    assert "training.num_mini_batches can only be a whole number >= 1; got 0.5" in written
    assert "loss.policy can only be" in written
    assert "by hand: x = q\\x1b[2J run_dir: y: not known" in written
    assert "\x1b" not in written
    assert written.startswith("# run.sh: 8 settings of TRL: ")
    assert "translated" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        port.main()
    assert stopped.value.code == 2
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("x.py", "print(1)", "neither GRPOConfig(...) nor GRPOTrainer(...)"),
        ("x.py", "GRPOConfig(", "never closed"),
        ("x.py", "x = " + "-" * 9000 + "1", "nested too deeply"),
        ("x.py", "\0", "null bytes"),
        ("x.sh", "echo hello", "no command in it starts verl"),
        ("x.sh", "python -m verl.trainer.main_ppo a='b", "No closing quotation"),
        ("x.sh", "#" * 200_000, "larger than 128 KiB"),
        ("x.sh", "a=xxxxxxxxxx\n" + "a=$a$a\n" * 60, "its variables make more than 1 MiB"),
        ("x.yaml", "a: [", "not valid YAML"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    reason: str,
) -> None:
    path = tmp_path / name
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["port", str(path)])
    with pytest.raises(SystemExit) as stopped:
        port.main()
    error = capsys.readouterr().err
    assert (stopped.value.code, error.count("\n")) == (2, 1)
    assert reason in error


@pytest.mark.parametrize("word", ["$a ", "x.py ", "a=1 ", "--a "])
def test_a_line_of_many_words_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    counts: list[int] = []

    def settings(words: list[str]) -> dict[str, Any]:
        counts.append(len(words))
        return {}

    monkeypatch.setattr(port, "_settings", settings)
    with pytest.raises(ConfigError, match="no command in it"):
        read_script(script(tmp_path, word * 5000), [])
    # Not once for each word, whose square would take minutes.
    assert counts == []


@pytest.mark.parametrize(
    "text",
    [
        # 2^40 look-ups, a circle, and a number without a bound.
        "a0 = ''\n"
        + "".join(f"a{i + 1} = a{i} or a{i}\n" for i in range(40))
        + "GRPOConfig(beta=a40)",
        "a = b\nb = a\nGRPOConfig(beta=a)",
        "GRPOConfig(beta=9**9**9**9)",
        "GRPOConfig(warmup_ratio='1e999999999', num_train_epochs='1e999999999')",
    ],
)
def test_hostile_expressions_end_soon(tmp_path: Path, text: str) -> None:
    # Without the bounds it takes hours, or all memory.
    result = ported(tmp_path, text, "x.py")
    assert "loss.kl_coef" not in result.entries
    assert {"beta", "num_train_epochs"} & result.notes.keys()


def test_the_table_names_keys_trainers_and_names_that_exist() -> None:
    keys = {*key_names(Config)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    for trainer, name, _, formula in read_table("port.tsv"):
        section = name.partition(".")[0]
        is_theirs = find_alias(trainer, name) is not None or ":" in name
        # A target with a section of ours is a key of ours, or a name of theirs.
        assert name in keys or is_theirs or section not in sections, name
        assert formula


def test_a_command_that_other_words_follow(tmp_path: Path) -> None:
    path = script(tmp_path, VERL + "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4")
    words = ["actor_rollout_ref.rollout.n=8", "data.max_prompt_length=77"]
    found = values(port.translate(read_script(path, words), {}, "run"))
    assert (found["rollout.group_size"], found["data.max_prompt_tokens"]) == (8, 77)


def test_a_yaml_of_trl_or_verl(tmp_path: Path) -> None:
    trl = "model_name_or_path: m\nlearning_rate: 2.0e-5\ndataset_name: o/s\ndataset_config: c\n"
    found = values(ported(tmp_path, trl, "x.yaml"))
    assert found["data.train"] == "hub:o/s:c:train"
    assert found["optimizer.lr"] == 2e-5
    verl = "actor_rollout_ref: {rollout: {n: 6}}\nalgorithm: {adv_estimator: rloo}\n"
    found = values(ported(tmp_path, verl, "x.yaml"))
    assert (found["rollout.group_size"], found["advantage.estimator"]) == (6, "rloo")


@pytest.mark.parametrize(
    "text",
    [
        "1: 2\nlearning_rate: 1999-01-01\nreward_funcs: []\n",
        "actor_rollout_ref: {}\ndata: {train_files: [], val_files: [1, 1999-01-01]}\n",
        'model_name_or_path: "a\\x7fb"\nreport_to: {a: 1}\nnum_generations: [1]\nmax_steps: .inf',
    ],
)
def test_values_of_wrong_types_leave_a_valid_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path, out = script(tmp_path, text, "x.yaml"), tmp_path / "out.yaml"
    monkeypatch.setattr(sys, "argv", ["port", "--out", str(out), str(path)])
    port.main()
    load_config(out)


def test_a_script_may_not_be_a_folder_or_absent(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.sh"):
        with pytest.raises(ConfigError):
            read_script(path, [])
