# Sourced by the examples with several servers. All that was started ends with the script.
declare -A started=()

end_all() {
  local name
  trap - EXIT
  for name in "${!started[@]}"; do kill -TERM "${started[$name]}" 2>/dev/null || true; done
  for name in "${!started[@]}"; do wait "${started[$name]}" 2>/dev/null || true; done
}
trap end_all EXIT
trap 'exit 130' INT TERM

start() { # start NAME FOLDER COMMAND...
  local name=$1 folder=$2
  shift 2
  "$@" >"$folder/$name.log" 2>&1 </dev/null &
  started[$name]=$!
  logs=$folder
  echo "$name: process $!, log $folder/$name.log"
}

wait_for() { # wait_for NAME URL: until it answers; fails if it ended
  local name=$1 url=$2 second
  for ((second = 0; second < 600; second++)); do
    if curl -sf -o /dev/null --max-time 5 "$url"; then
      echo "$name: ready"
      return
    fi
    if ! kill -0 "${started[$name]}" 2>/dev/null; then break; fi
    sleep 1
  done
  echo "$name did not start; the end of its log:" >&2
  tail -n 20 "$logs/$name.log" >&2
  exit 1
}

finish() { # finish URL [--check]: ask once and end, or stay until Ctrl-C
  local url=$1 body
  body='{"model": "default", "max_tokens": 8, "temperature": 0, "messages":
    [{"role": "user", "content": "def fibonacci(n):"}]}'
  if [ "${2:-}" = --check ]; then
    curl -sf --max-time 300 "$url/v1/chat/completions" \
      -H 'Content-Type: application/json' -d "$body" -D - | tr -d '\r' |
      grep -iE '^x-tiered|"choices"'
    return
  fi
  echo "curl -s $url/v1/chat/completions -H 'Content-Type: application/json' -d '$body'"
  echo "Ctrl-C stops everything"
  wait
}
