#!/usr/bin/env bash
# Measures the driver in a cluster, installed as tests/e2e/run.sh does it, and its parts against an API server alone, and
# prints the tables of docs/benchmarks.md. Nothing is left afterwards.
#
#   CLAIMS=1000 PODS=50           of the cluster
#   AGENTS=500 VOLUMES=10000 IDLE=5m   of the API server; how long to watch that nothing happens
#   MANAGER_QPS=500               requests per second for each of Kubernetes' own controllers, whose default of 20 lets 4
#                                 claims bind in a second
#   OUT=bin/bench-cluster         where logs go
#   FIGURES=bin/figures           where pictures of the tables go
#   PARTS="parts cluster rest"    which of these to measure: the parts against an API server; the cluster; its pods at rest, with metrics and page
#                                 and without
#   KEEP=1                        leave the cluster as it is at the end
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-bin/bench-cluster}
export NODES=${NODES:-1}
. tests/e2e/lib.sh
go build -o "$out/benchcluster" ./tests/benchcluster

figures=${FIGURES:-bin/figures}
wanted() { [[ " ${PARTS:-parts cluster rest} " == *" $1 "* ]]; }
if wanted parts; then
	say "parts against an API server: ${AGENTS:-500} agents, ${VOLUMES:-10000} volumes" >&2
	"$out/benchcluster" parts --figures="$figures" --agents="${AGENTS:-500}" --volumes="${VOLUMES:-10000}" --idle="${IDLE:-5m}"
fi
wanted cluster || wanted rest || exit 0
export AUDIT=1 MANAGER_QPS=${MANAGER_QPS:-500}
{ bring_up; install_driver; } >&2
if wanted cluster; then
	say "the cluster: ${CLAIMS:-1000} claims, ${PODS:-50} pods" >&2
	audit=
	[ "$where" != own ] || audit=$CLUSTER_DIR/log/audit
	in_cluster "$out/benchcluster" cluster --figures="$figures" --kubeconfig="$config" --claims="${CLAIMS:-1000}" --pods="${PODS:-50}" --audit="$audit" \
		--image="$("$bin/e2e.test" --list-images 2>/dev/null | grep /pause: | sort -V | tail -n 1)"
fi
if wanted rest && [ "$where" = own ]; then # its processes are to be seen
	say "the pods at rest" >&2
	hack/kubernetes/cluster.sh net "$out/benchcluster" rest --kubeconfig="$config"
fi
