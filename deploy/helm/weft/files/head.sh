#!/bin/bash
# The head's container: Ray's head, and the service on it. When either ends the container ends, and Kubernetes starts
# both again. SIGTERM stops the service first: requests in flight are finished while Ray still runs.
#
#   head.sh CLUSTER_FILE LOG_LEVEL [outlived]       KubeRay sets KUBERAY_GEN_RAY_START_CMD, the chart POD_IP.
#
# outlived: Ray's tables lie in a Redis and workers go on without their head. SIGTERM then leaves the service as it is, and
# the next head takes it over.
set -u
address=$POD_IP:6379
[[ $POD_IP == *:* ]] && address=[$POD_IP]:6379 # IPv6
ulimit -n 65536 2>/dev/null

signal=TERM
[[ ${3:-} == outlived ]] && signal=KILL # it has nothing to say to the service
is_stopping=0
serve=
is_told=0
trap 'is_stopping=1; [[ -z $serve ]] || { is_told=1; kill -s "$signal" "$serve"; }' TERM INT
eval "exec $KUBERAY_GEN_RAY_START_CMD" &
ray=$!
until ray health-check --address "$address" >/dev/null 2>&1; do
  ((is_stopping)) && { kill -TERM "$ray"; wait "$ray"; exit; }
  kill -0 "$ray" 2>/dev/null || { echo "Ray's head ended before it was healthy" >&2; exit 1; }
  sleep 1
done

export RAY_ADDRESS=$address # named, so that `auto` waits for the head's own node and does not search for one
weft serve "$1" --log-level "$2" --take-over &
serve=$!
((is_stopping && !is_told)) && kill -s "$signal" "$serve" # told to stop before it was known whom to tell
wait -n "$ray" "$serve"
status=$?
if ((is_stopping)); then
  wait "$serve"
  status=$?
fi
kill -TERM "$ray" 2>/dev/null
kill -s "$signal" "$serve" 2>/dev/null
wait
exit "$status"
