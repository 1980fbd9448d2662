#!/usr/bin/env bash
# lock_hashes.sh: writes scripts/requirements.lock, the packages of an installation with
# SGLang in the versions of scripts/constraints.txt, each with the hashes of its files. uv
# asks the package index for them and installs nothing.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
cd -- "$root"
uv=$(command -v uv || echo .cache/install/bin/uv)
locked=.cache/requirements.lock

mkdir -p .cache
cat >"$locked" <<'HEAD'
# Every package of an installation with SGLang, with hashes: made by `make lock`.
# Python 3.11, Linux on x86-64 with glibc 2.34 or newer.
#   pip install --require-hashes -r scripts/requirements.lock && pip install --no-deps .
HEAD
"$uv" pip compile pyproject.toml --extra sglang --extra etcd --extra control \
  -c scripts/constraints.txt --generate-hashes --python-version 3.11 \
  --python-platform x86_64-manylinux_2_34 --no-annotate --no-header -q >>"$locked"
mv "$locked" scripts/requirements.lock
say lock "wrote scripts/requirements.lock"
