# Sourced by the scripts here: one line per step, with the time since the command began.
# STARTED_AT (seconds since 1970) is handed down so that all scripts of one command count
# from the same moment.
: "${STARTED_AT:=$(date +%s)}"
export STARTED_AT

say() { # say TAG MESSAGE...
  local tag=$1 bold='' plain=''
  shift
  if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
  printf '%s[%s %4d s]%s %s\n' "$bold" "$tag" "$(($(date +%s) - STARTED_AT))" "$plain" "$*"
}
