#!/usr/bin/env bash
# Makes the virtual environment $1 (default .venv) with SGLang, the plugin, its CPU
# platform and the development tools, from a Python 3.11+ and the package index alone.
# The transports come along, with libraries of the system where they can be installed.
#
# Safe to run again: it returns at once when nothing has changed, and a second run at the
# same time waits for the first. PYTHON names the interpreter to use.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
cd -- "$root"

venv=${1:-.venv}
tools="$root/.cache/install"   # our own copy of uv, where the machine has none
need_gb=15                     # 10 GB of packages, and their downloads while they unpack
locked=scripts/constraints.txt # the versions that were tested together; `make lock`
sources=(pyproject.toml platform_dist/pyproject.toml scripts/install.sh
  scripts/install-system.sh "$locked")

tell() { say install "$@"; }
fail() { say install "FAILED: $*" >&2; exit 1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() { # prints the real path: a shim would follow us to another version later
  local name
  for name in ${PYTHON:+"$PYTHON"} python3 python python3.12 python3.11 python3.13; do
    if is_new_enough "$name"; then
      "$name" -c 'import sys; print(sys.executable)'
      return
    fi
    if [ -n "${PYTHON:-}" ]; then break; fi
  done
  fail "Python 3.11 or newer is needed, and ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 || true);" \
    "install one and set PYTHON=/path/to/python3"
}

choose_mooncake() { # three packages have one module: for a CUDA, or for none
  local cuda
  cuda=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA Version: ([0-9]+).*/\1/p' | head -n 1) || true
  case ${cuda:-0} in
    0) mooncake=mooncake ;;
    1[0-2]) mooncake=mooncake-cuda12 ;;
    *) mooncake=mooncake-cuda13 ;;
  esac
}

fingerprint() { # what the environment was made from; a moved one has wrong paths in it
  { cat -- "${sources[@]}"; printf '%s\n' "$root" "$venv" "$extras"; } | "$python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_current() {
  [ -f "$venv/.installed" ] && [ "$(cat -- "$venv/.installed")" = "$wanted" ] &&
    "$venv/bin/python" -c '' >/dev/null 2>&1
}

find_uv() { # sets uv to a command that works, or to nothing
  uv=$(command -v uv || true)
  if [ -n "$uv" ] && "$uv" --version >/dev/null 2>&1; then return; fi
  uv="$tools/bin/uv"
  if "$uv" --version >/dev/null 2>&1; then return; fi
  tell "uv (a faster installer) is not here: fetching it into ${tools#"$root"/}"
  # --target works where the system's Python is marked as externally managed (PEP 668)
  # and changes nothing outside this checkout.
  if "$python" -m pip install --quiet --target "$tools" --upgrade uv >/dev/null 2>&1 &&
    "$uv" --version >/dev/null 2>&1; then return; fi
  if "$python" -m venv "$tools/venv" >/dev/null 2>&1 &&
    "$tools/venv/bin/python" -m pip install --quiet uv >/dev/null 2>&1; then
    uv="$tools/venv/bin/uv"
    if "$uv" --version >/dev/null 2>&1; then return; fi
  fi
  uv=""
}

warn_of_small_disk() {
  local free_gb
  free_gb=$(($(df -Pk -- "$(dirname -- "$venv")" | awk 'NR == 2 {print $4}') / 1000000))
  if [ "$free_gb" -ge "$need_gb" ]; then return; fi
  tell "WARNING: $free_gb GB are free here, and a first installation wants $need_gb GB"
  tell "  (torch with its CUDA libraries is most of it). If it fails: make room, or put"
  tell "  the environment on another disk with VENV=/other/disk/venv, and uv's download"
  tell "  cache beside it with UV_CACHE_DIR=/other/disk/uv so that files are linked."
}

install_packages() {
  if [ -n "$uv" ]; then
    "$uv" pip install --python "$venv/bin/python" -c "$locked" -e "$extras" -e platform_dist
  else
    "$venv/bin/python" -m pip install --progress-bar off -c "$locked" \
      -e "$extras" -e platform_dist
  fi
}

python=$(find_python)
choose_mooncake
extras=".[sglang,bench,dev,etcd,nixl,$mooncake]"
if [ -n "${UNLOCKED:-}" ]; then # to lock: with what only scripts/docs.sh installs
  locked=/dev/null
  extras=".[sglang,bench,dev,docs,etcd,nixl,$mooncake]"
fi
wanted=$(fingerprint)
if is_current; then exit 0; fi

# The lock belongs to descriptor 9 of this shell, so it ends with it however that ends.
mkdir -p -- "$root/.cache" "$(dirname -- "$venv")"
exec 9>"$root/.cache/install.lock"
"$python" - <<'PY'
import fcntl
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("[install] another installation runs in this checkout: waiting", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
PY
if is_current; then exit 0; fi

warn_of_small_disk
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-300}" UV_PYTHON_DOWNLOADS="${UV_PYTHON_DOWNLOADS:-never}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
find_uv
if ! "$venv/bin/python" -c '' >/dev/null 2>&1; then
  tell "making $venv with $("$python" --version)"
  if [ -n "$uv" ]; then
    "$uv" venv --quiet --clear --python "$python" "$venv"
  else
    "$python" -m venv --clear "$venv" ||
      fail "$python cannot make a virtual environment; Debian and Ubuntu: apt install python3-venv"
  fi
fi
# A broken installation must not look whole to the next run.
rm -f -- "$venv/.installed"
tell "installing with ${uv:-pip}; the first time downloads about 4 GB (torch with CUDA libraries)"
if ! install_packages; then
  tell "that failed; trying once more in 5 s (the package index may have been slow)"
  sleep 5
  install_packages || fail "the packages could not be installed; the reason is above." \
    "Free disk: $(df -Ph -- "$venv" | awk 'NR == 2 {print $4}')"
fi
bash scripts/install-system.sh
printf '%s\n' "$wanted" >"$venv/.installed.new"
mv -- "$venv/.installed.new" "$venv/.installed"
tell "done: $venv"
