"""The Triton kernels for logprobs, without a GPU: their values in Triton's interpreter, and their
compilation for real GPUs. Both are processes: triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT


def _run(method: str, **env: str) -> str:
    command = [sys.executable, "-m", "tests.support.workers.fused_logprobs", method]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_equal_float64_in_the_interpreter() -> None:
    """Shapes, dtypes, soft caps, -inf and large logits, gradients: asserts in the worker."""
    _run("interpret", TRITON_INTERPRET="1")


def test_kernels_compile_for_real_gpus(tmp_path: Path) -> None:
    """Down to machine code of A100, H100 and B200, which needs no GPU."""
    assert "compiled" in _run("compile", TRITON_CACHE_DIR=str(tmp_path))
