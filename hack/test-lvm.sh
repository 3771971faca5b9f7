#!/usr/bin/env bash
# Runs the tests of LVM pools: the conformance suite and what can go wrong, csi-sanity, whole lives, and the
# driver killed at some points. On this machine's kernel if it has a device mapper, else in a virtual machine
# (hack/in-vm.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p bin/lvm
CGO_ENABLED=0 go test -c -o bin/lvm/ ./pkg/blockdev ./tests/sanity ./tests/life ./tests/points ./cmd/driver
CGO_ENABLED=0 go build -o bin/lvm/driver ./cmd/driver

where=(env)
modprobe -q -a dm-mod dm-thin-pool dm-snapshot 2>/dev/null || true
if ! dmsetup version >/dev/null 2>&1; then
	where=(hack/in-vm.sh env TMPDIR=/run) # in memory
	export VM_MEMORY=${VM_MEMORY:-6144M}
fi
# Only the verdicts are shown, and all that a test said if it fails.
VM_SECONDS=${VM_SECONDS:-1500} "${where[@]}" ASHLAR_LVM=1 ASHLAR_DRIVER="$PWD/bin/lvm/driver" TESTS="$PWD/bin/lvm" bash -c '
log=$(mktemp)
trap "rm -f \$log" EXIT
run() {
	echo "running $*"
	"$TESTS/$1.test" "${@:2}" >"$log" 2>&1 || { cat "$log"; exit 1; }
	grep -a "no tests to run" "$log" && exit 1
	grep -aEo "csi-sanity: .*|^points: .* LVM pool: .*|^PASS" "$log"
}
run blockdev -test.run LVM -test.timeout 15m
run driver -test.run LVM -test.timeout 5m
run sanity -test.timeout 15m
run life -test.run "^(TestLife|TestGroupSnapshot|TestManyLives|TestSnapshotMetadata)$" -test.timeout 10m
run points -test.run LVM -test.timeout 10m
'
