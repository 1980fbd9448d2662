#!/usr/bin/env bash
# test.sh VENV PARTS [PYTEST ARGUMENTS...]: runs the parts (of: lint fast e2e faults cluster) in
# order, the later ones even if an earlier one failed, and fails if any did.
#
# Each part is a process of its own: e2e and faults start servers, which inherit the
# environment, and must not inherit what a kernel test set there. Nothing is printed
# after pytest's closing line.
set -uo pipefail
here=$(dirname -- "${BASH_SOURCE[0]}")
. "$here/say.sh"
venv=${1:?the virtual environment}
parts=${2:?parts, of: lint fast e2e faults}
shift 2
fast_folders=(unit property conformance kernels contract)
status=0

note_failure() { # note_failure PART CODE
  if [ "$2" -eq 0 ]; then return; fi
  # 5: no test was selected. That is expected only where arguments select tests.
  if [ "$2" -eq 5 ] && [ "$num_args" -gt 0 ]; then return; fi
  failures="${failures:-}${failures:+, }$1"
  status=1
}

run_pytest() { # run_pytest PART TIMEOUT_S FOLDERS...
  local part=$1 timeout_s=$2 folder found=()
  shift 2
  for folder in "$@"; do
    if [ -n "$(find "tests/$folder" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
      found+=("tests/$folder")
    fi
  done
  if [ "${#found[@]}" -eq 0 ]; then return; fi
  say test "$part: ${found[*]}${failures:+ (FAILED before: $failures; see above)}"
  "$venv/bin/python" -m pytest --timeout="$timeout_s" "${found[@]}" "${args[@]}"
  note_failure "$part" $?
}

args=("$@")
num_args=$#
for part in $parts; do
  case $part in
    lint) bash "$here/lint.sh" "$venv"; note_failure lint $? ;;
    fast) run_pytest fast 300 "${fast_folders[@]}" ;;
    e2e) run_pytest e2e 900 e2e ;;
    faults) run_pytest faults 900 faults ;;
    cluster) run_pytest cluster 1800 cluster ;;
    *) say test "unknown part: $part"; exit 2 ;;
  esac
done
exit "$status"
