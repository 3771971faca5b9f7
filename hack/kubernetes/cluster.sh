#!/usr/bin/env bash
# A Kubernetes of real nodes (kubelets, containerds, real pods) in namespaces of their own, without registry, systemd or
# KVM. Its control plane has namespaces of its own too. Nothing that they mount or listen on is seen outside; ending the
# first process of a node ends all of that node.
#
#   cluster.sh up [IMAGE-ARCHIVE...]   start it, with these images loaded
#   cluster.sh load IMAGE-ARCHIVE...   load more, on every node
#   cluster.sh nodes                   the names of its nodes
#   cluster.sh exec COMMAND...         run a command beside the control plane, with kubectl set up
#   cluster.sh net COMMAND...          run a command out here, but in the control plane's network
#   cluster.sh on NODE COMMAND...      run a command in a node; there, systemctl is for its kubelet and its containerd
#   cluster.sh stop NODE               end it as a shutdown does: all that runs is told, and has 20 s
#   cluster.sh kill NODE               end it at once, as a power cut does, but for what the machine's kernel still writes
#   cluster.sh start NODE              start it again after that, with the disks that it had
#   cluster.sh guests N IMAGE-ARCHIVE...  start N more nodes, in one virtual machine, whose kernel has NVMe/TCP (hack/vm/kernel.sh); nodes, on,
#                                      stop, kill and start do not know them
#   cluster.sh down                    end it all and remove what was its; KEEP_LOGS=1 keeps logs
#
# Needs root, and what build.sh built. NODES: how many (default 3). POOL_FS=xfs (default), btrfs or none: what
# /var/lib/ashlar of each node is made of, in a sparse image of POOL_SIZE (default 30G). AUDIT=1: the API server writes
# every request down in log/audit. MANAGER_QPS: requests per second that each of Kubernetes' own controllers may make (its
# default is 20). What the nodes share, with each other and with the machine: /dev with its loop devices, the kernel's
# settings, and cgroups below one of the cluster's own.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
d=$CLUSTER_DIR
api=https://$address:443

nodes() { cat "$d/nodes.list" 2>/dev/null || true; }

# in_hub COMMAND...: in the network of the control plane, to which all cables go. In the virtual machine of guests there is no control plane, and
# the cables go to the machine's own.
in_hub() { if [ -e "$d/control.pid" ]; then enter control -n -- "$@"; else "$@"; fi; }

# first NAME: the first process of a node, or of "control", by the machine's number.
first() {
	local parent children
	parent=$(cat "$d/$1.pid" 2>/dev/null) || return 1
	[ "$(cat "/proc/$parent/comm" 2>/dev/null)" = unshare ] || return 1
	children=$(cat "/proc/$parent/task/$parent/children" 2>/dev/null) || return 1
	[ -n "$children" ] && echo "${children%% *}"
}

# enter NAME FLAG... -- COMMAND...: in these of its namespaces.
enter() {
	local pid
	pid=$(first "$1") || die "$1 does not run in $d"
	shift
	PATH=$d/conf/bin:$bin:$runtime/usr/bin:$runtime/usr/sbin:$runtime/bin:$PATH KUBECONFIG=$d/keys/admin.kubeconfig nsenter -t "$pid" "$@"
}

# inside NAME COMMAND...
inside() {
	local name=$1
	shift
	enter "$name" -m -u -i -n -p --wd="$PWD" -- "$@"
}

# run NAME COMMAND...: a part of the control plane in the background, with its output in log/NAME.
run() {
	local name=$1
	shift
	(cd "$d" && inside control setsid "$@") >>"$d/log/$name" 2>&1 </dev/null &
}

