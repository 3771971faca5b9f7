#!/usr/bin/env bash
# Runs a command, and says how many seconds it took, and for how many processors worked for it; also in the file TIMES, at its end, if
# that is set. Work of processes that nobody waited for is not counted. The exit status is the command's.
#
#   hack/timed.sh NAME COMMAND [ARGUMENT...]
set -uo pipefail

name=$1
shift
status=0
"$@" || status=$?
read -ra stat <"/proc/$$/stat"
worked=$(((stat[15] + stat[16]) / $(getconf CLK_TCK))) # proc(5): cutime, cstime
echo "==> $name took $SECONDS s, and $worked s of processors"
[ -z "${TIMES-}" ] || printf '%5d s  %5d s of processors  %s\n' "$SECONDS" "$worked" "$name" >>"$TIMES"
exit "$status"
