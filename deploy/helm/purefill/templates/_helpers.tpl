{{/* Prefix of all names. KubeRay and the parts add up to 23 characters. */}}
{{- define "purefill.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "purefill.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "purefill.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "purefill.selectorLabels" . }}
{{- end -}}

{{- define "purefill.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "purefill.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "purefill.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "purefill.apiKeysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.keys -}}
{{ include "purefill.fullname" . }}-api-keys
{{- end -}}
{{- end -}}

{{- define "purefill.redisSecret" -}}
{{ default (printf "%s-redis" (include "purefill.fullname" .)) .Values.redis.existingSecret }}
{{- end -}}

{{- define "purefill.rayTokenSecret" -}}
{{ default (include "purefill.fullname" .) .Values.ray.auth.existingSecret }}
{{- end -}}

{{/* Seconds from SIGTERM to SIGKILL: what runs may take, and Ray's own 30 seconds to end, twice. */}}
{{- define "purefill.graceSeconds" -}}
{{ add .Values.drainTimeoutSeconds 60 }}
{{- end -}}

{{/* Whether nodes outlive the head. */}}
{{- define "purefill.outlivesHead" -}}
{{- if or .Values.redis.enabled .Values.externalRedis.gcsAddress -}}yes{{- end -}}
{{- end -}}

{{/* The file of `purefill serve --config`. */}}
{{- define "purefill.config" -}}
{{- $set := dict
  "model" .Values.model
  "host" "0.0.0.0"
  "port" (.Values.frontend.port | int)
  "api_servers" (.Values.frontend.apiServers | int)
  "prefill_workers" (.Values.frontend.waitFor.prefill | int)
  "decode_workers" (.Values.frontend.waitFor.decode | int)
  "drain_timeout_s" (.Values.drainTimeoutSeconds | int)
  "prefill_resources" (dict "purefill_prefill" 1)
  "decode_resources" (dict "purefill_decode" 1)
-}}
{{- toYaml (merge $set .Values.config) -}}
{{- end -}}
