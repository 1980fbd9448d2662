#!/usr/bin/env bash
# search.sh URL: LSPDojo's tree search on begun.py. A model writes, a language server finds
# errors, the search goes on from the line before each; every node sends the whole file so
# far. Status 1 (a limit was reached before a file without errors was found) is no failure
# here: the small demo model seldom repairs anything.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
url=${1:-http://127.0.0.1:30000}
out=${2:-out/lsp_tree}
status=0
python -m sgl_tiered_workloads.lsp_dojo "$here/begun.py" --repair --fixes 1 \
  --url "$url" --out "$out" "${@:3}" || status=$?
[ "$status" -le 1 ]
