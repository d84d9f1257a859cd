"""Whether the GPU builds of vLLM, and the torch that each brings, keep what `grpo_spmd/engine/`
relies on: the table of contract_rows.py, held against the wheels that a GPU host would install.
Needs no GPU.

python -m benchmarks.agreement.contract [--vllm 0.26.0 0.32.0 ...] [--installed] [--json FILE]

Each wheel is downloaded into a temporary folder, and its Python files alone are unpacked and read
(vllm 0.5 GB, torch
0.6; gone at the end). Where the vllm so unpacked can be imported beside the torch of this
environment, the calls are also bound to what Python makes of them, and the options that start.py
passes are looked up in its EngineArgs: a reader of source could be wrong about decorators and base
classes. `--installed` holds the table against this environment's own vLLM instead, as a unit test
does. Exit code 1 where a row is broken.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

from benchmarks.agreement.contract_check import Finding, check, installed_version
from benchmarks.agreement.contract_rows import CPU, TORCH, VLLM
from benchmarks.agreement.contract_source import Source
from benchmarks.support.report import Row, arguments_parser, report

VERSIONS = (
    "0.26.0",
    "0.32.0",
    "0.33.0",
)  # the least that pyproject.toml takes, the one that is pinned, the newest


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--vllm", nargs="+", default=VERSIONS, metavar="VERSION", help="releases to hold it against"
    )
    parser.add_argument(
        "--installed", action="store_true", help="hold it against the vLLM of this environment"
    )
    args = parser.parse_args()
    rows: list[Row] = []
    for version in ["installed"] if args.installed else args.vllm:
        result, facts = _of_installed() if args.installed else _of_release(version)
        for finding in (finding for finding in result if finding.verdict == "broken"):
            print(
                f"broken: {finding.row.label}: {finding.how}; relied on for: {finding.row.why}",
                flush=True,
            )
        verdicts = Counter(finding.verdict for finding in result)
        absent = sorted(
            finding.row.name.rpartition(".")[2]
            for finding in result
            if finding.verdict.startswith("absent")
        )
        counts = {"rows": len(result), "kept": verdicts["kept"], "broken": verdicts["broken"]}
        rows.append({**facts, **counts, "absent_as_allowed": ", ".join(absent) or "none"})
    report("contract", rows, args.json)
    raise SystemExit(any(row["broken"] for row in rows))


def _of_installed() -> tuple[list[Finding], Row]:
    site = Path(sysconfig.get_path("purelib"))
    source, version = Source(site), installed_version("vllm", site)
    result = [
        *check((*VLLM, *CPU), source, version),
        *check(TORCH, source, installed_version("torch", site)),
    ]
    local = f"{version[0]}.{version[1]}, installed"
    return result, {"vllm": local, "wheel": "-", "its torch": "installed", "imported": "-"}


def _of_release(version: str) -> tuple[list[Finding], Row]:
    with tempfile.TemporaryDirectory() as folder:
        site, torch_values = (
            Path(folder, "vllm"),
            Path(folder, "torch"),
        )  # apart: the import takes the installed torch
        vllm = _unpack("vllm", version, site)
        wanted = re.search(
            r"^Requires-Dist: torch==([\w.]+)", _metadata(site, "vllm"), re.MULTILINE
        )
        assert wanted is not None, f"vllm {version} names no version of torch"
        _unpack("torch", wanted[1], torch_values)
        result = [*check(VLLM, Source(site), installed_version("vllm", site))]
        result += check(TORCH, Source(torch_values), installed_version("torch", torch_values))
        broken_calls, imported = _of_import(site / "vllm")
        result += broken_calls
    return result, {"vllm": version, "wheel": vllm, "its torch": wanted[1], "imported": imported}


def _unpack(package: str, version: str, site: Path) -> str:
    """Download a wheel and unpack what can be read of it; its name."""
    with tempfile.TemporaryDirectory() as folder:
        # Three equal signs: this very version, not one with a local suffix such as +cpu.
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            "--no-deps",
        ]
        print(f"downloading {package} {version}", flush=True)
        done = subprocess.run(
            [
                *pip,
                "--only-binary=:all:",
                "--no-cache-dir",
                "-q",
                "-d",
                folder,
                f"{package}==={version}",
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(
                f"pip could not download {package} {version}: "
                f"{done.stderr.strip().splitlines()[-1]}"
            )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.endswith((".py", ".pyi", ".json", "METADATA"))
            ]
            archive.extractall(site, names)
        return wheel.name


def _metadata(site: Path, package: str) -> str:
    return next(site.glob(f"{package}-*.dist-info/METADATA")).read_text(
        encoding="utf-8", errors="replace"
    )


def _of_import(package: Path) -> tuple[list[Finding], str]:
    """Rows whose call does not bind to the imported object, and in how many it does; or why it
    cannot be imported.
    In a process of its own, where this folder stands for the installed vllm, beside the installed
    torch."""
    worker = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.agreement.contract_import",
        str(package),
    ]
    done = subprocess.run(
        worker, capture_output=True, text=True, env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    )
    if done.returncode:
        final = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return [], f"no: {final[:120]}"
    message = json.loads(done.stdout.splitlines()[-1])
    rows = {row.label: row for row in VLLM}
    return [
        Finding(rows[label], "broken", f"imported, {method}") for label, method in message["broken"]
    ], message["summary"]


if __name__ == "__main__":
    main()
