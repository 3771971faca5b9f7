#!/usr/bin/env bash
# A Kubernetes of one real node (kubelet, containerd, real pods) in namespaces of its own, without registry, systemd
# or KVM. Nothing that it mounts or listens on is seen outside; ending its first process ends all of it.
#
#   cluster.sh up [IMAGE-ARCHIVE...]   start it, with these images loaded; 10 to 20 s
#   cluster.sh load IMAGE-ARCHIVE...   load more
#   cluster.sh exec COMMAND...         run a command in the node, with kubectl set up
#   cluster.sh down                    end it and remove what was its; KEEP_LOGS=1 keeps logs
#
# Needs root, and what build.sh built. POOL_FS=xfs (default), btrfs or none: what /var/lib/ashlar is made of, in a
# sparse image of POOL_SIZE (default 30G). AUDIT=1: the API server writes every request down in log/audit. MANAGER_QPS:
# requests per second that each of Kubernetes' own controllers may make (its default is 20). Shared with the machine are
# /dev, the kernel's settings, and cgroups below /ashlar-e2e.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
d=$CLUSTER_DIR
node=ashlar-e2e
address=10.244.0.1
service=10.96.0.1
cgroup=ashlar-e2e
api=https://127.0.0.1:443

# The node's first process, by the machine's number.
first() {
	local parent children
	parent=$(cat "$d/unshare.pid" 2>/dev/null) || return 1
	children=$(cat "/proc/$parent/task/$parent/children" 2>/dev/null) || return 1
	[ -n "$children" ] && echo "${children%% *}"
}

inside() {
	local pid
	pid=$(first) || die "no cluster is running in $d"
	PATH=$bin:$runtime/usr/bin:$runtime/usr/sbin:$runtime/bin:$PATH KUBECONFIG=$d/keys/admin.kubeconfig \
		nsenter -t "$pid" -m -u -i -n -p --wd="$PWD" -- "$@"
}

# service NAME COMMAND...: in the background, inside, with its output in log/NAME.
run() {
	local name=$1
	shift
	(cd "$d" && inside setsid "$@") >>"$d/log/$name" 2>&1 </dev/null &
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

keys() {
	cd "$d/keys"
	openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 30 -subj /CN=ashlar-e2e 2>/dev/null
	openssl genrsa -out accounts.key 2048 2>/dev/null
	openssl rsa -in accounts.key -pubout -out accounts.pub 2>/dev/null
	sign() { # NAME SUBJECT EXTENSION
		openssl req -newkey rsa:2048 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
		openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -set_serial "0x$(openssl rand -hex 8)" -days 30 -out "$1.crt" -extfile <(echo "$3") 2>/dev/null
	}
	sign server /CN=kube-apiserver "subjectAltName=IP:127.0.0.1,IP:$address,IP:$service,DNS:kubernetes.default.svc" &
	local who
	for who in admin:/O=system:masters/CN=admin manager:/CN=system:kube-controller-manager \
		scheduler:/CN=system:kube-scheduler "kubelet:/O=system:nodes/CN=system:node:$node"; do
		sign "${who%%:*}" "${who#*:}" extendedKeyUsage=clientAuth &
		cat >"${who%%:*}.kubeconfig" <<-YAML
			apiVersion: v1
			kind: Config
			clusters: [{name: e2e, cluster: {server: "$api", certificate-authority: $d/keys/ca.crt}}]
			users: [{name: me, user: {client-certificate: $d/keys/${who%%:*}.crt, client-key: $d/keys/${who%%:*}.key}}]
			contexts: [{name: e2e, context: {cluster: e2e, user: me}}]
			current-context: e2e
		YAML
	done
	wait
	cd - >/dev/null
}

settings() {
	: >"$d/conf/resolv.conf"
	echo '{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [{"level": "Metadata"}]}' >"$d/conf/audit.yaml"
	cat >"$d/conf/containerd.toml" <<-TOML
		version = 2
		root = "$d/containerd"
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
		    conf_dir = "$d/conf/cni"
	TOML
	cat >"$d/conf/cni/10-bridge.conflist" <<-JSON
		{"cniVersion": "0.4.0", "name": "e2e", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
		  "ipam": {"type": "host-local", "dataDir": "$d/addresses", "ranges": [[{"subnet": "${address%.*}.0/24", "rangeStart": "${address%.*}.10"}]],
		  "routes": [{"dst": "0.0.0.0/0"}]}}]}
	JSON
	cat >"$d/conf/kubelet.yaml" <<-YAML
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: $d/keys/ca.crt}}
		authorization: {mode: AlwaysAllow}
		containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
		cgroupDriver: cgroupfs
		cgroupRoot: /$cgroup
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
	echo 1 >"$d/sysctl/vm.overcommit_memory"
	echo 0 >"$d/sysctl/vm.panic_on_oom"
	echo 10 >"$d/sysctl/kernel.panic"
	echo 1 >"$d/sysctl/kernel.panic_on_oops"
	echo 1000000 >"$d/sysctl/kernel.keys.root_maxkeys"
	echo 25000000 >"$d/sysctl/kernel.keys.root_maxbytes"
}

load() {
	local archive
	for archive; do
		inside ctr -n k8s.io images import "$(realpath "$archive")" >>"$d/log/images" 2>&1 || { tail -n 5 "$d/log/images" >&2; die "cannot load $archive"; }
	done
}

