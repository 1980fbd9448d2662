#!/usr/bin/env bash
# wheels.sh: builds wheels and source packages of both distributions into out/dist, checks
# what an index would show of them, and installs them in an environment that has nothing
# else, where the command line has to work.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
cd -- "$root"
tools=.cache/wheels
dist="$root/out/dist"
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH # with the sources on it, pip takes them for an installation

if ! [ -x "$tools/bin/twine" ]; then
  say wheels "installing build and twine into $tools"
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet -c scripts/constraints.txt build twine
fi
rm -rf -- "$dist"
for source in . platform_dist; do
  "$tools/bin/python" -m build --quiet --outdir "$dist" "$source"
done
"$tools/bin/python" -m twine check --strict "$dist"/*

clean=$(mktemp -d)
trap 'rm -rf -- "$clean"' EXIT
"$python" -m venv "$clean/venv"
"$clean/venv/bin/python" -m pip install --quiet -c scripts/constraints.txt "$dist"/*.whl
cd -- "$clean" # where no module of the checkout is found
program="$clean/venv/bin/sgl-tiered"
"$program" --version
"$program" simulate --rate 2 --num-requests 3 --host-gb 1 --json >summary.json
"$program" completion bash >completion.sh
# Without SGLang nothing can be served, and the doctor has to say so: exit code 1.
code=0
"$program" doctor --json >doctor.json || code=$?
"$clean/venv/bin/python" - "$code" <<'PY'
import importlib.metadata
import json
import sys

assert sys.argv[1] == "1", "doctor without SGLang"
doctor = json.load(open("doctor.json"))
assert not doctor["serving_possible"] and "SGLang is not installed" in doctor["obstacles"][0]
assert json.load(open("summary.json"))["num_requests"] == 3
for group, name in (
    ("sglang.srt.plugins", "sgl_tiered"),
    ("sglang.srt.platforms", "sgl_tiered_cpu"),
):
    assert name in {point.name for point in importlib.metadata.entry_points(group=group)}
PY
say wheels "built, checked and installed in a clean environment: out/dist"
