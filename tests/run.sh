#!/usr/bin/env bash
# Set-up, lint, types and every test that needs no GPU.
#   tests/run.sh [pytest arguments]      e.g. tests/run.sh -k weight_sync
set -euo pipefail
cd "$(dirname "$0")/.."

launch/setup.sh
. .venv/bin/activate
echo "tests: ruff"
ruff check grpo_spmd tests benchmarks
ruff format --check --quiet grpo_spmd tests benchmarks
echo "tests: mypy"
mypy
echo "tests: pytest"
# Two files at a time: most of a multi-rank test is start-up on one core.
exec python -m pytest -m "not gpu" -n 2 --dist loadfile "$@"