# until_ok SECONDS WHAT COMMAND...
until_ok() {
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@" >/dev/null 2>&1; do
		[ "$SECONDS" -lt "$end" ] || { tail -n 20 "$d"/log/* >&2; die "gave up waiting for $what"; }
		sleep 0.3
	done
}

# sign NAME SUBJECT EXTENSION: a key in the directory of keys, and its certificate.
sign() {
	openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
	echo "$3" >"$1.ext"
	openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 8)" -days 30 -out "$1.crt" -extfile "$1.ext" 2>/dev/null
}

# client NAME SUBJECT: a key to be known by to the API server, and a kubeconfig with it.
client() {
	sign "$1" "$2" extendedKeyUsage=clientAuth
	cat >"$1.kubeconfig" <<-YAML
		apiVersion: v1
		kind: Config
		clusters: [{name: e2e, cluster: {server: "$api", certificate-authority: $d/keys/ca.crt}}]
		users: [{name: me, user: {client-certificate: $d/keys/$1.crt, client-key: $d/keys/$1.key}}]
		contexts: [{name: e2e, context: {cluster: e2e, user: me}}]
		current-context: e2e
	YAML
}
kubelet_key() { client "$1" "/O=system:nodes/CN=system:node:$1"; }

keys() {
	local node
	cd "$d/keys"
	openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=ashlar-e2e 2>/dev/null
	openssl genrsa -out accounts.key 2048 2>/dev/null
	openssl rsa -in accounts.key -pubout -out accounts.pub 2>/dev/null
	sign server /CN=kube-apiserver "subjectAltName=IP:127.0.0.1,IP:$address,IP:$service,DNS:kubernetes.default.svc" &
	client admin /O=system:masters/CN=admin &
	client manager /CN=system:kube-controller-manager &
	client scheduler /CN=system:kube-scheduler &
	for node in $(nodes); do kubelet_key "$node" & done
	wait
	# For the ssh servers of the nodes: root's, in a home of its own. (Clients in Go ask for an RSA key, and dropbear 2022.83
	# dies if it has none.)
	dropbearkey -t rsa -s 2048 -f ssh-host >/dev/null 2>&1
	dropbearkey -t ed25519 -f ssh.dropbear >/dev/null 2>&1
	dropbearconvert dropbear openssh ssh.dropbear ssh 2>/dev/null
	mkdir -p -m 700 "$d/conf/home/.ssh"
	dropbearkey -y -f ssh.dropbear | grep ^ssh- >"$d/conf/home/.ssh/authorized_keys"
	chmod 600 "$d/conf/home/.ssh/authorized_keys"
	sed "s|^root:.*|root:x:0:0:root:$d/conf/home:/bin/bash|" /etc/passwd >"$d/conf/passwd"
	cd - >/dev/null
}

settings() {
	: >"$d/conf/resolv.conf"
	ln -sf "$hack/service.sh" "$d/conf/bin/systemctl"
	echo '{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}]}' >"$d/conf/audit.yaml"
	echo 1 >"$d/sysctl/vm.overcommit_memory"
	echo 0 >"$d/sysctl/vm.panic_on_oom"
	echo 10 >"$d/sysctl/kernel.panic"
	echo 1 >"$d/sysctl/kernel.panic_on_oops"
	echo 1000000 >"$d/sysctl/kernel.keys.root_maxkeys"
	echo 25000000 >"$d/sysctl/kernel.keys.root_maxbytes"
}

# node_settings NODE: what it has on its disk before it starts for the first time.
node_settings() {
	local own=$d/nodes/$1 pods=10.244.${1##*-}
	mkdir -p "$own"/{containerd,kubelet,varlog,cni,addresses,pool}
	cat >"$own/containerd.toml" <<-TOML
		version = 2
		root = "$own/containerd"
		state = "/run/containerd/state"
		disabled_plugins = ["io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.internal.v1.opt"]
		[grpc]
		  address = "/run/containerd/containerd.sock"
		[plugins."io.containerd.grpc.v1.cri"]
		  sandbox_image = "$(cat "$built/images/pause.name")"
		  restrict_oom_score_adj = true
		  disable_apparmor = true
		  stream_server_address = "127.0.0.1"
		  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
		    runtime_type = "io.containerd.runc.v2"
		    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
		      BinaryName = "$runtime/usr/sbin/runc"
		  [plugins."io.containerd.grpc.v1.cri".cni]
		    bin_dir = "$runtime/usr/lib/cni"
		    conf_dir = "$own/cni"
	TOML
	cat >"$own/cni/10-bridge.conflist" <<-JSON
		{"cniVersion": "0.4.0", "name": "e2e", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
		  "ipam": {"type": "host-local", "dataDir": "$own/addresses", "ranges": [[{"subnet": "$pods.0/24", "rangeStart": "$pods.10"}]],
		  "routes": [{"dst": "0.0.0.0/0"}]}}]}
	JSON
	cat >"$own/kubelet.yaml" <<-YAML
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: $d/keys/ca.crt}}
		authorization: {mode: AlwaysAllow}
		containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
		cgroupDriver: cgroupfs
		cgroupRoot: /$cgroup/$1
		failCgroupV1: false
		failSwapOn: false
		makeIPTablesUtilChains: false
		protectKernelDefaults: true
		resolvConf: ""
		clusterDNS: [10.96.0.10]
		imageGCHighThresholdPercent: 100
		evictionHard: {memory.available: 50Mi, nodefs.available: 1Gi, nodefs.inodesFree: 1%, imagefs.available: 1Gi}
		oomScoreAdj: 0
		serializeImagePulls: false
		volumeStatsAggPeriod: 10s
	YAML
	[ "${POOL_FS:-xfs}" != none ] || return 0
	truncate -s "${POOL_SIZE:-30G}" "$own/pool.img"
	"mkfs.${POOL_FS:-xfs}" -q "$own/pool.img"
}

# begin NAME ARGUMENT...: its namespaces, with init.sh as the first process.
begin() {
	setsid unshare --mount --uts --ipc --net --pid --fork --kill-child --propagation private \
		bash "$hack/init.sh" "$d" "$@" >>"$d/log/$1" 2>&1 </dev/null &
	echo $! >"$d/$1.pid"
	until_ok 60 "the namespaces of $1" first "$1"
}

# start_node NODE: all of it but its kubelet.
start_node() {
	local node=$1 number=${1##*-} own=$d/nodes/$1 hierarchy at file
	first "$node" >/dev/null && die "$node runs already"
	rm -f "$own/ready"
	if [ -e /sys/fs/cgroup/cgroup.controllers ]; then # version 2
		mkdir -p "/sys/fs/cgroup/$cgroup/$node"
		for at in "" "/$cgroup"; do
			sed 's/[^ ]\+/+&/g' "/sys/fs/cgroup$at/cgroup.controllers" >"/sys/fs/cgroup$at/cgroup.subtree_control"
		done
	fi
	for hierarchy in /sys/fs/cgroup/*/; do # version 1
		[ -e "$hierarchy/cgroup.procs" ] && [ "$(basename "$hierarchy")" != unified ] && [ -e "$hierarchy/tasks" ] || continue
		for at in "$cgroup" "$cgroup/$node"; do
			mkdir -p "$hierarchy/$at"
			for file in cpuset.cpus cpuset.mems; do
				[ ! -e "$hierarchy/$file" ] || cat "$hierarchy/$file" >"$hierarchy/$at/$file"
			done
		done
		[ ! -e "$hierarchy/cpu.shares" ] || echo 4096 >"$hierarchy/$cgroup/cpu.shares" # all pods together, against each process outside
	done
	begin "$node" "$number"
	# Its network card, and the way to its pods.
	in_hub ip link delete "$node" 2>/dev/null || true
	in_hub ip link add "$node" type veth peer name eth0 netns "$(first "$node")"
	in_hub ip link set "$node" master nodes up
	[ ! -e "$d/control.pid" ] || route "$number"
	until_ok 60 "$node" test -e "$own/ready"
	inside "$node" stat -c %Hd:%Ld /var/lib/ashlar >"$own/pool.device"
	inside "$node" systemctl start containerd
	until_ok 180 "containerd of $node" inside "$node" ctr version
}

# route NUMBER: the way to the pods of a node.
route() { enter control -n -- ip route replace "10.244.$1.0/24" via "10.244.0.$((10 + $1))"; }

load() { # NODE IMAGE-ARCHIVE...
	local archive node=$1
	shift
	for archive; do
		inside "$node" ctr -n k8s.io images import "$(realpath "$archive")" >>"$d/log/images" 2>&1 || { tail -n 5 "$d/log/images" >&2; die "cannot load $archive on $node"; }
	done
}

# share_images NODE OTHER: gives another one, before it starts, the images of a node whose containerd is stopped. Layers
# are only read, so both have the same files; what says which there are is each one's own.
share_images() {
	local from=$d/nodes/$1/containerd to=$d/nodes/$2/containerd
	rmdir "$to"
	cp -al "$from" "$to"
	(cd "$from" && find . -name '*.db' -print0 | xargs -0 cp --parents --remove-destination -t "$to")
}

# start_nodes IMAGE-ARCHIVE...: all of them with these images, but without their kubelets. Images are unpacked once.
start_nodes() {
	local node model
	model=$(nodes | head -n 1)
	start_node "$model"
	load "$model" "$@"
	inside "$model" systemctl stop containerd
	for node in $(nodes); do
		[ "$node" = "$model" ] || share_images "$model" "$node"
	done
	inside "$model" systemctl start containerd
	for node in $(nodes); do
		[ "$node" = "$model" ] || start_node "$node"
	done
}

start_kubelets() {
	local node
	for node in $(nodes); do
		until_ok 180 "containerd of $node" inside "$node" ctr version
		inside "$node" systemctl start kubelet
	done
}

up() {
	[ "$(id -u)" = 0 ] || die "needs root"
	if [ -e "$d/nodes.list" ]; then
		first control >/dev/null && die "it is up already ($d)"
		down # of one that ended with its machine, or was killed
	fi
	[ -s "$built/key" ] || die "run hack/kubernetes/build.sh first"
	case ${POOL_FS:-xfs} in none | xfs | btrfs) ;; *) die "POOL_FS: xfs, btrfs or none" ;; esac
	mkdir -p "$d"/{keys,log,etcd,conf/bin,sysctl,nodes}
	chmod 700 "$d/keys"
	d=$(realpath "$d")
	seq -f 'ashlar-e2e-%g' 1 "${NODES:-3}" >"$d/nodes.list"
	local node
	keys
	settings
	for node in $(nodes); do node_settings "$node"; done
	begin control
	until_ok 20 "the control plane's namespaces" test -e "$d/ready"

	local k=$d/keys
	run etcd etcd --data-dir "$d/etcd" --unsafe-no-fsync --log-level=warn --listen-client-urls=http://127.0.0.1:2379 \
		--advertise-client-urls=http://127.0.0.1:2379 --listen-peer-urls=http://127.0.0.1:2380
	run apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --secure-port=443 --bind-address=0.0.0.0 \
		--advertise-address=$address --service-cluster-ip-range=10.96.0.0/16 --client-ca-file="$k/ca.crt" \
		--tls-cert-file="$k/server.crt" --tls-private-key-file="$k/server.key" \
		--service-account-key-file="$k/accounts.pub" --service-account-signing-key-file="$k/accounts.key" \
		--service-account-issuer=https://kubernetes.default.svc --kubelet-client-certificate="$k/admin.crt" \
		--kubelet-client-key="$k/admin.key" --kubelet-preferred-address-types=InternalIP --requestheader-client-ca-file="$k/ca.crt" \
		--requestheader-allowed-names=none --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
		${AUDIT:+--audit-policy-file="$d/conf/audit.yaml" --audit-log-path="$d/log/audit" --audit-log-maxsize=10000}
	start_nodes "$built"/images/*.tar "$@"
	until_ok 120 "the API server" inside control kubectl get --raw=/readyz
	run controller-manager kube-controller-manager --kubeconfig="$k/manager.kubeconfig" --authentication-kubeconfig="$k/manager.kubeconfig" \
		--authorization-kubeconfig="$k/manager.kubeconfig" --service-account-private-key-file="$k/accounts.key" \
		--root-ca-file="$k/ca.crt" --use-service-account-credentials --leader-elect=false --bind-address=127.0.0.1 \
		${MANAGER_QPS:+--kube-api-qps="$MANAGER_QPS" --kube-api-burst="$MANAGER_QPS"}
	run scheduler kube-scheduler --kubeconfig="$k/scheduler.kubeconfig" --authentication-kubeconfig="$k/scheduler.kubeconfig" \
		--authorization-kubeconfig="$k/scheduler.kubeconfig" --leader-elect=false --bind-address=127.0.0.1
	start_kubelets
	for node in $(nodes); do
		until_ok 180 "$node to be ready" inside control kubectl wait --for=condition=Ready "node/$node" --timeout=2s
	done
	inside control kubectl apply -f "$built/crds" >"$d/log/crds" 2>&1 || { cat "$d/log/crds" >&2; die "the snapshot CRDs"; }
	run snapshot-controller snapshot-controller --kubeconfig="$k/admin.kubeconfig" --http-endpoint=127.0.0.1:8181
	until_ok 60 "the default service account" inside control kubectl get serviceaccount default
	echo "Kubernetes $KUBERNETES is up; its nodes are $(nodes | paste -sd ' ')"
}

# guests N IMAGE-ARCHIVE...: their machine is one more at the end of a cable, and they are behind it.
guests() {
	local last number node all=() count=$1 archives=()
	shift
	first control >/dev/null || die "the cluster is not up"
	[ ! -e "$d/guests.pid" ] || die "there are guests already"
	last=$(nodes | wc -l)
	cd "$d/keys"
	for number in $(seq $((last + 1)) $((last + count))); do
		all+=("ashlar-e2e-$number")
		kubelet_key "ashlar-e2e-$number"
		route "$number"
	done
	cd - >/dev/null
	[ $# -eq 0 ] || mapfile -t archives < <(realpath "$@")
	enter control -n -- ip tuntap add guests mode tap
	enter control -n -- ip link set guests master nodes up
	VM_KERNEL=${VM_KERNEL:-$("$hack/../vm/kernel.sh")}
	export VM_KERNEL VM_CPUS=${VM_CPUS:-2} VM_MEMORY=${VM_MEMORY:-6144M} VM_SECONDS=${VM_SECONDS:-0} VM_ARGUMENTS="nvme_core.multipath=N ${VM_ARGUMENTS-}"
	export VM_SHARE=$d/log VM_QEMU="-netdev tap,id=cable,ifname=guests,script=no,downscript=no -device virtio-net-pci,netdev=cable,mac=02:00:00:f4:01:00"
	# shellcheck disable=SC2016
	enter control -n -- setsid bash -c 'echo $$ >"$0" && exec "$@"' "$d/guests.pid" "$hack/../vm/run.sh" \
		env CLUSTER_DIR="$d" ASHLAR_CACHE="$ASHLAR_CACHE" "$hack/cluster.sh" host "${all[*]}" "${archives[@]}" >"$d/log/guests" 2>&1 </dev/null &
	for node in "${all[@]}"; do
		until_ok 600 "$node to be ready" inside control kubectl wait --for=condition=Ready "node/$node" --timeout=2s
	done
	echo "guests are ${all[*]}"
}

# host "NODE..." IMAGE-ARCHIVE...: in their virtual machine. What it has of the cluster's directory are keys and settings, at the same place, and the
# logs themselves.
host() {
	local node own=$TMPDIR/cluster
	mkdir -p "$own"/{log,nodes} && cp -a "$d"/{keys,conf,sysctl} "$own"
	mount -t 9p -o "$VM_SHARE_OPTIONS" share "$own/log"
	mount --rbind "$own" "$d"
	ln -s /proc/self/fd /dev/fd
	mkdir -p /dev/pts /dev/shm && mount -t devpts devpts /dev/pts && mount -t tmpfs tmpfs /dev/shm
	mount -t configfs configfs /sys/kernel/config
	echo 8192 >/proc/sys/fs/inotify/max_user_instances
	ip link add nodes address 02:00:00:f4:01:01 type bridge
	ip link set eth0 master nodes up
	ip link set nodes up
	tr ' ' '\n' <<<"$1" >"$d/nodes.list"
	shift
	for node in $(nodes); do node_settings "$node"; done
	start_nodes "$built"/images/{pause,tests,livenessprobe,csi-node-driver-registrar}.tar "$@" # no controller comes here
	start_kubelets
	sleep infinity
}

# end NAME: kills its first process, and so all others of it.
end() {
	local pid try
	pid=$(first "$1") || return 0
	kill -KILL "$pid"
	for try in {1..100}; do [ -d "/proc/$pid" ] && sleep 0.1 || return 0; done
	die "process $pid of $1 does not end"
}

# devices NODE: loop devices over files in its pool. They are known by the filesystem that these files are on: the number
# of its device says which that is only while the device is that of the node's own disk.
devices() {
	local own=$d/nodes/$1 file
	if [ -e "$own/pool.img" ]; then
		[ -n "$(losetup -j "$own/pool.img")" ] || return 0
		losetup -ln -O NAME,BACK-MAJ:MIN | awk -v pool="$(cat "$own/pool.device" 2>/dev/null)" '$2 == pool {print $1}'
	else
		for file in "$own"/pool/volumes/*.img; do
			[ ! -e "$file" ] || losetup -j "$file" | cut -d: -f1
		done
	fi
}

# kill_node NODE: ends it, and what would not outlive a machine: the loop devices of raw block volumes, and first what the
# kubelet laid over them.
kill_node() {
	local node=$1 own=$d/nodes/$1 device over hierarchy try
	end "$node"
	devices "$node" | while read -r device; do
		losetup -ln -O NAME,BACK-INO,BACK-MAJ:MIN | awk -v i="$(stat -c %i "$device")" -v d="$(stat -c %Hd:%Ld "$device")" '$2 == i && $3 == d {print $1}' |
			while read -r over; do losetup -d "$over" || true; done
		losetup -d "$device" 2>/dev/null || true
	done
	for hierarchy in /sys/fs/cgroup/*/; do
		[ -d "$hierarchy/$cgroup/$node" ] || continue
		for try in {1..20}; do
			find "$hierarchy/$cgroup/$node" -depth -type d -exec rmdir {} + 2>/dev/null && break
			sleep 0.3
		done
	done
	for try in {1..100}; do # mounting a disk again that the kernel still has would be two of it
		[ -e "$own/pool.img" ] && [ -n "$(losetup -j "$own/pool.img")" ] || return 0
		sleep 0.2
	done
	die "something holds the disk of $node: $(devices "$node" | paste -sd ' ')"
}

