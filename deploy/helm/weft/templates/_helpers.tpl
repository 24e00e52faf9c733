{{/* Names and labels; the models' file; what Pods share. */}}

{{- define "weft.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters: KubeRay and the Services below add their own endings. */}}
{{- define "weft.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "weft.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "weft.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "weft.selectorLabels" -}}
app.kubernetes.io/name: {{ include "weft.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "weft.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "weft.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "weft.image" -}}
{{- include "weft.imageOf" (list .Values.image.repository (.Values.image.tag | default (printf "%s-cuda" .Chart.AppVersion))) }}
{{- end }}

{{- define "weft.routerImage" -}}
{{- $repository := .Values.router.image.repository | default .Values.image.repository }}
{{- include "weft.imageOf" (list $repository (.Values.router.image.tag | default (printf "%s-router" .Chart.AppVersion))) }}
{{- end }}

{{/* Takes repository and tag, of which a digest needs none. */}}
{{- define "weft.imageOf" -}}
{{- contains "@" (first .) | ternary (first .) (join ":" .) }}
{{- end }}

{{- define "weft.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ quote . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What clients call a model. */}}
{{- define "weft.modelName" -}}
{{- .name | default (base (.path | default "weft-tiny")) }}
{{- end }}

{{/* What listeners bind that others reach, probes too. */}}
{{- define "weft.everyAddress" -}}
{{- eq .Values.ipFamily "IPv6" | ternary "::" "0.0.0.0" }}
{{- end }}

{{/* The cluster file that the head serves. Its own router serves gRPC only, for `weft` inside the head. */}}
{{- define "weft.clusterFile" -}}
host: {{ include "weft.everyAddress" . | quote }}
ray:
  address: auto
{{- with .Values.innerTls }}
{{- if .existingSecret }}
inner_tls:
  cert_file: /etc/weft-inner-tls/tls.crt
  key_file: /etc/weft-inner-tls/tls.key
  ca_file: /etc/weft-inner-tls/ca.crt
  server_name: {{ .serverName | quote }}
{{- end }}
{{- end }}
controller:
  port: {{ .Values.controller.port }}
  metrics_port: {{ .Values.controller.metricsPort }}
router:
  port: {{ .Values.router.ports.grpc }}
  http_port: null
  metrics_port: null
  policy: {{ .Values.router.policy }}
  grace_s: {{ .Values.router.graceSeconds }}
  {{- if include "weft.tlsSecret" . }}
  tls:
    cert_file: /etc/weft-tls/tls.crt
    key_file: /etc/weft-tls/tls.key
    {{- if .Values.router.tls.requireClientCertificate }}
    ca_file: /etc/weft-tls/ca.crt
    {{- end }}
  {{- end }}
  {{- if include "weft.keysSecret" . }}
  api_keys: /etc/weft-keys/keys.yaml
  {{- end }}
  {{- include "weft.routerSettings" . | nindent 2 }}
{{- with .Values.tracing }}
{{- if .endpoint }}
tracing:
  endpoint: {{ .endpoint | quote }}
  protocol: {{ .protocol }}
  sample_ratio: {{ .sampleRatio }}
{{- end }}
{{- end }}
{{- if .Values.recordDecisions }}
recording:
  folder: /tmp/weft-decisions
{{- end }}
models:
  {{- toYaml .Values.models | nindent 2 }}
{{- end }}

{{/* Settings that routers beside Ray and those of the cluster file have in common. */}}
{{- define "weft.routerSettings" -}}
{{- $own := dict "metrics" (dict "log_requests" .Values.router.logRequests) }}
{{- mergeOverwrite $own (deepCopy (default dict .Values.router.settings)) | toYaml }}
{{- end }}

{{- define "weft.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "weft.containerSecurityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{- define "weft.modelVolume" -}}
{{- if ne .Values.modelStorage.kind "none" }}
- name: models
  {{- if eq .Values.modelStorage.kind "hostPath" }}
  hostPath:
    path: {{ .Values.modelStorage.hostPath | quote }}
    type: Directory
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ eq .Values.modelStorage.kind "create" | ternary (printf "%s-models" (include "weft.fullname" .)) .Values.modelStorage.claimName | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "weft.hubSecret" -}}
{{- if .Values.huggingface.existingSecret }}
{{- .Values.huggingface.existingSecret }}
{{- else if .Values.huggingface.token }}
{{- include "weft.fullname" . }}-huggingface
{{- end }}
{{- end }}

{{/* The environment of head and workers. */}}
{{- define "weft.rayEnv" -}}
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- if ne .Values.modelStorage.kind "none" }}
- name: HF_HOME
  value: {{ printf "%s/huggingface" .Values.modelStorage.mountPath | quote }}
{{- end }}
{{- with include "weft.hubSecret" . }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ quote . }}
      key: token
{{- end }}
{{- with .Values.innerTls }}
{{- if .existingSecret }}
# For `weft` inside these Pods.
- {name: WEFT_CONTROL_TLS_CERT, value: /etc/weft-inner-tls/tls.crt}
- {name: WEFT_CONTROL_TLS_KEY, value: /etc/weft-inner-tls/tls.key}
- {name: WEFT_CONTROL_TLS_CA, value: /etc/weft-inner-tls/ca.crt}
- {name: WEFT_CONTROL_TLS_NAME, value: {{ .serverName | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Ray's own ports, which would lie among those that the NetworkPolicy opens to routers. Its workers' do not. */}}
{{- define "weft.rayPorts" -}}
node-manager-port: "6380"
object-manager-port: "6381"
runtime-env-agent-port: "6382"
dashboard-agent-grpc-port: "6383"
dashboard-agent-listen-port: "6384" # runs jobs of whoever reaches it
{{- end }}

{{/* Requests and limits inside the RayCluster, where Kubernetes takes no fraction such as 0.5, but "0.5". */}}
{{- define "weft.rayResources" -}}
{{- $found := dict }}
{{- range $kind, $amounts := . }}
{{- $strings := dict }}
{{- range $name, $amount := $amounts }}
{{- $_ := set $strings $name (kindIs "string" $amount | ternary $amount (toJson $amount)) }}
{{- end }}
{{- $_ := set $found $kind $strings }}
{{- end }}
{{- toYaml $found }}
{{- end }}

{{/* Where a Pod may run, from a part of the values. */}}
{{- define "weft.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- end }}

{{/* Who may read metrics. */}}
{{- define "weft.monitoringPeers" -}}
{{- toYaml (.Values.networkPolicy.monitoring | default (list (dict "podSelector" dict))) }}
{{- end }}

{{- define "weft.tlsSecret" -}}
{{- with .Values.router.tls }}
{{- if .existingSecret }}
{{- .existingSecret }}
{{- else if .certificate }}
{{- include "weft.fullname" $ }}-tls
{{- end }}
{{- end }}
{{- end }}

{{- define "weft.keysSecret" -}}
{{- with .Values.router.apiKeys }}
{{- if .existingSecret }}
{{- .existingSecret }}
{{- else if .keys }}
{{- include "weft.fullname" $ }}-api-keys
{{- end }}
{{- end }}
{{- end }}

{{/* What everyone has who speaks inside the cluster: head, workers and routers. */}}
{{- define "weft.innerVolumes" -}}
{{- with .Values.innerTls.existingSecret }}
- name: inner-tls
  secret:
    secretName: {{ quote . }}
{{- end }}
{{- end }}

{{- define "weft.innerMounts" -}}
{{- if .Values.innerTls.existingSecret }}
- {name: inner-tls, mountPath: /etc/weft-inner-tls, readOnly: true}
{{- end }}
{{- end }}

{{/* What every router has, those of the Deployment and the head's own. */}}
{{- define "weft.routerVolumes" -}}
{{- with include "weft.tlsSecret" . }}
- name: tls
  secret:
    secretName: {{ quote . }}
{{- end }}
{{- with include "weft.keysSecret" . }}
- name: api-keys
  secret:
    secretName: {{ quote . }}
{{- end }}
{{- end }}

{{- define "weft.routerMounts" -}}
{{- if include "weft.tlsSecret" . }}
- {name: tls, mountPath: /etc/weft-tls, readOnly: true}
{{- end }}
{{- if include "weft.keysSecret" . }}
- {name: api-keys, mountPath: /etc/weft-keys, readOnly: true}
{{- end }}
{{- end }}

{{/* How a router is asked for its health: kubelet's gRPC probes speak no TLS, and kubelet has no certificate of its own. */}}
{{- define "weft.probe" -}}
{{- if .root.Values.router.tls.requireClientCertificate }}
tcpSocket: {port: grpc}
{{- else if include "weft.tlsSecret" .root }}
httpGet: {path: {{ .path }}, port: http, scheme: HTTPS}
{{- else if .service }}
grpc: {port: {{ .root.Values.router.ports.grpc }}, service: {{ .service }}}
{{- else }}
grpc: {port: {{ .root.Values.router.ports.grpc }}}
{{- end }}
{{- end }}

{{/* Whether `helm test` sends a request: a certificate, or a key, that nobody gave it cannot be shown. */}}
{{- define "weft.hasTest" -}}
{{- $hasKey := or (not (include "weft.keysSecret" .)) .Values.test.apiKeySecret }}
{{- $hasCertificate := or (not .Values.router.tls.requireClientCertificate) .Values.test.clientSecret }}
{{- if and $hasKey $hasCertificate }}yes{{ end }}
{{- end }}
