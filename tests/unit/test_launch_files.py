"""The recipes of launch/ for containers, Kubernetes and SkyPilot, which nothing here runs: what
they name is there."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from grpo_spmd.config.load import load_config
from tests.support.job_schemas import PYTORCH_JOB, SKYPILOT_TASK
from tests.support.processes import ROOT

KUBERNETES, SKYPILOT = (
    yaml.safe_load((ROOT / f"launch/{name}.yaml").read_text())
    for name in ("kubernetes", "skypilot")
)


def problems(document: Any, schema: dict[str, Any]) -> list[str]:
    return [
        error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]


def test_kubernetes_takes_the_job() -> None:
    jsonschema.Draft202012Validator.check_schema(PYTORCH_JOB)
    assert problems(KUBERNETES, PYTORCH_JOB) == []


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (["spec"], "nprocPerNode", 8),  # a number is refused by the CRD
        (["spec", "runPolicy"], "backOffLimit", 3),
        (["spec", "pytorchReplicaSpecs", "Master"], "restartPolicy", "Exit"),
        (
            ["spec", "pytorchReplicaSpecs", "Worker", "template", "spec"],
            "terminationGracePeriod",
            180,
        ),
        (
            ["spec", "pytorchReplicaSpecs", "Master", "template", "spec", "containers", 0],
            "environment",
            [],
        ),
    ],
)
def test_what_kubernetes_would_refuse_or_drop_is_seen(
    path: list[Any], key: str, value: Any
) -> None:
    job = piece = json.loads(
        json.dumps(KUBERNETES)
    )  # both replicas have one template, by YAML's reference
    for name in path:
        piece = piece[name]
    piece[key] = value
    assert len(problems(job, PYTORCH_JOB)) == 1


def test_the_pods_have_time_to_save_memory_to_share_and_one_folder() -> None:
    spec = KUBERNETES["spec"]
    for replica in spec["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        [container] = pod["containers"]
        assert container["name"] == "pytorch"  # Kubeflow looks for it
        script = (ROOT / "launch/node.sh").read_text()
        shutdown = re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", script)
        assert shutdown
        assert pod["terminationGracePeriodSeconds"] >= int(shutdown[1]) + 30
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["shm"] == "/dev/shm"
        assert replica["restartPolicy"] == "ExitCode"
        check_command(container["args"], mounts["shared"])


def check_command(words: list[str], shared: str) -> None:
    script, config, *overrides = words
    assert (ROOT / script).is_file()
    assert Path(load_config(ROOT / config, overrides).run_dir).is_relative_to(shared)


def test_skypilot_takes_the_task_and_its_commands_name_what_is_there() -> None:
    jsonschema.Draft202012Validator.check_schema(SKYPILOT_TASK)
    assert problems(SKYPILOT, SKYPILOT_TASK) == []
    assert len(problems(SKYPILOT | {"num_node": 2}, SKYPILOT_TASK)) == 1
    assert len(problems(SKYPILOT | {"envs": {"OVERRIDES": 3}}, SKYPILOT_TASK)) == 1
    [kind] = re.findall(r"^launch/setup.sh (\w+)$", SKYPILOT["setup"], re.MULTILINE)
    assert (ROOT / f"launch/constraints-{kind}.txt").is_file()
    words = shlex.split(SKYPILOT["run"].splitlines()[-1])
    assert words[0] == "exec"
    filled = [
        word.replace("$CONFIG", SKYPILOT["envs"]["CONFIG"])
        for word in words[1:]
        if word != "$OVERRIDES"
    ]
    [shared] = SKYPILOT["volumes"]
    check_command(filled, shared)


def test_both_schedulers_try_again_what_the_script_says_can_go_on() -> None:
    script = (ROOT / "launch/node.sh").read_text()
    codes = {int(code) for code in re.findall(r"\bexit (\d+)", script)}
    assert codes == {0, 2, 138, 140}
    assert SKYPILOT["resources"]["job_recovery"]["recover_on_exit_codes"] == [138]
    assert {code for code in codes if code >= 128} == {
        138,
        140,
    }  # Kubeflow's restartPolicy ExitCode makes those again


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "launch/Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", "", text).splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def is_sent(name: str) -> bool:
    """Whether .dockerignore lets a file into the build: the last line that it, or a folder above
    it, meets decides."""
    verdict = True
    for line in (ROOT / ".dockerignore").read_text().split():
        rule = line.removeprefix("!")
        if any(
            fnmatch.fnmatch(str(path), rule.replace("**", "*"))
            for path in (Path(name), *Path(name).parents)
        ):
            verdict = line.startswith("!")
    return verdict


def test_the_image_names_its_base_by_version_and_copies_what_is_there() -> None:
    steps = instructions()
    values = dict(value.split("=") for name, value in steps if name == "ARG" and "=" in value)
    [base] = [value for name, value in steps if name == "FROM"]
    assert re.fullmatch(
        r"python:3\.\d+\.\d+-slim-\w+", base.replace("${PYTHON_VERSION}", values["PYTHON_VERSION"])
    )
    copied = [source for name, value in steps if name == "COPY" for source in value.split()[:-1]]
    assert copied[-1] == "."
    for source in copied[:-1]:
        assert (ROOT / source).exists()
        assert is_sent(source)
    assert not is_sent(".venv/bin/python")
    assert not is_sent(".git/config")
    assert not is_sent("grpo_spmd/__pycache__/loop.cpython-311.pyc")
    assert {"launch/node.sh", "configs/demo.yaml", "grpo_spmd/loop.py"} <= set(
        filter(is_sent, TRACKED)
    )
    users = [value for name, value in steps if name == "USER"]
    assert users == ["1000:1000"]


TRACKED = ("launch/node.sh", "configs/demo.yaml", "grpo_spmd/loop.py")


def test_the_image_runs_commands_that_exist() -> None:
    installed = {"apt-get", "rm", "git", ".venv/bin/python"}  # git by the first of them
    for name, value in instructions():
        if name == "RUN":
            for command in value.split("&&"):
                words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
                assert words[0] in installed or (ROOT / words[0]).stat().st_mode & 0o111, command
                if words[0] == "launch/setup.sh":
                    assert words[1:] == ["${KIND}"]
