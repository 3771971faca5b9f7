#!/usr/bin/env bash
# Runs a command in a virtual machine (boot.sh), as root, on another kernel than this machine's (kernel.sh). The machine's own root directory is
# the VM's, read-only; TMPDIR is an empty ext4 on a disk of 16 GiB (sparse) that goes with the VM.
#
#   hack/vm/run.sh COMMAND [ARGUMENT...]
#
# A script that calls it has it end with itself: setpriv --pdeathsig TERM hack/vm/run.sh ...
#
# The exit status is the command's; a VM that ends without telling it is a failure. VM_MEMORY (default 2048M)
# and VM_SECONDS (default 3600) bound it. VM_KERNEL is another kernel, VM_ARGUMENTS what it is told beside the rest; VM_SHARE is a directory that it can write to (boot.sh), and VM_QEMU
# more of its devices. With VM_APISERVER=1 tests there find an API server, which runs on this machine (internal/apitest, Serve).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export VM_KERNEL=${VM_KERNEL:-$("$here/kernel.sh")}
scratch=$(mktemp -d /var/tmp/ashlar-vm.XXXXXX)
finish() {
	local status=$?
	[ -z "${vm-}" ] || kill -KILL -- "-$vm" 2>/dev/null || true
	if [ -n "${server-}" ]; then
		kill "$server" 2>/dev/null || true
		wait "$server" || true
	fi
	rm -rf "$scratch"
	exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

truncate -s 16G "$scratch/disk"
mkdir "$scratch/t" # where the disk is mounted; all else of the machine's directories is as it is
printf '%q ' "$@" >"$scratch/command"

network=()
if [ "${VM_APISERVER-}" = 1 ]; then
	ASHLAR_APISERVER=$("$here/../apiserver.sh")
	go build -C "$here/../.." -o "$scratch/serve" ./internal/apitest/serve
	TMPDIR=$scratch ASHLAR_APISERVER=$ASHLAR_APISERVER "$scratch/serve" >"$scratch/port" </dev/null &
	server=$!
	until [ -s "$scratch/port" ]; do
		kill -0 "$server"
		sleep 0.05
	done
	network=(-netdev user,id=host,ipv6=off -device virtio-net-pci,netdev=host)
fi

# Every line of it runs in the VM, as its first process.
cat >"$scratch/init" <<EOF
#!/bin/bash
. "$here/init.sh"
export HOME=$scratch/t TMPDIR=$scratch/t
mkfs.ext4 -q /dev/vda && mount /dev/vda $scratch/t && cd $scratch/t || exit
ip link set lo up 2>/dev/null
${server:+ip addr add 10.0.2.15/24 dev eth0 && ip link set eth0 up && export ASHLAR_APISERVER=tcp://10.0.2.2:$(cat "$scratch/port") || exit} # QEMU is the router, and gives the host's loopback this address
echo "in a VM: Linux \$(uname -r), \$(nproc) CPU, \$(awk '/^MemTotal/ { print int(\$2 / 1024) }' /proc/meminfo) MiB"
bash -c "\$(cat "$scratch/command")"
echo "$scratch ended with \$?"
power_off
EOF
chmod +x "$scratch/init"

# shellcheck disable=SC2086 # words
setsid timeout --kill-after=5 "${VM_SECONDS:-3600}" "$here/boot.sh" "$scratch/init" -drive if=virtio,format=raw,discard=unmap,file="$scratch/disk" "${network[@]}" ${VM_QEMU-} </dev/null >"$scratch/console" 2>&1 &
vm=$!
tail --pid="$vm" -n +1 -F "$scratch/console" 2>/dev/null &
ended=0
wait "$vm" || ended=$? # a signal to this script ends it
vm=
wait $! || true # until all is shown

verdict=$(grep -ao "^$scratch ended with [0-9]*" "$scratch/console" | tail -n 1) || true
if [ -z "$verdict" ]; then
	case $ended in
	124 | 137) why="it was still at work after ${VM_SECONDS:-3600} s" ;; # timeout(1)
	*) why="QEMU ended with $ended after $SECONDS s" ;;
	esac
	echo "hack/vm/run.sh: the VM ended without a verdict: $why" >&2
	exit 1
fi
exit "${verdict##* }"
