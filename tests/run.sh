#!/usr/bin/env bash
# Set-up, lint, types and every test that needs no GPU.
#   tests/run.sh [pytest arguments]      e.g. tests/run.sh -k weight_sync
#   tests/run.sh --quick [...]           lint, and the tests that start no process: about a minute after set-up
set -euo pipefail
cd "$(dirname "$0")/.."

quick=""
if [ "${1:-}" = --quick ]; then quick=yes; shift; fi

launch/setup.sh
. .venv/bin/activate
echo "tests: ruff"
ruff check grpo_spmd tests benchmarks
ruff format --check --quiet grpo_spmd tests benchmarks
if [ -n "$quick" ]; then
  set -- tests/unit "$@"
else
  echo "tests: mypy"
  mypy
fi
echo "tests: pytest"
# Two files at a time, in the order of tests/conftest.py: the longest first, so that at the end both cores have work.
exec python -m pytest -m "not gpu" -n 2 --dist loadfile --no-loadscope-reorder "$@"
