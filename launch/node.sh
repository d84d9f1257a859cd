#!/usr/bin/env bash
# One node of a job that Kubernetes (launch/kubernetes.yaml) or SkyPilot (launch/skypilot.yaml) starts on each node, and starts again.
#   launch/node.sh CONFIG [section.key=value ...]
# torchrun reads how many nodes there are and where they meet from PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and
# PET_MASTER_PORT: Kubeflow sets them, and of SkyPilot's variables they are made here. All nodes must see run_dir.
# Exit codes: 0 done; 2 a bad config, of no use to try again; 138 stopped, and all saved; 140 anything else. Started again, the run goes on
# from its newest checkpoint.
set -euo pipefail

if [ $# -lt 1 ]; then
  echo "usage: launch/node.sh CONFIG [section.key=value ...]" >&2
  exit 2
fi
config=$1
shift
if [ -n "${SKYPILOT_NODE_IPS:-}" ]; then
  export PET_NNODES=$(($(wc -l <<<"$SKYPILOT_NODE_IPS"))) PET_NODE_RANK=$SKYPILOT_NODE_RANK PET_NPROC_PER_NODE=$SKYPILOT_NUM_GPUS_PER_NODE
  export PET_MASTER_ADDR=${SKYPILOT_NODE_IPS%%$'\n'*} PET_MASTER_PORT=${PET_MASTER_PORT:-29400}
fi
: "${PET_NNODES:?set by Kubeflow or SkyPilot}" "${PET_NODE_RANK:?}" "${PET_NPROC_PER_NODE:?}"

say() { echo "node.sh: $(date '+%F %T') node $PET_NODE_RANK: $*"; }
# One line and exit code 2 for a bad config, before a rank is started.
WORLD_SIZE=$((PET_NNODES * PET_NPROC_PER_NODE)) python -m grpo_spmd.train --check --config "$config" checkpoint.resume=auto "$@"
run_dir=$(python -c 'import sys, yaml
tree = yaml.safe_load(open(sys.argv[1]))
for word in sys.argv[2:]:
    name, _, value = word.partition("=")
    tree[name] = yaml.safe_load(value) if name == "run_dir" else tree.get(name)
print(tree["run_dir"])' "$config" "$@")
if [ "$PET_NODE_RANK" = 0 ]; then rm -f "$run_dir/preempted.json"; fi  # of the last start
# A run that has begun goes on from its newest checkpoint; a new one may start from the one that `checkpoint.resume=FOLDER` names.
arguments=(checkpoint.resume=auto "$@")
if [ -e "$run_dir/config.yaml" ] || [ -e "$run_dir/checkpoints" ]; then arguments=("$@" checkpoint.resume=auto); fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Told to leave, torchrun kills its ranks after this time (by default 30 s): the time to save is what the pod is given.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-150}
job=""
hand_on() { if [ -n "$job" ]; then kill -TERM "$job" 2>/dev/null || true; else exit 138; fi; }
trap hand_on TERM INT
say "starting $PET_NPROC_PER_NODE ranks, one of $PET_NNODES nodes, run_dir $run_dir"
torchrun -m grpo_spmd.train --config "$config" "${arguments[@]}" &
job=$!
code=0
wait "$job" || code=$?
while kill -0 "$job" 2>/dev/null; do  # a signal ended `wait`, not torchrun
  code=0
  wait "$job" || code=$?
done
# All ranks leave together, those of nodes that nobody told to leave with 0: the marker tells.
if [ -e "$run_dir/preempted.json" ]; then
  say "stopped and saved: $(cat "$run_dir/preempted.json")"
  exit 138
fi
if [ "$code" = 0 ]; then exit 0; fi
say "torchrun failed with exit code $code"
exit 140
