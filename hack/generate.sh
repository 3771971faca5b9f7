#!/usr/bin/env bash
# Makes what is generated: from pkg/api DeepCopy methods and the definitions of the custom resources; from the alerts their
# PrometheusRule; and the README of the chart from its values.
#
#   hack/generate.sh [DIRECTORY]     into DIRECTORY instead of the tree, to compare
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-.}
GOFLAGS=-mod=mod go run sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0 paths=./pkg/api/... \
	object output:object:dir="$out/pkg/api/v1alpha1" crd output:crd:dir="$out/deploy/kubernetes/crds"

# The alerts, as the Prometheus operator takes them.
mkdir -p "$out/deploy/monitoring"
{
	cat <<-'YAML'
		# Made of rules.yaml by make generate.
		apiVersion: monitoring.coreos.com/v1
		kind: PrometheusRule
		metadata:
		  name: ashlar
		spec:
	YAML
	sed -e '/^#/d' -e 's/^\(.\)/  \1/' deploy/monitoring/rules.yaml
} >"$out/deploy/monitoring/prometheusrule.yaml"
[ "$out" != . ] || go -C tests/deploy test -count=1 -run '^TestReadme$' . -update >/dev/null
