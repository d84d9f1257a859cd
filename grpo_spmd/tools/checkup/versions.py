"""Packages against the ranges that this project and vLLM ask for, by their metadata alone: nothing is imported."""

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

from grpo_spmd import __version__
from grpo_spmd.checks.machine import VLLM
from grpo_spmd.checks.model_folder import version_of
from grpo_spmd.config.load import is_built_for_cpu
from grpo_spmd.tools.checkup.results import Place, Result, listed

_PACKAGE = Path(__file__).resolve().parents[2]
_SHOWN = ("torch", "transformers")  # on lines of their own, and vLLM
_REMEDY = "launch/setup.sh installs the tested set"


def asked_for(package: Path = _PACKAGE) -> tuple[str, list[str]]:
    """The range of Python and the requirements (PEP 508, extras as markers): of the checkout's pyproject.toml, else of
    the installed package's metadata."""
    file = package.with_name("pyproject.toml")
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == "grpo_spmd":
            extras = project["optional-dependencies"]
            of_extras = [
                f'{text}; extra == "{name}"' for name, texts in extras.items() for text in texts
            ]
            return project["requires-python"], [*project["dependencies"], *of_extras]
    metadata = importlib.metadata.metadata("grpo_spmd")
    return metadata["Requires-Python"] or "", importlib.metadata.requires("grpo_spmd") or []


def look_at_python(_: Place) -> Iterator[Result]:
    from packaging.specifiers import SpecifierSet

    asked, here = asked_for()[0], platform.python_version()
    where = f"{here} ({sys.prefix})"
    alike = {"Python": here, "grpo_spmd": f"{__version__} {source_digest()}"}
    if not SpecifierSet(asked).contains(here, prereleases=True):
        yield Result(
            "python",
            "bad",
            f"{where}, and {asked} is asked for",
            "PYTHON=python3.12 launch/setup.sh",
            alike,
        )
    else:
        yield Result("python", "ok", where, alike=alike)


def source_digest(package: Path = _PACKAGE) -> str:
    """Of this package's code: ranks that see different checkouts run different programs."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def look_at_packages(place: Place) -> Iterator[Result]:
    from packaging.requirements import Requirement

    vllm = next((name for name in VLLM if version_of(name)), None)
    asked = [Requirement(text) for text in asked_for()[1]]
    mandatory = [each for each in asked if each.marker is None or "extra" not in str(each.marker)]
    by_name = {each.name: each for each in asked if each in mandatory or version_of(each.name)}
    wrong: dict[str, str] = {}
    for name, each in by_name.items():
        here = version_of(name)
        if each.marker is not None and each in mandatory and not each.marker.evaluate():
            continue
        if name in VLLM and re.match(
            r"0\.\d+\.?\d*\.?dev", here or ""
        ):  # built from source: it may be any
            continue
        if here is None or not each.specifier.contains(here, prereleases=True):
            wrong[name] = (
                f"{name} {here or 'is missing'}, and {each.specifier or 'any version'} is asked for"
            )
    for name in (*_SHOWN, vllm) if vllm else _SHOWN:
        yield _of_one(name, wrong.pop(name, None), vllm)
    if vllm is None:
        which = "gpu" if place.num_gpus else "cpu"
        yield Result(
            "vllm", "bad", "not installed: it samples the completions", f"launch/setup.sh {which}"
        )
    if both := [name for name in VLLM if version_of(name)][1:]:
        what = f"{vllm} and {both[0]} are both installed, over each other's files"
        yield Result("vllm", "bad", what, f"pip uninstall {vllm} {both[0]}, then launch/setup.sh")
    rest = [name for name in by_name if name not in (*_SHOWN, *VLLM)]
    alike = {name: version_of(name) or "missing" for name in rest}
    if wrong:
        yield Result("packages", "bad", "; ".join(wrong.values()), _REMEDY, alike)
    else:
        yield Result("packages", "ok", f"{len(rest)} others within their ranges", alike=alike)


def _of_one(name: str, wrong: str | None, vllm: str | None) -> Result:
    """The line of torch, transformers or vLLM; torch and transformers against what vLLM was built with too."""
    here = version_of(name)
    alike = {name: here or "missing"}
    if wrong is not None:
        return Result(name, "bad", wrong, _REMEDY, alike)
    if vllm is not None and name != vllm and (pinned := _asked_by(vllm, name)):
        asked, fits = pinned
        if not fits:
            what = f"{here}, and {vllm} {version_of(vllm)} was built for {name}{asked}"
            return Result(
                name, "bad", what, f"pip install '{name}{asked}', or launch/setup.sh", alike
            )
        return Result(name, "ok", f"{here}, as {vllm} {version_of(vllm)} asks", alike=alike)
    return Result(name, "ok", str(here), alike=alike)


def _asked_by(distribution: str, name: str) -> tuple[str, bool] | None:
    """The range in which `distribution` asks for `name` here, and whether what is installed is in it."""
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(distribution) or ():
        each = Requirement(text)
        if each.name == name and (each.marker is None or each.marker.evaluate({"extra": ""})):
            return str(each.specifier), each.specifier.contains(
                version_of(name) or "0", prereleases=True
            )
    return None


def look_at_build(place: Place) -> Iterator[Result]:
    """What torch's files say of themselves, beside their metadata: an install over another leaves both."""
    spec, said = find_spec("torch"), version_of("torch")
    if spec is None or spec.origin is None:
        yield Result("torch's build", "bad", "there is no torch that could be imported", _REMEDY)
        return
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ *= *['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= *['\"]([\d.]+)", text, re.MULTILINE)
    build = f"for CUDA {cuda[1]}" if cuda else "for the CPU"
    if found and said and found[1].partition("+")[0] != said.partition("+")[0]:
        where = f"its files are {found[1]}, and the metadata that is found first says {said}: two installs are mixed"
        first = next((str(path.parent) for path in _dist_info("torch")), "?")
        yield Result(
            "torch's build",
            "bad",
            where,
            f"look at {first} and PYTHONPATH; or set up anew: launch/setup.sh",
        )
    elif is_built_for_cpu(spec) and place.num_gpus:
        what = f"{build}, and this machine has {place.num_gpus} GPUs: ranks would train on the CPU"
        yield Result(
            "torch's build",
            "bad",
            what,
            "launch/setup.sh gpu; CUDA_VISIBLE_DEVICES= where the CPU is meant",
        )
    elif cuda and not place.num_gpus:
        what = f"{build}, and no GPU is to be found: ranks would train on the CPU"
        yield Result(
            "torch's build",
            "warning",
            what,
            "look at the driver (nvidia-smi), or launch/setup.sh cpu",
        )
    else:
        yield Result("torch's build", "ok", build)


def _dist_info(name: str) -> Iterator[Path]:
    for each in importlib.metadata.distributions(name=name):
        if isinstance(path := getattr(each, "_path", None), Path):
            yield path


def look_at_tested_set(place: Place) -> Iterator[Result]:
    """Beside the checkout's lock. Other versions within the ranges may do as well: no warning."""
    lock = _PACKAGE.parent / "launch" / f"constraints-{'gpu' if version_of('vllm') else 'cpu'}.txt"
    if not lock.is_file():
        return
    pinned = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    there = [
        (name, version, here) for name, version in pinned if (here := version_of(name)) is not None
    ]
    other = [f"{name} {here} for {version}" for name, version, here in there if here != version]
    what = f"{len(there) - len(other)} of {len(pinned)} packages are as tested"
    yield Result("tested set", "ok", f"{what}; others: {listed(other, 4)}" if other else what)
