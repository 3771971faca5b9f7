#!/usr/bin/env bash
# Builds what the tests of the cluster talk to, kube-apiserver and etcd, from the Go module proxy, and prints
# the folder that they are in. A few minutes the first time; afterwards it takes milliseconds.
#
#   hack/apiserver.sh
#
# ASHLAR_CACHE is where they are kept (default: ~/.cache/ashlar). internal/apitest starts and ends them.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/apiserver"
key=$({ cat go.mod go.sum "../${BASH_SOURCE[0]##*/}" && go env GOVERSION GOARCH; } | sha256sum | cut -c 1-16)
cache=${ASHLAR_CACHE:-$HOME/.cache/ashlar}
dir=$cache/apiserver-$key

# One builds, the others that come meanwhile wait for it.
mkdir -p "$cache"
exec 9>"$cache/apiserver.lock"
[ -e "$dir" ] || flock 9
if ! [ -e "$dir" ]; then
	echo "building kube-apiserver and etcd; this takes minutes, once" >&2
	version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
	minor=${version#v1.}
	mkdir -p "$dir.part"
	go list -f '{{.ImportPath}}' tool | while read -r program; do
		name=${program##*/}
		case $program in go.etcd.io/*) name=etcd ;; esac
		CGO_ENABLED=0 nice go build -mod=readonly -trimpath -o "$dir.part/$name" -ldflags "-s -w \
			-X k8s.io/component-base/version.gitVersion=$version -X k8s.io/component-base/version.gitMajor=1 \
			-X k8s.io/component-base/version.gitMinor=${minor%%.*}" "$program" >&2
	done
	mv "$dir.part" "$dir"
fi
echo "$dir"
