#!/usr/bin/env bash
# The first process of the control plane, or of a node: lays out files and network in the namespaces that it is alone in,
# then waits. Started by cluster.sh.
#
#   init.sh DIR control
#   init.sh DIR NODE NUMBER
set -eu
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
dir=$1 name=$2 number=${3-}

common() {
	hostname "$name"
	mount --make-rprivate /
	mount --make-rshared / # within these namespaces, mounts spread to pods and back
	mount -t proc proc /proc
	mount -t tmpfs -o mode=755 tmpfs /run
	mkdir -p /run/lock /run/lvm
	mount --bind "$dir/conf/resolv.conf" /etc/resolv.conf # empty: what is missing fails at once
	ip link set lo up
	echo 1 >/proc/sys/net/ipv4/ip_forward
}

control() {
	common
	mount -t tmpfs tmpfs "$dir/etcd"
	ip link add nodes address 02:00:00:f4:00:00 type bridge # else it would take another one with each node that comes
	ip address add "$address/24" dev nodes
	ip link set nodes up
	ip address add "$service/32" dev lo # no proxy: the API's service is at one of this machine's own addresses
	ip route add default dev nodes
}

node() {
	local own=$dir/nodes/$name file shown
	common
	# The machine's directories are read, never written: what a node keeps is elsewhere.
	mount -t tmpfs -o mode=755 tmpfs /var/lib
	mkdir -p /var/lib/kubelet /var/lib/ashlar
	mount --bind "$own/kubelet" /var/lib/kubelet
	mount --make-rshared /var/lib/kubelet
	mount --bind "$own/varlog" /var/log
	mount --bind "$dir/conf/passwd" /etc/passwd
	if [ -e "$own/pool.img" ]; then # goes with the namespaces, and its loop device with it
		echo "$own/pool.img /var/lib/ashlar auto loop" >"$own/fstab"
		[ ! -e /etc/fstab ] || mount --bind "$own/fstab" /etc/fstab
		for _ in {1..20}; do # a loop device that somebody made read-only stays so for its next file
			blockdev --setrw "$(losetup -f)"
			mount -w -T "$own/fstab" /var/lib/ashlar && break
		done
		mountpoint -q /var/lib/ashlar
	else
		mount --bind "$own/pool" /var/lib/ashlar
	fi
	# Settings of the kernel that a kubelet insists on, as files that read so: the kernel is the machine's.
	for file in "$dir"/sysctl/*; do
		shown=/proc/sys/$(basename "$file" | tr . /)
		[ ! -e "$shown" ] || mount --bind "$file" "$shown"
	done
	for _ in {1..100}; do # from cluster.sh
		ip link show eth0 >/dev/null 2>&1 && break
		sleep 0.1
	done
	ip address add "10.244.0.$((10 + number))/24" dev eth0
	ip link set eth0 up
	ip route add default via "$address"
	# With an address of its own: else it would have the lowest of the pods', a new one whenever a pod comes or goes, and
	# all other pods would talk to the old one for a while.
	ip link add cni0 address "02:00:00:f4:00:$(printf %02x "$number")" type bridge
	ip address add "10.244.$number.1/24" dev cni0
	ip link set cni0 up
	printf 'CLUSTER_DIR=%q\nASHLAR_CACHE=%q\nnode=%q\nnumber=%q\n' "$dir" "$ASHLAR_CACHE" "$name" "$number" >/run/node
	dropbear -s -p "10.244.0.$((10 + number)):22" -r "$dir/keys/ssh-host" -P /run/dropbear.pid -c "$hack/service.sh"
	touch "$own/ready"
}

if [ "$name" = control ]; then
	control
	touch "$dir/ready"
else
	node
fi
mkfifo /run/never
exec 3<>/run/never
while :; do # and buries the processes that lost their parents
	read -r -u 3 || true
done
