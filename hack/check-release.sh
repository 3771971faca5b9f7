#!/usr/bin/env bash
# Checks that what says a version says this one, before it is released: hack/check-release.sh v1.2.3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$1

failures=0
says() { # FILE LINE
	grep -qxF -- "$2" "$1" || { echo "$1 does not say \"$2\"" >&2; failures=1; }
}
says deploy/charts/ashlar/Chart.yaml "version: ${version#v}"
says deploy/charts/ashlar/Chart.yaml "appVersion: $version"
# The first image is the driver's own.
[ "$(grep -m1 -A1 'name: ghcr.io/ashlar-csi/ashlar$' deploy/kubernetes/kustomization.yaml | tail -n 1)" = "    newTag: $version" ] ||
	{ echo "deploy/kubernetes/kustomization.yaml has another newTag of ghcr.io/ashlar-csi/ashlar than $version" >&2; failures=1; }
grep -q "^## ${version#v}\\( \\|\$\\)" CHANGELOG.md || { echo "CHANGELOG.md has no section \"## ${version#v}\"" >&2; failures=1; }
# Which images they are, the registry is asked by make digests.
for image in $(sed -n 's/.*name: \(registry.k8s.io.*\)/\1/p' deploy/kubernetes/kustomization.yaml); do
	grep -A2 -- "name: $image\$" deploy/kubernetes/kustomization.yaml | grep -q 'digest: sha256:' || { echo "$image has no digest: run make digests" >&2; failures=1; }
done
exit $failures
