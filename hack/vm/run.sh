#!/usr/bin/env bash
# Runs a command in a virtual machine, as root, on another kernel than this machine's: User Mode Linux of
# Debian (the kernel of Debian 12), which needs neither KVM nor an image. The machine's own root directory is
# the VM's, read-only; TMPDIR is an empty ext4 on a disk of 16 GiB (sparse) that goes with the VM. It goes without
# the 512 old pseudo terminals (pty.legacy_count) of this kernel: lvm2 looks at each file in /dev. It has one processor (pinned.sh).
#
#   hack/vm/run.sh COMMAND [ARGUMENT...]
#
# The exit status is the command's; a VM that ends without telling it is a failure. VM_MEMORY (default 2048M)
# and VM_SECONDS (default 3600) bound it. VM_KERNEL is another kernel (hack/vm/kernel.sh), VM_ARGUMENTS what it is told beside the rest.
set -euo pipefail

kernel=${VM_KERNEL:-linux.uml}
command -v "$kernel" >/dev/null || {
	echo "hack/vm/run.sh: $kernel is missing (Debian: apt-get install user-mode-linux)" >&2
	exit 1
}

scratch=$(mktemp -d /var/tmp/ashlar-vm.XXXXXX)
finish() {
	local status=$?
	[ -z "${vm-}" ] || kill -KILL -- "-$vm" 2>/dev/null || true
	pkill -KILL -f "ubd0=$scratch/disk" || true # of a kernel that crashed, parts stay
	rm -rf "$scratch"
	exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cc -shared -fPIC -o "$scratch/uml-host.so" "$(dirname "${BASH_SOURCE[0]}")/host.c" -ldl
truncate -s 16G "$scratch/disk"
mkdir "$scratch/t" # where the disk is mounted; all else of the machine's directories is as it is
printf '%q ' "$@" >"$scratch/command"

# Every line of it runs in the VM, as its first process.
cat >"$scratch/init" <<EOF
#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=$scratch/t TMPDIR=$scratch/t LC_ALL=C
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t tmpfs tmpfs /run && mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit
mountpoint -q /dev || mount -t devtmpfs dev /dev
# The last lines are dm-crypt, after what it needs. A kernel without modules has all of it.
[ ! -e /proc/modules ] || for module in drivers/block/loop drivers/md/{dm-mod,dm-bufio,dm-bio-prison,persistent-data/dm-persistent-data,dm-thin-pool,dm-snapshot,dm-flakey,dm-log-writes,dm-zero,dm-log,dm-region-hash,dm-mirror,dm-era,dm-delay} \\
	crypto/{gf128mul,ecb,xts,cbc,hmac} security/keys/encrypted-keys/encrypted-keys drivers/md/dm-crypt; do
	insmod /usr/lib/uml/modules/\$(uname -r)/kernel/\$module.ko || exit
done
mkfs.ext4 -q /dev/ubda && mount /dev/ubda $scratch/t && cd $scratch/t || exit
ip link set lo up 2>/dev/null
echo "in a VM: Linux \$(uname -r), \$(nproc) CPU, \$(awk '/^MemTotal/ { print int(\$2 / 1024) }' /proc/meminfo) MiB"
bash -c "\$(cat "$scratch/command")"
echo "$scratch ended with \$?"
sync
echo o >/proc/sysrq-trigger
halt -f
EOF
chmod +x "$scratch/init"

setsid timeout --kill-after=5 "${VM_SECONDS:-3600}" "$(dirname "${BASH_SOURCE[0]}")/pinned.sh" env LD_PRELOAD="$scratch/uml-host.so" "$kernel" mem="${VM_MEMORY:-2048M}" rootfstype=hostfs ro root=/dev/root \
	ubd0="$scratch/disk" pty.legacy_count=0 init="$scratch/init" con=null con0=fd:0,fd:1 quiet loglevel=3 ${VM_ARGUMENTS-} </dev/null >"$scratch/console" 2>&1 &
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
	*) why="$kernel ended with $ended after $SECONDS s" ;;
	esac
	echo "hack/vm/run.sh: the VM ended without a verdict: $why" >&2
	exit 1
fi
exit "${verdict##* }"
