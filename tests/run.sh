#!/usr/bin/env bash
# Set-up, lint, types and the tests that need no GPU.
#   tests/run.sh [pytest arguments]      e.g. tests/run.sh -k weight_sync; all tests but those marked nightly
#   tests/run.sh --quick [...]           lint, and the tests that start no process: about 90 s after set-up
#   tests/run.sh --nightly [...]         everything: further variants of what the plain call shows already
set -euo pipefail
cd "$(dirname "$0")/.."

quick="" marks="not gpu and not nightly"
case ${1:-} in
  --quick) quick=yes; shift ;;
  --nightly) marks="not gpu"; shift ;;
esac

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
# In the order of tests/conftest.py: the small files last, so that at the end all processes have work.
exec python -m pytest -m "$marks" -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder "$@"
