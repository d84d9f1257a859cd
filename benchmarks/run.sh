#!/usr/bin/env bash
# One benchmark or all: a readable table, and with --json one JSON object a row.
#   benchmarks/run.sh NAME|all [--json FILE]
set -euo pipefail
cd "$(dirname "$0")/.."

names=(init weight_sync loss_memory update balance host_overhead rollout_tail step_vs_trl gpu learning trl_loss mutations slurm_trial faults)
name=${1:-}
case " ${names[*]} all " in
  *" $name "*) [ -n "$name" ] || { echo "usage: benchmarks/run.sh NAME|all [--json FILE]   NAME: ${names[*]}" >&2; exit 2; } ;;
  *) echo "usage: benchmarks/run.sh NAME|all [--json FILE]   NAME: ${names[*]}" >&2; exit 2 ;;
esac
shift
launch/setup.sh
. .venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ "$name" = all ]; then chosen=("${names[@]}"); else chosen=("$name"); fi
for each in "${chosen[@]}"; do
  python -m "benchmarks.$each" "$@"
done
