#!/usr/bin/env bash
# Trains the built-in demo on a fresh machine: sets up .venv, makes a tiny model, and lets GRPO teach it countdown.
#   launch/demo.sh [section.key=value ...]      e.g. launch/demo.sh seed=3
#   NPROC=1 launch/demo.sh                      another number of ranks; default: every GPU, or 2 on the CPU
set -euo pipefail
cd "$(dirname "$0")/.."

launch/setup.sh
. .venv/bin/activate
gpus=0  # torch knows CUDA_VISIBLE_DEVICES and MIG; it takes seconds to ask, so only where there may be one
if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(python -c 'import torch; print(torch.cuda.device_count())'); fi
nproc=${NPROC:-$(( gpus > 0 ? gpus : 2 ))}

python -m grpo_spmd.demo
# Bad overrides are refused here in one line, before torchrun wraps them in its report. (Where run_dir is not the user's own, it is moved
# out of the way below, and must not be refused because the last run is still in it.)
case " $*" in *" run_dir="*) elsewhere=() ;; *) elsewhere=(run_dir=runs/checked) ;; esac
WORLD_SIZE=$nproc python -m grpo_spmd.train --config configs/demo.yaml --check "$@" "${elsewhere[@]}" >/dev/null
# The newest run is always runs/demo; an earlier one is moved aside, never written over.
if [ ${#elsewhere[@]} -gt 0 ] && [ -e runs/demo ]; then
  n=1
  while [ -e "runs/demo.$n" ]; do n=$((n + 1)); done
  mv runs/demo "runs/demo.$n"
  echo "demo: moved the last run to runs/demo.$n"
fi
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > nproc ? cores / nproc : 1 ))}
echo "demo: torchrun --nproc-per-node $nproc -m grpo_spmd.train --config configs/demo.yaml $*"
exec torchrun --standalone --nproc-per-node "$nproc" -m grpo_spmd.train --config configs/demo.yaml "$@"
