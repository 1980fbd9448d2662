#!/usr/bin/env bash
# start.sh [--check]: a prefill server, a decode server and a router before them, on this
# machine, with tiers on both sides (--tiered-pd-caching 3: answers go back to prefill).
# With --check one question goes through the router, and everything ends.
#   MODEL=path     default: the demo model of this repository
#   FIRST_PORT=N   the first of 8 ports; default 30100
#   FLAGS="..."    for both servers; default: what serves best without an accelerator
#   OUT=folder     for logs and the registry; default out/pd_pair
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
. "$root/examples/servers.sh"
model=${MODEL:-$root/workloads/models/demo}
first=${FIRST_PORT:-30100}
out=${OUT:-out/pd_pair}
flags=${FLAGS:---max-total-tokens 16384 --sleep-on-idle --disable-overlap-schedule}
mkdir -p "$out"
prefill=$first decode=$((first + 1)) bootstrap=$((first + 2)) front=$((first + 3))
# What the servers tell each other of where they are. On several machines leave it out.
export SGLANG_HOST_IP=127.0.0.1 HOST_IP=127.0.0.1

both=(--model-path "$model" --page-size 16
  --radix-cache-backend tiered --tiered-host-size 200MB
  --tiered-pool "file:$out/pool" --tiered-pd-caching 3
  --disaggregation-transfer-backend tiered)
events() { # events PORT: KV events, by which the router knows what a server holds
  printf '{"publisher":"zmq","endpoint":"tcp://*:%s","replay_endpoint":"tcp://*:%s"}' \
    "$1" "$(($1 + 1))"
}

# shellcheck disable=SC2086  # FLAGS are several words
start prefill "$out" python -m sglang.launch_server "${both[@]}" $flags \
  --port "$prefill" --disaggregation-mode prefill \
  --disaggregation-bootstrap-port "$bootstrap" \
  --tiered-pool-name prefill --kv-events-config "$(events $((first + 4)))"
# shellcheck disable=SC2086
start decode "$out" python -m sglang.launch_server "${both[@]}" $flags \
  --port "$decode" --disaggregation-mode decode \
  --tiered-pool-name decode --kv-events-config "$(events $((first + 6)))"
wait_for prefill "http://127.0.0.1:$prefill/health"
wait_for decode "http://127.0.0.1:$decode/health"
start router "$out" sgl-tiered router --port "$front" --tokenizer "$model" \
  --show-cached-tokens \
  --instance "http://127.0.0.1:$prefill,kind=prefill,bootstrap=$bootstrap,name=prefill" \
  --instance "http://127.0.0.1:$decode,kind=decode,name=decode"
wait_for router "http://127.0.0.1:$front/health"
finish "http://127.0.0.1:$front" "${1:-}"
