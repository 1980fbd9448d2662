#!/usr/bin/env bash
# sims.sh TRACES NAMES COMMAND...: programs of benchmarks/sim, all or those named, with the
# arguments that their pages in docs/benchmarks/simulator are of, each by COMMAND, which runs
# and keeps it (recorded.py). TRACES is the folder of the traces; if it is empty, what reads
# one is left out.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
traces=$1 names=" $2 "
shift 2
runner=("$@") failed=()

play() { # play NAME ARGS...
  local name=$1
  shift
  [[ $names == "  " || $names == *" $name "* ]] || return 0
  say sim "$name $*"
  "${runner[@]}" "sim-$name" "benchmarks/sim/$name.py" "$@" || failed+=("$name")
}

play activations
play cluster_plan
play figures berkeley car-5
play figures layerkv-1
play layerkv_cpu
play memserve 8 --requests 120
play memserve 13 14
play prefetch --requests 1500 --seeds 1
play orders --orders cost --scale 0.25
play orders --orders cost --scale 0.4 --only chat
play layerkv_tables
if [ -n "$traces" ]; then
  mooncake=$traces/mooncake_conversation_trace.jsonl.gz weka=$traces/weka_agentic_dev.jsonl.gz
  conversations=$traces/azure_llm_2023_conv.csv.gz code=$traces/azure_llm_2023_code.csv.gz
  sharegpt=$traces/sharegpt_8k_llama2_lengths.csv.gz arxiv=$traces/arxiv_summ_llama2_lengths.csv.gz
  play theory "$mooncake" "$weka"
  play theory "$mooncake" --page-tokens 16
  play theory "$weka" --page-tokens 64
  play chain "$mooncake"
  play chain "$mooncake" --sizes-gb 54,100,0,200 --eviction lru,cost --requests 4000
  play lengths "$mooncake" "$conversations" "$weka" "$code" "$sharegpt" "$arxiv" \
    "$traces/servegen_deepseek_r1_clients.tgz"
  play slo "$code" "$conversations" --requests 300 --rates 2 4 8 16 24 28 \
    --predictors online oracle
  play slo "$arxiv" "$sharegpt" --requests 300 --rates 8 12 16 20 24 \
    --predictors online oracle
  play eviction "conversation=$mooncake" "weka=$weka" "sharegpt=$sharegpt" \
    "tau=$traces/tau_bench_airline_gpt4o.json.gz" "react=$traces/react_hotpot_sessions.json.gz"
  play orders --orders cost --scale 0.1 --only weka --weka "$weka"
  play orders --orders cost --scale 0.125 --only mooncake --mooncake "$mooncake"
fi
if [ "${#failed[@]}" -gt 0 ]; then
  say sim "not as wanted, or failed: ${failed[*]}"
  exit 1
fi
