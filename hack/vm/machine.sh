#!/usr/bin/env bash
# Boots a machine in a VM (boot.sh) of its own, in a network, with a disk that stays. SIGKILL of this process cuts its power, SIGSTOP freezes it; it
# can be booted again when the process is gone.
#
#   hack/vm/machine.sh DIR TAP ADDRESS COMMAND [ARGUMENT...]
#
# DIR, an existing directory, has all of it: the disk, an ext4 that is at /run/disk in the machine; console, what the machine says; and what it writes below
# /run/machine, which stays without a disk. TAP is the tap device at the other end of its cable, ADDRESS what it has in that network
# (10.78.0.1/24). COMMAND is run in it, as root; the machine ends when that does.
#
# The disk has a cache that goes with the power: what was not flushed is lost, but for VM_DISK_KEEPS percent (disk.c; 0).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=$(cd "$1" && pwd) tap=$2 address=$3
shift 3

[ -e "$dir/disk.so" ] || cc -O2 -shared -fPIC -o "$dir/disk.so" "$here/disk.c" -ldl
if ! [ -e "$dir/disk" ]; then
	truncate -s 2G "$dir/disk.new"
	mkfs.ext4 -q -F "$dir/disk.new"
	mv "$dir/disk.new" "$dir/disk"
fi

cat >"$dir/init" <<END
#!/bin/bash
. "$here/init.sh"
export HOME=/run TMPDIR=/run
mkdir /run/disk /run/machine && mount -t 9p -o "\$VM_SHARE_OPTIONS" share /run/machine && mount /dev/vda /run/disk || exit
ip link set lo up && ip addr add $address dev eth0 && ip link set eth0 up || exit
$(printf '%q ' "$@")
echo "the machine ends: \$?"
power_off
END
chmod +x "$dir/init"

# Its address on the wire is the same after each boot, else others look for it in vain for a while.
mac=$(printf '02:00:%02x:%02x:%02x:%02x' $(tr ./ '  ' <<<"$address" | cut -d ' ' -f 1-4))
export VM_DISK=$dir/disk VM_PRELOAD=$dir/disk.so VM_MEMORY=${VM_MEMORY:-1024M} VM_SHARE=$dir
exec "$here/boot.sh" "$dir/init" -drive if=virtio,format=raw,discard=unmap,aio=threads,file="$dir/disk" \
	-netdev tap,id=cable,ifname="$tap",script=no,downscript=no -device virtio-net-pci,netdev=cable,mac="$mac" </dev/null >>"$dir/console" 2>&1
