#!/usr/bin/env bash
# docs.sh: builds the documentation's site into out/site, strictly. MkDocs and its theme
# get an environment of their own, .cache/docs, as nothing else here wants them; the
# versions are those of the extra `docs` and of the lock.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
cd -- "$root"
venv=.cache/docs
wanted=$(cat pyproject.toml scripts/constraints.txt scripts/docs.sh | cksum)

if [ "$(cat -- "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
  say docs "installing mkdocs-material into $venv"
  rm -rf -- "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  packages=$("$venv/bin/python" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")')
  printf '%s\n' "$packages" >"$venv/wanted.txt"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    -c scripts/constraints.txt -r "$venv/wanted.txt"
  printf '%s\n' "$wanted" >"$venv/.installed"
fi
export NO_MKDOCS_2_WARNING=1 # its advertisement for a successor
"$venv/bin/python" -m mkdocs build --strict --clean "$@"
say docs "done: out/site/index.html"
