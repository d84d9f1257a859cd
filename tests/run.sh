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
exec python -m pytest -m "not gpu" "$@"