stop_node() {
	inside "$1" systemctl stop kubelet
	inside "$1" bash -c 'kill -TERM -1; for try in {1..200}; do kill -0 -1 2>/dev/null || exit 0; sleep 0.1; done' || true
	kill_node "$1"
}

# end_guests ends their machine: run.sh, which is told, ends what it has started.
end_guests() {
	local pid try
	pid=$(cat "$d/guests.pid")
	[[ "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)" == *vm/run.sh* ]] || return 0
	kill -TERM "$pid"
	for try in {1..100}; do [ -d "/proc/$pid" ] && sleep 0.1 || return 0; done
	die "process $pid, the machine of the guests, does not end"
}

down() {
	local node hierarchy
	[ -d "$d" ] || return 0
	d=$(realpath "$d")
	if [ -e "$d/guests.pid" ]; then
		end_guests
	fi
	for node in $(nodes); do
		kill_node "$node" || true
	done
	end control
	for hierarchy in /sys/fs/cgroup/*/; do
		[ ! -d "$hierarchy/$cgroup" ] || rmdir "$hierarchy/$cgroup" || true
	done
	if [ "${KEEP_LOGS-}" = 1 ]; then
		for node in $(nodes); do mv "$d/nodes/$node/varlog" "$d/log/$node.pods"; done
		find "$d" -mindepth 1 -maxdepth 1 ! -name log -exec rm -rf --one-file-system {} +
	else
		rm -rf --one-file-system "$d"
	fi
}

command=${1-}
[ $# -eq 0 ] || shift
case $command in
up) up "$@" ;;
load) for node in $(nodes); do load "$node" "$@"; done ;;
nodes) nodes ;;
exec) inside control "$@" ;;
net) enter control -n -- "$@" ;;
on) inside "$@" ;;
stop) stop_node "$1" ;;
kill) kill_node "$1" ;;
start) start_node "$1" && inside "$1" systemctl start kubelet ;;
guests) guests "$@" ;;
host) host "$@" ;;
down) down ;;
*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
