#!/usr/bin/env bash
# Makes the virtual environment $1 with SGLang, the plugin, its CPU platform and the
# development tools. Uses uv where it is there or can be installed, else pip.
set -euo pipefail
venv=${1:-.venv}
python=${PYTHON:-python3}
say() { printf '\033[1m[install]\033[0m %s\n' "$*"; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  say "Python 3.11 or newer is needed, $("$python" --version 2>&1) was found: set PYTHON=/path/to/python3.11"; exit 1; }
if command -v uv >/dev/null 2>&1; then uv=$(command -v uv)
elif "$python" -m pip install --quiet --user uv >/dev/null 2>&1 && "$python" -m uv --version >/dev/null 2>&1; then uv="$python -m uv"
else uv=""; fi

extras=".[sglang,bench,dev]"
if [ -n "$uv" ]; then
  say "using uv; the first installation downloads about 4 GB (torch with CUDA libraries)"
  [ -x "$venv/bin/python" ] || $uv venv --quiet --python "$python" "$venv"
  $uv pip install --python "$venv/bin/python" -e "$extras" -e platform_dist
else
  say "using pip; this takes about 3 minutes"
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -e "$extras" -e platform_dist
fi
touch "$venv/.installed"
say "done: $venv"
