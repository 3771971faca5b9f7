#!/usr/bin/env bash
# Builds the sidecar of external-snapshot-metadata, as an image archive by the name that the manifests have for it, and a client of it,
# from the Go module proxy:
#
#   hack/snapshot-metadata/build.sh DIRECTORY     csi-snapshot-metadata.tar, snapshot-metadata-lister and crd.yaml, in it
set -euo pipefail
mkdir -p "${1?the directory}"
out=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")"
module=github.com/kubernetes-csi/external-snapshot-metadata
manifest=../../deploy/kubernetes/snapshot-metadata/kustomization.yaml
name=registry.k8s.io/sig-storage/csi-snapshot-metadata:$(sed -n '/csi-snapshot-metadata$/{n;s/.*newTag: //p}' "$manifest")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CGO_ENABLED=0 GOFLAGS=-mod=readonly GOOS=linux
go build -trimpath -ldflags '-s -w' -o "$work/root/csi-snapshot-metadata" "$module/cmd/csi-snapshot-metadata"
go build -trimpath -ldflags '-s -w' -o "$out/snapshot-metadata-lister" ./lister
install -m 0644 "$(go list -m -f '{{.Dir}}' "$module/client")/config/crd/cbt.storage.k8s.io_snapshotmetadataservices.yaml" "$out/crd.yaml"

mkdir "$work/root/tmp" "$work/a"
tar -C "$work/root" --sort=name --numeric-owner --owner=0 --group=0 --mtime=@0 -cf "$work/a/layer.tar" .
sum=$(sha256sum "$work/a/layer.tar" | cut -d' ' -f1)
jq -n --arg sum "$sum" '{architecture: "amd64", os: "linux", config: {Entrypoint: ["/csi-snapshot-metadata"]},
	rootfs: {type: "layers", diff_ids: ["sha256:" + $sum]}}' >"$work/a/config.json"
jq -n --arg name "$name" '[{Config: "config.json", RepoTags: [$name], Layers: ["layer.tar"]}]' >"$work/a/manifest.json"
tar -C "$work/a" -cf "$out/csi-snapshot-metadata.tar" .
