#!/usr/bin/env bash
# Becomes a command, on one processor, before all else there: one that no other virtual machine has, as long as there is one. A kernel that is a process goes from one address
# space to another all the time, by ptrace(2). On one processor that takes 7 us; from one to another, which then has to be woken, it takes 35 us; and beside
# others, which have their turn in between, as long as they like.
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
exec nice -n -12 taskset -c "$of" "$@"
