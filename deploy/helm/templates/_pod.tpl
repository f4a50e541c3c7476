{{- define "millrace.labels" -}}
app.kubernetes.io/name: millrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "millrace.token" -}}
{{ .Values.token.existingSecret | default .Release.Name }}
{{- end }}

{{- define "millrace.claim" -}}
{{ .Values.data.existingClaim | default (printf "%s-data" .Release.Name) }}
{{- end }}

{{- /* What the pods of all three services have: .root, .component, .of (its values), .image, .env, .command, .probe, .graceS,
.port, .sandbox for replicas, and .account, whose token the pod gets. */ -}}
{{- define "millrace.pod" -}}
terminationGracePeriodSeconds: {{ .graceS }}
automountServiceAccountToken: {{ not (empty .account) }}
{{- with .account }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if .sandbox }}
# Sandboxes need user namespaces and an unmasked /proc, which Kubernetes gives only to a pod with a user namespace of its own.
hostUsers: false
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: {{ ternary "Unconfined" "RuntimeDefault" (default false .sandbox) }}}
containers:
  - name: {{ .component }}
    image: {{ .root.Values.images.prefix }}{{ .image }}:{{ .root.Values.images.tag | default .root.Chart.AppVersion }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    {{- with .command }}
    command: {{ toYaml . | nindent 6 }}
    {{- end }}
    env:
      - {name: MILLRACE_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      - {name: MILLRACE_TOKEN, valueFrom: {secretKeyRef: {name: {{ include "millrace.token" .root }}, key: token}}}
      - {name: MILLRACE_COORDINATOR, value: "{{ .root.Release.Name }}-coordinator:7600"}
      - {name: MILLRACE_RUNS, value: /data/runs}
      - {name: MILLRACE_METRICS_PORT, value: "7800"}
      {{- if .root.Values.tls.existingSecret }}
      - {name: MILLRACE_TLS_CERT, value: /secrets/tls/tls.crt}
      - {name: MILLRACE_TLS_KEY, value: /secrets/tls/tls.key}
      - {name: MILLRACE_TLS_CA, value: /secrets/tls/ca.crt}
      - {name: MILLRACE_TLS_NAME, value: {{ .root.Values.tls.name }}}
      {{- else if .root.Values.tls.plaintext }}
      - {name: MILLRACE_PLAINTEXT, value: "1"}
      {{- else }}
      {{- fail "tls.existingSecret: empty, and tls.plaintext is false. Fix: name a Secret with tls.crt, tls.key and ca.crt, or set tls.plaintext=true if nobody else is on the pod network." }}
      {{- end }}
      {{- range .env }}
      - {{ toYaml . | nindent 8 | trim }}
      {{- end }}
      {{- with concat .root.Values.env (default list .of.env) }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with .root.Values.envFrom }}
    envFrom: {{ toYaml . | nindent 6 }}
    {{- end }}
    ports:
      {{- toYaml .ports | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      capabilities: {drop: [ALL]}
      {{- if .sandbox }}
      appArmorProfile: {type: Unconfined}
      procMount: Unmasked
      {{- end }}
    # As long as a first start takes: images of engines import and compile for minutes.
    startupProbe: {exec: {command: {{ toJson (default .probe .alive) }}}, periodSeconds: 10, timeoutSeconds: 10, failureThreshold: 90}
    livenessProbe: {exec: {command: {{ toJson (default .probe .alive) }}}, periodSeconds: 20, timeoutSeconds: 15, failureThreshold: 6}
    readinessProbe: {exec: {command: {{ toJson .probe }}}, periodSeconds: {{ default 20 .readyS }}, timeoutSeconds: 15, failureThreshold: 2}
    {{- /* There is no preStop hook: SIGTERM is the drain, and a second one would end it. */}}
    resources:
      {{- $resources := deepCopy (default dict .of.resources) }}
      {{- if .of.gpus }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (merge (dict "nvidia.com/gpu" .of.gpus) (default dict $resources.limits))) }}
      {{- end }}
      {{- toYaml $resources | nindent 6 }}
    volumeMounts:
      - {name: data, mountPath: /data}
      - {name: shm, mountPath: /dev/shm}
      {{- if .root.Values.tls.existingSecret }}
      - {name: tls, mountPath: /secrets/tls, readOnly: true}
      {{- end }}
      {{- range .root.Values.secrets }}
      - {name: secret-{{ . }}, mountPath: /secrets/{{ . }}, readOnly: true}
      {{- end }}
volumes:
  - {name: data, persistentVolumeClaim: {claimName: {{ include "millrace.claim" .root }}}}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .of.shm | default "1Gi" }}}}
  {{- if .root.Values.tls.existingSecret }}
  - {name: tls, secret: {secretName: {{ .root.Values.tls.existingSecret }}, defaultMode: 0440}}
  {{- end }}
  {{- range .root.Values.secrets }}
  - {name: secret-{{ . }}, secret: {secretName: {{ . }}}}
  {{- end }}
{{- end }}
