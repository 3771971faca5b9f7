#!/usr/bin/env bash
# Installs the driver from deploy/kubernetes on a cluster, as pods from an image made here, and runs Kubernetes'
# external storage suite against it. The cluster is $KUBECONFIG's if that is set, else one of kind if Docker runs, else
# one that is built and started here (hack/kubernetes). Nothing of it is left afterwards.
#
#   PROCS=6            specs at a time
#   FOCUS, SKIP        regular expressions, in place of External.Storage and of those that cannot run here
#   OUT=bin/e2e        where logs and reports go
#   KEEP=1             leave the cluster (and the driver) as it is at the end
#
# What a given cluster must have: tests/e2e/lib.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-bin/e2e}
. tests/e2e/lib.sh
began=$(date +%s)

bring_up

# Left out: what needs another operating system, SELinux, ssh to the node, or a volume populator.
skip=${SKIP-'\[Disruptive\]|\[Feature:Windows\]|\[Feature:SELinux|any volume data source'}
install_driver
if [[ $(in_cluster kubectl api-resources --api-group=admissionregistration.k8s.io -o name) == *mutatingadmissionpolicies* ]]; then
	in_cluster kubectl apply -f tests/e2e/least-size.yaml
else
	skip="${skip:+$skip|}volumegroupsnapshottable"
fi
# This spec never makes a pod for its claims, so it has a run of its own, with a class that binds at once.
immediate='multiple pods should modify volumes with a different volumeAttributesClass'
cp tests/e2e/testdriver*.yaml "$out/"
# ext4 grows while it is mounted only for those who have CAP_SYS_RESOURCE (bit 24), which privileged pods have unless
# the whole machine is a container without it. There, what leaves the filesystem to the class is tried on XFS.
if [ "$where" = own ] && ((!(0x$(sed -n 's/^CapBnd:\s*//p' /proc/self/status) >> 24 & 1))); then
	echo "no CAP_SYS_RESOURCE on this machine: the class that the specs use is ashlar-xfs"
	sed -i '/^StorageClass:/{n;s/ashlar$/ashlar-xfs/}' "$out/testdriver.yaml"
fi
status=0
suite() { # NAME FOCUS SKIP TESTDRIVER PROCS
	in_cluster ginkgo run --procs="$5" --timeout="${TIMEOUT:-75m}" --no-color --silence-skips --output-dir="$out" \
		--json-report="$1.json" --junit-report="$1.junit.xml" --focus="$2" ${3:+--skip="$3"} \
		"$bin/e2e.test" -- --provider=skeleton --kubeconfig="$config" --allowed-not-ready-nodes=0 --num-nodes=1 \
		--storage.testdriver="$out/$4" >"$out/$1.log" 2>&1 || status=$?
	[ -s "$out/$1.json" ] || { tail -n 40 "$out/$1.log"; exit 1; }
}
say "running the specs, ${PROCS:-6} at a time"
suite suite "${FOCUS:-External.Storage}" "${skip:+$skip|}$immediate" testdriver.yaml "${PROCS:-6}"
[ -n "${FOCUS-}" ] || suite immediate "External.Storage.*$immediate" "" testdriver-immediate.yaml 2
if [ -z "${FOCUS-}" ]; then
	say "replacing the driver's pods under a writer"
	if [ "$where" = own ]; then kubectl=(hack/kubernetes/cluster.sh exec kubectl); else kubectl=(env KUBECONFIG="$config" "$bin/kubectl"); fi
	IMAGE=$("$bin/e2e.test" --list-images 2>/dev/null | grep /busybox: | sort -V | tail -n 1) \
		tests/e2e/replace.sh "${kubectl[@]}" >"$out/replace.log" 2>&1 || status=$?
	tail -n 1 "$out/replace.log"
	if [ "$where" != given ]; then
		say "killing the driver and its sidecars under 100 claims"
		export -f in_cluster on_node
		export out config kind bin
		IMAGE=$("$bin/e2e.test" --list-images 2>/dev/null | grep /pause: | sort -V | tail -n 1) tests/e2e/kill.sh >"$out/kill.log" 2>&1 || status=$?
		grep agree "$out/kill.log" || tail -n 20 "$out/kill.log"
	fi
fi
jq -s add "$out"/suite.json "$out"/immediate.json >"$out/report.json" 2>/dev/null || cp "$out/suite.json" "$out/report.json"

specs() { jq -r "[.[].SpecReports[] | select(.LeafNodeType == \"It\" and ($1))] | length" "$out/report.json"; }
failed='.State | IN("failed", "timedout", "panicked", "interrupted", "aborted")'
jq -r '.[].SpecReports[] | select(.LeafNodeType == "It" and ('"$failed"')) |
	"FAILED \((.RunTime / 1e9) | floor) s: \(.ContainerHierarchyTexts | join(" ")) \(.LeafNodeText)\n    \((.Failure.Message // "") | gsub("\n"; " ") | .[0:400])"' "$out/report.json"
echo "skipped, and why:"
jq -r '.[].SpecReports[] | select(.LeafNodeType == "It" and .State == "skipped" and (.Failure.Message // "") != "") | .Failure.Message | gsub("\n.*"; "")' \
	"$out/report.json" | sed -E 's/^(.{0,160}).*/    \1/' | sort | uniq -c | sort -rn
echo "ran $(specs '.State | IN("passed", "failed", "timedout", "panicked")'), passed $(specs '.State == "passed"'), failed $(specs "$failed")," \
	"skipped $(specs '.State == "skipped" and (.Failure.Message // "") != ""'); $((($(date +%s) - began) / 60)) min in all"
exit "$status"
