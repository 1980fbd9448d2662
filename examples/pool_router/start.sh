#!/usr/bin/env bash
# start.sh [--check]: two servers in one pool and a router that finds them by its registry.
# What one server has computed the other pulls, where that is faster than computing it.
# With --check one question goes through the router, and everything ends.
#   MODEL=path     default: the demo model of this repository
#   FIRST_PORT=N   the first of 7 ports; default 30200
#   FLAGS="..."    for both servers; default: what serves best without an accelerator
#   OUT=folder     for logs and the registry; default out/pool_router
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
. "$root/examples/servers.sh"
model=${MODEL:-$root/workloads/models/demo}
first=${FIRST_PORT:-30200}
out=${OUT:-out/pool_router}
flags=${FLAGS:---max-total-tokens 16384 --sleep-on-idle --disable-overlap-schedule}
mkdir -p "$out"
front=$((first + 2))

for number in 0 1; do
  events=$((first + 3 + 2 * number))
  # shellcheck disable=SC2086  # FLAGS are several words
  start "server-$number" "$out" python -m sglang.launch_server --model-path "$model" \
    --page-size 16 $flags --port $((first + number)) \
    --radix-cache-backend tiered --tiered-host-size 200MB \
    --tiered-pool "file:$out/pool" --tiered-pool-name "server-$number" \
    --kv-events-config "{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$events\",\"replay_endpoint\":\"tcp://*:$((events + 1))\"}"
done
wait_for server-0 "http://127.0.0.1:$first/health"
wait_for server-1 "http://127.0.0.1:$((first + 1))/health"
start router "$out" sgl-tiered router --port "$front" --tokenizer "$model" \
  --show-cached-tokens --registry "file:$out/pool"
wait_for router "http://127.0.0.1:$front/health"
sgl-tiered pool list --registry "file:$out/pool"
finish "http://127.0.0.1:$front" "${1:-}"
