#!/usr/bin/env bash
# Builds the documentation site from README.md, the pages beside it, and docs/: hack/docs/build.sh [DIRECTORY] (bin/site).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath -m "${1:-bin/site}")
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT

# Pages keep their paths, so links among them are those of the tree. What Hugo calls _index.md is README.md there.
mkdir -p "$stage/content" "$stage/static"
cp README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md "$stage/content"
cp -r docs "$stage/content"
find "$stage/content" -name README.md -execdir mv {} _index.md \;
(cd "$stage/content" && find docs -type f ! -name '*.md' -exec install -D -m 644 {} ../static/{} \; -delete)

rm -rf "$out"
hugo --source hack/docs --contentDir "$stage/content" --destination "$out" --cacheDir "$stage/cache" --noBuildLock >"$stage/log" 2>&1 ||
	{ cat "$stage/log" >&2; exit 1; }
cp -r "$stage/static/." "$out"
echo "the site is in $out: open $out/index.html"
