#!/usr/bin/env bash
# Trains a built-in demo on a fresh machine: sets up .venv, makes a tiny model, and lets GRPO teach it countdown, or to use a tool, or a
# teacher's distribution (distill), or by a reward model (rm), or a mixture of experts (experts), or a hybrid of
# gated delta nets and attention (hybrid).
#   launch/demo.sh [NAME] [section.key=value ...]      e.g. launch/demo.sh seed=3; NAME: tools, compacting, experts, hybrid, distill, judge, ppo or rm
#   NPROC=1 launch/demo.sh                             another number of ranks; default: every GPU, or 2 on the CPU
set -euo pipefail
cd "$(dirname "$0")/.."

name=demo
case ${1:-=} in *=* | -*) ;; *) name=demo-$1; shift ;; esac
if [ ! -f "configs/$name.yaml" ]; then
  others=$(cd configs && ls demo-*.yaml 2>/dev/null | sed 's/^demo-//; s/\.yaml$//' | paste -sd ' ' || true)
  echo "error: there is no demo ${name#demo-}; without a name it is countdown${others:+, others are: $others}" >&2
  exit 2
fi

launch/setup.sh
. .venv/bin/activate
gpus=0  # torch knows CUDA_VISIBLE_DEVICES and MIG; it takes seconds to ask, so only where there may be one
if command -v nvidia-smi >/dev/null 2>&1; then
  echo "demo: asking torch for GPUs"
  trap 'echo "demo: stopped by Ctrl-C" >&2; exit 1' INT
  gpus=$(python -c 'import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); import torch; print(torch.cuda.device_count())')
  trap - INT
fi
if [ "$name" = demo-judge ]; then  # for as long as this runs, at a free port; whoever names another judge has the last word
  exec {judge}< <(exec python -m grpo_spmd.demo judge)
  trap "kill $! 2>/dev/null || true" EXIT
  read -r url <&"$judge"
  set -- "rewards.0.url=$url" "$@"
fi
nproc=${NPROC:-$(( gpus > 0 ? gpus : 2 ))}

case $name in demo-tools | demo-compacting | demo-experts | demo-hybrid | demo-distill | demo-rm) made=("${name#demo-}") ;; *) made=() ;; esac
python -m grpo_spmd.demo "${made[@]}"
# Bad overrides are refused before the last run is moved. (Unless the user names a run folder, or goes on with the last run, that is moved
# out of the way below, and must not be a reason to refuse.)
case " $* " in *" run_dir="* | *" checkpoint.resume="*) elsewhere=() ;; *) elsewhere=(run_dir=runs/checked) ;; esac
echo "demo: checking the config"
WORLD_SIZE=$nproc python -m grpo_spmd.train --config "configs/$name.yaml" --check "$@" "${elsewhere[@]}" >/dev/null
# The newest run is always runs/demo; an earlier one is moved aside, never written over.
if [ ${#elsewhere[@]} -gt 0 ] && [ -e "runs/$name" ]; then
  n=1
  while [ -e "runs/$name.$n" ]; do n=$((n + 1)); done
  mv "runs/$name" "runs/$name.$n"
  echo "demo: moved the last run to runs/$name.$n"
fi
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( cores > nproc ? cores / nproc : 1 ))}
started="grpo-spmd train --nproc $nproc --config configs/$name.yaml"
echo "demo: $started${*:+ $*}"
[ "$name" = demo-judge ] || exec python -m grpo_spmd.cli ${started#grpo-spmd }  "$@"
python -m grpo_spmd.cli ${started#grpo-spmd }  "$@"
