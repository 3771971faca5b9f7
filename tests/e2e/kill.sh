#!/usr/bin/env bash
# Kills the driver's processes and its sidecars' (kill -9), again and again, while 100 claims are made, pods use some of
# them, and half of them go. At the end claims, Volume objects and images must agree one to one; and when all claims are
# gone, nothing of them may be left. Called by run.sh, with its functions in_cluster, on_node and nodes, the directory out,
# and IMAGE for the pods.
set -euo pipefail
namespace=ashlar-kill
k() { in_cluster kubectl -n "$namespace" "$@"; }

all=$(nodes)

# slay PROGRAM [ARGUMENT]: all processes of a program on all nodes, with that argument.
slay() {
	local node
	for node in $all; do slay_on "$node" "$@"; done
}
slay_on() {
	local node=$1
	shift
	on_node "$node" sh -c 'for p in /proc/[0-9]*; do
		[ "$(cat "$p/comm" 2>/dev/null)" = "$(echo "$1" | cut -c 1-15)" ] || continue
		tr "\0" " " <"$p/cmdline" | grep -q -e "$2" || continue
		kill -KILL "${p#/proc/}" && echo "killed $1 $2"; done' kill "$1" "${2-}"
}

# in_pools SUFFIX: what is in all pools, as "NODE ID".
in_pools() {
	local node
	for node in $all; do
		on_node "$node" sh -c 'ls /var/lib/ashlar/volumes' | sed -n "s/^\(.*\)\.$1\$/$node vol.default.\1/p"
	done | sort
}

# agree N: there are N claims, and the volumes, objects, images and records are theirs, on the nodes that the objects name.
agree() {
	local dir=$out/agree
	mkdir -p "$dir"
	k get pvc -o json | jq -r '.items[] | .spec.volumeName' | sort >"$dir/claimed"
	in_cluster kubectl get pv -o json | jq -r --arg n "$namespace" '.items[] | select(.spec.claimRef.namespace == $n) | .metadata.name' | sort >"$dir/pvs"
	in_cluster kubectl get pv -o json | jq -r --arg n "$namespace" '.items[] | select(.spec.claimRef.namespace == $n) | .spec.csi.volumeHandle' | sort >"$dir/handles"
	in_cluster kubectl get volumes.ashlar.dev -o json | jq -r '.items[] | "\(.spec.nodeName) vol.\(.spec.pool).\(.metadata.name)"' | sort >"$dir/objects"
	in_pools img >"$dir/images"
	in_pools rec >"$dir/records"
	diff "$dir/claimed" "$dir/pvs" && diff "$dir/handles" <(cut -d ' ' -f 2 "$dir/objects" | sort) && diff "$dir/objects" "$dir/images" && diff "$dir/images" "$dir/records" &&
		[ "$(wc -l <"$dir/claimed")" = "$1" ] && echo "$1 claims, volumes, objects, images and records agree"
}

# until_ok SECONDS WHAT COMMAND...
until_ok() {
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		[ "$SECONDS" -lt "$end" ] || { echo "gave up waiting for $what" >&2; return 1; }
		sleep 1
	done
}
bound() { [ "$(k get pvc -o json | jq '[.items[] | select(.status.phase == "Bound")] | length')" = "$1" ]; }
volumes() { [ "$(in_cluster kubectl get volumes.ashlar.dev -o name | wc -l)" = "$1" ] && [ "$(in_cluster kubectl get pv -o name | wc -l)" = "$1" ]; }

# A restart of a container that was killed comes after 10 s, then 20, 40: so each is killed once in each of two rounds.
victims() {
	slay driver --mode=controller
	sleep 1
	slay driver --mode=node
	sleep 1
	slay csi-provisioner
	sleep 1
	slay csi-attacher
	slay csi-resizer
	slay csi-snapshotter
	slay csi-node-driver-registrar
}

in_cluster kubectl create namespace "$namespace"
for i in {1..100}; do
	cat <<-YAML
		---
		apiVersion: v1
		kind: PersistentVolumeClaim
		metadata: {name: claim-$i}
		spec: {storageClassName: ashlar-e2e-immediate, accessModes: [ReadWriteOnce], resources: {requests: {storage: 8Mi}}}
	YAML
	[ "$i" -gt 8 ] || cat <<-YAML
		---
		apiVersion: v1
		kind: Pod
		metadata: {name: pod-$i}
		spec:
		  terminationGracePeriodSeconds: 0
		  containers: [{name: main, image: $IMAGE, volumeMounts: [{name: data, mountPath: /data}]}]
		  volumes: [{name: data, persistentVolumeClaim: {claimName: claim-$i}}]
	YAML
done >"$out/kill.yaml"
k apply -f - <"$out/kill.yaml" >/dev/null &
sleep 3
victims
wait $!
until_ok 300 "100 claims to be bound" bound 100
until_ok 300 "pods to run" k wait --for=condition=Ready pod --all --timeout=5s
agree 100
k delete pvc --wait=false $(seq -f 'claim-%g' 51 100) >/dev/null &
sleep 1
victims
wait $!
until_ok 300 "50 volumes to be gone" volumes 50
agree 50
k delete pod --all --timeout=120s >/dev/null
k delete pvc --all --timeout=300s >/dev/null
until_ok 300 "all volumes to be gone" volumes 0
agree 0
in_cluster kubectl delete namespace "$namespace" --timeout=60s
in_cluster kubectl -n ashlar-system rollout status daemonset/ashlar-node deployment/ashlar-controller --timeout=300s
in_cluster kubectl -n ashlar-system get pods -o json |
	jq -e '[.items[].status.containerStatuses[] | select(.name != "liveness-probe") | .restartCount] | min >= 1' >/dev/null ||
	{ echo "something was not killed" >&2; exit 1; }
