#!/usr/bin/env bash
# Installs the driver from deploy/kubernetes on a cluster of three nodes, as pods from an image made here, and runs
# Kubernetes' external storage suite against it; then its specs that stop kubelets; then our own tests of nodes, kubelets
# and drivers that die (tests/e2e/nodes); then the driver's pods are replaced, and killed, under load. The cluster is
# $KUBECONFIG's if that is set, else one of kind if Docker runs, else one that is built and started here (hack/kubernetes).
# Nothing of it is left afterwards. What stops kubelets and nodes runs on the last one only.
#
#   PROCS=6            specs at a time
#   FOCUS, SKIP        regular expressions, in place of External.Storage and of those that cannot run here. With FOCUS,
#                      only these specs run, and
#   TESTS              those of our own tests whose names match this regular expression
#   OUT=bin/e2e        where logs and reports go
#   KEEP=1             leave the cluster (and the driver) as it is at the end
#
# What a given cluster must have: tests/e2e/lib.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-bin/e2e}
. tests/e2e/lib.sh

bring_up

# Left out: what needs another operating system, SELinux, or a volume populator; what is disruptive has a run of its own.
skip=${SKIP-'\[Disruptive\]|\[Feature:Windows\]|\[Feature:SELinux|any volume data source'}
install_driver
if [[ $(in_cluster kubectl api-resources --api-group=admissionregistration.k8s.io -o name) == *mutatingadmissionpolicies* ]]; then
	in_cluster kubectl apply -f tests/e2e/least-size.yaml
	groups=volumegroupsnapshottable
else
	groups=
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
# The snapshot controller (external-snapshotter 8.7.0, setAnnVolumeGroupSnapshotBeingDeleted) marks its cached copy of a content
# before it patches the object. Where the patch fails, it takes the mark for written, and a content with the policy Retain that is
# being deleted stays until the controller is started anew, which would write the mark. So it is written here, and said.
mark_retained() {
	local mark=groupsnapshot.storage.kubernetes.io/volumegroupsnapshot-being-deleted retained
	while sleep 10; do
		retained=$(in_cluster kubectl get volumegroupsnapshotcontents -o json | jq -r --arg mark "$mark" \
			'.items[] | select(.metadata.deletionTimestamp and .spec.deletionPolicy == "Retain" and .metadata.annotations[$mark] == null) | .metadata.name') || continue
		# shellcheck disable=SC2086 # a list
		[ -z "$retained" ] || in_cluster kubectl annotate volumegroupsnapshotcontents $retained "$mark=yes" || true # it may have gone
	done
}
say "running the specs, ${PROCS:-6} at a time"
suite suite "${FOCUS:-External.Storage}" "${skip:+$skip|}$immediate${groups:+|$groups}" testdriver.yaml "${PROCS:-6}"
[ -n "${FOCUS-}" ] || suite immediate "External.Storage.*$immediate" "" testdriver-immediate.yaml 2
if [ -n "$groups" ] && [[ -z ${FOCUS-} || ${FOCUS-} == *$groups* ]]; then
	# The volumes of a group are on one node, and these specs leave it to the scheduler on which nodes they are.
	say "running the specs of group snapshots, on one node"
	others=$(nodes | tail -n +2)
	away=ashlar-e2e
	# shellcheck disable=SC2086 # a list
	[ -z "$others" ] || in_cluster kubectl taint nodes $others "$away=away:NoSchedule"
	mark_retained >"$out/marked.log" 2>&1 &
	marking=$!
	suite groups "External.Storage.*$groups" "" testdriver.yaml 4 --non-blocking-taints="$away"
	kill "$marking" || true
	wait "$marking" || true
	grep annotated "$out/marked.log" || true
	# shellcheck disable=SC2086
	[ -z "$others" ] || in_cluster kubectl taint nodes $others "$away-"
fi
if [ "$where" = own ] && [ -z "${FOCUS-}" ]; then
	say "running the specs that stop kubelets, one after the other"
	# Left out: SELinux, and a spec about servers of files that go away.
	suite disruptive 'External.Storage.*\[Disruptive\]' '\[Feature:SELinux|\[Feature:Windows\]|network filesystem disruption' testdriver.yaml 1
fi
image_of() { "$bin/e2e.test" --list-images 2>/dev/null | grep "/$1:" | sort -V | tail -n 1; }
if [ "$where" = own ] && { [ -n "${TESTS-}" ] || [ -z "${FOCUS-}" ]; }; then
	say "our own tests of nodes, kubelets and drivers that die"
	go test -c -tags e2e -o "$out/nodes.test" ./tests/e2e/nodes
	CLUSTER=$PWD/hack/kubernetes/cluster.sh IMAGE=$(image_of busybox) hack/kubernetes/cluster.sh net \
		"$out/nodes.test" -test.v -test.timeout=3h -test.run="${TESTS:-.}" >"$out/nodes.log" 2>&1 || status=$?
	grep -E '^(---|===|PASS|FAIL|    .*_test.go)' "$out/nodes.log" | grep -v '^=== RUN' | cut -c 1-400 || true
fi
if [ "$where" = own ] && [ -z "${FOCUS-}" ]; then
	say "our own tests of the scheduler, the binder and the provisioner, and of a copy that takes minutes"
	KUBERNETES_BIN=$bin go test -tags e2e -count=1 -v -run 'TestScheduled|TestLongCopy' ./tests/e2e >"$out/schedule.log" 2>&1 || status=$?
	grep -E '^(---|ok|FAIL)' "$out/schedule.log"
fi
if [ -z "${FOCUS-}" ]; then
	say "replacing the driver's pods under a writer"
	if [ "$where" = own ]; then kubectl=(hack/kubernetes/cluster.sh exec kubectl); else kubectl=(env KUBECONFIG="$config" "$bin/kubectl"); fi
	IMAGE=$(image_of busybox) tests/e2e/replace.sh "${kubectl[@]}" >"$out/replace.log" 2>&1 || status=$?
	tail -n 1 "$out/replace.log"
	if [ "$where" != given ]; then
		say "killing the driver and its sidecars under 100 claims"
		export -f in_cluster on_node nodes
		export out config kind bin
		IMAGE=$(image_of pause) tests/e2e/kill.sh >"$out/kill.log" 2>&1 || status=$?
		grep agree "$out/kill.log" || tail -n 20 "$out/kill.log"
	fi
fi
report suite immediate groups disruptive
exit "$status"
