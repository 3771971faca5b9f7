# Settings of the cluster of the end-to-end tests; sourced by the scripts beside it.
#
#   ASHLAR_CACHE  what is built once and kept (default $HOME/.cache/ashlar)
#   CLUSTER_DIR   the running cluster: its data, logs, keys (default $ASHLAR_CACHE/cluster); those of different directories may run at once
# shellcheck shell=bash disable=SC2034
hack=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ASHLAR_CACHE=${ASHLAR_CACHE:-$HOME/.cache/ashlar}
CLUSTER_DIR=$(realpath -m "${CLUSTER_DIR:-$ASHLAR_CACHE/cluster}")
KUBERNETES=$(sed -n 's|^require k8s.io/kubernetes v||p; s|^\tk8s.io/kubernetes v||p' "$hack/src/go.mod" | head -1)
KUBERNETES=${KUBERNETES%% *}
built=$ASHLAR_CACHE/kubernetes-$KUBERNETES
bin=$built/bin
runtime=$built/runtime # Debian's containerd, runc and CNI plugins, unpacked
cgroup=ashlar-e2e-$(cksum <<<"$CLUSTER_DIR" | cut -d" " -f1) # its own, as a kubelet ends what it does not know below its root
address=10.244.0.1 # of the control plane; node N has 10.244.0.(10+N), and its pods 10.244.N.0/24
service=10.96.0.1

die() {
	echo "${0##*/}: $*" >&2
	exit 1
}
