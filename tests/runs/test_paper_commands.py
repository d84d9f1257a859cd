"""Every command in the papers runs: each is taken out of its paper, given files where the paper has
placeholders, and started.

What trains is stopped behind its checks (`--check`). Launchers that this machine does not have
(sbatch, docker, ...) are listed in ELSEWHERE with the test that holds their files.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run_command

PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/*.md"))]
FIRST_WORDS = (
    "python3? -m (?:grpo_spmd|benchmarks)|grpo-spmd|torchrun|srun|sbatch|docker|kubectl|sky|"
    r"launch/\w+\.sh|benchmarks/run\.sh|tests/run\.sh"
)
# How a command begins, and the test that runs it or holds its file.
ELSEWHERE = {
    "launch/setup.sh": "runs/test_scripts.py, and tests/run.sh begins with it",
    "launch/demo.sh": "runs/test_scripts.py and runs/test_demos.py",
    "launch/node.sh": "unit/test_launch_files.py",
    "sbatch": "unit/test_launch_files.py, benchmarks/survival/slurm_trial.py",
    "srun": "unit/test_launch_files.py, benchmarks/survival/slurm_trial.py",
    "docker": "unit/test_launch_files.py",
    "kubectl": "unit/test_launch_files.py",
    "sky": "unit/test_launch_files.py",
    "tests/run.sh": "what runs this test",
    "benchmarks/run.sh gpu_day": "runs/test_gpu_day.py",
    "python -m grpo_spmd.COMMAND": "a pattern, no command",
    "grpo-spmd COMMAND": "a pattern, no command",
    "grpo-spmd eval": "ranks/test_evaluate.py, beside the figures of a run",
    "grpo-spmd port": "unit/test_port.py, which has scripts to translate",
    "python -m grpo_spmd.prefetch": "runs/test_prefetch.py, with a hub on loopback",
    "python -m grpo_spmd.demo": "runs/test_scripts.py",
    "python -m benchmarks.agreement.mutations": "unit/test_mutations.py",
    "python -m benchmarks.measured": "unit/test_measured.py",
}


@dataclass(frozen=True)
class PaperCommand:
    """A command as a paper has it."""

    paper: str
    text: str

    def __str__(self) -> str:
        return f"{self.paper}: {self.text}"


def paper_commands() -> list[PaperCommand]:
    """Returns the commands of all papers: lines of code blocks, and what prose has in backticks."""
    commands: dict[str, PaperCommand] = {}
    for paper in PAPERS:
        name = str(paper.relative_to(ROOT))
        if name == "CHANGELOG.md":
            continue
        text = paper.read_text(encoding="utf-8")
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        blocks = [block for language, block in fenced if language in ("", "bash", "sh")]
        blocks += re.findall(r"^    (?:tests|launch|benchmarks)/.*$", text, re.MULTILINE)
        lines = [line for block in blocks for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for line in lines:
            line = re.sub(r"\s{2,}#.*| {5,}\S.*", "", line.strip().removeprefix("$ "))
            line = re.sub(r"^more=\$\((.*)\) &&$", r"\1", line)
            if re.match(rf"(?:{FIRST_WORDS})[ .]?\S*( |$)", line) and " " in line:
                commands.setdefault(line, PaperCommand(name, line))
    return list(commands.values())


COMMANDS = paper_commands()
OTHERS = [command for command in COMMANDS if command.text.startswith(tuple(ELSEWHERE))]
BENCHMARKS = [
    command
    for command in COMMANDS
    if command not in OTHERS and re.match(r"benchmarks/run|python -m benchmarks", command.text)
]
RUN_HERE = [command for command in COMMANDS if command not in [*OTHERS, *BENCHMARKS]]


def test_the_papers_have_commands() -> None:
    """The search finds them: every file of tools/ is the command of a paper, and train."""
    texts = "\n".join(command.text for command in COMMANDS)
    for name in ("train", "checkup", "plan", "show", "report", "replay", "export", "prefetch"):
        assert f"grpo_spmd.{name}" in texts, name
    for beginning in ELSEWHERE:
        assert any(command.text.startswith(beginning) for command in COMMANDS), beginning


@pytest.mark.parametrize("command", BENCHMARKS, ids=str)
def test_a_benchmark_that_is_named_exists(command: PaperCommand) -> None:
    modules = re.search(r"modules=\((.*?)\)", (ROOT / "benchmarks/run.sh").read_text(), re.DOTALL)
    assert modules
    names = {module.rpartition(".")[2] for module in modules[1].split()}
    if command.text.startswith("python"):
        module = command.text.split()[2].replace(".", "/")
        assert (ROOT / f"{module}.py").is_file() or (ROOT / module / "__main__.py").is_file()
        return
    argument = command.text.split()[1]
    assert {*argument.split("|")} <= names | {"NAME", "all"}


# A shipped config names a model and data of the hub: these stand in their place.
FOR_THE_TINY_MODEL = [
    "model.path=model",
    "data.train=train.jsonl",
    "data.eval={}",
    "data.prompt_key=prompt",
    "data.as_chat=false",
    "data.system_prompt=null",
    "data.max_prompt_tokens=16",
    "rollout.num_prompts_per_step=8",
    "rollout.max_completion_tokens=12",
]


def argv_of(command: PaperCommand, config: str) -> tuple[list[str], dict[str, str]]:
    """Returns what is started in the place of a command, and its environment.

    `config` is the path of a config. `[...]` is left out; a training run ends behind its checks.
    """
    text = re.sub(r"\s*\[[^\]]*\]|\s*(?<=[ ])\.\.\.", "", command.text).replace("=%a", "=0")
    text = re.sub(r"\$more\b", "", text)
    words = shlex.split(text)
    environment = {}
    if words[0] == "torchrun":
        launch = dict(pairwise(words[: words.index("-m")]))
        ranks = int(launch.get("--nproc-per-node", "1")) * int(launch.get("--nnodes", "1"))
        environment["WORLD_SIZE"] = str(ranks)
        words = ["python", *words[words.index("-m") :]]
        if words[2] == "grpo_spmd.checkup":
            environment = {}
    if words[0] == "grpo-spmd":
        words = ["python", "-m", "grpo_spmd.cli", *words[1:]]
    words[0] = sys.executable
    if len(words) - words.index("-m") - 1 - ("grpo_spmd.cli" in words) == 1:
        # Prose names a command without its arguments.
        return [*words[:4], "--help"], environment
    placeholders = {
        "x.yaml": config,
        "CONFIG": config,
        "RUN": "recorded",
        "N": "2",
        "HOST:PORT": "localhost:29400",
        "ID": "1",
        "CHECKPOINT": "recorded/checkpoints/step_000002",
        "runs/x/checkpoints/step_000050": "recorded/checkpoints/step_000002",
        "runs/x": "recorded",
        "runs/first/run": "recorded",
        "OUT": "exported",
        "out": "exported",
    }
    is_shipped = any(word.startswith("configs/") for word in words)
    words = [placeholders.get(word, word) for word in words]
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    if "--step" in words:
        # The recorded run has three steps.
        words[words.index("--step") + 1] = "2"
    trains = "grpo_spmd.train" in words or words[2:4] == ["grpo_spmd.cli", "train"]
    if trains and "--config" not in words and "--help" not in words:
        words += ["--config", config]
    if trains and not {"--help", "--check", "--explain"} & {*words}:
        words.append("--check")
    if is_shipped:
        words += FOR_THE_TINY_MODEL
    return words, environment


@pytest.fixture(scope="module")
def folder(elaborate_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, its model and data, and a recorded run."""
    folder = tmp_path_factory.mktemp("papers")
    for name in ("model", "train.jsonl", "my_reward.py"):
        (folder / name).symlink_to(elaborate_run / name)
    text = (elaborate_run / "config.yaml").read_text()
    (folder / "x.yaml").write_text(text.replace(f"{elaborate_run}/run", f"{folder}/new_run"))
    (folder / "runs/first").mkdir(parents=True)
    shutil.copy(folder / "x.yaml", folder / "runs/first/config.yaml")
    shutil.copytree(elaborate_run / "run", folder / "recorded")
    return folder


# The papers show these to say what is refused.
REFUSED = ("--learning_rate", "actor_rollout_ref", "group_sise")


# Papers show the same command with other names of files: one of each is started.
STARTED = {repr(argv_of(command, "x.yaml")): command for command in reversed(RUN_HERE)}


@pytest.mark.parametrize("command", [*reversed(STARTED.values())], ids=str)
def test_a_command_runs(command: PaperCommand, folder: Path) -> None:
    words, environment = argv_of(command, "x.yaml")
    shutil.rmtree(folder / "exported", ignore_errors=True)
    done = run_command(words, cwd=folder, env=environment)
    is_refused = any(name in command.text for name in REFUSED)
    assert done.returncode == (2 if is_refused else 0), (words, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, (words, done.stderr)
