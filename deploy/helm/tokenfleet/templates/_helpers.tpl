{{- define "tokenfleet.name" -}}
{{- $short := ternary .Release.Name (printf "%s-tokenfleet" .Release.Name) (contains "tokenfleet" .Release.Name) -}}
{{- $short | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{- define "tokenfleet.selector" -}}
app.kubernetes.io/name: tokenfleet
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tokenfleet.labels" -}}
{{ include "tokenfleet.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tokenfleet.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tokenfleet.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "tokenfleet.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- /* Where Redis is: a variable that both kinds of pod read. */ -}}
{{- define "tokenfleet.redisEnv" -}}
- name: TOKENFLEET_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.existingSecret | default (printf "%s-redis" (include "tokenfleet.name" .)) }}
      key: {{ ternary .Values.redis.existingSecretKey "url" (ne .Values.redis.existingSecret "") }}
- name: TOKENFLEET_NAMESPACE
  value: {{ .Values.redis.namespace | quote }}
{{- if ne (int .Values.redis.partitions) 1 }}
- name: TOKENFLEET_PARTITIONS
  value: {{ .Values.redis.partitions | quote }}
{{- end }}
{{- end }}

{{- define "tokenfleet.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "tokenfleet.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
