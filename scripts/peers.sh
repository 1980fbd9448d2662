#!/usr/bin/env bash
# peers.sh VENV: installs what only the benches of routers compare with, once: sglang-router,
# into an environment of its own, .cache/sglang-router, as it brings packages that nothing
# else here wants.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
cd -- "$root"
venv=${1:?the virtual environment}
router=.cache/sglang-router
wanted="sglang-router==0.3.2"

find_uv() {
  local found
  for found in "$(command -v uv || true)" "$root/.cache/install/bin/uv"; do
    if [ -n "$found" ] && "$found" --version >/dev/null 2>&1; then
      printf '%s\n' "$found"
      return
    fi
  done
}

add() { # add PYTHON PACKAGES...
  local python=$1
  shift
  if [ -n "$uv" ]; then
    "$uv" pip install --quiet --python "$python" "$@"
  else
    "$python" -m pip install --quiet "$@"
  fi
}

uv=$(find_uv)
if [ "$(cat -- "$router/.installed" 2>/dev/null)" != "$wanted" ]; then
  say peers "installing $wanted into $router"
  rm -rf -- "$router"
  if [ -n "$uv" ]; then
    "$uv" venv --quiet --python "$venv/bin/python" "$router"
  else
    "$venv/bin/python" -m venv "$router"
  fi
  add "$router/bin/python" "$wanted"
  printf '%s\n' "$wanted" >"$router/.installed"
fi
