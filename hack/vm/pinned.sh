#!/usr/bin/env bash
# Becomes a command, on one processor that no other virtual machine has, as long as there is one. A kernel that is a process goes from one address space to another all the
# time, by ptrace(2): on one processor that takes a fifth of what it takes from one to another (7 us, 35 us), which then has
# to be woken each time.
#
#   hack/vm/pinned.sh COMMAND [ARGUMENT...]
set -euo pipefail

processors=()
for range in $(sed -n 's/^Cpus_allowed_list:\s*//p' /proc/self/status | tr , ' '); do
	for ((n = ${range%-*}; n <= ${range#*-}; n++)); do
		processors+=("$n")
	done
done
of=${processors[RANDOM % ${#processors[@]}]}
for n in "${processors[@]}"; do
	exec 8>"/run/lock/ashlar-vm-processor-$n" # which the command keeps open
	if flock -n 8; then
		of=$n
		break
	fi
done
exec taskset -c "$of" "$@"
