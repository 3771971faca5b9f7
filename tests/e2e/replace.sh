#!/usr/bin/env bash
# Replaces every pod of the driver while a pod writes to a filesystem and to a raw device, every 50 ms, and makes sure
# that it did not notice: no write failed or took a second. Called by run.sh with the way to run kubectl.
#
#   replace.sh COMMAND...      for example: replace.sh env KUBECONFIG=... kubectl
set -euo pipefail
k=("$@")
namespace=ashlar-replace
trap '"${k[@]}" delete namespace $namespace --wait=true --timeout=60s >/dev/null 2>&1 || true' EXIT

"${k[@]}" apply -f - <<YAML
apiVersion: v1
kind: Namespace
metadata: {name: $namespace}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: files, namespace: $namespace}
spec: {storageClassName: ashlar, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: device, namespace: $namespace}
spec: {storageClassName: ashlar, volumeMode: Block, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: writer, namespace: $namespace}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - name: writer
      image: ${IMAGE:-busybox}
      command:
        - sh
        - -c
        - |
          n=0 worst=0 last=\$(date +%s%N)
          while :; do
            echo \$n >/files/log && sync /files/log || echo FAILED filesystem
            dd if=/dev/zero of=/device bs=4096 count=1 seek=\$((n % 1000)) conv=fsync,notrunc 2>/dev/null || echo FAILED device
            now=\$(date +%s%N) took=\$(((now - last) / 1000000)) last=\$now n=\$((n + 1))
            [ \$took -le \$worst ] || { worst=\$took; echo "write \$n took \$worst ms"; }
            sleep 0.05
          done
      volumeMounts: [{name: files, mountPath: /files}]
      volumeDevices: [{name: device, devicePath: /device}]
  volumes:
    - {name: files, persistentVolumeClaim: {claimName: files}}
    - {name: device, persistentVolumeClaim: {claimName: device}}
YAML
"${k[@]}" -n $namespace wait --for=condition=Ready pod/writer --timeout=60s
sleep 3
"${k[@]}" -n ashlar-system rollout restart daemonset/ashlar-node deployment/ashlar-controller
"${k[@]}" -n ashlar-system rollout status daemonset/ashlar-node deployment/ashlar-controller --timeout=120s
sleep 3
log=$("${k[@]}" -n $namespace logs writer)
worst=$(sed -n 's/^write [0-9]* took \([0-9]*\) ms$/\1/p' <<<"$log" | tail -n 1)
restarts=$("${k[@]}" -n $namespace get pod writer -o jsonpath='{.status.containerStatuses[0].restartCount}')
# And the new pods can undo what the old ones did.
"${k[@]}" -n $namespace delete pod writer --timeout=60s
"${k[@]}" -n $namespace delete pvc files device --timeout=60s
if grep -q FAILED <<<"$log" || [ "$restarts" != 0 ] || [ -z "$worst" ] || [ "$worst" -ge 1000 ]; then
	echo "the writer noticed that the driver's pods were replaced: $log" >&2
	exit 1
fi
echo "the driver's pods were replaced; the slowest of the writer's writes took $worst ms"
