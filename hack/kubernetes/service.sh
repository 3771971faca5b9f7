#!/usr/bin/env bash
# A node's services, seen from within the node, with the words of systemctl:
#
#   systemctl start|stop|restart kubelet|containerd
#   systemctl kill --signal=KILL kubelet|containerd
#   systemctl show kubelet --property ActiveState --value
#
# The node's ssh server runs this for each command that it is given.
set -euo pipefail
. /run/node
. "$(dirname "$(realpath "${BASH_SOURCE[0]}")")/lib.sh"
export PATH=$CLUSTER_DIR/conf/bin:$bin:$runtime/usr/bin:$runtime/usr/sbin:$runtime/bin:/usr/sbin:/usr/bin:/sbin:/bin
if [ -n "${SSH_ORIGINAL_COMMAND-}" ]; then
	command=$SSH_ORIGINAL_COMMAND
	unset SSH_ORIGINAL_COMMAND
	exec bash -c "$command"
fi

own=$CLUSTER_DIR/nodes/$node
words=()
for word; do
	[[ $word == -* ]] || words+=("${word%.service}")
done
verb=${words[0]-} name=${words[1]-}

runs() { [ -e "/run/$name.pid" ] && kill -0 "$(cat "/run/$name.pid")" 2>/dev/null; }

start() {
	runs && return
	local command
	case $name in
	kubelet) command=(kubelet --config="$own/kubelet.yaml" --kubeconfig="$CLUSTER_DIR/keys/$node.kubeconfig"
		--hostname-override="$node" --node-ip="10.244.0.$((10 + number))" --root-dir=/var/lib/kubelet) ;;
	containerd) command=(containerd --config "$own/containerd.toml") ;;
	*) die "there is no service $name" ;;
	esac
	cd "$CLUSTER_DIR"
	setsid "${command[@]}" >>"log/$node.$name" 2>&1 </dev/null &
	echo $! >"/run/$name.pid"
}

# stop SIGNAL: and KILL, if it has not ended ten seconds later.
stop() {
	local pid try
	runs || return 0
	pid=$(cat "/run/$name.pid")
	kill "-$1" "$pid"
	for try in {1..100}; do
		kill -0 "$pid" 2>/dev/null || break
		[ "$try" -lt 100 ] || kill -KILL "$pid"
		sleep 0.1
	done
	rm -f "/run/$name.pid"
}

case $verb in
start) start ;;
stop) stop TERM ;;
kill) stop KILL ;;
restart) stop TERM && start ;;
show) runs && echo active || echo inactive ;;
*) die "no such verb: $verb" ;;
esac
