#!/usr/bin/env bash
# Runs those tests of a test program whose names match REGEXP. With SAMPLE=1 it runs one after another, in another order each day, and begins none after
# SECONDS; at least one it runs.
#
#   hack/vm/sample.sh SECONDS PROGRAM REGEXP [ARGUMENT...]
set -euo pipefail
seconds=$1 program=$2 regexp=$3
shift 3
[ "${SAMPLE-}" = 1 ] || exec "$program" -test.run "$regexp" "$@"

names=$("$program" -test.list "$regexp" | awk -v day="$(($(date +%s) / 86400))" 'BEGIN { srand(day) } /^Test/ { print rand(), $1 }' | sort -n | cut -d' ' -f2)
[ -n "$names" ] || {
	echo "$program has no tests to run that match $regexp" >&2
	exit 1
}
mapfile -t tests <<<"$names"
for ((i = 0; i < ${#tests[@]} && (i == 0 || SECONDS < seconds); i++)); do
	"$program" -test.run "^${tests[i]}\$" "$@"
done
echo "sampled $i of ${#tests[@]} tests: ${tests[*]:0:i}"
