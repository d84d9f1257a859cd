"""The Triton kernels for logprobs, without a GPU: their values in Triton's interpreter, and their
compilation for real GPUs. Both are processes: triton reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.models import write_config
from tests.support.processes import run_command

METRICS = ("loss/policy", "loss/entropy", "optim/grad_norm", "weight_sync/mismatch_abs_mean")


def _run(method: str, cases: str, **env: str) -> str:
    command = [sys.executable, "-m", "tests.support.workers.fused_logprobs", method, cases]
    done = run_command(command, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("cases", ["some", "all"])
def test_kernels_equal_float64_in_the_interpreter(cases: str) -> None:
    """Shapes, dtypes, soft caps, -inf and large logits, gradients: asserts in the worker."""
    _run("interpret", cases, TRITON_INTERPRET="1")


@pytest.mark.parametrize("cases", ["some", "all"])
def test_kernels_compile_for_real_gpus(tmp_path: Path, cases: str) -> None:
    """Down to machine code of A100, H100 and B200 (some: of H100), which needs no GPU."""
    assert "compiled" in _run("compile", cases, TRITON_CACHE_DIR=str(tmp_path))


def test_a_run_with_the_kernels_is_the_run_without(tmp_path: Path, folder: Path) -> None:
    """The whole loop with its running checks, in the interpreter: a step of two optimizer steps,
    with a reference and an entropy bonus."""
    metrics = {}
    for kernel in ("plain", "fused"):
        config = write_config(
            tmp_path,
            folder / "model",
            run_dir=str(tmp_path / kernel),
            model={"path": str(folder / "model"), "dtype": "float32", "logprob_kernel": kernel},
            loss={"kl_coef": 0.01, "entropy_coef": 0.001},
            rollout={"num_prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 8},
            training={"num_steps": 1, "num_mini_batches": 2, "max_tokens_per_micro_batch": 64},
        )
        command = [sys.executable, "-m", "grpo_spmd.train", "--config", str(config)]
        done = run_command(command, env={"TRITON_INTERPRET": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / kernel / "metrics.jsonl").read_text().splitlines()
        metrics[kernel] = [{name: json.loads(line)[name] for name in METRICS} for line in lines]
    for plain, fused in zip(metrics["plain"], metrics["fused"], strict=True):
        assert fused == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_the_kernels_are_refused_where_they_cannot_run(tmp_path: Path, folder: Path) -> None:
    config = write_config(
        tmp_path,
        folder / "model",
        model={"path": str(folder / "model"), "dtype": "float32", "logprob_kernel": "fused"},
    )
    done = run_command([sys.executable, "-m", "grpo_spmd.train", "--config", str(config)])
    assert done.returncode == 2
    assert "model.logprob_kernel: fused needs a GPU" in done.stderr
    assert "starting vLLM" not in done.stderr
