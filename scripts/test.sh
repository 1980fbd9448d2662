#!/usr/bin/env bash
# test.sh VENV "PARTS" [--long] [PYTEST ARGUMENTS...]: runs the parts (of: lint fast
# servers e2e faults cluster scenarios), the later ones even if an earlier one failed, and
# fails if any did. --long: with all that is left out otherwise, and more examples per
# property. servers is e2e and faults in one run, which waits for a last test only once.
#
# Each part is a process of its own: those with servers hand them their environment, and
# must not inherit what a kernel test set there. lint runs beside the part that follows
# it. The end says what took how long; its last line sums up all parts like pytest's.
set -uo pipefail
here=$(dirname -- "${BASH_SOURCE[0]}")
. "$here/say.sh"
venv=${1:?the virtual environment}
parts=${2:?parts, of: lint fast servers e2e faults cluster scenarios}
shift 2
num_args=$#
args=()
fast_timeout_s=300
for arg in "$@"; do
  if [ "$arg" = --long ]; then
    args+=(--full --faults-long)
    num_args=$((num_args - 1))
    export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-full}
    fast_timeout_s=1800
  else
    args+=("$arg")
  fi
done
# What is said of each part; of this run alone.
told=.cache/test
rm -rf "$told" && mkdir -p "$told"
failures='' lint_pid=''
TIMEFORMAT='%R %U %S'
cores=$(env -u OMP_NUM_THREADS nproc)

side_by_side() { # side_by_side MOST: how many processes of tests this machine has room for
  echo "$((cores < $1 ? cores : $1))"
}

with_servers() { # with_servers PART: two processes more than cores, as servers often wait
  local num=$((cores < 3 ? cores + 2 : 4))
  # Files in the order in which they are collected: that of tests/e2e/conftest.py.
  run_pytest "$1" 900 -n "$num" --dist loadfile --no-loadscope-reorder -- "${@:2}"
}

note_failure() { # note_failure PART CODE
  if [ "$2" -eq 0 ]; then return; fi
  # 5: no test was selected. That is expected only where arguments select tests.
  if [ "$2" -eq 5 ] && [ "$num_args" -gt 0 ]; then return; fi
  failures="$failures${failures:+ }$1"
}

start_lint() {
  { time bash "$here/lint.sh" "$venv" >"$told/lint.log" 2>&1; } 2>"$told/lint.time" &
  lint_pid=$!
}

end_lint() {
  if [ -z "$lint_pid" ]; then return; fi
  wait "$lint_pid"
  note_failure lint $?
  lint_pid=''
  cat "$told/lint.log"
}

run_pytest() { # run_pytest PART TIMEOUT_S OPTIONS... -- FOLDERS...
  local part=$1 timeout_s=$2 folder found=() options=()
  shift 2
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  for folder in "$@"; do
    if [ -n "$(find "tests/$folder" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
      found+=("tests/$folder")
    fi
  done
  if [ "${#found[@]}" -eq 0 ]; then return; fi
  say test "$part: ${found[*]}${failures:+ (FAILED before: $failures; see above)}"
  # The figures go to a file of their own: 3 is this script's output.
  { time "$venv/bin/python" -m pytest --timeout="$timeout_s" \
    --junitxml="$told/$part.xml" "${options[@]}" "${found[@]}" "${args[@]}" 2>&3; \
  } 3>&2 2>"$told/$part.time"
  note_failure "$part" $?
}

run_part() { # run_part PART
  case $1 in
    # The longest tests first, so that no process ends long before another.
    fast) run_pytest fast "$fast_timeout_s" -n "$(side_by_side 8)" --dist worksteal -- \
      contract kernels conformance property unit ;;
    # Each process has a server, which the tests of a file share.
    servers) with_servers servers e2e faults ;;
    e2e) with_servers e2e e2e ;;
    faults) with_servers faults faults ;;
    cluster) run_pytest cluster 1800 -- cluster ;;
    scenarios) run_pytest scenarios 900 -n "$(side_by_side 2)" --dist loadfile -- scenarios ;;
    *) say test "unknown part: $1"; exit 2 ;;
  esac
}

for part in $parts; do
  if [ "$part" = lint ]; then start_lint; continue; fi
  run_part "$part"
  end_lint
done
end_lint
"$venv/bin/python" "$here/test_summary.py" "$told" "$(($(date +%s) - STARTED_AT))" $failures
[ -z "$failures" ]
