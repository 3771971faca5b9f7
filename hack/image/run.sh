#!/usr/bin/env bash
# Runs hack/image on the Dockerfile of this repository: hack/image/run.sh [FLAGS]. Paths are those of the caller.
set -euo pipefail
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
program=$(mktemp)
trap 'rm -f "$program"' EXIT
(cd "$here" && go build -o "$program" .)
"$program" -source "$here/../.." "$@"
