#!/usr/bin/env bash
# Measures the driver in a cluster, installed as tests/e2e/run.sh does it, and its parts against an API server alone, and
# prints the tables of docs/benchmarks/cluster.md. Nothing is left afterwards.
#
#   CLAIMS=1000 PODS=50           of the cluster
#   AGENTS=500 VOLUMES=10000 IDLE=5m   of the API server; how long to watch that nothing happens
#   MANAGER_QPS=500               requests per second for each of Kubernetes' own controllers, whose default of 20 lets 4
#                                 claims bind in a second
#   OUT=bin/bench-cluster         where logs go
#   FIGURES=bin/figures           where pictures of the tables go
#   PARTS="parts null cluster rest"   which of these to measure: the parts against an API server; the cluster with a driver that does nothing (null), which
#                                 is what Kubernetes and the sidecars take themselves; the cluster; its pods at rest, with metrics and page and without
#   PEER=PATH                     the program of csi-driver-host-path (its cmd/hostpathplugin, without cgo, and with -X main.version=VERSION), which is then measured as well, after null
#   KEEP=1                        leave the cluster as it is at the end
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-bin/bench-cluster}
export NODES=${NODES:-1}
. tests/e2e/lib.sh
go build -o "$out/benchcluster" ./tests/benchcluster
null=/var/tmp/ashlar-null peer=/var/tmp/ashlar-peer # as in their manifests
trap 'code=$?; set +e; rm -rf "$null" "$peer"; (exit "$code"); finish' EXIT

figures=${FIGURES:-bin/figures}
wanted() { [[ " ${PARTS:-parts null cluster rest} " == *" $1 "* ]]; }
if wanted parts; then
	say "parts against an API server: ${AGENTS:-500} agents, ${VOLUMES:-10000} volumes" >&2
	"$out/benchcluster" parts --figures="$figures" --agents="${AGENTS:-500}" --volumes="${VOLUMES:-10000}" --idle="${IDLE:-5m}"
fi
wanted null || wanted cluster || wanted rest || [ -n "${PEER-}" ] || exit 0
export AUDIT=1 MANAGER_QPS=${MANAGER_QPS:-500}
bring_up >&2
audit=
[ "$where" != own ] || audit=$CLUSTER_DIR/log/audit
cluster() {
	in_cluster "$out/benchcluster" cluster --kubeconfig="$config" --claims="${CLAIMS:-1000}" --pods="${PODS:-50}" --audit="$audit" \
		--image="$("$bin/e2e.test" --list-images 2>/dev/null | grep /pause: | sort -V | tail -n 1)" "$@"
}
# other measures the cluster with another driver: its name, and the directory of its manifests.
other() {
	overlay=$2
	install_driver >&2
	say "the cluster, with $1: ${CLAIMS:-1000} claims, ${PODS:-50} pods" >&2
	printf '\n## With %s\n' "$1"
	cluster
	in_cluster kubectl delete -k "$overlay" --wait --timeout=120s >&2
}
if wanted null && [ "$where" = own ]; then # whose nodes find the binary
	mkdir -p "$null"
	CGO_ENABLED=0 go build -o "$null/null" ./tests/benchcluster/null
	other 'a driver that does nothing' tests/benchcluster/null
fi
if [ -n "${PEER-}" ] && [ "$where" = own ]; then
	mkdir -p "$peer/bin" "$peer/data"
	cp "$PEER" "$peer/bin/hostpathplugin"
	other csi-driver-host-path tests/benchcluster/hostpath
fi
if wanted cluster; then
	overlay=tests/benchcluster/ashlar
	install_driver >&2
	say "the cluster: ${CLAIMS:-1000} claims, ${PODS:-50} pods" >&2
	cluster --figures="$figures"
fi
if wanted rest && [ "$where" = own ]; then # its processes are to be seen
	overlay=tests/e2e/overlay # which has the page
	install_driver >&2
	say "the pods at rest" >&2
	hack/kubernetes/cluster.sh net "$out/benchcluster" rest --kubeconfig="$config"
fi
