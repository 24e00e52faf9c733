#!/bin/bash
# Keeps `weft serve` running on a Ray head: it is started again when it breaks, and goes on with the service that then still
# runs on Ray; but not when it was stopped (exit code 0, or a signal) or its settings are wrong (2). While one runs, a second
# call does nothing, so that `ray up` can be repeated. SIGTERM stops the service: requests in flight are finished first.
#
#   serve.sh ARGUMENTS OF weft serve
exec 9>"$HOME/.weft-serve.lock"
flock --nonblock 9 || exit 0
is_stopping=0
serve=
is_told=0
trap 'is_stopping=1; [[ -z $serve ]] || { is_told=1; kill -TERM "$serve"; }' TERM INT
while true; do
  weft serve "$@" --take-over 9>&- &
  serve=$!
  ((is_stopping && !is_told)) && kill -TERM "$serve" # told to stop before it was known whom to tell
  wait "$serve"
  status=$?
  if ((is_stopping)); then
    wait "$serve" # the trap has ended the first wait
    exit
  fi
  serve=
  case $status in 0 | 2 | 130 | 143) exit "$status" ;; esac
  sleep 5
  ((is_stopping)) && exit
done
