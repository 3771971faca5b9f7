#!/usr/bin/env bash
# Boots a machine in a VM (run.sh) of its own, in a network, with a disk that stays. SIGKILL of this process's group cuts its power, SIGSTOP of this process freezes it; it
# can be booted again when the group is gone.
#
#   hack/vm/machine.sh DIR TAP ADDRESS COMMAND [ARGUMENT...]
#
# DIR, an existing directory, has all of it: the disk, an ext4 that is at /run/disk in the machine; console, what the machine says; and what it writes below
# /run/machine, which stays without a disk. TAP is the tap device at the other end of its cable, ADDRESS what it has in that network
# (10.78.0.1/24). COMMAND is run in it, as root; the machine ends when that does.
#
# The disk is a loop device over a file of this machine, with a cache that goes with the power: what was not flushed is lost, but for VM_DISK_KEEPS percent
# (disk.c; 0). A disk of User Mode Linux itself does not do: that of Linux 6.1 loses its flushes.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kernel=${VM_KERNEL:-$("$here/kernel.sh")}
dir=$(cd "$1" && pwd) tap=$2 address=$3
shift 3

for library in host disk; do
	[ -e "$dir/uml-$library.so" ] || cc -O2 -shared -fPIC -o "$dir/uml-$library.so" "$here/$library.c" -ldl
done
if ! [ -e "$dir/disk" ]; then
	truncate -s 2G "$dir/disk.new"
	mkfs.ext4 -q -F "$dir/disk.new"
	mv "$dir/disk.new" "$dir/disk"
fi

cat >"$dir/init" <<END
#!/bin/bash
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run LC_ALL=C
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t tmpfs tmpfs /run && mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit
mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir /run/disk /run/machine && mount -t hostfs -o "$dir" machine /run/machine && losetup /dev/loop0 /run/machine/disk && mount /dev/loop0 /run/disk || exit
ip link set lo up && ip addr add $address dev eth0 && ip link set eth0 up || exit
$(printf '%q ' "$@")
echo "the machine ends: \$?"
sync
echo o >/proc/sysrq-trigger
halt -f
END
chmod +x "$dir/init"

# Its address on the wire is the same after each boot, else others look for it in vain for a while.
mac=$(printf '02:00:%02x:%02x:%02x:%02x' $(tr ./ '  ' <<<"$address" | cut -d ' ' -f 1-4))
export VM_DISK=$dir/disk
unset TMPDIR # its memory is in /dev/shm
exec "$here/pinned.sh" env LD_PRELOAD="$dir/uml-host.so:$dir/uml-disk.so" "$kernel" mem="${VM_MEMORY:-1024M}" rootfstype=hostfs ro root=/dev/root eth0=tuntap,"$tap,$mac" uml_dir="$dir" pty.legacy_count=0 \
	init="$dir/init" con=null con0=fd:0,fd:1 quiet loglevel=3 ${VM_ARGUMENTS-} </dev/null >>"$dir/console" 2>&1
