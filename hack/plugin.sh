#!/usr/bin/env bash
# Builds kubectl ashlar for each platform that deploy/krew/ashlar.yaml names, as bin/kubectl-ashlar-OS-ARCH.tar.gz, and writes krew's
# manifest of that version: bin/ashlar.yaml. The same source gives the same archives.
#
#   VERSION=v1.2.3 hack/plugin.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p bin
sed -e "/^#/d" -e "s/@VERSION@/$VERSION/" deploy/krew/ashlar.yaml >"$scratch/ashlar.yaml"
platforms=$(sed -n 's/.*@SHA256-\(.*\)@.*/\1/p' deploy/krew/ashlar.yaml)
[ -n "$platforms" ] || { echo "deploy/krew/ashlar.yaml names no platform" >&2; exit 1; }
for platform in $platforms; do
	os=${platform%-*} arch=${platform#*-} suffix=""
	[ "$os" != windows ] || suffix=.exe
	mkdir "$scratch/$platform"
	cp LICENSE deploy/krew/kubectl_complete-ashlar "$scratch/$platform"
	CGO_ENABLED=0 GOOS=$os GOARCH=$arch go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o "$scratch/$platform/kubectl-ashlar$suffix" ./cmd/kubectl-ashlar
	archive=bin/kubectl-ashlar-$platform.tar.gz
	tar -C "$scratch/$platform" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - . | gzip -n >"$archive"
	sum=$(sha256sum "$archive")
	sed -i "s/@SHA256-$platform@/${sum%% *}/" "$scratch/ashlar.yaml"
done
! grep -n '@.*@' "$scratch/ashlar.yaml" >&2 || { echo "this is left to fill in" >&2; exit 1; }
mv "$scratch/ashlar.yaml" bin/ashlar.yaml
