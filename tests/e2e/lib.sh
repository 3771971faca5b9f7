# A cluster with the driver in it; sourced by scripts that set out, the directory for logs (which is emptied), and are at
# the top of the source.
#
# The cluster is $KUBECONFIG's if that is set, else one of kind if Docker runs, else one that is built and started here
# (hack/kubernetes); of NODES nodes (3), unless it is given. Nothing of it is left afterwards; KEEP=1 leaves it as it is.
# With $KUBECONFIG, the nodes must be able to get the image, the cluster must have the snapshot CRDs and the
# snapshot-controller.
# status becomes that of what failed last; a script exits with it.
# shellcheck shell=bash disable=SC2154
. hack/kubernetes/lib.sh
overlay=tests/e2e/overlay
image=ghcr.io/ashlar-csi/ashlar:e2e
kind=ashlar-e2e
rm -rf "$out" && mkdir -p "$out"
out=$(realpath "$out")
start=$SECONDS
status=0

say() { echo "==> $* ($((SECONDS - start)) s)"; }

# in_cluster COMMAND...: with kubectl set up. on_node NODE COMMAND...: as root on a node, among its processes.
export NODES=${NODES:-3}
if [ -n "${KUBECONFIG-}" ]; then
	where=given
	config=$KUBECONFIG
	in_cluster() { PATH=$bin:$PATH "$@"; }
elif command -v kind >/dev/null && docker info >/dev/null 2>&1; then
	where=kind
	config=$out/kubeconfig
	in_cluster() { PATH=$bin:$PATH KUBECONFIG=$config "$@"; }
	on_node() { docker exec -i "$@"; }
else
	where=own
	config=$CLUSTER_DIR/keys/admin.kubeconfig
	in_cluster() { hack/kubernetes/cluster.sh exec "$@"; }
	on_node() { hack/kubernetes/cluster.sh on "$@"; }
fi
# nodes: the names of those that pods may be on.
nodes() { in_cluster kubectl get nodes -o json | jq -r '.items[] | select(any(.spec.taints[]?; .effect == "NoSchedule") | not) | .metadata.name'; }

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

# bring_up builds what is not built yet, and starts the cluster.
bring_up() {
	say "building what is not built yet"
	hack/kubernetes/build.sh
	[ "$where" = given ] || hack/image.sh -o "$out/image.tar" "$image"
	say "starting the cluster ($where)"
	case $where in
	kind)
		{
			printf 'kind: Cluster\napiVersion: kind.x-k8s.io/v1alpha4\nnodes:\n- role: control-plane\n'
			[ "$NODES" = 1 ] || for _ in $(seq "$NODES"); do echo "- role: worker"; done
		} | kind create cluster --name "$kind" --kubeconfig "$config" --wait 120s --config -
		kind load image-archive "$out/image.tar" --name "$kind"
		in_cluster kubectl apply -f "$built/crds"
		# Its controller: from this cluster's build, as an image that kind has to be given.
		in_cluster snapshot-controller --kubeconfig="$config" --http-endpoint=127.0.0.1:0 >"$out/snapshot-controller.log" 2>&1 &
		;;
	own) hack/kubernetes/cluster.sh up "$out/image.tar" ;;
	esac
}

# install_driver applies the manifests, and waits until every kubelet knows the driver.
install_driver() {
	say "installing the driver: $overlay"
	in_cluster kubectl apply -k "$overlay"
	registered
}

# registered waits until the driver's pods are ready, and every kubelet knows the driver.
registered() {
	local _ expected
	in_cluster kubectl -n ashlar-system rollout status daemonset/ashlar-node deployment/ashlar-controller --timeout=300s
	expected=$(in_cluster kubectl -n ashlar-system get daemonset ashlar-node -o jsonpath='{.status.desiredNumberScheduled}')
	for _ in {1..120}; do
		[ "$(in_cluster kubectl get csinodes -o jsonpath='{.items[*].spec.drivers[*].name}' | grep -o block.csi.ashlar.dev | wc -l)" = "$expected" ] && return
		sleep 1
	done
	echo "not all of $expected nodes have registered the driver" >&2
	return 1
}

# suite NAME FOCUS SKIP TESTDRIVER PROCS FLAG...: runs specs of Kubernetes, with logs and reports of that name.
suite() {
	in_cluster env KUBE_SSH_USER=root KUBE_SSH_KEY_PATH="$CLUSTER_DIR/keys/ssh" ginkgo run --procs="$5" --timeout="${TIMEOUT:-75m}" --no-color --silence-skips --output-dir="$out" \
		--json-report="$1.json" --junit-report="$1.junit.xml" --focus="$2" ${3:+--skip="$3"} \
		"$bin/e2e.test" -- --provider=local --kubeconfig="$config" --allowed-not-ready-nodes=0 --num-nodes="$NODES" \
		--storage.testdriver="$out/$4" "${@:6}" >"$out/$1.log" 2>&1 || status=$?
	[ -s "$out/$1.json" ] || { tail -n 40 "$out/$1.log"; exit 1; }
}

# report NAME...: what failed, why others skipped themselves, and how many there were, of suites of which there may be some.
report() {
	local name reports=()
	for name; do
		[ ! -s "$out/$name.json" ] || reports+=("$out/$name.json")
	done
	jq -s add "${reports[@]}" >"$out/report.json"

	specs() { jq -r "[.[].SpecReports[] | select(.LeafNodeType == \"It\" and ($1))] | length" "$out/report.json"; }
	local failed='.State | IN("failed", "timedout", "panicked", "interrupted", "aborted")'
	jq -r '.[].SpecReports[] | select(.LeafNodeType == "It" and ('"$failed"')) |
		"FAILED \((.RunTime / 1e9) | floor) s: \(.ContainerHierarchyTexts | join(" ")) \(.LeafNodeText)\n    \((.Failure.Message // "") | gsub("\n"; " ") | .[0:400])"' "$out/report.json"
	echo "skipped, and why:"
	jq -r '.[].SpecReports[] | select(.LeafNodeType == "It" and .State == "skipped" and (.Failure.Message // "") != "") | .Failure.Message | gsub("\n.*"; "")' \
		"$out/report.json" | sed -E 's/^(.{0,160}).*/    \1/' | sort | uniq -c | sort -rn
	echo "ran $(specs '.State | IN("passed", "failed", "timedout", "panicked")'), passed $(specs '.State == "passed"'), failed $(specs "$failed")," \
		"skipped $(specs '.State == "skipped" and (.Failure.Message // "") != ""'); $(((SECONDS - start) / 60)) min in all"
}
