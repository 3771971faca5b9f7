#!/usr/bin/env bash
# Backs a raw volume up by its changed blocks, on a cluster as that of run.sh, through the sidecar of external-snapshot-metadata and its
# client: all of it once, two increments, and a restore on another node, which has the same bytes. Then what a data mover does
# with a filesystem: its snapshot as a raw volume, which is filled, and bound again as a filesystem by the same handle.
#
#   OUT=bin/e2e-blocks  where logs go
#   KEEP=1              leave the cluster as it is at the end
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-bin/e2e-blocks}
NODES=${NODES:-2}
. tests/e2e/lib.sh
# shellcheck disable=SC2034 # lib.sh has it applied
overlay=tests/e2e/blocks
[ "$where" = own ] || { echo "blocks.sh: it loads images into a cluster of its own" >&2; exit 1; }
say "building the sidecar"
hack/snapshot-metadata/build.sh "$out"
bring_up
hack/kubernetes/cluster.sh load "$out/csi-snapshot-metadata.tar"
mapfile -t nodes < <(nodes)
busybox=$("$bin/e2e.test" --list-images 2>/dev/null | grep /busybox: | sort -V | tail -n 1)
k() { in_cluster kubectl "$@"; }

say "the certificate, and what backup tools find"
openssl req -x509 -newkey rsa:2048 -days 2 -nodes -keyout "$out/ca.key" -out "$out/ca.crt" -subj /CN=ca 2>/dev/null
openssl req -newkey rsa:2048 -nodes -keyout "$out/tls.key" -out "$out/tls.csr" -subj /CN=ashlar-snapshot-metadata.ashlar-system 2>/dev/null
printf 'subjectAltName=DNS:ashlar-snapshot-metadata.ashlar-system' >"$out/names"
openssl x509 -req -in "$out/tls.csr" -days 2 -CA "$out/ca.crt" -CAkey "$out/ca.key" -CAcreateserial -out "$out/tls.crt" -extfile "$out/names" 2>/dev/null
k apply -f "$out/crd.yaml"
k create namespace ashlar-system
k -n ashlar-system create secret tls ashlar-snapshot-metadata --cert="$out/tls.crt" --key="$out/tls.key"
install_driver
k apply -f - <<YAML
apiVersion: cbt.storage.k8s.io/v1beta1
kind: SnapshotMetadataService
metadata: {name: block.csi.ashlar.dev}
spec:
  address: ashlar-snapshot-metadata.ashlar-system:6443
  audience: ashlar.dev/snapshot-metadata
  caCert: $(base64 -w0 "$out/ca.crt")
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: backup}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: backup}
rules: [{apiGroups: [snapshot.storage.k8s.io], resources: [volumesnapshots], verbs: [get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: backup}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: backup}
subjects: [{kind: ServiceAccount, name: backup, namespace: default}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: stranger}
YAML
# There is no DNS and no proxy of services in this cluster: the name stands for one of the pods.
pod=$(k -n ashlar-system get pods -l app.kubernetes.io/component=controller -o jsonpath='{.items[0].status.podIP}')
lister() {
	in_cluster unshare -m bash -c 'echo "$1 ashlar-snapshot-metadata.ashlar-system" >"$2/hosts" && mount --bind "$2/hosts" /etc/hosts && shift 2 && exec "$@"' \
		bash "$pod" "$out" "$out/snapshot-metadata-lister" -kubeconfig "$config" -service-account-namespace default -service-account "$@"
}
k patch snapshotmetadataservice block.csi.ashlar.dev --type=merge -p '{"spec":{"address":"ashlar-snapshot-metadata.ashlar-system:50051"}}'

# claim NAME MODE [SNAPSHOT]; pod_of NAME NODE: a pod of the name, with the claim at /dev/it or /it.
claim() {
	k apply -f - <<YAML
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: $1}
spec:
  storageClassName: ashlar
  accessModes: [ReadWriteOnce]
  volumeMode: $2
  resources: {requests: {storage: 256Mi}}
  ${3:+dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: $3\}}
YAML
}
pod_of() {
	local how='volumeMounts: [{name: it, mountPath: /it}]'
	[ "$(k get pvc "$1" -o jsonpath='{.spec.volumeMode}')" = Filesystem ] || how='volumeDevices: [{name: it, devicePath: /dev/it}]'
	k apply -f - <<YAML
apiVersion: v1
kind: Pod
metadata: {name: $1}
spec:
  terminationGracePeriodSeconds: 0
  ${2:+nodeSelector: {kubernetes.io/hostname: $2\}}
  containers:
    - {name: c, image: "$busybox", command: [sleep, "100000"], $how}
  volumes: [{name: it, persistentVolumeClaim: {claimName: $1}}]
YAML
	k wait --for=condition=Ready "pod/$1" --timeout=180s
}
take() { # NAME CLAIM
	k apply -f - <<YAML
apiVersion: snapshot.storage.k8s.io/v1
kind: VolumeSnapshot
metadata: {name: $1}
spec: {volumeSnapshotClassName: ashlar, source: {persistentVolumeClaimName: $2}}
YAML
	k wait --for=jsonpath='{.status.readyToUse}'=true "volumesnapshot/$1" --timeout=120s
}
# scribble POD BLOCK...: random bytes into these blocks of 64 KiB.
scribble() {
	# shellcheck disable=SC2016 # the pod's shell
	k exec "$1" -- sh -c 'for n; do dd if=/dev/urandom of=/dev/it bs=65536 count=1 seek=$n conv=notrunc 2>/dev/null; done; sync' sh "${@:2}"
}
# The bytes of the ranges in a list, one after the other, out of a device and into one.
# shellcheck disable=SC2016
read_ranges='while read -r at n; do dd if=/dev/it bs=4096 skip=$((at / 4096)) count=$((n / 4096)) 2>/dev/null; done'
# shellcheck disable=SC2016
write_ranges='for r; do dd of=/dev/it bs=4096 seek=$((${r%:*} / 4096)) count=$((${r#*:} / 4096)) iflag=fullblock conv=notrunc 2>/dev/null; done; sync'

