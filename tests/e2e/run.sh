#!/usr/bin/env bash
# Installs the driver from deploy/kubernetes on a cluster, as pods from an image made here, and runs Kubernetes'
# external storage suite against it. The cluster is $KUBECONFIG's if that is set, else one of kind if Docker runs, else
# one that is built and started here (hack/kubernetes). Nothing of it is left afterwards.
#
#   PROCS=6            specs at a time
#   FOCUS, SKIP        regular expressions, in place of External.Storage and of those that cannot run here
#   OUT=bin/e2e        where logs and reports go
#   KEEP=1             leave the cluster (and the driver) as it is at the end
#
# With $KUBECONFIG, the nodes must be able to get IMAGE (ghcr.io/ashlar-csi/ashlar:e2e), the cluster must have the
# snapshot CRDs and the snapshot-controller.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. hack/kubernetes/lib.sh
overlay=tests/e2e/overlay
out=${OUT:-bin/e2e}
image=ghcr.io/ashlar-csi/ashlar:e2e
rm -rf "$out" && mkdir -p "$out"
out=$(realpath "$out")
start=$SECONDS
began=$(date +%s)

say() { echo "==> $* ($((SECONDS - start)) s)"; }

say "building what is not built yet"
hack/kubernetes/build.sh
[ -n "${KUBECONFIG-}" ] || hack/image.sh -o "$out/image.tar" "$image"

kind=ashlar-e2e
if [ -n "${KUBECONFIG-}" ]; then
	where=given
	in_cluster() { PATH=$bin:$PATH "$@"; }
	config=$KUBECONFIG
elif command -v kind >/dev/null && docker info >/dev/null 2>&1; then
	where=kind
	config=$out/kubeconfig
	in_cluster() { PATH=$bin:$PATH KUBECONFIG=$config "$@"; }
else
	where=own
	config=$CLUSTER_DIR/keys/admin.kubeconfig
	in_cluster() { hack/kubernetes/cluster.sh exec "$@"; }
fi

finish() {
	local status=$?
	trap - EXIT
	logs
	[ "${KEEP-}" = 1 ] && exit "$status"
	say "taking it down"
	case $where in
	given)
		in_cluster kubectl delete -f tests/e2e/least-size.yaml --ignore-not-found >/dev/null 2>&1 || true
		in_cluster kubectl delete -k "$overlay" --ignore-not-found --wait --timeout=120s >"$out/delete.log" 2>&1 || cat "$out/delete.log"
		;;
	kind) kind delete cluster --name "$kind" >/dev/null 2>&1 || true ;;
	own)
		cp -r "$CLUSTER_DIR/log" "$out/cluster-log" 2>/dev/null || true
		hack/kubernetes/cluster.sh down
		;;
	esac
	exit "$status"
}
logs() {
	local pod
	for pod in $(in_cluster kubectl -n ashlar-system get pods -o name 2>/dev/null); do
		in_cluster kubectl -n ashlar-system logs "$pod" --all-containers --prefix --timestamps >"$out/${pod##*/}.log" 2>/dev/null || true
	done
	in_cluster kubectl get pv,pvc,volumeattachments,volumesnapshots,volumesnapshotcontents -A >"$out/left.txt" 2>&1 || true
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "starting the cluster ($where)"
case $where in
kind)
	kind create cluster --name "$kind" --kubeconfig "$config" --wait 120s
	kind load image-archive "$out/image.tar" --name "$kind"
	in_cluster kubectl apply -f "$built/crds"
	# Its controller: from this cluster's build, as an image that kind has to be given.
	in_cluster snapshot-controller --kubeconfig="$config" --http-endpoint=127.0.0.1:0 >"$out/snapshot-controller.log" 2>&1 &
	;;
own) hack/kubernetes/cluster.sh up "$out/image.tar" ;;
esac

# Left out: what needs another operating system, SELinux, ssh to the node, or a volume populator.
skip=${SKIP-'\[Disruptive\]|\[Feature:Windows\]|\[Feature:SELinux|any volume data source'}
say "installing the driver: $overlay"
in_cluster kubectl apply -k "$overlay"
if in_cluster kubectl api-resources --api-group=admissionregistration.k8s.io -o name | grep -q mutatingadmissionpolicies; then
	in_cluster kubectl apply -f tests/e2e/least-size.yaml
