#!/usr/bin/env bash
# Runs every static check with the tools of the environment $1, all of them even if one
# fails, and fails if any did.
set -uo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/say.sh"
bin=${1:?the virtual environment}/bin
failed=()

check() { # check NAME COMMAND...
  local name=$1
  shift
  say lint "$name"
  "$@" || failed+=("$name")
}

check "ruff check" "$bin/python" -m ruff check .
check "ruff format --check" "$bin/python" -m ruff format --check .
check "mypy --strict" "$bin/python" -m mypy
check "lint-imports" "$bin/lint-imports" --no-logo
if [ "${#failed[@]}" -gt 0 ]; then
  say lint "FAILED: ${failed[*]}"
  exit 1
fi
say lint "all checks passed"
