#!/usr/bin/env bash
# One server of two processes on this machine, with the embedded model, or with the options given:
#
#   scripts/launch/local_two_processes.sh [--restart] [options of serve.py]
#
# --restart starts both again when they end with an error; that is all that a supervisor has to do,
# since a process that is lost ends the other one too. SIGTERM and SIGINT drain the server.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
port=${COORDINATOR_PORT:-8476}
restart=false
if [ "${1:-}" = --restart ]; then
  restart=true
  shift
fi
[ $# -gt 0 ] || set -- --mesh tp2

start() {
  "$python" scripts/serve.py --coordinator "127.0.0.1:$port" --num-hosts 2 --host-id "$1" "${@:2}" &
}

stopping=false
pids=()
stop() {
  stopping=true
  kill -TERM "${pids[@]}" 2>/dev/null
}
trap stop TERM INT

# A signal interrupts `wait`, which then has to be called again.
wait_for() {
  local code
  while true; do
    wait "$1"
    code=$?
    kill -0 "$1" 2>/dev/null || return "$code"
  done
}

while true; do
  pids=()
  for host in 0 1; do
    start "$host" "$@"
    pids+=($!)
  done
  code=0
  for pid in "${pids[@]}"; do
    wait_for "$pid" || code=$?
  done
  # 2: the options were refused, and would be again.
  if ! $restart || $stopping || [ "$code" -eq 0 ] || [ "$code" -eq 2 ]; then
    exit "$code"
  fi
  echo "local_two_processes.sh: starting again after exit code $code" >&2
  sleep 1
done