else
	skip="${skip:+$skip|}volumegroupsnapshottable"
fi
in_cluster kubectl -n ashlar-system rollout status daemonset/ashlar-node deployment/ashlar-controller --timeout=120s
driver() { in_cluster kubectl get csinodes -o jsonpath='{.items[*].spec.drivers[*].name}' | grep -q block.csi.ashlar.dev; }
for _ in {1..60}; do
	driver && break
	sleep 1
done
driver || { echo "no node has registered the driver" >&2; exit 1; }

# This spec never makes a pod for its claims, so it has a run of its own, with a class that binds at once.
immediate='multiple pods should modify volumes with a different volumeAttributesClass'
cp tests/e2e/testdriver*.yaml "$out/"
# ext4 grows while it is mounted only for those who have CAP_SYS_RESOURCE (bit 24), which privileged pods have unless
# the whole machine is a container without it. There, what leaves the filesystem to the class is tried on XFS.
if [ "$where" = own ] && ((!(0x$(sed -n 's/^CapBnd:\s*//p' /proc/self/status) >> 24 & 1))); then
	echo "no CAP_SYS_RESOURCE on this machine: the class that the specs use is ashlar-xfs"
	sed -i '/^StorageClass:/{n;s/ashlar$/ashlar-xfs/}' "$out/testdriver.yaml"
fi
status=0
suite() { # NAME FOCUS SKIP TESTDRIVER PROCS
	in_cluster ginkgo run --procs="$5" --timeout="${TIMEOUT:-75m}" --no-color --silence-skips --output-dir="$out" \
		--json-report="$1.json" --junit-report="$1.junit.xml" --focus="$2" ${3:+--skip="$3"} \
		"$bin/e2e.test" -- --provider=skeleton --kubeconfig="$config" --allowed-not-ready-nodes=0 --num-nodes=1 \
		--storage.testdriver="$out/$4" >"$out/$1.log" 2>&1 || status=$?
	[ -s "$out/$1.json" ] || { tail -n 40 "$out/$1.log"; exit 1; }
}
say "running the specs, ${PROCS:-6} at a time"
suite suite "${FOCUS:-External.Storage}" "${skip:+$skip|}$immediate" testdriver.yaml "${PROCS:-6}"
[ -n "${FOCUS-}" ] || suite immediate "External.Storage.*$immediate" "" testdriver-immediate.yaml 2
if [ -z "${FOCUS-}" ]; then
	say "replacing the driver's pods under a writer"
	if [ "$where" = own ]; then kubectl=(hack/kubernetes/cluster.sh exec kubectl); else kubectl=(env KUBECONFIG="$config" "$bin/kubectl"); fi
	IMAGE=$("$bin/e2e.test" --list-images 2>/dev/null | grep /busybox: | sort -V | tail -n 1) \
		tests/e2e/replace.sh "${kubectl[@]}" >"$out/replace.log" 2>&1 || status=$?
	tail -n 1 "$out/replace.log"
fi
jq -s add "$out"/suite.json "$out"/immediate.json >"$out/report.json" 2>/dev/null || cp "$out/suite.json" "$out/report.json"

specs() { jq -r "[.[].SpecReports[] | select(.LeafNodeType == \"It\" and ($1))] | length" "$out/report.json"; }
failed='.State | IN("failed", "timedout", "panicked", "interrupted", "aborted")'
jq -r '.[].SpecReports[] | select(.LeafNodeType == "It" and ('"$failed"')) |
	"FAILED \((.RunTime / 1e9) | floor) s: \(.ContainerHierarchyTexts | join(" ")) \(.LeafNodeText)\n    \((.Failure.Message // "") | gsub("\n"; " ") | .[0:400])"' "$out/report.json"
echo "skipped, and why:"
jq -r '.[].SpecReports[] | select(.LeafNodeType == "It" and .State == "skipped" and (.Failure.Message // "") != "") | .Failure.Message | gsub("\n.*"; "")' \
	"$out/report.json" | sed -E 's/^(.{0,160}).*/    \1/' | sort | uniq -c | sort -rn
echo "ran $(specs '.State | IN("passed", "failed", "timedout", "panicked")'), passed $(specs '.State == "passed"'), failed $(specs "$failed")," \
	"skipped $(specs '.State == "skipped" and (.Failure.Message // "") != ""'); $((($(date +%s) - began) / 60)) min in all"
exit "$status"
