"""Shapes in the signatures of the pure maths are checked while the tests run, and cost nothing in a run."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks on two cores: with more threads vLLM's CPU back end is 20 times slower

from jaxtyping import install_import_hook

install_import_hook(["grpo_spmd.advantages", "grpo_spmd.logprobs", "grpo_spmd.loss", "grpo_spmd.policy"], "beartype.beartype")
