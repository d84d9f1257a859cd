#!/usr/bin/env bash
# One benchmark or all: a readable table, and with --json one JSON object a row.
#   benchmarks/run.sh NAME|all [--json FILE]
#   benchmarks/run.sh gpu_day [--dry] [--minutes N] ...      a day of evidence on one GPU host; see benchmarks/README.md
set -euo pipefail
cd "$(dirname "$0")/.."

modules=(
  speed.start speed.init speed.weight_sync speed.loss_memory speed.logprob_kernels speed.update speed.shared_prefixes speed.balance speed.rank0 speed.host_overhead speed.prompts speed.rollout_dump speed.rollout_tail speed.report speed.signals speed.engine_host speed.step_vs_trl speed.episodes speed.gpu
  agreement.learning agreement.families agreement.trained_weights agreement.router_replay agreement.speculation agreement.sequence_parallel agreement.trl_loss agreement.trl_episodes agreement.self_teacher agreement.plan agreement.mutations agreement.diagnosis agreement.contract agreement.dry_run agreement.old_vllm
  survival.slurm_trial survival.faults
)
name=${1:-}
if [ "$name" = gpu_day ]; then
  shift
  # A borrowed host has no package index: where python3 finds torch and vLLM, they are used as they are.
  python3 -c 'import sys; from importlib.util import find_spec; sys.exit(not (find_spec("torch") and find_spec("vllm")))' || {
    launch/setup.sh
    . .venv/bin/activate
  }
  exec python3 -m benchmarks.gpu_day "$@"
fi
chosen=()
for module in "${modules[@]}"; do
  case $name in all | "${module#*.}") chosen+=("$module") ;; esac
done
if [ ${#chosen[@]} = 0 ]; then
  echo "usage: benchmarks/run.sh NAME|all [--json FILE]   NAME: ${modules[*]#*.} gpu_day" >&2
  exit 2
fi
shift
launch/setup.sh
. .venv/bin/activate
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
for module in "${chosen[@]}"; do
  python -m "benchmarks.$module" "$@"
done
