#!/usr/bin/env bash
# Runs the tests of whole machines that lose their power (tests/anynode, TestMachines...): kernels of their own (hack/vm/machine.sh), in a network
# that nobody else is in. When it ends, however that is, nothing of them is left. With SAMPLE=1 one of the tests, another one each day (hack/vm/sample.sh). Arguments are those of the test program.
#
#   hack/vm/machines.sh [-test.v] [-anynode.full [-test.run=TestMachines/NAME]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bin=$PWD/bin/vm/machines
mkdir -p "$bin"
CGO_ENABLED=0 go test -c -o "$bin/" ./tests/anynode
CGO_ENABLED=0 go build -o "$bin/driver" ./cmd/driver
VM_KERNEL=$(hack/vm/kernel.sh)
ASHLAR_APISERVER=$(hack/apiserver.sh)
TMPDIR=$(mktemp -d /var/tmp/ashlar-machines.XXXXXX)
trap 'rm -rf "$TMPDIR"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export VM_ARGUMENTS=${VM_ARGUMENTS:-nvme_core.multipath=N} # with multipath a flush is lost: tests/anynode, TestFlushInFlight
export VM_KERNEL ASHLAR_APISERVER TMPDIR ASHLAR_DRIVER=$bin/driver ASHLAR_MACHINES=1
# The first process there takes all others along, and waits for those whose parents have ended.
unshare --net --mount --pid --fork --kill-child --mount-proc bash -c 'ip link set lo up && "$@"; exit' machines "$PWD/hack/vm/sample.sh" 0 "$bin/anynode.test" '^TestMachines' -test.timeout=90m "$@"
