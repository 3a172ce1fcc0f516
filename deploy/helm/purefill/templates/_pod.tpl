{{/* Parts that the pods of the head, the front end and all groups share. Each takes a dict with `root`, and `spec`:
the values of that kind of pod. */}}

{{- define "purefill.podMetadata" -}}
labels:
  # Without the chart's version: another one of the same pods replaces none.
  {{- include "purefill.selectorLabels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
annotations:
  # The command below is run as it is: KubeRay would put its own in its place.
  ray.io/overwrite-container-cmd: "true"
  {{- with .annotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .spec.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "purefill.podSpec" -}}
serviceAccountName: {{ include "purefill.serviceAccount" .root }}
automountServiceAccountToken: false
# A Service named purefill would become variables such as PUREFILL_PORT.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "purefill.graceSeconds" .root }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .spec.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{- define "purefill.volumes" -}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.ray.objectStoreSize }}}
{{- if .models }}
- name: models
  {{- $cache := .root.Values.modelCache }}
  {{- if eq $cache.type "hostPath" }}
  hostPath: {path: {{ $cache.hostPath | quote }}, type: DirectoryOrCreate}
  {{- else if eq $cache.type "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "purefill.fullname" .root)) $cache.existingClaim }}
  {{- else }}
  emptyDir: {sizeLimit: {{ $cache.size }}}
  {{- end }}
{{- end }}
{{- if .config }}
- name: config
  configMap: {name: {{ include "purefill.fullname" .root }}-config}
{{- end }}
{{- end -}}

{{- define "purefill.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if .models }}
- {name: models, mountPath: /models}
{{- end }}
{{- if .config }}
- {name: config, mountPath: /etc/purefill, readOnly: true}
{{- end }}
{{- end -}}

{{- define "purefill.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: HOME, value: /tmp}
- {name: PUREFILL_CACHE, value: /models/purefill}
- {name: HF_HOME, value: /models/huggingface}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
# As in a service on one machine: see scheduler/ray_environment.py
- {name: RAY_worker_niceness, value: "0"}
- {name: OMP_WAIT_POLICY, value: passive}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: {{ .root.Values.ray.headReconnectSeconds | quote }}}
- {name: RAY_HEAD, value: "{{ include "purefill.fullname" .root }}-head-svc:6379"}
- {name: RAY_METRICS_PORT, value: "8080"}
- {name: RAY_NODE_PORT, value: "6380"}
{{- if .outside }}
{{- if .root.Values.ray.auth.enabled }}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "purefill.rayTokenSecret" .root }}, key: auth_token}}
{{- end }}
{{- end }}
{{- with .spec.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "purefill.container" -}}
image: {{ include "purefill.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
{{- end -}}

{{- define "purefill.fetchModel" -}}
{{- if .root.Values.modelCache.fetch }}
initContainers:
  - name: model
    {{- include "purefill.container" . | nindent 4 }}
    command: [purefill, models, {{ .root.Values.model | quote }}]
    env:
      {{- include "purefill.env" . | nindent 6 }}
    resources:
      requests: {cpu: 500m, memory: 2Gi}
      limits: {memory: 4Gi}
    volumeMounts:
      {{- include "purefill.volumeMounts" (dict "root" .root "models" true) | nindent 6 }}
{{- end }}
{{- end -}}

{{/* A pod of workers: a Ray node with places for them. */}}
{{- define "purefill.workerPod" -}}
{{- $places := dict -}}
{{- if .spec.places.prefill }}{{ $_ := set $places "purefill_prefill" (.spec.places.prefill | int) }}{{ end -}}
{{- if .spec.places.decode }}{{ $_ := set $places "purefill_decode" (.spec.places.decode | int) }}{{ end -}}
{{- if not $places }}{{ fail (printf "%s.places must have at least one prefill or decode worker" .name) }}{{ end -}}
metadata:
  {{- include "purefill.podMetadata" (merge (dict "component" .name) .) | nindent 2 }}
spec:
  {{- include "purefill.podSpec" . | nindent 2 }}
  {{- include "purefill.fetchModel" . | nindent 2 }}
  containers:
    - name: ray-worker
      {{- include "purefill.container" . | nindent 6 }}
      command: [/bin/bash, -c]
      args:
        - >-
          exec ray start --block --address="$RAY_HEAD" --node-ip-address="$POD_IP"
          --num-cpus=0 --num-gpus={{ .spec.gpus }} --resources='{{ toJson $places }}'
          --object-store-memory=83886080
          --node-manager-port="$RAY_NODE_PORT" --metrics-export-port="$RAY_METRICS_PORT"
      env:
        {{- include "purefill.env" . | nindent 8 }}
      ports:
        - {name: metrics, containerPort: 8080}
      resources:
        {{- $gpus := ternary (dict .spec.gpuResource (.spec.gpus | int)) dict (gt (.spec.gpus | int) 0) }}
        requests:
          {{- toYaml (merge $gpus .spec.resources.requests) | nindent 10 }}
        limits:
          {{- toYaml (merge $gpus .spec.resources.limits) | nindent 10 }}
      lifecycle:
        preStop:
          exec:
            # Nothing is lost if it fails: what ran here then runs again elsewhere.
            command: [purefill, leave, --timeout-s, "{{ .root.Values.drainTimeoutSeconds }}"]
      # That Ray's node answers says that the pod is well. That workers are is the scheduler's to know.
      startupProbe: {tcpSocket: {port: 6380}, periodSeconds: 5, failureThreshold: 60}
      livenessProbe: {tcpSocket: {port: 6380}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      readinessProbe: {tcpSocket: {port: 6380}, periodSeconds: 10, timeoutSeconds: 5}
      volumeMounts:
        {{- include "purefill.volumeMounts" (dict "root" .root "models" true) | nindent 8 }}
  volumes:
    {{- include "purefill.volumes" (dict "root" .root "models" true) | nindent 4 }}
{{- end -}}
