#!/usr/bin/env bash
# Runs the tests of what goes over NVMe/TCP, in virtual machines (hack/vm/run.sh) on a kernel that has it, and has it built in (hack/vm/kernel.sh):
# target and host, with and without multipath; exports of a node and volumes of others; and the sweeps of tests/anynode. With SAMPLE=1, as most kernels
# have it (with multipath), and as many as some minutes allow (hack/vm/sample.sh). With arguments, just tests/anynode with these, which must have no blanks;
# MULTIPATH=N is without. VM_KERNEL is another kernel (hack/vm/kernel.sh VERSION); with ASHLAR_TLSHD (hack/vm/tlshd.sh) what crosses the network is encrypted, and the sweeps are
# samples, with multipath alone:
#
#   MULTIPATH=N hack/vm/any.sh -test.run=TestFlushInFlight
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bin=$PWD/bin/vm
mkdir -p "$bin"
CGO_ENABLED=0 go test -c -o "$bin/" ./pkg/blockdev/mirror ./pkg/blockdev/nvme ./pkg/blockdev/nvmet ./pkg/volume ./tests/anynode
CGO_ENABLED=0 go build -o "$bin/driver" ./cmd/driver
export VM_APISERVER=1 VM_MEMORY=${VM_MEMORY:-6144M}

# run MULTIPATH TESTS: each line is a test program, seconds for a sample, which tests, arguments. Only what they measured is shown, and all that a test said if it fails.
run() {
	VM_ARGUMENTS=nvme_core.multipath=$1 setpriv --pdeathsig TERM hack/vm/run.sh env ASHLAR_NVME=1 ASHLAR_TLSHD="${ASHLAR_TLSHD-}" SAMPLE="${SAMPLE-}" ASHLAR_DRIVER="$bin/driver" ASHLAR_DRBD="$PWD/bin" bash -c '
while read -r test seconds regexp arguments; do
	began=$SECONDS
	"$3" "$seconds" "$1/$test.test" "$regexp" -test.v $arguments >$test.log 2>&1 </dev/null || { cat $test.log; dmesg | tail -n 100; exit 1; }
	grep -aE "^sampled |^Benchmark.*/|^Benchmark.* [0-9]|^ +[a-z]+_test.go:[0-9]+: .* (in|took|after) " $test.log || true
	grep -a "no tests to run" $test.log && exit 1
	echo "$test $regexp $arguments: passed in $((SECONDS - began)) s"
done <<<"$2"' tests "$bin" "$2" "$PWD/hack/vm/sample.sh"
}

both='nvmet 30 . -test.timeout 15m
nvme 15 . -test.timeout 15m
mirror 15 . -test.timeout 15m'
above='volume 15 ^(TestNVMe|TestReached) -test.timeout 15m
anynode 15 . -test.timeout 200m'
encrypted='volume 30 ^(TestNVMe|TestReached) -test.timeout 15m
anynode 60 ^Test(TLS|Wire|Readers|Move|AnyNode|HomeWithoutPower) -test.timeout 150m'
points='anynode 0 ^TestPoints$ -test.timeout 10m'
flush='anynode 0 ^TestFlushInFlight$ -test.timeout 10m'
if [ $# -gt 0 ]; then
	run "${MULTIPATH:-Y}" "anynode 0 . -test.timeout 0 $*"
elif [ -n "${ASHLAR_TLSHD-}" ]; then
	export VM_SECONDS=${VM_SECONDS:-10800}
	run Y "$both
$encrypted"
elif [ "${SAMPLE-}" = 1 ]; then
	run Y "$both
$above
$points"
	run N "$flush"
else
	export VM_SECONDS=${VM_SECONDS:-13500}
	run Y "$both
$above -anynode.full -points.time=20m"
	run N "$both
$flush"
fi
