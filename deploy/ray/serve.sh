#!/bin/bash
# Keeps `weft serve` running on a Ray head: it is started again when it breaks, but not when it was stopped (exit code 0,
# or a signal) or its settings are wrong (2). While one runs, a second call does nothing, so that `ray up` can be repeated.
#
#   serve.sh ARGUMENTS OF weft serve
exec 9>"$HOME/.weft-serve.lock"
flock --nonblock 9 || exit 0
while true; do
  weft serve "$@" 9>&-
  case $? in 0 | 2 | 130 | 143) exit ;; esac
  sleep 5
done
