#!/usr/bin/env bash
# Runs Kubernetes' external storage suite with volumes that any node can use (access: any) and pods that are never on the node that has them, so that
# all is over NVMe/TCP. Of the cluster that is started here (hack/kubernetes) one node is on this machine, with the control plane and the driver's
# controllers; three are in a virtual machine, whose kernel has NVMe/TCP (hack/vm): the home of all volumes, and two for pods. Who was given what is
# counted; a volume that was attached at its home, or none that was exported, is a failure.
#
#   PROCS=2            specs at a time
#   FOCUS, SKIP        regular expressions, in place of External.Storage and of those that cannot run here: late binding has the volume where its
#                      first pod is
#   TIMEOUT=3h         for all specs
#   OUT=bin/e2e-any    where logs and reports go
#   KEEP=1             leave the cluster as it is at the end
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${OUT:-bin/e2e-any}
NODES=1
. tests/e2e/lib.sh
# shellcheck disable=SC2034 # lib.sh has it applied
overlay=tests/e2e/any
[ "$where" = own ] || { echo "any.sh: the kernels of a given cluster are what they are" >&2; exit 1; }
home=ashlar-e2e-2 consumers=2 # class.yaml has the home too
reserved=node-role.kubernetes.io/control-plane

bring_up
install_driver # the controllers have no other node yet
in_cluster kubectl taint nodes ashlar-e2e-1 "$reserved=:NoSchedule"
say "starting the nodes in a virtual machine"
hack/kubernetes/cluster.sh guests $((1 + consumers)) "$out/image.tar"
in_cluster kubectl taint nodes "$home" "$reserved=:NoSchedule"
registered

# seen FILE RESOURCE COLUMNS: a line for each state of each of them.
seen() { while in_cluster kubectl get "$2" --watch --no-headers -o custom-columns="$3" >>"$out/$1" 2>/dev/null; do :; done; }
seen attached volumeattachments VA:.metadata.name,NODE:.spec.nodeName,ATTACHED:.status.attached &
watching=($!)
seen exported volumes.ashlar.dev VOLUME:.metadata.name,HOME:.spec.nodeName,NODE:.status.export.node,GENERATION:.status.export.generation,READERS:.status.readers[*].node &
watching+=($!)

cp tests/e2e/any/testdriver.yaml "$out/"
say "running the specs, ${PROCS:-2} at a time"
NODES=$consumers TIMEOUT=${TIMEOUT:-3h} suite suite "${FOCUS:-External.Storage}" \
	"${SKIP-\[Disruptive\]|\[Feature:Windows\]|\[Feature:SELinux|any volume data source|\(late-binding\)}" testdriver.yaml "${PROCS:-2}"
kill "${watching[@]}"
report suite

# total FILE CONDITION: how many there were.
total() { awk "$2"' { key = $1 " " $3 " " $4 " " $5; if (!(key in seen)) { seen[key] = 1; n++ } } END { print n + 0 }' "$out/$1"; }
away=$(total attached "\$3 == \"true\" && \$2 != \"$home\"") at_home=$(total attached "\$3 == \"true\" && \$2 == \"$home\"")
exported=$(total exported "\$2 == \"$home\" && (\$3 != \"<none>\" || \$5 != \"<none>\")")
echo "volumes were attached to other nodes than their home $away times, and at home $at_home times; over NVMe/TCP they were used $exported times"
[ "$at_home" -eq 0 ] && [ "$exported" -gt 0 ] || status=1
exit "$status"
