#!/usr/bin/env bash
# Replaces every pod of the driver while a pod writes to a filesystem and to a raw device, and makes sure that nothing
# fails and nothing is lost: no write and no read of what was written. How long the slowest write took is printed, and is
# no reason to fail. Called by run.sh with the way to run kubectl.
#
#   replace.sh COMMAND...      for example: replace.sh env KUBECONFIG=... kubectl
set -euo pipefail
k=("$@")
namespace=ashlar-replace
trap '"${k[@]}" delete namespace $namespace --wait=true --timeout=60s >/dev/null 2>&1 || true' EXIT

"${k[@]}" create namespace $namespace
"${k[@]}" -n $namespace create configmap writer --from-literal=writer.sh="$(cat "$(dirname "${BASH_SOURCE[0]}")/nodes/writer.sh")"
writer() { # COMMAND: a pod that does that with the claims
	"${k[@]}" apply -f - <<-YAML
		apiVersion: v1
		kind: Pod
		metadata: {name: writer, namespace: $namespace}
		spec:
		  terminationGracePeriodSeconds: 0
		  restartPolicy: Never
		  containers:
		    - name: writer
		      image: ${IMAGE:-busybox}
		      command: [sh, /writer/writer.sh, $1, replace, /files, /device]
		      env: [{name: PAUSE, value: "0.05"}]
		      volumeMounts: [{name: files, mountPath: /files}, {name: writer, mountPath: /writer}]
		      volumeDevices: [{name: device, devicePath: /device}]
		  volumes:
		    - {name: files, persistentVolumeClaim: {claimName: files}}
		    - {name: device, persistentVolumeClaim: {claimName: device}}
		    - {name: writer, configMap: {name: writer}}
	YAML
}
for claim in files:Filesystem device:Block; do
	"${k[@]}" apply -f - <<-YAML
		apiVersion: v1
		kind: PersistentVolumeClaim
		metadata: {name: ${claim%:*}, namespace: $namespace}
		spec: {storageClassName: ashlar, volumeMode: ${claim#*:}, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
	YAML
done

log() { "${k[@]}" -n $namespace logs writer; }
safe() { log | sed -n 's/^safe //p' | tail -n 1; }
# onwards: waits until it wrote on, however long the machine takes for it.
onwards() {
	local from now _
	from=$(safe)
	for _ in {1..300}; do
		now=$(safe)
		[ "${now:--1}" -lt $((${from:--1} + 20)) ] || return 0
		sleep 1
	done
	log | tail -n 20 >&2
	echo "the writer does not go on after $from" >&2
	return 1
}

writer run
"${k[@]}" -n $namespace wait --for=condition=Ready pod/writer --timeout=300s
onwards
"${k[@]}" -n ashlar-system rollout restart daemonset/ashlar-node deployment/ashlar-controller
"${k[@]}" -n ashlar-system rollout status daemonset/ashlar-node deployment/ashlar-controller --timeout=600s
onwards
log=$(log)
safe=$(safe)
worst=$(sed -n 's/^write [0-9]* took \([0-9]*\) ms$/\1/p' <<<"$log" | tail -n 1)
if grep -q FAILED <<<"$log"; then
	echo "the writer noticed that the driver's pods were replaced: $log" >&2
	exit 1
fi
# The new pods can undo what the old ones did, and do it again; and all is there.
"${k[@]}" -n $namespace delete pod writer --timeout=300s
writer check
"${k[@]}" -n $namespace wait --for=jsonpath='{.status.phase}'=Succeeded pod/writer --timeout=300s || { log >&2; exit 1; }
log
for path in /files /device; do
	has=$(log | sed -n "s|^$path has ||p")
	[ "$has" -ge "$safe" ] || { echo "$path has $has, and $safe was safe" >&2; exit 1; }
done
"${k[@]}" -n $namespace delete pod writer --timeout=300s
"${k[@]}" -n $namespace delete pvc files device --timeout=300s
echo "the driver's pods were replaced; nothing failed, nothing is lost of $((safe + 1)) numbers; the slowest write took $worst ms"
