#!/usr/bin/env bash
# Builds a Kubernetes from the Go module proxy, with the CSI sidecars and the tests, and unpacks a container runtime
# from Debian's packages: all of it below $ASHLAR_CACHE, nothing is installed. About ten minutes on two cores the first
# time, and nothing when nothing has changed.
#
# Needs go, apt (Debian and its kin), and what hack/install-tools.sh e2e installs.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck disable=SC2154
key=$(cat "$hack/build.sh" "$hack"/src/go.* "$hack"/src/*/* | sha256sum)
[ "$(cat "$built/key" 2>/dev/null)" != "$key" ] || exit 0
"$hack/../image.sh" -b >/dev/null # what images.sh builds on; without its tools it fails now, and not after minutes
mkdir -p "$bin" "$built/crds"
start=$SECONDS

export CGO_ENABLED=0 GOFLAGS=-mod=readonly GOOS=linux
stamp=k8s.io/component-base/version
ldflags="-s -w -X $stamp.gitVersion=v$KUBERNETES -X $stamp.gitMajor=${KUBERNETES%%.*} -X $stamp.gitMinor=$(cut -d. -f2 <<<"$KUBERNETES") -X $stamp.gitTreeState=clean"
gobuild() { # FOLDER OUTPUT PACKAGE...
	local folder=$1 output=$2 began=$SECONDS
	shift 2
	(cd "$hack/src/$folder" && go build -trimpath -ldflags "$ldflags" -o "$output" "$@")
	echo "built ${*##*/} in $((SECONDS - began)) s"
}

csi=github.com/kubernetes-csi
gobuild . "$bin/" k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubelet,kubectl} \
	k8s.io/kubernetes/test/images/agnhost
gobuild . "$bin/etcd" go.etcd.io/etcd/server/v3
gobuild . "$bin/" "$csi/external-attacher/v4/cmd/csi-attacher" "$csi/external-resizer/v2/cmd/csi-resizer" \
	"$csi"/external-snapshotter/v8/cmd/{csi-snapshotter,snapshot-controller}
gobuild provisioner "$bin/" "$csi/external-provisioner/v6/cmd/csi-provisioner"
gobuild . "$bin/" github.com/onsi/ginkgo/v2/ginkgo ./standin
began=$SECONDS
(cd "$hack/src" && go test -c -trimpath -ldflags "$ldflags" -o "$bin/e2e.test" k8s.io/kubernetes/test/e2e)
echo "built e2e.test in $((SECONDS - began)) s"

# The definitions of snapshots travel with their client.
(
	cd "$hack/src"
	from=$(go list -m -f '{{.Dir}}' "$csi/external-snapshotter/client/v8")/config/crd
	rm -f "$built"/crds/*
	install -m 0644 "$from"/*snapshot*.yaml "$built/crds/"
)
if ! [ -x "$runtime/usr/bin/containerd" ]; then
	debs=$(mktemp -d)
	(
		cd "$debs"
		apt-get download -qq containerd runc containernetworking-plugins busybox-static 2>&1 | grep -v 'unsandboxed as root' || true
		for deb in *.deb; do dpkg-deb -x "$deb" "$runtime"; done
	)
	rm -rf "$debs"
fi
"$hack/images.sh"
echo "$key" >"$built/key"
echo "Kubernetes $KUBERNETES is in $built: $((SECONDS - start)) s"