say "a volume, and three snapshots of it"
claim data Block
pod_of data "${nodes[0]}"
scribble data 0 1 2 3 100 1000 1001 4095
take s0 data
scribble data 2 1000 2000
take s1 data
scribble data 2 3 2001 4095
k exec data -- dd if=/dev/zero of=/dev/it bs=65536 count=1 seek=100 conv=notrunc
k exec data -- sync
take s2 data

say "what a stranger, and one without rights, are told"
if lister stranger -s s0 2>"$out/stranger"; then
	echo "a stranger was told" >&2
	exit 1
fi
cat "$out/stranger"

say "a full backup and two increments"
previous=
for s in s0 s1 s2; do
	lister backup -s "$s" ${previous:+-p "$previous"} >"$out/$s.list"
	echo "$s: $(wc -l <"$out/$s.list") ranges, $(awk '{ n += $2 } END { print n / 1024 }' "$out/$s.list") KiB"
	claim "read-$s" Block "$s"
	pod_of "read-$s"
	k exec -i "read-$s" -- sh -c "$read_ranges" <"$out/$s.list" >"$out/$s.bytes"
	[ "$(stat -c %s "$out/$s.bytes")" = "$(awk '{ n += $2 } END { print n }' "$out/$s.list")" ]
	previous=$s
done
# From the middle, as after a call that was interrupted.
half=$(awk 'NR == 2 { print $1 + $2 }' "$out/s0.list")
lister backup -s s0 -starting-offset "$half" -max-results 1 >"$out/s0.rest"
cmp "$out/s0.rest" <(tail -n +3 "$out/s0.list")

say "restored on ${nodes[1]}"
claim restored Block
pod_of restored "${nodes[1]}"
for s in s0 s1 s2; do
	# shellcheck disable=SC2046 # a list
	k exec -i restored -- sh -c "$write_ranges" sh $(tr ' ' : <"$out/$s.list") <"$out/$s.bytes"
done
want=$(k exec read-s2 -- sha256sum /dev/it | cut -d' ' -f1)
have=$(k exec restored -- sha256sum /dev/it | cut -d' ' -f1)
[ "$want" = "$have" ] || { echo "restored: $have, want $want" >&2; exit 1; }
[ "$want" = "$(k exec data -- sha256sum /dev/it | cut -d' ' -f1)" ]

say "an agent that is started again, and one that is away"
k -n ashlar-system delete pod -l app.kubernetes.io/component=node --wait
k -n ashlar-system rollout status daemonset/ashlar-node --timeout=120s
for _ in {1..60}; do
	lister backup -s s2 -p s0 >"$out/again.list" 2>"$out/again.err" && break
	sleep 2
done
[ -s "$out/again.list" ] || { cat "$out/again.err" >&2; exit 1; }

say "a filesystem's snapshot as a raw volume, filled, and bound again"
claim shop Filesystem
pod_of shop "${nodes[0]}"
k exec shop -- sh -c 'head -c 20000000 /dev/urandom >/it/goods; sync'
goods=$(k exec shop -- sha256sum /it/goods | cut -d' ' -f1)
take shop-now shop
content=$(k get volumesnapshot shop-now -o jsonpath='{.status.boundVolumeSnapshotContentName}')
k annotate volumesnapshotcontent "$content" snapshot.storage.kubernetes.io/allow-volume-mode-change=true
claim mover Block shop-now
pod_of mover
claim target Block
pod_of target "${nodes[1]}"
k exec mover -- cat /dev/it | k exec -i target -- sh -c 'dd of=/dev/it bs=1048576 iflag=fullblock conv=notrunc 2>/dev/null; sync'
pv=$(k get pvc target -o jsonpath='{.spec.volumeName}')
k patch pv "$pv" -p '{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}'
k delete pod target --wait
k delete pvc target --wait
for _ in {1..60}; do
	[ -n "$(k get volumeattachments -o json | jq -r --arg pv "$pv" '.items[] | select(.spec.source.persistentVolumeName == $pv)')" ] || break
	sleep 1
done
k get pv "$pv" -o json | jq 'del(.status, .metadata.uid, .metadata.resourceVersion, .metadata.creationTimestamp, .metadata.managedFields, .metadata.finalizers) |
	.metadata.name = "moved" | .spec.volumeMode = "Filesystem" | .spec.csi.fsType = "ext4" | .spec.claimRef = {namespace: "default", name: "moved"}' >"$out/moved.json"
k delete pv "$pv" --wait
k apply -f "$out/moved.json"
k apply -f - <<YAML
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: moved}
spec: {storageClassName: ashlar, volumeName: moved, accessModes: [ReadWriteOnce], resources: {requests: {storage: 256Mi}}}
YAML
pod_of moved
[ "$goods" = "$(k exec moved -- sha256sum /it/goods | cut -d' ' -f1)" ]
say "equal bytes, by changed blocks and by a data mover"
