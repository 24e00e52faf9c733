{{/* What the schema cannot say: whether the models fit the workers, as cluster/placement.py would judge it. */}}
{{- define "weft.validate" -}}
{{- $largest := 0 }}
{{- $total := 0 }}
{{- range .Values.workerGroups }}
{{- $gpus := int (.gpus | default 0) }}
{{- $largest = max $largest $gpus }}
{{- $most := $.Values.autoscaling.enabled | ternary (.maxReplicas | default .replicas) .replicas }}
{{- $total = add $total (mul $gpus (int $most)) }}
{{- if and $.Values.autoscaling.enabled (lt (int (.maxReplicas | default .replicas)) (int .replicas)) }}
{{- fail (printf "workerGroups: %s has maxReplicas %d; allowed: at least its replicas, %d" .name (int .maxReplicas) (int .replicas)) }}
{{- end }}
{{- end }}
{{- $wanted := 0 }}
{{- range $index, $model := .Values.models }}
{{- $tensor := int ($model.tensor_parallel | default 1) }}
{{- $device := $model.device | default "auto" }}
{{- if ne $device "cpu" }}
{{- if and (eq $device "cuda") (gt $tensor (int $largest)) }}
{{- fail (printf "models[%d] needs %d GPUs on one worker; the largest worker group has %d" $index $tensor (int $largest)) }}
{{- end }}
{{- if eq $device "auto" }}
{{- fail (printf "models[%d].device is auto; allowed: cuda or cpu, because the head starts before any worker has shown a GPU" $index) }}
{{- end }}
{{- $wanted = add $wanted (mul $tensor (int ($model.pipeline_parallel | default 1)) (int ($model.replicas | default 1))) }}
{{- end }}
{{- $path := $model.path | default "weft-tiny" }}
{{- if and (eq $.Values.modelStorage.kind "none") (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$" $path) }}
{{- fail (printf "models[%d].path is the hub id %q, and modelStorage.kind is none; allowed: a storage that head, workers and routers share" $index $path) }}
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
{{- end }}
{{- with .Values.router.autoscaling }}
{{- if and .enabled (lt (int .maxReplicas) (int .minReplicas)) }}
{{- fail (printf "router.autoscaling.maxReplicas is %d; allowed: at least minReplicas, %d" (int .maxReplicas) (int .minReplicas)) }}
{{- end }}
{{- end }}
{{- end }}
