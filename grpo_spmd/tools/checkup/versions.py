"""Installed packages, compared with the ranges that this project and vLLM require.

Reads metadata only: nothing is imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_spmd import __version__
from grpo_spmd.checks.machine import VLLM
from grpo_spmd.checks.model_folder import version_of
from grpo_spmd.config.load import is_built_for_cpu
from grpo_spmd.tools.checkup.devices import torch_cuda
from grpo_spmd.tools.checkup.results import Result, Target, bad, join_items, ok, warning

_PACKAGE = Path(__file__).resolve().parents[2]
_OWN_LINES = ("torch", "transformers")  # vLLM has its own line too
_REMEDY = "launch/setup.sh installs the tested set"


def read_requirements(package: Path = _PACKAGE) -> tuple[str, list[str]]:
    """The range of Python and the requirements (PEP 508, extras as markers), from the checkout's
    pyproject.toml, else from the installed package's metadata."""
    file = package.with_name("pyproject.toml")
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == "grpo_spmd":
            extras = project["optional-dependencies"].items()
            optional = [f'{text}; extra == "{name}"' for name, texts in extras for text in texts]
            return project["requires-python"], [*project["dependencies"], *optional]
    metadata = importlib.metadata.metadata("grpo_spmd")
    return metadata["Requires-Python"] or "", importlib.metadata.requires("grpo_spmd") or []


def check_python(_: Target) -> Iterator[Result]:
    required, version = read_requirements()[0], platform.python_version()
    finding = f"{version} ({sys.prefix})"
    facts = {"Python": version, "grpo_spmd": f"{__version__} {_source_digest()}"}
    if SpecifierSet(required).contains(version, prereleases=True):
        yield ok("python", finding, facts)
    else:
        yield bad(
            "python",
            f"{finding}, and {required} is asked for",
            "PYTHON=python3.12 launch/setup.sh",
            facts,
        )


def _source_digest() -> str:
    """Digest of this package's code: ranks with different checkouts run different programs."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def check_packages(target: Target) -> Iterator[Result]:
    engines = [name for name in VLLM if version_of(name)]
    engine = engines[0] if engines else None
    problems: dict[str, str] = {}
    names: set[str] = set()
    for requirement in map(Requirement, read_requirements()[1]):
        name, marker, version = requirement.name, requirement.marker, version_of(requirement.name)
        is_extra = "extra" in str(marker)
        # An extra that is not installed is not asked for.
        if is_extra and version is None:
            continue
        names.add(name)
        is_for_others = marker is not None and not is_extra and not marker.evaluate()
        # vLLM built from source says 0.1.dev: it may be any version.
        from_source = name in VLLM and re.match(r"0\.\d+\.?\d*\.?dev", version or "")
        if is_for_others or from_source:
            continue
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            required = requirement.specifier or "any version"
            problems[name] = f"{name} {version or 'is missing'}, and {required} is asked for"
    for name in (*_OWN_LINES, *engines[:1]):
        yield _check_package(name, problems.pop(name, None), engine)
    if engine is None:
        yield bad(
            "vllm",
            "not installed: it samples the completions",
            f"launch/setup.sh {'gpu' if target.num_gpus else 'cpu'}",
        )
    # Both packages install the module vllm.
    if len(engines) > 1:
        yield bad(
            "vllm",
            f"{engines[0]} and {engines[1]} are both installed, over each other's files",
            f"pip uninstall {' '.join(engines)}, then launch/setup.sh",
        )
    rest = sorted(names.difference(_OWN_LINES, VLLM))
    facts = {name: version_of(name) or "missing" for name in rest}
    if problems:
        yield bad("packages", "; ".join(problems.values()), _REMEDY, facts)
    else:
        yield ok("packages", f"{len(rest)} others within their ranges", facts)


def _check_package(name: str, problem: str | None, engine: str | None) -> Result:
    """torch and transformers must also be those that vLLM was built with."""
    version = version_of(name)
    engine_version = version_of(engine) if engine else None
    facts = {name: version or "missing"}
    if problem is not None:
        return bad(name, problem, _REMEDY, facts)
    texts = importlib.metadata.requires(engine) if engine else None
    for requirement in map(Requirement, texts or ()):
        marker = requirement.marker
        if requirement.name != name or (marker and not marker.evaluate({"extra": ""})):
            continue
        # vLLM's kernels are compiled against one version of torch.
        if requirement.specifier.contains(version or "0", prereleases=True):
            return ok(name, f"{version}, as {engine} {engine_version} asks", facts)
        pinned = f"{name}{requirement.specifier}"
        return bad(
            name,
            f"{version}, and {engine} {engine_version} was built for {pinned}",
            f"pip install '{pinned}', or launch/setup.sh",
            facts,
        )
    return ok(name, str(version), facts)


def check_build(target: Target) -> Iterator[Result]:
    """Compare torch's files with its metadata: one install over another leaves both."""
    name, spec, version = "torch's build", find_spec("torch"), version_of("torch")
    if spec is None or spec.origin is None:
        yield bad(name, "there is no torch that could be imported", _REMEDY)
        return
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__ *= *['\"]([^'\"+]+)", text, re.MULTILINE)
    cuda = torch_cuda()
    build = f"for CUDA {cuda}" if cuda else "for the CPU"
    if match and version and match[1] != version.partition("+")[0]:
        paths = (getattr(d, "_path", None) for d in importlib.metadata.distributions(name="torch"))
        folder = next((path.parent for path in paths if isinstance(path, Path)), "?")
        yield bad(
            name,
            f"its files are {match[1]}, and the metadata that is found first says {version}: "
            "two installs are mixed",
            f"look at {folder} and PYTHONPATH; or set up again: launch/setup.sh",
        )
    elif is_built_for_cpu(spec) and target.num_gpus:
        yield bad(
            name,
            f"{build}, and this machine has {target.num_gpus} GPUs: ranks would train on the CPU",
            "launch/setup.sh gpu; CUDA_VISIBLE_DEVICES= where the CPU is meant",
        )
    elif cuda and not target.num_gpus:
        yield warning(
            name,
            f"{build}, and no GPU is to be found: ranks would train on the CPU",
            "look at the driver (nvidia-smi), or launch/setup.sh cpu",
        )
    else:
        yield ok(name, build)


def check_tested_set(_: Target) -> Iterator[Result]:
    """Compare with the checkout's lock. Other versions within the ranges are no warning."""
    lock = _PACKAGE.parent / "launch" / f"constraints-{'gpu' if version_of('vllm') else 'cpu'}.txt"
    if not lock.is_file():
        return
    pinned = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    versions = [(name, wanted, version_of(name)) for name, wanted in pinned]
    num_same = sum(version == wanted for _, wanted, version in versions)
    other = [f"{name} {v} for {wanted}" for name, wanted, v in versions if v not in (None, wanted)]
    rest = f"; others: {join_items(other, 4)}" if other else ""
    yield ok("tested set", f"{num_same} of {len(pinned)} packages are as tested{rest}")