up() {
	[ "$(id -u)" = 0 ] || die "needs root"
	first >/dev/null && die "it is up already ($d)"
	[ -s "$built/key" ] || die "run hack/kubernetes/build.sh first"
	mkdir -p "$d"/{keys,log,pid,etcd,containerd,kubelet,varlog,conf/cni,addresses,sysctl,pool}
	chmod 700 "$d/keys"
	d=$(realpath "$d")
	keys
	settings
	case ${POOL_FS:-xfs} in
	none) ;;
	xfs | btrfs)
		truncate -s "${POOL_SIZE:-30G}" "$d/pool.img"
		"mkfs.${POOL_FS:-xfs}" -q "$d/pool.img"
		;;
	*) die "POOL_FS: xfs, btrfs or none" ;;
	esac
	local hierarchy file
	for hierarchy in /sys/fs/cgroup/*/; do # version 1
		[ -e "$hierarchy/cgroup.procs" ] && [ "$(basename "$hierarchy")" != unified ] && [ -e "$hierarchy/tasks" ] || continue
		mkdir -p "$hierarchy/$cgroup"
		[ ! -e "$hierarchy/cpu.shares" ] || echo 4096 >"$hierarchy/$cgroup/cpu.shares" # all pods together, against each process outside
		for file in cpuset.cpus cpuset.mems; do
			[ ! -e "$hierarchy/$file" ] || cat "$hierarchy/$file" >"$hierarchy/$cgroup/$file"
		done
	done
	setsid unshare --mount --uts --ipc --net --pid --fork --kill-child --propagation private \
		bash "$hack/node-init.sh" "$d" "$node" "$address" "$service" >"$d/log/node" 2>&1 </dev/null &
	echo $! >"$d/unshare.pid"
	until_ok 20 "the node's namespaces" test -e "$d/pid/ready"
	[ ! -e "$d/pool.img" ] || inside findmnt -no MAJ:MIN /var/lib/ashlar | tr -d ' ' >"$d/pool.device"

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
		${AUDIT:+--audit-policy-file="$d/conf/audit.yaml" --audit-log-path="$d/log/audit"}
	run containerd containerd --config "$d/conf/containerd.toml"
	until_ok 90 "the API server" inside kubectl get --raw=/readyz
	run controller-manager kube-controller-manager --kubeconfig="$k/manager.kubeconfig" --authentication-kubeconfig="$k/manager.kubeconfig" \
		--authorization-kubeconfig="$k/manager.kubeconfig" --service-account-private-key-file="$k/accounts.key" \
		--root-ca-file="$k/ca.crt" --use-service-account-credentials --leader-elect=false --bind-address=127.0.0.1 \
		${MANAGER_QPS:+--kube-api-qps="$MANAGER_QPS" --kube-api-burst="$MANAGER_QPS"}
	run scheduler kube-scheduler --kubeconfig="$k/scheduler.kubeconfig" --authentication-kubeconfig="$k/scheduler.kubeconfig" \
		--authorization-kubeconfig="$k/scheduler.kubeconfig" --leader-elect=false --bind-address=127.0.0.1
	until_ok 60 containerd inside ctr version
	load "$built"/images/*.tar "$@"
	run kubelet kubelet --config="$d/conf/kubelet.yaml" --kubeconfig="$k/kubelet.kubeconfig" --hostname-override=$node \
		--node-ip=$address --root-dir=/var/lib/kubelet
	until_ok 90 "the node to be ready" inside kubectl wait --for=condition=Ready node/$node --timeout=2s
	inside kubectl apply -f "$built/crds" >"$d/log/crds" 2>&1 || { cat "$d/log/crds" >&2; die "the snapshot CRDs"; }
	run snapshot-controller snapshot-controller --kubeconfig="$k/admin.kubeconfig" --http-endpoint=127.0.0.1:8181
	until_ok 60 "the default service account" inside kubectl get serviceaccount default
	echo "Kubernetes $KUBERNETES is up; its node is $node"
}

down() {
	local pid try device over hierarchy
	[ -d "$d" ] || return 0
	d=$(realpath "$d")
	if pid=$(first); then
		kill -KILL "$pid"
		for try in {1..100}; do [ -d "/proc/$pid" ] && sleep 0.1 || break; done
	fi
	# Loop devices that outlive the node hold its pool: those of raw block volumes, and first what the kubelet laid over
	# them. They are known by the filesystem that their files are on.
	losetup -ln -O NAME,BACK-MAJ:MIN,BACK-FILE | awk -v pool="$(cat "$d/pool.device" 2>/dev/null)" -v d="$d/pool/" '$2 == pool || index($3, d) == 1 {print $1}' |
		while read -r device; do
			losetup -ln -O NAME,BACK-INO,BACK-MAJ:MIN | awk -v i="$(stat -c %i "$device")" -v d="$(stat -c %Hd:%Ld "$device")" '$2 == i && $3 == d {print $1}' |
				while read -r over; do losetup -d "$over" || true; done
			losetup -d "$device" 2>/dev/null || true
		done
	for hierarchy in /sys/fs/cgroup/*/; do
		[ -d "$hierarchy/$cgroup" ] || continue
		for try in {1..20}; do
			find "$hierarchy/$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null && break
			sleep 0.3
		done
	done
	if [ "${KEEP_LOGS-}" = 1 ]; then
		find "$d" -mindepth 1 -maxdepth 1 ! -name log ! -name e2e ! -name varlog -exec rm -rf --one-file-system {} +
	else
		rm -rf --one-file-system "$d"
	fi
}

command=${1-}
[ $# -eq 0 ] || shift
case $command in
up) up "$@" ;;
load) load "$@" ;;
exec) inside "$@" ;;
down) down ;;
*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
