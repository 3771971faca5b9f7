#!/usr/bin/env bash
# The first process of the cluster's node, in namespaces of its own: lays out its files and its network, then waits.
# Started by cluster.sh.
set -eu
dir=$1 name=$2 address=$3 service=$4

hostname "$name"
mount --make-rprivate /
mount --make-rshared / # within these namespaces, mounts spread to pods and back
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/lvm
# The machine's folders are read, never written: what a node keeps is elsewhere.
mount -t tmpfs -o mode=755 tmpfs /var/lib
mkdir -p /var/lib/kubelet /var/lib/ashlar
mount --bind "$dir/kubelet" /var/lib/kubelet
mount --make-rshared /var/lib/kubelet
mount --bind "$dir/varlog" /var/log
mount -t tmpfs tmpfs "$dir/etcd"
if [ -e "$dir/pool.img" ]; then # goes with the namespaces, and its loop device with it
	mount -o loop "$dir/pool.img" /var/lib/ashlar
else
	mount --bind "$dir/pool" /var/lib/ashlar
fi
# Settings of the kernel that a kubelet insists on, as files that read so: the kernel is the machine's.
for file in "$dir"/sysctl/*; do
	shown=/proc/sys/$(basename "$file" | tr . /)
	[ ! -e "$shown" ] || mount --bind "$file" "$shown"
done
mount --bind "$dir/conf/resolv.conf" /etc/resolv.conf # empty: what is missing fails at once
ip link set lo up
# With an address of its own: else it would have the lowest of the pods', a new one whenever a pod comes or goes, and
# all other pods would talk to the old one for a while.
ip link add cni0 address 02:00:00:f4:00:01 type bridge
ip address add "$address/24" dev cni0
ip link set cni0 up
ip address add "$service/32" dev lo # no proxy: the API's service is at one of the node's own addresses
ip route add default dev cni0
touch "$dir/pid/ready"
while :; do
	sleep 3600 &
	wait $! || true
done
