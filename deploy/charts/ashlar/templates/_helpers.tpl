{{- define "ashlar.labels" -}}
{{- with .Values.commonLabels }}
{{- toYaml . }}
{{ end -}}
app.kubernetes.io/name: ashlar
app.kubernetes.io/part-of: ashlar
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "ashlar.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end }}

{{/* The image of a sidecar, an entry of .Values.sidecars. */}}
{{- define "ashlar.sidecarImage" -}}
{{ .repository }}:{{ .tag }}{{ with .digest }}@{{ . }}{{ end }}
{{- end }}

{{/* What a pod has of the API server, and where: the token ends after an hour, and with the pod. */}}
{{- define "ashlar.apiVolume" -}}
- name: api
  projected:
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end }}

{{- define "ashlar.apiMount" -}}
- name: api
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end }}

{{- define "ashlar.pull" -}}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- define "ashlar.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* One sidecar of the controller: a dict of root, name, image (an entry of .Values.sidecars), port, args. */}}
{{- define "ashlar.sidecar" -}}
- name: {{ .name }}
  image: {{ include "ashlar.sidecarImage" .image }}
  {{- include "ashlar.pull" .root | nindent 2 }}
  args:
    - --csi-address=/csi/csi.sock
    - --leader-election
    - --http-endpoint=:{{ .port }}
    {{- range .args }}
    - {{ . }}
    {{- end }}
    - --kube-api-qps=200
    - --kube-api-burst=400
    - --v={{ .root.Values.logLevel }}
  {{- if eq .name "provisioner" }}
  env:
    - name: NAMESPACE
      valueFrom:
        fieldRef:
          fieldPath: metadata.namespace
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
  {{- end }}
  ports:
    - name: {{ .name }}
      containerPort: {{ .port }}
  livenessProbe:
    httpGet:
      path: /healthz/leader-election
      port: {{ .name }}
    initialDelaySeconds: 10
    periodSeconds: 20
    timeoutSeconds: 5
  resources:
    {{- toYaml (.image.resources | default .root.Values.controller.resources) | nindent 4 }}
  securityContext:
    {{- include "ashlar.confined" . | nindent 4 }}
  volumeMounts:
    - name: socket
      mountPath: /csi
    {{- include "ashlar.apiMount" . | nindent 4 }}
{{- end }}

{{/* The driver's flag for metrics, and the port of its container: a dict of root, port. */}}
{{- define "ashlar.metrics" -}}
{{- if .root.Values.metrics.enabled }}
- --metrics-endpoint=:{{ .port }}
{{- end }}
{{- end }}

{{- define "ashlar.metricsPort" -}}
{{- if .root.Values.metrics.enabled }}
- name: metrics
  containerPort: {{ .port }}
{{- end }}
{{- end }}

{{/* yes, if the agents have a port: something that is on needs it. */}}
{{- define "ashlar.agentPort" -}}
{{- if or .Values.agentPort.enabled .Values.snapshotMetadata.enabled .Values.anyNode.enabled }}yes{{ end -}}
{{- end }}

{{/* yes, if a class is to be made: a dict of root, create, api. */}}
{{- define "ashlar.wanted" -}}
{{- if eq (toString .create) "auto" -}}
{{- if .root.Capabilities.APIVersions.Has .api }}yes{{ end -}}
{{- else if .create -}}yes{{- end -}}
{{- end }}
