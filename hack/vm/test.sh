#!/usr/bin/env bash
# Runs csi-sanity, the tests of file pools and the lives of volumes on Linux 6.1, in a virtual machine (hack/vm/run.sh), some of them under SELinux and some on a kernel without a
# device mapper. With SAMPLE=1, csi-sanity and as many others as some minutes allow (hack/vm/sample.sh).
#
#   hack/vm/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bin=$PWD/bin/vm
mkdir -p "$bin"
CGO_ENABLED=0 go test -c -o "$bin/" ./pkg/blockdev/filepool ./pkg/filesystem ./tests/sanity ./tests/life
secilc -c 31 -M true -o "$bin/selinux" -f /dev/null tests/life/testdata/selinux.cil

# in_vm KERNEL-ARGUMENTS TESTS. Only the verdicts are shown, and all that a test said if it fails.
in_vm() {
	VM_ARGUMENTS=$1 setpriv --pdeathsig TERM hack/vm/run.sh env ASHLAR_IO=1 SAMPLE="${SAMPLE-}" bash -c '
run() { # WHAT SECONDS PROGRAM REGEXP
	local began=$SECONDS
	"$sample" "$2" "$bin/$3.test" "$4" >log 2>&1 </dev/null || { cat log; exit 1; }
	grep -a "no tests to run" log && exit 1
	grep -aEo "^sampled .*|csi-sanity: .*" log
	echo "$1: passed in $((SECONDS - began)) s"
}
bin=$1 sample=$2
'"$2" tests "$bin" "$PWD/hack/vm/sample.sh"
}
# shellcheck disable=SC2016 # expanded there
in_vm '' '
run sanity 0 sanity .
run "file pools" 20 filepool .
run filesystems 10 filesystem .
run lives 30 life .'
in_vm lsm=selinux 'ASHLAR_SELINUX=$bin/selinux run SELinux 0 life SELinux'
in_vm initcall_blacklist=dm_init 'run "limits without a device mapper" 0 life "Limits(Kept|Gone|Lift)"'
