#!/usr/bin/env bash
# The packages that a bare GPU host lacks, as parts small enough to travel one by one.
#   site.sh build PARTS [PART_MIB]    here: PARTS/site.tar.xz.00 and so on, with their sums; needs pip, some GiB and minutes
#   site.sh take FROM PARTS           there: add the parts that came in FROM to PARTS, and say what is missing
#   site.sh unpack PARTS SITE         there: once all are in PARTS; then export PYTHONPATH=SITE
set -euo pipefail

say() { echo "site: $*"; }
fail() { echo "site: $*" >&2; exit 1; }
usage() { sed -n '3,5s/^# *//p' "$0" >&2; exit 2; }

# Parts that the list of sums names and that are not in folder $1, or not as they were built; one a line.
missing() {
  (cd "$1" && sha256sum --check --quiet site.sha256 2>/dev/null || true) | sed -n 's/: FAILED.*//p'
}

build() {
  local parts=$1 size=${2:-56} site glibc platforms=()
  site=$(mktemp -d)
  # The name now, since this variable is gone at the end.
  trap "rm -rf '$site'" EXIT
  for glibc in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform any)
  say "fetching the packages of site.txt"
  python3 -m pip install -q --no-deps --only-binary=:all: --implementation cp --python-version 3.12 "${platforms[@]}" \
    --target "$site" -r "$(dirname "$0")/site.txt"
  # A Hopper chip runs FlashAttention 3; version 2, the front end in Rust and other chips' kernels are only weight.
  rm -rf "$site"/vllm/vllm_flash_attn/_vllm_fa2_C*.so "$site"/vllm/vllm-rs "$site"/vllm/third_party/fmha_sm100 \
    "$site"/bin "$site"/share
  find "$site" -name __pycache__ -type d -prune -exec rm -rf {} +
  mkdir -p "$parts"
  rm -f "$parts"/site.tar.xz.* "$parts"/site.sha256
  say "packing $(du -sm "$site" | cut -f1) MiB"
  # In blocks, so that all cores of the host can unpack them.
  tar -C "$site" -c . | xz -T0 -6 --block-size=64MiB | split -b "${size}m" -d - "$parts/site.tar.xz."
  (cd "$parts" && sha256sum site.tar.xz.* >site.sha256)
  say "$(wc -l <"$parts/site.sha256") parts, $(du -cm "$parts"/site.tar.xz.* | tail -n 1 | cut -f1) MiB in all, in $parts"
}

take() {
  local from=$1 parts=$2 left
  [ -f "$from/site.sha256" ] || fail "$from/site.sha256 is not there: it travels with each part"
  mkdir -p "$parts"
  cp "$from"/site.sha256 "$parts"/
  cp "$from"/site.tar.xz.* "$parts"/
  left=$(missing "$parts" | tr '\n' ' ')
  say "$(wc -l <"$parts/site.sha256") parts in all, missing: ${left:-none}"
}

unpack() {
  local parts=$1 site=$2 left
  [ -f "$parts/site.sha256" ] || fail "$parts/site.sha256 is not there: take a part first"
  left=$(missing "$parts" | tr '\n' ' ')
  [ -z "$left" ] || fail "missing or damaged in $parts: ${left}; take them again"
  if [ -f "$site/site_done" ] && cmp -s "$site/site_done" "$parts/site.sha256"; then
    say "$site is unpacked already"
    return
  fi
  rm -rf "$site"
  mkdir -p "$site"
  # By the list, not by what lies there: a part of an older build would go unseen.
  (cd "$parts" && sed 's/^[0-9a-f]* [ *]//' site.sha256 | sort | xargs cat) | xz -dc -T0 | tar -x -C "$site"
  cp "$parts/site.sha256" "$site/site_done"
  say "unpacked into $site; export PYTHONPATH=$site"
}

case "${1:-}:$#" in
  build:2 | build:3 | take:3 | unpack:3) "$@" ;;
  *) usage ;;
esac
