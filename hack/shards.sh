#!/usr/bin/env bash
# Runs test programs for `go test -exec`: one whose name is in SHARDED as several processes at once, each with a part of its tests; every other one as it is. That is for
# programs whose tests wait more than they compute, and cannot run at once in one process, as they change what they share: an API server that
# they kill, say. Each process has its own. A part that was chosen, with -run say, is not divided.
#
#   SHARDED='cluster.test=3' go test -exec hack/shards.sh ./...
#
# What the processes that failed say comes one after another when all have ended; of the others nothing. If one fails, it fails.
set -euo pipefail

parts=
for sharded in ${SHARDED-}; do
	[ "${1##*/}" != "${sharded%=*}" ] || parts=${sharded#*=}
done
[[ -n $parts && ! " $*" =~ " -test."(run|list|bench|fuzz|coverprofile) ]] || exec "$@"

mapfile -t tests < <("$1" -test.list . | grep -E '^(Test|Fuzz|Example)')
[ "${#tests[@]}" -gt 0 ] || exec "$@"
scratch=$(mktemp -d)
running=()
finish() {
	[ "${#running[@]}" -eq 0 ] || kill "${running[@]}" 2>/dev/null || true
	rm -rf "$scratch"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 131' QUIT # go test, of one that has taken too long
trap 'exit 143' TERM
for ((part = 0; part < parts; part++)); do
	names=
	for ((i = part; i < ${#tests[@]}; i += parts)); do
		names+="${names:+|}${tests[i]}"
	done
	"$@" -test.run "^($names)\$" >"$scratch/$part" 2>&1 </dev/null &
	running+=($!)
done
status=0
for ((part = 0; part < parts; part++)); do
	if wait "${running[part]}"; then
		rm "$scratch/$part"
	else
		status=$?
	fi
done
running=()
[ "$status" -eq 0 ] || cat "$scratch"/*
exit "$status"
