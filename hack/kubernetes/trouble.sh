#!/usr/bin/env bash
# Makes three troubles in the cluster of cluster.sh, in which the driver is installed (README.md), for somebody new to find, and to
# mend by docs/runbooks: the pool of the first node is full, the disk of the second one is gone, and a volume on the third
# one is damaged. Walked by TestWalk of tests/e2e/nodes.
#
#   trouble.sh IMAGE [NAMESPACE]   IMAGE: what the pods run, with a shell. NAMESPACE (trouble) is made, and has all of it:
#
#     claim most                   has all that was left of the first node's pool
#     claim refused                is to be there too, at once
#     pod waits                    has to be there, and its claim, which waits for it
#     statefulset missing          has its volume on the second node, and does not start
#     statefulset damaged          has its volume on the third one, and cannot write
#
# When all is mended: kubectl delete namespace NAMESPACE; kubectl delete storageclass NAMESPACE-first
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 1 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
image=$1 namespace=${2:-trouble}
on() { "$hack/cluster.sh" on "$@"; }
k() { "$hack/cluster.sh" exec kubectl -n "$namespace" "$@"; }
{ read -r first && read -r second && read -r third; } < <("$hack/cluster.sh" nodes)

# until_is SECONDS WHAT WANT COMMAND...: until a command prints that.
until_is() {
	local end=$((SECONDS + $1)) what=$2 want=$3
	shift 3
	until [ "$("$@" 2>/dev/null)" = "$want" ]; do
		[ "$SECONDS" -lt "$end" ] || die "gave up waiting for $what"
		sleep 1
	done
}
health() { k get pools.ashlar.dev "$1.default" -o 'jsonpath={.status.conditions[?(@.type=="Healthy")].reason}'; }
driver() { k -n ashlar-system get pods -l app.kubernetes.io/component=node --field-selector "spec.nodeName=$1" -o name; }

# keeper NAME NODE: a StatefulSet of one pod, which keeps a file in a volume.
keeper() {
	cat <<-YAML
		---
		apiVersion: apps/v1
		kind: StatefulSet
		metadata: {name: $1}
		spec:
		  serviceName: $1
		  selector: {matchLabels: {app: $1}}
		  template:
		    metadata: {labels: {app: $1}}
		    spec:
		      terminationGracePeriodSeconds: 1
		      nodeSelector: {kubernetes.io/hostname: $2}
		      containers:
		        - name: main
		          image: $image
		          command: [sh, -c, "[ -e /data/kept ] || echo $1 >/data/kept; sync; exec sleep 1000000"]
		          volumeMounts: [{name: data, mountPath: /data}]
		  volumeClaimTemplates:
		    - metadata: {name: data}
		      spec: {storageClassName: ashlar, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
	YAML
}
# claim NAME SIZE: at once, on the first node.
claim() {
	cat <<-YAML
		---
		apiVersion: v1
		kind: PersistentVolumeClaim
		metadata: {name: $1}
		spec: {storageClassName: $namespace-first, accessModes: [ReadWriteOnce], resources: {requests: {storage: "$2"}}}
	YAML
}

k get namespace "$namespace" >/dev/null 2>&1 || k create namespace "$namespace"
{ keeper missing "$second" && keeper damaged "$third"; } | k apply -f -

echo "filling the pool of $first"
{
	cat <<-YAML
		apiVersion: storage.k8s.io/v1
		kind: StorageClass
		metadata: {name: $namespace-first}
		provisioner: block.csi.ashlar.dev
		allowVolumeExpansion: true
		allowedTopologies: [{matchLabelExpressions: [{key: topology.ashlar.dev/node, values: [$first]}]}]
	YAML
	claim most "$(k get pools.ashlar.dev "$first.default" -o 'jsonpath={.status.maxVolume}')"
} | k apply -f -
until_is 120 "the claim most to be bound" Bound k get pvc most -o 'jsonpath={.status.phase}'
claim refused 64Mi | k apply -f -
k apply -f - <<-YAML
	apiVersion: v1
	kind: PersistentVolumeClaim
	metadata: {name: waits}
	spec: {storageClassName: ashlar, accessModes: [ReadWriteOnce], resources: {requests: {storage: 64Mi}}}
	---
	apiVersion: v1
	kind: Pod
	metadata: {name: waits}
	spec:
	  terminationGracePeriodSeconds: 1
	  nodeSelector: {kubernetes.io/hostname: $first}
	  containers: [{name: main, image: $image, command: [sleep, "1000000"], volumeMounts: [{name: data, mountPath: /data}]}]
	  volumes: [{name: data, persistentVolumeClaim: {claimName: waits}}]
YAML

echo "taking the disk of $second away"
k rollout status statefulset/missing --timeout=180s
k scale statefulset missing --replicas=0
until_is 120 "the volume of missing to be detached" "" k get volumeattachments -o "jsonpath={.items[?(@.spec.source.persistentVolumeName==\"$(k get pvc data-missing-0 -o 'jsonpath={.spec.volumeName}')\")].metadata.name}"
on "$second" umount -l /var/lib/ashlar
k -n ashlar-system delete "$(driver "$second")" # as after a boot without the disk: the old one has a mount of its own
until_is 120 "the pool to be missed" PoolMissing health "$second"
k scale statefulset missing --replicas=1

echo "damaging a volume on $third"
k rollout status statefulset/damaged --timeout=180s
handle=$(k get pv "$(k get pvc data-damaged-0 -o 'jsonpath={.spec.volumeName}')" -o 'jsonpath={.spec.csi.volumeHandle}')
# shellcheck disable=SC2016 # it is expanded there
on "$third" sh -c 'device=$(losetup -nO NAME -j "/var/lib/ashlar/volumes/$1.img") && echo "made by trouble.sh" >"/sys/fs/ext4/${device#/dev/}/trigger_fs_error"' sh "${handle##*.}"
echo "there is trouble: start with kubectl ashlar status"
