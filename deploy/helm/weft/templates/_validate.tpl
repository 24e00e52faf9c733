{{/* What the schema cannot say: whether the models fit the workers, as cluster/placement.py would judge it. */}}
{{- define "weft.validate" -}}
{{- include "weft.validateNames" . }}
{{- include "weft.validatePorts" . }}
{{- include "weft.validatePeers" .Values.networkPolicy }}
{{- include "weft.validateRouter" (.Values.router.settings | default dict) }}
{{- $largest := 0 }}
{{- $total := 0 }}
{{- $groups := list }}
{{- $accelerators := list }}
{{- range $index, $group := .Values.workerGroups }}
{{- with $group }}
{{- if has .name $groups }}
{{- fail (printf "workerGroups[%d].name is %s as another one's is; allowed: a name of its own" $index .name) }}
{{- end }}
{{- $groups = append $groups .name }}
{{- $accelerators = append $accelerators (.accelerator | default "") }}
{{- $gpus := int (.gpus | default 0) }}
{{- $largest = max $largest $gpus }}
{{- $total = add $total (mul $gpus (int (include "weft.mostWorkers" (list $ .)))) }}
{{- if and $.Values.autoscaling.enabled (lt (int (.maxReplicas | default .replicas)) (int .replicas)) }}
{{- fail (printf "workerGroups: %s has maxReplicas %d; allowed: at least its replicas, %d" .name (int .maxReplicas) (int .replicas)) }}
{{- end }}
{{- if and $.Values.autoscaling.enabled (not (or (dig "limits" "cpu" "" .resources) (dig "requests" "cpu" "" .resources))) }}
{{- fail (printf "workerGroups: %s has no cpu in its resources; allowed: a request or a limit, without which Ray's autoscaler starts no worker of any group" .name) }}
{{- end }}
{{- if and $.Values.autoscaling.enabled (gt (int .minReplicas) (int .replicas)) }}
{{- fail (printf "workerGroups: %s has minReplicas %d; allowed: at most its replicas, %d" .name (int .minReplicas) (int .replicas)) }}
{{- end }}
{{- end }}
{{- end }}
{{- $wanted := 0 }}
{{- $names := list }}
{{- range $index, $model := .Values.models }}
{{- $name := include "weft.modelName" $model }}
{{- if has $name $names }}
{{- fail (printf "models[%d] is called %q as another one is; allowed: a name of its own" $index $name) }}
{{- end }}
{{- $names = append $names $name }}
{{- include "weft.validateModel" (list $index $model) }}
{{- if and (kindIs "map" $model.autoscaling) (empty $model.max_replicas) }}
{{- fail (printf "models[%d].autoscaling needs max_replicas" $index) }}
{{- end }}
{{- $accelerator := $model.accelerator | default "" }}
{{- if and $.Values.autoscaling.enabled $accelerator (not (has $accelerator $accelerators)) }}
{{- fail (printf "models[%d].accelerator is %s; no worker group has it as its accelerator, so Ray's autoscaler would start none for it" $index $accelerator) }}
{{- end }}
{{- $tensor := int ($model.tensor_parallel | default 1) }}
{{- $device := $model.device | default "auto" }}
{{- $replicas := hasKey $model "replicas" | ternary $model.replicas 1 | int }}
{{- $least := int ($model.min_replicas | default 0) }}
{{- $most := int ($model.max_replicas | default $replicas) }}
{{- if lt $replicas $least }}
{{- fail (printf "models[%d].replicas is %d; allowed: at least min_replicas, %d" $index $replicas $least) }}
{{- end }}
{{- if gt $replicas $most }}
{{- fail (printf "models[%d].replicas is %d; allowed: at most max_replicas, %d" $index $replicas $most) }}
{{- end }}
{{- if ne $device "cpu" }}
{{- if and (eq $device "cuda") (gt $tensor (int $largest)) }}
{{- fail (printf "models[%d] needs %d GPUs on one worker; the largest worker group has %d" $index $tensor (int $largest)) }}
{{- end }}
{{- if eq $device "auto" }}
{{- fail (printf "models[%d].device is auto; allowed: cuda or cpu, because the head starts before any worker has shown a GPU" $index) }}
{{- end }}
{{- $size := mul $tensor (int ($model.pipeline_parallel | default 1)) }}
{{- $wanted = add $wanted (mul $size $replicas) }}
{{- /* All models together may want more than there is, one after the other; what one could never have is a mistake. */}}
{{- $room := 0 }}
{{- range $.Values.workerGroups }}
{{- $room = add $room (mul (div (int (.gpus | default 0)) $tensor) (int (include "weft.mostWorkers" (list $ .)))) }}
{{- end }}
{{- $room = div $room (int ($model.pipeline_parallel | default 1)) }}
{{- if gt $most (int $room) }}
{{- fail (printf "models[%d].%s is %d, of %d GPUs each; the worker groups have room for %d at most" $index (empty $model.max_replicas | not | ternary "max_replicas" "replicas") $most (int $size) (int $room)) }}
{{- end }}
{{- end }}
{{- $path := $model.path | default "weft-tiny" }}
{{- if and (eq $.Values.modelStorage.kind "none") (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$" $path) }}
{{- fail (printf "models[%d].path is the hub id %q, and modelStorage.kind is none; allowed: a storage that head and workers share" $index $path) }}
{{- end }}
{{- end }}
{{- if gt (int $wanted) (int $total) }}
{{- fail (printf "the models need %d GPUs; the worker groups have at most %d" (int $wanted) (int $total)) }}
{{- end }}
{{- $storage := .Values.modelStorage }}
{{- if and (eq $storage.kind "claim") (not $storage.claimName) }}
{{- fail "modelStorage.kind is claim; modelStorage.claimName is missing" }}
{{- end }}
{{- if and (eq $storage.kind "hostPath") (not $storage.hostPath) }}
{{- fail "modelStorage.kind is hostPath; modelStorage.hostPath is missing" }}
{{- end }}
{{- if or (has (clean $storage.mountPath) (list "/tmp" "/tmp/ray" "/dev/shm")) (hasPrefix "/etc/weft" (clean $storage.mountPath)) }}
{{- fail (printf "modelStorage.mountPath is %s, where a Pod has something else; allowed: a folder of its own" $storage.mountPath) }}
{{- end }}
{{- if and .Values.huggingface.existingSecret .Values.huggingface.token }}
{{- fail "huggingface.existingSecret and huggingface.token are both set; allowed: one of the two" }}
{{- end }}
{{- with .Values.router.tls }}
{{- if and .existingSecret .certificate }}
{{- fail "router.tls.existingSecret and router.tls.certificate are both set; allowed: one of the two" }}
{{- end }}
{{- if ne (empty .certificate) (empty .key) }}
{{- fail "router.tls has a certificate or a key only; allowed: both" }}
{{- end }}
{{- if and .requireClientCertificate (not .existingSecret) }}
{{- fail "router.tls.requireClientCertificate needs router.tls.existingSecret, with the clients' authorities in ca.crt" }}
{{- end }}
{{- end }}
{{- with .Values.router.apiKeys }}
{{- if and .existingSecret .keys }}
{{- fail "router.apiKeys.existingSecret and router.apiKeys.keys are both set; allowed: one of the two" }}
{{- end }}
{{- $keys := .keys }}
{{- range $what := list "name" "sha256" }}
{{- $seen := list }}
{{- range $index, $key := $keys }}
{{- $value := get $key $what }}
{{- if has $value $seen }}
{{- fail (printf "router.apiKeys.keys[%d].%s is %s as another one's is; allowed: one of its own" $index $what $value) }}
{{- end }}
{{- $seen = append $seen $value }}
{{- end }}
{{- end }}
{{- end }}
{{- $service := .Values.router.service.type }}
{{- if and .Values.networkPolicy.enabled (ne $service "ClusterIP") }}
{{- $isOpen := false }}
{{- range .Values.networkPolicy.clients }}
{{- $isOpen = or $isOpen (hasKey . "ipBlock") }}
{{- end }}
{{- if not $isOpen }}
{{- fail (printf "router.service.type is %s, and networkPolicy.clients has no ipBlock, so that nobody from outside gets through; allowed: one, such as {ipBlock: {cidr: 10.0.0.0/8}}, or networkPolicy.enabled false" $service) }}
{{- end }}
{{- end }}
{{- with .Values.router.autoscaling }}
{{- if and .enabled (lt (int .maxReplicas) (int .minReplicas)) }}
{{- fail (printf "router.autoscaling.maxReplicas is %d; allowed: at least minReplicas, %d" (int .maxReplicas) (int .minReplicas)) }}
{{- end }}
{{- $resources := $.Values.router.resources }}
{{- if and .enabled (not (or (dig "requests" "cpu" "" $resources) (dig "limits" "cpu" "" $resources))) }}
{{- fail "router.resources has no cpu; allowed: a request or a limit, in parts of which router.autoscaling counts" }}
{{- end }}
{{- end }}
{{- end }}

{{/* What of one model contradicts itself. Takes its place and the model; the numbers are the program's defaults. */}}
{{- define "weft.validateModel" -}}
{{- $at := printf "models[%d]" (first .) }}
{{- with last . }}
{{- $cpus := .cpus_per_rank | default 1 | float64 }}
{{- if and (gt $cpus 1.0) (ne $cpus (floor $cpus)) }}
{{- fail (printf "%s.cpus_per_rank is %v, which is not whole; allowed: a fraction up to 1, or a whole number" $at $cpus) }}
{{- end }}
{{- $scheduler := .scheduler | default dict }}
{{- $tokens := $scheduler.max_num_batched_tokens | default 2048 | int }}
{{- $seqs := $scheduler.max_num_seqs | default 256 | int }}
{{- if lt $tokens $seqs }}
{{- fail (printf "%s.scheduler.max_num_batched_tokens is %d; allowed: at least max_num_seqs, %d" $at $tokens $seqs) }}
{{- end }}
{{- $cache := .cache | default dict }}
{{- if and $cache.host_cache_bytes (hasKey $cache "enable_prefix_caching") (not $cache.enable_prefix_caching) }}
{{- fail (printf "%s.cache.host_cache_bytes is for prefixes; allowed: with enable_prefix_caching" $at) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Likewise of `router.settings`. */}}
{{- define "weft.validateRouter" -}}
{{- range dig "clients" "allowed_origins" list . }}
{{- if not (regexMatch "^(\\*|[a-z][a-z0-9+.-]*://[^/\\sA-Z]+)$" .) }}
{{- fail (printf "router.settings.clients.allowed_origins has %q; allowed: '*', or an origin such as 'https://app.example'" .) }}
{{- end }}
{{- end }}
{{- $settings := . }}
{{- range list (list "breaker" "open_s" 1.0 "max_open_s" 30.0) (list "link" "backoff_s" 0.05 "max_backoff_s" 2.0) }}
{{- $section := first . }}
{{- $least := dig $section (index . 1) (index . 2) $settings | float64 }}
{{- $most := dig $section (index . 3) (index . 4) $settings | float64 }}
{{- if lt $most $least }}
{{- fail (printf "router.settings.%s.%s is %v; allowed: at least %s, %v" $section (index . 3) $most (index . 1) $least) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Who may connect. Kubernetes refuses such peers too, but with the rest of the release installed. */}}
{{- define "weft.validatePeers" -}}
{{- $policy := . }}
{{- range $who := list "clients" "monitoring" }}
{{- range $index, $peer := get $policy $who }}
{{- if or (empty $peer) (and (hasKey $peer "ipBlock") (gt (len $peer) 1)) }}
{{- fail (printf "networkPolicy.%s[%d] has %s; allowed: podSelector, namespaceSelector or both, or ipBlock alone" $who $index (keys $peer | sortAlpha | join " and " | default "nothing")) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* How many workers a group may have. Takes the root and the group. */}}
{{- define "weft.mostWorkers" -}}
{{- $group := index . 1 }}
{{- (index . 0).Values.autoscaling.enabled | ternary ($group.maxReplicas | default $group.replicas) $group.replicas }}
{{- end }}

{{/* Of a Service and of the RayCluster, which take nothing else. */}}
{{- define "weft.validateNames" -}}
{{- if not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$" (include "weft.name" .)) }}
{{- fail (printf "nameOverride is %q; allowed: letters, digits, -, _ and ." .Values.nameOverride) }}
{{- end }}
{{- $fullname := include "weft.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $fullname) }}
{{- fail (printf "the name of the objects is %q; allowed: lower-case letters, digits and -, a letter first: set fullnameOverride" $fullname) }}
{{- end }}
{{- if has $fullname (list "y" "n" "yes" "no" "on" "off" "true" "false" "null") }}
{{- fail (printf "the name of the objects is %q, which YAML takes for no name; allowed: another one: set fullnameOverride" $fullname) }}
{{- end }}
{{- end }}

{{/* Those of the head, where Ray has some too and a router is beside the controller; and those of a router. */}}
{{- define "weft.validatePorts" -}}
{{- $ports := .Values.router.ports }}
{{- $head := list (list "Ray's GCS" 6379) (list "Ray's raylet" 6380) (list "Ray's objects" 6381) (list "Ray's environments" 6382) (list "Ray's agent" 6383) (list "Ray's agent" 6384) (list "Ray's dashboard" 8265) (list "Ray's metrics" 8080) (list "Ray's clients" 10001) (list "controller.port" .Values.controller.port) (list "controller.metricsPort" .Values.controller.metricsPort) (list "router.ports.grpc" $ports.grpc) }}
{{- $router := list (list "router.ports.grpc" $ports.grpc) (list "router.ports.http" $ports.http) (list "router.ports.metrics" $ports.metrics) }}
{{- range list $head $router }}
{{- $taken := dict }}
{{- range . }}
{{- $port := last . | int | toString }}
{{- if hasKey $taken $port }}
{{- fail (printf "%s is %s, which %s is already; allowed: a port of its own" (first .) $port (get $taken $port)) }}
{{- end }}
{{- $_ := set $taken $port (first .) }}
{{- end }}
{{- end }}
{{- end }}
