"""The separate environment in which benchmarks run TRL."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
import transformers

TRL_VERSION = "1.16.0"
_PACKAGES = (f"trl=={TRL_VERSION}", "accelerate==1.15.0")
_ENVIRONMENT = Path(".venv-trl")
# a variable of the worker's environment; TRL takes 10 s to import vLLM where it finds it
NO_VLLM = "BENCHMARK_WITHOUT_VLLM"


def trl_python() -> str:
    """The interpreter of .venv-trl, made on first use: TRL of its own, torch, vLLM and the rest
    from the environment we
    run in."""
    python = _ENVIRONMENT / "bin" / "python"
    # Ours come behind its own packages on the path.
    hide_vllm = f"import os, sys; '{NO_VLLM}' in os.environ and sys.modules.update(vllm=None)"
    shared = f"{sysconfig.get_path('purelib')}\n{hide_vllm}\n"
    wanted = f"{shared}{' '.join(_PACKAGES)}"
    done = _ENVIRONMENT / "setup_done"
    if done.is_file() and done.read_text() == wanted:
        return str(python)
    print(f"making {_ENVIRONMENT} with {', '.join(_PACKAGES)}", flush=True)
    shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", _ENVIRONMENT], check=True)
    local = next(_ENVIRONMENT.glob("lib/python3*/site-packages"))
    (local / "shared.pth").write_text(shared)
    # torch and transformers are met by ours; where TRL asked for others, pip shall fail and not
    # fetch a CUDA build.
    constraints, log = _ENVIRONMENT / "constraints.txt", _ENVIRONMENT / "setup.log"
    constraints.write_text(
        f"torch=={torch.__version__}\ntransformers=={transformers.__version__}\n"
    )
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        *_PACKAGES,
        "-c",
        str(constraints),
    ]
    with log.open("w") as file:
        code = subprocess.run(pip, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"pip failed; its output is in {log}")
    done.write_text(wanted)
    return str(python)
