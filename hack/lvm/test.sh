#!/usr/bin/env bash
# Runs tests of LVM pools: on this machine's kernel if it has a device mapper, else in a virtual machine
# (hack/vm/run.sh).
#
#   hack/lvm/test.sh pools     the conformance suite and what can go wrong, the devices over those of a pool, an agent with them, and encrypted volumes in a cluster
#   hack/lvm/test.sh driver    over the driver: csi-sanity (of a cluster too), whole lives, crashes and faults at some points, and
#                              some power cuts (which need a device mapper also for pools of files)
#   hack/lvm/test.sh ./tests/points -test.v -test.run REGEXP ...
#                              those of one package, with arguments
#
# With SAMPLE=1, as many of each as some minutes allow, others each day (hack/vm/sample.sh): of the pools the conformance suite of one kind, and some of the
# rest; of the driver not csi-sanity of a cluster, whose part is the same over all pools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Each line: package, name of its test program, seconds for a sample, which tests, arguments.
case ${1-} in
pools) tests='./pkg/blockdev/lvmpool lvmpool 0 ^Test(Linear|Thin)Pool$ -test.timeout 60m
./pkg/blockdev/lvmpool lvmpool 15 LVM -test.timeout 60m
./pkg/device device 15 . -test.timeout 20m
./pkg/blockdev/mirror mirror 15 . -test.timeout 20m
./pkg/blockdev/era era 15 . -test.timeout 20m
./pkg/blockdev/replicapool replicapool 15 . -test.timeout 20m
./pkg/volume volume 15 LVM|Header -test.timeout 20m
./pkg/cluster/agent agent 15 . -test.timeout 20m
./pkg/cluster cluster 15 ^TestEncrypted -test.timeout 20m' ;;
driver) tests='./cmd/driver driver 15 LVM -test.timeout 40m
./tests/sanity sanity 0 . -test.timeout 40m
./tests/sanity/cluster cluster 0 . -test.timeout 40m
./tests/life life 0 ^(TestLife|TestGroupSnapshot|TestManyLives|TestSnapshotMetadata|TestHostilePod|TestReaderSeesWriter|TestReadOnlyThenWritten|TestRawUsage|TestLimits|TestEncryptedLife|TestKeys|TestKeySlots|TestGrowsWithKey|TestCryptoErase|TestHeaderIsKept|TestEncryptionOfCopies)$ -test.timeout 40m
./tests/points points 0 LVM -points.seed=1 -test.timeout 40m
./tests/power power 0 . -test.timeout 40m' ;;
./*) tests=$1 ;;
*)
	sed -n '2,/^[^#]/s/^# \?//p' "$0" >&2
	exit 2
	;;
esac
[ "${SAMPLE-}" != 1 ] || tests=$(sed '/^\.\/tests\/sanity\/cluster /d' <<<"$tests")

bin=$PWD/bin/lvm/$1
mkdir -p "$bin"
# shellcheck disable=SC2046 # a list
CGO_ENABLED=0 go test -c -o "$bin/" $(cut -d' ' -f1 <<<"$tests" | sort -u)
CGO_ENABLED=0 go build -o "$bin/driver" ./cmd/driver

where=(flock /run/lock/ashlar-test-lvm env) # one at a time on one kernel
# Where a virtual machine's tests work: in memory; but targets for reading need a filesystem of which a file can be
# mounted with other owners, and before Linux 6.3 tmpfs is none: the tests of life have the disk, those of one package
# an ext4 in memory.
memory=
modprobe -q -a dm-mod dm-thin-pool dm-snapshot dm-log-writes dm-mirror dm-era dm-delay 2>/dev/null || true
if ! dmsetup version >/dev/null 2>&1; then
	where=(setpriv --pdeathsig TERM hack/vm/run.sh env)
	memory=/run
	export VM_MEMORY=${VM_MEMORY:-6144M}
fi
export VM_SECONDS=${VM_SECONDS:-4500}
where+=(ASHLAR_LVM=1 ASHLAR_IO="${memory:+1}" SAMPLE="${SAMPLE-}" ASHLAR_DRIVER="$bin/driver")
if [[ $1 != ./* || $1 == ./pkg/cluster ]]; then # those with tests that need it
	if [ -n "$memory" ]; then
		export VM_APISERVER=1
	else
		server=$(hack/apiserver.sh)
		where+=(ASHLAR_APISERVER="$server")
	fi
fi
case $1 in
./*/life) exec "${where[@]}" "$bin/life.test" "${@:2}" ;;
./*)
	[ -z "$memory" ] || where+=(TMPDIR=$memory/ext4 bash -c 'mkdir "$TMPDIR" && truncate -s 2G /run/disk && mkfs.ext4 -q /run/disk && mount -o loop,discard /run/disk "$TMPDIR" && exec "$@"' bash)
	exec "${where[@]}" "$bin/${1##*/}.test" "${@:2}"
	;;
esac
# Only the verdicts are shown, and all that a test said if it fails.
"${where[@]}" bash -c '
log=$(mktemp)
trap "rm -f \$log" EXIT
while read -r _ test seconds regexp arguments; do
	echo "running $test, $regexp"
	in=${TMPDIR-} began=$SECONDS
	[ -z "$3" ] || [ "$test" = life ] || in=$3
	TMPDIR=$in "$4" "$seconds" "$1/$test.test" "$regexp" $arguments >"$log" 2>&1 </dev/null || { cat "$log"; exit 1; }
	grep -a "no tests to run" "$log" && exit 1
	grep -aEo "^sampled .*|csi-sanity: .*|^points: .* LVM pool: .*|power loss on .*" "$log"
	echo "passed in $((SECONDS - began)) s"
done <<<"$2"
' tests "$bin" "$tests" "$memory" "$PWD/hack/vm/sample.sh"
