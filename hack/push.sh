#!/usr/bin/env bash
# Publishes a release: the archives of `make image-archive` as one image for both architectures, and the package
# of `make chart`.
#
#   hack/push.sh NAME:TAG oci://REGISTRY/CHARTS
#
# What it prints is for whoever signs: a line each for amd64, arm64, image (both) and chart, with the name by digest.
# It needs bin/crane and bin/helm, which log in as docker does (~/.docker/config.json). PLAIN_HTTP=1 is for a registry on
# this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
image=$1 charts=$2

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

manifests=()
for arch in amd64 arm64; do
	mkdir "$scratch/$arch"
	tar -xf "bin/image-$arch.tar" -C "$scratch/$arch"
	pushed=$(bin/crane push "$scratch/$arch" "$image-$arch")
	echo "$arch $pushed"
	manifests+=(--manifest "$pushed")
done
echo "image $(bin/crane index append "${manifests[@]}" --tag "$image")"

version=$(sed -n 's/^version: //p' deploy/charts/ashlar/Chart.yaml)
bin/helm push ${PLAIN_HTTP:+--plain-http} "bin/ashlar-$version.tgz" "$charts" >"$scratch/chart" 2>&1 || { cat "$scratch/chart" >&2; exit 1; }
echo "chart ${charts#oci://}/ashlar@$(sed -n 's/^Digest: //p' "$scratch/chart")"
