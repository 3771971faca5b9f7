#!/usr/bin/env bash
# Runs test programs for `go test -exec`: that of a package which is in SHARDED as several processes at once, each with a part of its tests; every other one as it is. That is for
# programs whose tests wait more than they compute, and cannot run at once in one process, as they change what they share: an API server that
# they kill, say. Each process has its own. A part that was chosen, with -run say, is not divided.
#
#   SHARDED='pkg/cluster=3' go test -exec hack/shards.sh ./...
#
# With DAYS=3 each of these packages runs a third of its tests, the next third on the next day, and all of them in three days.
#
# What the processes that failed say comes one after another when all have ended; of the others nothing. If one fails, it fails.
set -euo pipefail

parts=
# go test runs a program in the folder of its package.
for sharded in ${SHARDED-}; do
	[[ $PWD != */"${sharded%=*}" ]] || parts=${sharded#*=}
done
[[ -n $parts && ! " $*" =~ " -test."(run|list|bench|fuzz|coverprofile) ]] || exec "$@"

mapfile -t tests < <("$1" -test.list . | grep -E '^(Test|Fuzz|Example)')
[ "${#tests[@]}" -gt 0 ] || exec "$@"
days=${DAYS:-1} today=()
for ((i = $(date +%s) / 86400 % days; i < ${#tests[@]}; i += days)); do
	today+=("${tests[i]}")
done
tests=("${today[@]}")
[ "${#tests[@]}" -gt 0 ] || exit 0 # fewer tests than days
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
